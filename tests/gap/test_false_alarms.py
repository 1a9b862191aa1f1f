"""Healthy gaps of odd shapes: nothing is called a fault that is none."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rollproof.gap import GapReport, GapVerdict, gap_lines, limits_named, measure
from rollproof.gap.diagnosis.causes import CauseName
from rollproof.reporting.text import text_of
from tests.support.gap_profiles import PROFILES, bank, closed_form, noise_scale
from tests.support.measured_gap import sampled

FAULTLESS = {CauseName.NUMERICS, CauseName.UNEXPLAINED}


def healthy(
    seed: int,
    sequences: int = 40,
    length: int = 100,
    profile: str = "moe-bf16",
    factor: float = 1.0,
    update: float | None = None,
    **columns: Any,
) -> GapReport:
    """A gap without a fault. ``update`` is the size of a weight update that arrived: the previous
    weights are scored too.
    """
    rng = np.random.default_rng(seed)
    rollout = sampled(rng, sequences * length).reshape(sequences, length)
    trainer = closed_form(
        rollout, factor * noise_scale(PROFILES[profile], sequences, length, rng), rng
    )
    if update is not None:
        moved = rng.standard_normal((sequences, 1)) + rng.standard_normal(rollout.shape)
        previous = trainer - update * (1 - np.exp(rollout)) * moved
        columns["previous_logprob"] = np.minimum(previous, 0.0).ravel()
    given = {
        "sequence_id": np.arange(rollout.size) // length,
        "mask": np.ones(rollout.size),
        **columns,
    }
    return measure(rollout.ravel(), trainer.ravel(), **given, resamples=100)


def noted(report: GapReport) -> set[str]:
    return {cause.name for cause in report.causes}


@pytest.mark.parametrize(
    ("sequences", "length"), [(1, 1), (1, 3), (2, 2), (1, 200), (3, 40), (12, 8), (60, 2), (200, 1)]
)
def test_few_tokens_name_nothing(sequences: int, length: int) -> None:
    """A handful of tokens names no cause, whatever their logprobs are: 20 draws each."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        routes = np.argsort(rng.random((sequences * length, 3, 8)), axis=2)[:, :, :2]
        more = {
            "rollout_routes": routes,
            "trainer_routes": routes,
            "version": np.full(len(routes), 2),
            "groups": {"kind": rng.integers(3, size=len(routes))},
            "pack_index": np.arange(len(routes)) // length % 2,
        }
        assert noted(healthy(seed, sequences, length, update=0.1, **more)) <= FAULTLESS


@pytest.mark.parametrize("profile", ["dense-bf16", "moe-bf16", "moe-fp8"])
def test_updates_packs_groups_and_ends_of_healthy_runs_name_nothing(profile: str) -> None:
    """Rows of several sequences, three labels, and updates of any size that arrived: 8 draws
    each.
    """
    for seed in range(8):
        rng = np.random.default_rng(seed)
        groups = {f"label {i}": np.repeat(rng.integers(4, size=48), 100) for i in range(3)}
        report = healthy(
            seed,
            48,
            100,
            profile,
            update=(0.02, 0.1, 0.4)[seed % 3],
            replica=np.repeat(rng.integers(3, size=48), 100),
            pack_index=np.repeat(np.arange(48) % 4, 100),
            groups=groups,
        )
        assert noted(report) <= FAULTLESS


@pytest.mark.parametrize("profile", ["moe-bf16", "moe-fp8", "agentic-stale"])
def test_heavy_tails_are_no_fault(profile: str) -> None:
    """Rare tokens with |d| up to 16, healthy for a mixture of experts, are numerics, or unexplained
    where a limit breaks.
    """
    for seed in range(6):
        assert noted(healthy(seed, 60, 200, profile, factor=2.0)) <= FAULTLESS


def test_one_huge_token_names_nothing() -> None:
    """One token with |d| = 40 makes no temperature, no truncation, no wrong version and no stale
    replica.
    """
    rng = np.random.default_rng(0)
    rollout = sampled(rng, 6000)
    trainer = np.minimum(rollout + 0.01 * rng.standard_normal(6000) * (1 - np.exp(rollout)), 0)
    owner = np.arange(6000) // 100
    for at in (3, 2500, 5999):
        torn = trainer.copy()
        torn[at] -= 40.0
        report = measure(
            rollout,
            torn,
            sequence_id=owner,
            mask=np.ones(6000),
            replica=owner % 4,
            version=np.full(6000, 2),
            resamples=100,
            by_version={1: trainer + 1e-4 * (trainer < -0.1), 2: torn},
        )
        assert noted(report) <= FAULTLESS
        assert report.panel.worst[0]["abs_diff"] == pytest.approx(40, abs=1)


def test_harder_prompts_are_no_stale_replica_and_no_staleness() -> None:
    """Sequences of uncertain tokens differ more; that one replica, or the older versions, have them
    is no fault of either.
    """
    rng = np.random.default_rng(1)
    rollout = sampled(rng, 300 * 40).reshape(300, 40)
    hard = np.argsort(np.argsort(rollout.mean(axis=1)))  # 0: the least certain
    replica, version = (hard >= 60).astype(int), 9 + np.minimum(hard // 60, 4)
    scale = np.full(rollout.shape, 0.08)
    trainer = closed_form(rollout, scale, rng)
    columns = {
        "replica": np.repeat(replica, 40),
        "version": np.repeat(version, 40),
        "current_version": np.full(rollout.size, 13),
    }
    report = measure(
        rollout.ravel(),
        trainer.ravel(),
        sequence_id=np.arange(rollout.size) // 40,
        mask=np.ones(rollout.size),
        **columns,
    )
    assert noted(report) <= FAULTLESS


@pytest.mark.parametrize(("layers", "top_k"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_flip_in_a_shallow_model_is_no_polluted_capture(layers: int, top_k: int) -> None:
    """Where a token has few expert slots, a near-tie that flips may change all of them: that is
    numerics.
    """
    rng = np.random.default_rng(2)
    scores = rng.standard_normal((4000, layers, 8))
    left, right = (
        np.argsort(-s, axis=2)[:, :, :top_k]
        for s in (scores, scores + 0.05 * rng.standard_normal(scores.shape))
    )
    report = healthy(3, rollout_routes=left, trainer_routes=right)
    assert 0.01 < report.panel.metrics["any_layer_mismatch"].value
    assert noted(report) <= FAULTLESS


def test_updates_below_the_noise_are_no_wrong_version() -> None:
    """Scores under versions that part by less than the numerics do not tell one from another."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        rollout = sampled(rng, 4000)
        noise = 0.05 * rng.standard_t(3, 4000) * (1 - np.exp(rollout))
        scores = {
            version: np.minimum(rollout + noise + 1e-3 * rng.standard_normal(4000), 0)
            for version in (1, 2, 3)
        }
        tags = np.arange(4000) // 1000 % 3 + 1
        trainer = np.select([tags == version for version in scores], list(scores.values()))
        columns = {
            "sequence_id": np.arange(4000) // 100,
            "mask": np.ones(4000),
            "version": tags,
            "by_version": scores,
        }
        assert noted(measure(rollout, trainer, **columns, resamples=100)) <= FAULTLESS


def test_a_constant_offset_is_no_temperature() -> None:
    """A difference that is the same for all tokens is no function of the logprob."""
    rng = np.random.default_rng(4)
    rollout = np.minimum(sampled(rng, 4000), -1e-3)
    report = measure(
        rollout,
        rollout - 5e-4,
        sequence_id=np.arange(4000) // 100,
        mask=np.ones(4000),
        resamples=100,
    )
    assert noted(report) <= FAULTLESS


def test_a_version_ahead_of_the_trainer_is_told() -> None:
    """Tokens of a version that the current weights have not reached yet are counted in a note."""
    report = healthy(5, version=np.arange(4000) % 3, current_version=np.ones(4000, int))
    assert any(
        "1,333 tokens were sampled by a version that is newer" in note for note in report.notes
    )


def test_the_replica_of_each_token_counts_and_not_that_of_its_sequence_s_first() -> None:
    """Sequences that move to another replica on resume: the one that is off is named, and none that
    it handed over from.
    """
    rng = np.random.default_rng(5)
    rollout = sampled(rng, 12_000).reshape(40, 300)
    replica = np.where(
        np.arange(300) < 50, np.arange(40)[:, None] % 4, (np.arange(40)[:, None] + 1) % 4
    )
    noise = (
        np.where(replica == 3, 0.2, 0.005) * (1 - np.exp(rollout)) * rng.normal(size=rollout.shape)
    )
    report = measure(
        rollout.ravel(),
        (rollout + noise).ravel(),
        sequence_id=np.arange(12_000) // 300,
        mask=np.ones(12_000),
        replica=replica.ravel(),
        resamples=100,
    )
    (cause,) = [cause for cause in report.causes if cause.name == "stale replica"]
    assert cause.because.startswith("sequences of replica 3 have ")


def test_rounding_that_has_a_pattern_is_no_temperature() -> None:
    """Logprobs that part by a millionth of themselves are equal for every purpose, whatever
    function of the logprob that is.
    """
    rollout = sampled(np.random.default_rng(0), 6000)
    for factor, named in ((1 + 1e-6, "numerics only"), (1.001, "temperature or logprob mode")):
        report = measure(
            rollout,
            rollout * factor,
            sequence_id=np.arange(6000) // 100,
            mask=np.ones(6000),
            resamples=100,
        )
        assert {named} == noted(report)


@pytest.mark.parametrize("apart", [0, 4])
def test_one_version_that_is_apart_is_no_rise(apart: int) -> None:
    """Of five ages only the oldest differs more: that is no |d| that rises with age; a difference
    that grows with it is.
    """
    rng = np.random.default_rng(1)
    rollout = sampled(rng, 24_000).reshape(60, 400)
    version = np.arange(60) % 5
    for factor, named in (
        (np.where(version == apart, 4.0, 1.0), "numerics only"),
        (5.0 - version, "staleness"),
    ):
        noise = 0.02 * factor[:, None] * (1 - np.exp(rollout)) * rng.standard_normal(rollout.shape)
        columns = {
            "sequence_id": np.arange(24_000) // 400,
            "mask": np.ones(24_000),
            "version": np.repeat(version, 400),
        }
        assert {named} == noted(
            measure(
                rollout.ravel(), np.minimum(rollout + noise, 0).ravel(), **columns, resamples=100
            )
        )


def test_tokens_sampled_far_colder_than_the_limits_are_for_break_none() -> None:
    """At T = 0.1 numerics weigh ten times as much: a broken limit is undecided and says so, until
    limits are given for that temperature.
    """
    rng = np.random.default_rng(2)
    rollout = sampled(rng, 12_000)
    trainer = np.minimum(rollout + 0.4 * (1 - np.exp(rollout)) * rng.standard_normal(12_000), 0)
    given = {"sequence_id": np.arange(12_000) // 200, "mask": np.ones(12_000), "resamples": 100}
    assert GapVerdict.FAIL is measure(rollout, trainer, **given).verdict
    assert (
        GapVerdict.FAIL
        is measure(rollout, trainer, **given, temperature=np.full(12_000, 0.6)).verdict
    )
    cold = measure(rollout, trainer, **given, temperature=np.full(12_000, 0.1))
    assert (GapVerdict.INCONCLUSIVE, None, {"numerics only"}) == (
        cold.verdict,
        cold.required_n,
        noted(cold),
    )
    assert any(
        "sampled at temperature 0.1, and the limits moe-bf16 are for 1: numerics weigh 10 times"
        in note
        for note in cold.notes
    )
    assert "beyond the limit, which decides nothing at this temperature" in text_of(gap_lines(cold))
    own = dataclasses.replace(limits_named(), temperature=0.1)
    assert (
        GapVerdict.FAIL
        is measure(rollout, trainer, **given, temperature=np.full(12_000, 0.1), limits=own).verdict
    )
    exact = measure(rollout, trainer, **given, temperature=np.full(12_000, 0.1), limits="bitwise")
    assert GapVerdict.FAIL is exact.verdict


def test_greedy_tokens_break_no_law() -> None:
    """Tokens that were chosen are no draws: an E[rho] below 1 is neither a truncated support nor a
    broken limit; sizes are judged.
    """
    rng = np.random.default_rng(3)
    logits = bank(20_000, rng)
    picked = np.argmax(logits, axis=1)
    laws = [
        x - x.max(axis=1, keepdims=True)
        for x in (logits, logits + 0.5 * rng.standard_normal(logits.shape))
    ]
    rollout, trainer = (x[np.arange(20_000), picked] - np.log(np.exp(x).sum(axis=1)) for x in laws)
    given = {"sequence_id": np.arange(20_000) // 200, "mask": np.ones(20_000), "resamples": 100}
    assert "truncated support (top-p or top-k)" in noted(measure(rollout, trainer, **given))
    report = measure(rollout, trainer, **given, temperature=np.zeros(20_000))
    assert noted(report) <= FAULTLESS
    assert GapVerdict.INCONCLUSIVE is report.verdicts["rho_mean_minus_1"]
    assert GapVerdict.FAIL is report.verdicts["abs_diff_mean"]


def test_of_a_token_little_is_told_of_numerics() -> None:
    """Where no other sign could show, numerics are told with the least confidence, and why."""
    for sequences, few in ((1, True), (200, False)):
        (cause,) = healthy(0, sequences, 1).causes
        assert (
            few == (cause.confidence == 0.5) == ("1 token cannot show other signs" in cause.because)
        )
