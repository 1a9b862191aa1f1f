"""Scores by blocks are those of the whole logits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rollproof.errors import GapError

torch = pytest.importorskip("torch", reason="scoring needs torch")


def _case(tokens: int = 37, width: int = 24, vocabulary: int = 101) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=generator)
    head = torch.randn(vocabulary, width, generator=generator)
    return hidden, head, torch.randint(vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("block", [(7, 13), (64, 128), (5, 3)])
def test_blocks_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, temperature: float, block: tuple[int, int]
) -> None:
    """Logprob and entropy agree with a float64 softmax within 1e-5, however the logits are cut into
    blocks.
    """
    from rollproof.gap import scoring

    monkeypatch.setattr(scoring, "_CPU_TOKENS", block[0])
    monkeypatch.setattr(scoring, "_CPU_VOCAB", block[1])
    hidden, head, tokens = _case()
    law = torch.log_softmax(hidden.double() @ head.double().t() / temperature, -1)
    scores = scoring.score(hidden, head, tokens, temperature=temperature)
    torch.testing.assert_close(
        scores.logprob.double(), law.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        scores.entropy.double(), -(law.exp() * law).sum(-1), atol=1e-5, rtol=0
    )


def test_the_kl_of_two_heads_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """KL over the vocabulary agrees with float64 within 1e-5, is zero for equal heads and is not
    symmetric.
    """
    from rollproof.gap import scoring

    monkeypatch.setattr(scoring, "_CPU_VOCAB", 16)
    hidden, head, _ = _case()
    other = hidden * 1.1
    p, q = (
        torch.log_softmax(states.double() @ head.double().t(), -1) for states in (hidden, other)
    )
    there, back = (
        scoring.head_kl(hidden, head, other, head),
        scoring.head_kl(other, head, hidden, head),
    )
    torch.testing.assert_close(there.double(), (p.exp() * (p - q)).sum(-1), atol=1e-5, rtol=0)
    assert not torch.allclose(there, back, atol=1e-4)
    torch.testing.assert_close(
        scoring.head_kl(hidden, head, hidden, head), torch.zeros(37), atol=1e-5, rtol=0
    )


def test_bf16_operands_lose_nothing_in_the_product() -> None:
    """bf16 operands are multiplied and summed in float32: the only error is the operands' own
    rounding.
    """
    from rollproof.gap.scoring import score

    hidden, head, tokens = (
        item.to(torch.bfloat16) if item.is_floating_point() else item for item in _case()
    )
    law = torch.log_softmax(hidden.double() @ head.double().t(), -1)
    torch.testing.assert_close(
        score(hidden, head, tokens).logprob.double(),
        law.gather(1, tokens[:, None])[:, 0],
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": torch.tensor([0] * 36 + [101])}, "ids from 0 to 101, outside of a head of 101"),
        ({"tokens": torch.zeros(37)}, "must be integer ids"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, "do not fit each other"),
        ({"head": torch.zeros(101, 24, dtype=torch.float64)}, "cast one"),
        ({"hidden": torch.zeros(2, 37, 24)}, "flatten the batch"),
        ({"temperature": 0.0}, "temperature must be a positive number"),
        ({"temperature": math.nan}, "temperature must be a positive number"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    """Shapes, dtypes, ids and temperatures that do not fit are rejected before any computation."""
    from rollproof.gap.scoring import score

    hidden, head, tokens = _case()
    operands = {"hidden": hidden, "head": head, "tokens": tokens, **change}
    with pytest.raises(GapError, match=words):
        score(operands.pop("hidden"), operands.pop("head"), operands.pop("tokens"), **operands)


def test_no_tokens_give_no_scores() -> None:
    """An empty batch is scored to an empty result."""
    from rollproof.gap.scoring import score

    hidden, head, tokens = _case()
    assert (0,) == tuple(score(hidden[:0], head, tokens[:0]).logprob.shape)
