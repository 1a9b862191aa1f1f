"""Packed samples that attend by a kernel which knows where they begin; on a CPU, with a plain loop
in the place of the kernel.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")
varlen: Any = pytest.importorskip("torch.nn.attention.varlen")


def _loop(
    query: Any,
    key: Any,
    value: Any,
    bounds: Any,
    _keys: Any,
    longest: int,
    _longest: int,
    **options: Any,
) -> Any:
    assert int((bounds[1:] - bounds[:-1]).max()) == longest
    assert options.get("window_size", (-1, 0)) == (-1, 0)
    out = torch.empty_like(query)
    for start, end in itertools.pairwise(bounds.tolist()):
        parts = (one[start:end].transpose(0, 1) for one in (query, key, value))
        out[start:end] = torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True
        ).transpose(0, 1)
    return out


def test_samples_attend_to_themselves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do under the mask of transformers; a reference made of the same setup attends so,
    too.
    """
    from rollproof.replay.hf.hf_replay_trainer import HfTrainer
    from rollproof.replay.hf.hf_setups import Setup
    from rollproof.replay.hf.varlen_attention import VARLEN

    monkeypatch.setattr(varlen, "varlen_attn", _loop)
    ids = torch.arange(30)[None] % 60
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
    masked, packed = HfTrainer(Setup()).model, HfTrainer(Setup(varlen=True)).model
    with torch.no_grad():
        one, other = (
            model(input_ids=ids, position_ids=positions, use_cache=False).logits
            for model in (masked, packed)
        )

    assert VARLEN == packed.config._attn_implementation
    assert "varlen" in Setup(varlen=True).name
    assert torch.allclose(one, other, atol=1e-4)
    assert float((one - other).abs().max()) > 0
