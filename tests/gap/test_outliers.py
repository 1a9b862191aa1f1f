"""Single sequences that stand apart: told where a few in a hundred have a fault, and never of a
healthy gap.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from rollproof.gap import GapVerdict, measure
from rollproof.gap.diagnosis.outliers import find_mismatched, find_mistagged, find_tilted
from rollproof.gap.token_pairs import TokenPairs
from tests.support.gap_faults import GapWorld, gap_columns
from tests.support.gap_profiles import PROFILES, closed_form, noise_scale
from tests.support.measured_gap import sampled

WORLD = GapWorld(sequences=64, length=500, layers=1, experts=8, top_k=2)
ROUTED = GapWorld(sequences=64, length=200, layers=6, experts=32, top_k=4)
ODD = (5, 40)


@lru_cache
def fake(fault: str, seed: int) -> dict[str, Any]:
    """Columns without routes."""
    return {
        name: column
        for name, column in gap_columns(fault, seed=seed, world=WORLD).items()
        if "routes" not in name
    }


def planted(fault: str, *, healthy: str = "numerics only") -> dict[str, Any]:
    """A healthy gap of 64 sequences, of which ``ODD`` are of the fault."""
    good, bad = (fake(name, seed) for name, seed in ((healthy, 21), (fault, 22)))
    odd = np.isin(good["sequence_id"], ODD)
    out = good | {
        name: np.where(odd, bad[name], good[name])
        for name in ("rollout_logprob", "trainer_logprob")
    }
    if "by_version" in good:
        out["by_version"] = {
            version: np.where(odd, bad["by_version"][version], own)
            for version, own in good["by_version"].items()
        }
    return out


def stand_apart(columns: dict[str, Any]) -> list[str]:
    """Notes that name the sequences ``ODD``."""
    report = measure(**columns, resamples=100)
    return [note for note in report.notes if "2 of 64 sequences (5, 40)" in note]


@pytest.mark.parametrize(
    ("fault", "way"),
    [
        ("raw logprobs, T=0.6", "likely tokens are more likely"),
        ("raw logprobs, T=0.8", "likely tokens are more likely"),
        ("raw logprobs, T=1.2", "likely tokens are less likely"),
        ("trainer temperature, T=0.7", "likely tokens are less likely"),
    ],
)
def test_sequences_of_another_temperature_are_named(fault: str, way: str) -> None:
    """Two of 64, and no other: which, and which way their law differs."""
    (note,) = stand_apart(planted(fault))
    assert way in note
    assert "another temperature" in note


def test_swapped_samples_are_named() -> None:
    """Two sequences whose trainer logprobs are each other's have little in common with their
    rollout's.
    """
    columns = fake("numerics only", 21)
    own = columns["trainer_logprob"].reshape(64, -1).copy()
    own[list(ODD)] = own[list(ODD[::-1])]
    (note,) = stand_apart(columns | {"trainer_logprob": own.ravel()})
    assert re.search(r"agree which tokens are likely at [45]\d% of them at most", note)


@pytest.mark.parametrize(
    ("fault", "versions"),
    [("wrong version", "tag 3: version 2"), ("stuck weights", "tag 4: version 1")],
)
def test_sequences_of_another_version_are_named(fault: str, versions: str) -> None:
    """Scores under several versions tell two wrong tags of 64: that is wrong at any size, and fails
    the gap.
    """
    columns = planted(fault, healthy="numerics only, every version")
    report = measure(**columns, resamples=100)
    (cause,) = report.causes
    assert ("wrong version scored", GapVerdict.FAIL) == (cause.name, report.verdict)
    assert re.search(r"in [12] of 64 sequences \(", cause.because)
    assert set(map(int, re.findall(r"\d+", cause.because.split("(")[1].split(")")[0]))) <= set(ODD)
    assert versions in cause.because


@pytest.mark.parametrize("cluster", [0.5, 1.0])
@pytest.mark.parametrize("profile", PROFILES)
def test_healthy_sequences_never_stand_apart(profile: str, cluster: float) -> None:
    """Whatever the tails and the noise of single sequences (benchmarks/gap_outliers.py
    counts over thousands of sets).
    """
    rng = np.random.default_rng(24)
    for sequences, length in ((1000, 100), (100, 1000)):
        rollout = sampled(rng, 20_000)[rng.integers(20_000, size=(sequences, length))]
        trainer = closed_form(
            rollout, noise_scale(PROFILES[profile], sequences, length, rng, cluster=cluster), rng
        )
        names = np.repeat(np.arange(sequences), length)
        pairs = TokenPairs.of(
            rollout_logprob=rollout.ravel(),
            trainer_logprob=trainer.ravel(),
            sequence_id=names,
            mask=np.ones(len(names)),
        )
        assert ((), ()) == (find_tilted(pairs), find_mismatched(pairs))


def test_an_offset_that_all_share_is_no_strays() -> None:
    """Nor is a fault of all sequences, or of half of them, which the causes tell."""
    for fault in ("trainer temperature, T=0.7", "lost weights", "off by one, late", "top-p 0.90"):
        data = fake(fault, 22)
        assert ((), ()) == (
            find_tilted(TokenPairs.of(**data)),
            find_mismatched(TokenPairs.of(**data)),
        )


def test_versions_that_part_by_less_than_the_noise_are_not_told_apart() -> None:
    """Scores of versions that hardly differ name nothing, whichever way the noise leans."""
    columns = fake("numerics only", 21)
    rng = np.random.default_rng(27)
    trainer = columns["trainer_logprob"]
    scores = {1: np.minimum(trainer + 1e-4 * rng.standard_normal(len(trainer)), 0), 2: trainer}
    pairs = TokenPairs.of(**columns, version=np.full(len(trainer), 2), by_version=scores)
    assert () == find_mistagged(pairs, np.full(len(trainer), 0.01))


def lost(columns: dict[str, Any], rows: Any) -> dict[str, Any]:
    """The columns with the trainer's routes of ``rows`` those of a stranger."""
    routes = columns["trainer_routes"].copy()
    rng = np.random.default_rng(28)
    routes[rows] = np.argsort(rng.random((len(rows), 6, 32)), axis=2)[:, :, :4]
    return columns | {"trainer_routes": routes}


def test_one_wrong_route_row_in_500_is_seen() -> None:
    """Single rows of a stranger, 26 of 12,800, are a polluted capture; a handful of fewer than five
    is told as nothing.
    """
    columns = gap_columns("numerics only", seed=29, world=ROUTED)
    (cause,) = measure(**lost(columns, np.arange(26) * 400 + 123), resamples=100).causes
    assert "polluted capture" == cause.name
    assert "0.2% of the tokens (26) agree" in cause.because
    (cause,) = measure(**lost(columns, np.arange(4) * 400 + 123), resamples=100).causes
    assert "numerics only" == cause.name


def test_a_filler_in_the_last_row_is_no_polluted_capture() -> None:
    """The last sampled token was never forwarded: whatever stands in its row was declared so."""
    columns = gap_columns("numerics only", seed=29, world=ROUTED)
    routes = columns["rollout_routes"].copy()
    routes[199::200] = np.arange(4)
    (cause,) = measure(**columns | {"rollout_routes": routes}, resamples=100).causes
    assert "numerics only" == cause.name
