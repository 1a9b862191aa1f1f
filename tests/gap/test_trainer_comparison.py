"""Two scores of one rollout, compared token by token."""

from __future__ import annotations

import numpy as np
import pytest

from rollproof.errors import GapError
from rollproof.gap import GapVerdict
from rollproof.gap.intervals import Resampler
from rollproof.gap.token_pairs import FloatArray, TokenPairs
from rollproof.gap.trainer_comparison import COMPARED, compare
from tests.support.gap_profiles import PROFILES, bank, closed_form, noise_scale


def _rollout(seed: int, sequences: int = 40, length: int = 100) -> FloatArray:
    rng = np.random.default_rng(seed)
    logits = bank(sequences * length, rng)
    picked = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    own = (
        logits[np.arange(len(logits)), picked]
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))
        - logits.max(1)
    )
    return np.asarray(np.minimum(own, 0.0).reshape(sequences, length))


def _pairs(rollout: FloatArray, trainer: FloatArray, **columns: object) -> TokenPairs:
    given = {
        "sequence_id": np.repeat(np.arange(len(rollout)), rollout.shape[1]),
        "mask": np.ones(rollout.size, bool),
        **columns,
    }
    return TokenPairs.of(rollout_logprob=rollout.ravel(), trainer_logprob=trainer.ravel(), **given)


def _two_scores(seed: int, factor: float) -> tuple[TokenPairs, TokenPairs]:
    """The rollout scored with a noise, and with ``factor`` times that noise."""
    rollout = _rollout(seed)
    scale = noise_scale(PROFILES["moe-bf16-r3"], *rollout.shape, np.random.default_rng(seed + 1))
    first, second = (
        closed_form(rollout, scale * size, np.random.default_rng(seed + 2))
        for size in (1.0, factor)
    )
    return _pairs(rollout, first), _pairs(rollout, second)


def test_the_ratio_is_that_of_the_metrics() -> None:
    """A ratio is the one side's metric over the other's, over the tokens that both have."""
    on, off = _two_scores(0, 2.0)
    for effect in compare(on, off).effects:
        size = {"kl_mu_pi_k3": lambda d: np.expm1(d) - d, "abs_diff_mean": np.abs}[effect.metric]
        means = [float(size(side.trainer - side.rollout).mean()) for side in (on, off)]
        assert means == pytest.approx([effect.value, effect.against])
        assert means[0] / means[1] == pytest.approx(effect.ratio.value)


def test_smaller_larger_and_alike_are_told_apart() -> None:
    """Half the noise passes and twice the noise fails as replay, and the other way round as a
    control.
    """
    on, off = _two_scores(0, 2.0)
    assert GapVerdict.PASS is compare(on, off).verdict
    assert GapVerdict.FAIL is compare(off, on).verdict
    comparison = compare(on, off, controls={"permuted": on})
    assert {GapVerdict.FAIL} == {effect.verdict for effect in comparison.controls["permuted"]}
    assert GapVerdict.FAIL is comparison.verdict
    assert (
        GapVerdict.PASS
        is compare(on, on.select(np.ones(on.n_tokens, bool)), controls={"harmful": _worse(on)})
        .controls["harmful"][1]
        .verdict
    )


def _worse(pairs: TokenPairs) -> TokenPairs:
    return TokenPairs(
        rollout=pairs.rollout,
        trainer=np.minimum(pairs.rollout + 4 * (pairs.trainer - pairs.rollout), 0.0),
        starts=pairs.starts,
        sequences=pairs.sequences,
    )


def test_the_same_scores_twice_decide_nothing() -> None:
    """A ratio of exactly 1 is no improvement and no harm."""
    on, _ = _two_scores(0, 2.0)
    assert GapVerdict.INCONCLUSIVE is compare(on, on).verdict


def test_no_gap_with_replay_passes() -> None:
    """Where the replayed scores equal the rollout's there is nothing left to mend, whatever the
    other side has.
    """
    on, off = _two_scores(0, 2.0)
    exact = TokenPairs(
        rollout=on.rollout, trainer=on.rollout, starts=on.starts, sequences=on.sequences
    )
    assert GapVerdict.PASS is compare(exact, off).verdict
    assert GapVerdict.PASS is compare(exact, exact).verdict


def test_the_interval_covers() -> None:
    """Over 200 data sets with heavy-tailed sequences the 95 % interval covers the true ratio 180 to
    199 times.
    """
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        size = rng.lognormal(0, 0.7, (40, 1)) * rng.lognormal(0, 1, (40, 30))
        own, other = rng.standard_normal((2, 40, 30))
        sums = np.stack(
            [
                (size * abs(own)).sum(axis=1),
                1.5 * (size * abs(0.8 * own + 0.6 * other)).sum(axis=1),
            ],
            axis=1,
        )
        found = Resampler(sums, resamples=200).ratio(0, 1)
        hits += found.low <= 1 / 1.5 <= found.high
    assert 180 <= hits <= 199


def test_order_and_names_of_sequences_do_not_matter() -> None:
    """Sequences are matched by name, in any order, as numbers or as text."""
    on, off = _two_scores(0, 2.0)
    rollout, trainer = (values.reshape(40, 100)[::-1] for values in (off.rollout, off.trainer))
    turned = _pairs(rollout, trainer, sequence_id=np.repeat(np.arange(40)[::-1].astype(str), 100))
    assert compare(on, off).effects == compare(on, turned).effects


def test_what_is_on_one_side_only_is_left_out_and_told() -> None:
    """Sequences and tokens that a side lacks count on no side."""
    on, off = _two_scores(0, 2.0)
    part = off.select(np.repeat(np.arange(40) < 30, 100))
    part.trainer[7] = np.nan
    comparison = compare(on, part)
    assert (2999, 30) == (comparison.tokens, comparison.sequences)
    assert "10 sequences not on every side" in comparison.notes[0]
    assert "1 token without a finite logprob" in comparison.notes[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rollout, trainer: _pairs(rollout - 0.01, trainer),
            "hold different rollouts: 4,000 tokens with another token_id",
        ),
        (
            lambda rollout, trainer: _pairs(rollout[:, 1:], trainer[:, 1:]),
            "Sequence 0 has 100 unmasked tokens .* and 99 in",
        ),
        (
            lambda rollout, trainer: _pairs(
                rollout, trainer, sequence_id=np.arange(4000) // 100 + 100
            ),
            "No sequence_id is on every side",
        ),
        (
            lambda rollout, trainer: _pairs(rollout, trainer * np.nan),
            "No token has a finite logprob on every side",
        ),
    ],
)
def test_another_rollout_is_refused(change: object, message: str) -> None:
    """Scores of other tokens, of another mask, of other sequences or of nothing are an error that
    says which.
    """
    on, _ = _two_scores(0, 2.0)
    assert callable(change)
    other = change(on.rollout.reshape(40, 100), on.trainer.reshape(40, 100))
    with pytest.raises(GapError, match=message):
        compare(on, other)


def test_json_form() -> None:
    """Every compared metric is in the JSON with its ratio, its interval, what is wanted and the
    verdict.
    """
    on, off = _two_scores(0, 2.0)
    data = compare(on, off, controls={"shifted": off}).to_dict()
    assert list(COMPARED) == [effect["metric"] for effect in data["effects"]]
    assert {"below 1"} == {effect["wanted"] for effect in data["effects"]}
    assert {"above 1"} == {effect["wanted"] for effect in data["controls"]["shifted"]}
    assert all(effect["low"] < effect["ratio"] < effect["high"] for effect in data["effects"])
