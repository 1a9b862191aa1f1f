"""The panel's numbers: against closed forms, and against each other."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import numpy as np
import pytest

from rollproof.gap import limits_named, measure_pairs
from rollproof.gap.intervals import Resampler, metric_interval, share_interval
from rollproof.gap.metrics import METRICS, PLACE, sequence_sums
from rollproof.gap.panel import measure_panel
from rollproof.gap.token_pairs import FloatArray, TokenPairs
from tests.support.gap_profiles import PROFILES, bank, closed_form, noise_scale


def _pairs(rollout: FloatArray, trainer: FloatArray) -> TokenPairs:
    """Pairs of two ``(sequences, length)`` arrays."""
    sequences, length = rollout.shape
    return TokenPairs.of(
        rollout_logprob=rollout.ravel(),
        trainer_logprob=trainer.ravel(),
        sequence_id=np.repeat(np.arange(sequences), length),
        mask=np.ones(rollout.size, bool),
    )


def _log_softmax(logits: FloatArray) -> FloatArray:
    top = logits.max(axis=1, keepdims=True)
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True)))


@lru_cache(maxsize=2)
def _sampled(
    seed: int, tokens: int, noise: float
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Two laws over 64 candidates a token, and the logprobs of what the first sampled: ``(mu, pi,
    rollout, trainer)``.
    """
    rng = np.random.default_rng(seed)
    logits = bank(tokens, rng)
    mu, pi = _log_softmax(logits), _log_softmax(logits + noise * rng.standard_normal(logits.shape))
    picked = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    rows = np.arange(tokens)
    return mu, pi, mu[rows, picked], pi[rows, picked]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", lambda mu, pi: (np.exp(mu) * (mu - pi)).sum(axis=1).mean()),
        ("kl_mu_pi_k3", lambda mu, pi: (np.exp(mu) * (mu - pi)).sum(axis=1).mean()),
        ("rho_mean_minus_1", lambda mu, pi: 0.0),
        ("chi2_token", lambda mu, pi: (np.exp(2 * pi - mu)).sum(axis=1).mean() - 1),
        ("abs_diff_mean", lambda mu, pi: (np.exp(mu) * np.abs(mu - pi)).sum(axis=1).mean()),
        (
            "prob_diff_mean",
            lambda mu, pi: (np.exp(mu) * np.abs(np.exp(mu) - np.exp(pi))).sum(axis=1).mean(),
        ),
        ("F2", lambda mu, pi: (np.exp(mu) * (np.abs(mu - pi) > math.log(2))).sum(axis=1).mean()),
    ],
)
def test_an_estimator_is_unbiased_for_the_sum_over_the_vocabulary(
    name: str, expected: object
) -> None:
    """Over 40,000 sampled tokens each estimator is within five standard errors of the exact
    expectation.
    """
    assert callable(expected)
    mu, pi, rollout, trainer = _sampled(3, 40_000, 0.15)
    shape = (800, 50)
    sums = sequence_sums(_pairs(rollout.reshape(shape), trainer.reshape(shape)))
    interval = metric_interval(METRICS[name], Resampler(sums))
    error = (interval.high - interval.low) / 2 / 1.96
    if math.isnan(error):  # it has no interval; sequences are of one length
        error = METRICS[name].statistic(sums).std(ddof=1) / math.sqrt(len(sums))
    assert expected(mu, pi) == pytest.approx(interval.value, abs=5 * error)


@pytest.mark.parametrize("name", ["chi2_token", "ess_token", "variance_rate", "abs_diff_std"])
def test_what_a_handful_of_tokens_decides_has_no_interval(name: str) -> None:
    """A value, no bounds, and the reason in the JSON."""
    _, _, rollout, trainer = _sampled(3, 40_000, 0.15)
    pairs = _pairs(rollout.reshape(800, 50), trainer.reshape(800, 50))
    interval = metric_interval(METRICS[name], Resampler(sequence_sums(pairs), resamples=50))
    assert math.isfinite(interval.value) and math.isnan(interval.low) and math.isnan(interval.high)
    entry = measure_pairs(pairs, limits=limits_named(), resamples=50).to_dict()["metrics"][name]
    assert (None, None) == (entry["low"], entry["high"])
    assert "a handful of tokens decides it" in entry["no_interval"]


def test_equal_sides_have_the_healthy_value_of_every_metric() -> None:
    """Where both sides hold the same numbers, every metric of the panel is at its healthy value."""
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(0.5, (20, 50))
    panel = measure_panel(_pairs(rollout, rollout.copy()), resamples=100)
    assert {name: metric.healthy for name, metric in METRICS.items()} == pytest.approx(
        {name: panel.metrics[name].value for name in METRICS}, abs=1e-12
    )


def test_a_hand_computed_example() -> None:
    """Two sequences of two and one tokens give the values that a person computes."""
    pairs = TokenPairs.of(
        rollout_logprob=[-1.0, -2.0, -0.5],
        trainer_logprob=[-1.5, -1.0, -0.5],
        sequence_id=["a", "a", "b"],
        mask=[1, 1, 1],
    )
    metrics = measure_panel(pairs, resamples=100).metrics
    d = np.array([-0.5, 1.0, 0.0])
    assert -d.mean() == pytest.approx(metrics["k1"].value)
    assert (np.exp(d) - 1 - d).mean() == pytest.approx(metrics["kl_mu_pi_k3"].value)
    assert np.abs(d).mean() == pytest.approx(metrics["abs_diff_mean"].value)
    assert (np.abs([-0.25, 0.0])).mean() == pytest.approx(metrics["log_ppl_abs_gap"].value - 0.0)
    assert 1 / 3 == pytest.approx(metrics["F2"].value)
    assert 1.0 == metrics["abs_diff_max"].value
    assert np.exp([0.25, 0.0]).mean() == pytest.approx(metrics["geometric_ratio"].value)


def test_sums_do_not_depend_on_where_the_pass_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass over the tokens gives the same sums in one chunk and in chunks of few sequences."""
    rng = np.random.default_rng(1)
    rollout = -rng.exponential(0.5, (40, 30))
    pairs = _pairs(rollout, np.minimum(rollout + 0.1 * rng.standard_normal(rollout.shape), 0))
    sums_at_once = sequence_sums(pairs)
    monkeypatch.setattr("rollproof.gap.metrics._CHUNK", 64)
    np.testing.assert_allclose(sums_at_once, sequence_sums(pairs), rtol=1e-12)


def test_logprobs_that_are_not_finite_are_counted_and_left_out() -> None:
    """Infinite and missing logprobs change the count of them, and no metric."""
    rng = np.random.default_rng(2)
    rollout = -rng.exponential(0.5, (20, 50))
    trainer = np.minimum(rollout + 0.05 * rng.standard_normal(rollout.shape), 0)
    clean = measure_panel(_pairs(rollout[:, :49], trainer[:, :49]), resamples=100)
    trainer[:, 49] = np.where(np.arange(20) % 2, np.nan, -np.inf)
    dirty = measure_panel(_pairs(rollout, trainer), resamples=100)
    assert (0, 20) == (clean.n_nonfinite, dirty.n_nonfinite)
    assert clean.metrics["kl_mu_pi_k3"].value == pytest.approx(dirty.metrics["kl_mu_pi_k3"].value)
    assert clean.metrics["abs_diff_p99"].value == pytest.approx(dirty.metrics["abs_diff_p99"].value)


@pytest.mark.parametrize(
    "name", ["kl_mu_pi_k3", "k1", "abs_diff_mean", "rho_mean_minus_1", "F2", "pearson"]
)
def test_intervals_cover(name: str) -> None:
    """Of 60 clustered data sets at least 83 % have the true value in the 95 % interval
    (benchmarks/gap_coverage.py has 1,000).
    """
    hits, runs, profile = 0, 60, PROFILES["moe-bf16"]
    rng = np.random.default_rng(5)
    _, _, pool, _ = _sampled(6, 20_000, 0.0)

    def draw(sequences: int) -> TokenPairs:
        rollout = rng.choice(pool, (sequences, 100))
        return _pairs(rollout, closed_form(rollout, noise_scale(profile, sequences, 100, rng), rng))

    truth = (
        0.0
        if name == "rho_mean_minus_1"
        else float(METRICS[name].statistic(sequence_sums(draw(20_000)).sum(axis=0)))
    )
    for seed in range(runs):
        interval = metric_interval(
            METRICS[name], Resampler(sequence_sums(draw(80)), resamples=300, seed=seed)
        )
        hits += interval.low <= truth <= interval.high
    assert hits / runs >= 0.83


def test_tokens_taken_for_independent_would_not_cover() -> None:
    """The same data, each token a sequence of its own, gives intervals that are too narrow:
    sequences must be the units.
    """
    rng = np.random.default_rng(7)
    rollout = -rng.exponential(0.5, (60, 100))
    trainer = np.minimum(rollout + rng.normal(0, 0.2, (60, 1)) * (1 - np.exp(rollout)), 0)
    own = measure_panel(_pairs(rollout, trainer), resamples=300).metrics["k1"]
    apart = measure_panel(
        _pairs(rollout.reshape(-1, 1), trainer.reshape(-1, 1)), resamples=300
    ).metrics["k1"]
    assert own.high - own.low > 3 * (apart.high - apart.low)


def test_no_event_still_has_an_upper_bound() -> None:
    """A share of 0 among n tokens has the upper bound 3.7 / n, not 0."""
    interval = share_interval(np.zeros(50), np.full(50, 20.0))
    assert (0.0, 0.0) == (interval.value, interval.low)
    assert 3.689 / 1000 == pytest.approx(interval.high, rel=0.01)


def test_many_sequences_are_resampled_in_groups() -> None:
    """More sequences than are drawn one by one give the interval of fewer, longer ones of the same
    law.
    """
    rng = np.random.default_rng(8)
    sums = np.zeros((50_000, len(PLACE)))
    sums[:, PLACE["finite"]] = 10
    sums[:, PLACE["d"]] = rng.standard_normal(50_000)
    grouped = metric_interval(METRICS["k1"], Resampler(sums, resamples=300))
    expected = 1.96 * sums[:, PLACE["d"]].std() / math.sqrt(50_000) / 10
    assert expected == pytest.approx((grouped.high - grouped.low) / 2, rel=0.15)


def test_one_seed_gives_one_panel() -> None:
    """The same data and seed give equal intervals; another seed gives others."""
    rng = np.random.default_rng(9)
    rollout = -rng.exponential(0.5, (30, 50))
    pairs = _pairs(rollout, np.minimum(rollout + 0.1 * rng.standard_normal(rollout.shape), 0))
    first, again, other = (
        measure_panel(pairs, resamples=100, seed=seed).metrics["pearson"] for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_the_upper_end_of_k3_has_room_for_tokens_that_were_not_sampled() -> None:
    """By the rule of three: 3 in n of the tokens may be as large as the largest; the lower end
    knows nothing of them.
    """
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(1.0, (40, 20)) - 2
    trainer = rollout + 0.3 * rng.standard_normal(rollout.shape)
    trainer[3, 7] = rollout[3, 7] + 1.5
    sums = sequence_sums(_pairs(rollout, trainer))
    plain = dataclasses.replace(METRICS["kl_mu_pi_k3"], top="")
    with_room, without = (
        metric_interval(metric, Resampler(sums)) for metric in (METRICS["kl_mu_pi_k3"], plain)
    )
    d = trainer[3, 7] - rollout[3, 7]
    assert (with_room.value, with_room.low) == (without.value, without.low)
    assert with_room.high - without.high == pytest.approx(3 * (math.expm1(d) - d) / 800)
