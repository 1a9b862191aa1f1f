"""What the pattern of a gap is said to point to."""

from __future__ import annotations

import numpy as np
import pytest

from rollproof.gap import GapVerdict, measure
from rollproof.gap.diagnosis.causes import CauseName
from tests.support.gap_faults import GAP_FAULTS, GapWorld, gap_columns
from tests.support.gap_profiles import PROFILES, bank

EXPECTED = {
    "numerics only": "numerics only",
    "numerics only, every version": "numerics only",
    "raw logprobs, T=0.6": "temperature or logprob mode",
    "raw logprobs, T=0.8": "temperature or logprob mode",
    "raw logprobs, T=1.2": "temperature or logprob mode",
    "trainer temperature, T=0.7": "temperature or logprob mode",
    "top-p 0.95": "truncated support (top-p or top-k)",
    "top-p 0.90": "truncated support (top-p or top-k)",
    "top-k 8": "truncated support (top-p or top-k)",
    "off by one, late": "off by one",
    "off by one, early": "off by one",
    "stale replica": "stale replica",
    "version lag": "staleness",
    "wrong version": "wrong version scored",
    "stuck weights": "stale engine weights",
    "update arrived by 60 %": "partly arrived weights",
    "update arrived by 20 %": "partly arrived weights",
    "update arrived by 60 %, one column": "partly arrived weights",
    "update did not arrive, one column": "stale engine weights",
    "end token forced": "end token without a logprob",
    "packed without a block mask": "packed sequences see each other",
    "one group differs": "one group differs",
    "samples swapped": "a part is unrelated",
    "resume boundary": "resume boundary",
    "lost weights": "unrelated weights",
    "routes shifted by a token": "routes shifted by a token",
    "routes shifted by a layer": "routes shifted by a layer",
    "dense layer not skipped": "routes shifted by dense layers",
    "capture polluted": "polluted capture",
    "not finite": "not finite",
}
"""Each fault, and the class that must be named for it (benchmarks/gap_confusion.py counts over many
seeds).
"""


def test_every_fault_has_an_expected_class() -> None:
    """The table covers every fault, and names only classes that exist."""
    assert set(GAP_FAULTS) == set(EXPECTED)
    assert set(EXPECTED.values()) <= set(CauseName)


@pytest.mark.parametrize("fault", GAP_FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    """Each planted fault, and it alone, is named."""
    report = measure(**gap_columns(fault, seed=11), resamples=200)
    assert [EXPECTED[fault]] == [cause.name for cause in report.causes]


@pytest.mark.parametrize("profile", PROFILES)
def test_numerics_are_never_called_a_fault(profile: str) -> None:
    """Noise of every fitted pair of engines, however large, is told as numerics, or as unexplained
    where it breaks a limit.
    """
    world = GapWorld(sequences=40, length=300, profile=PROFILES[profile])
    report = measure(**gap_columns("numerics only", seed=4, world=world), resamples=200)
    names = {cause.name for cause in report.causes}
    assert names <= (
        {CauseName.NUMERICS} if report.verdict is not GapVerdict.FAIL else {"unexplained"}
    )


def test_a_fault_within_the_limits_fails_all_the_same() -> None:
    """Scores of another version than the tagged one are wrong at any size: the verdict is fail
    though every limit holds.
    """
    report = measure(**gap_columns("wrong version", seed=12), resamples=200)
    assert GapVerdict.FAIL not in report.verdicts.values()
    assert GapVerdict.FAIL is report.verdict


def test_a_constant_model_names_nothing() -> None:
    """Logprobs that are all equal (a vocabulary of one) give no correlation, no cause but numerics,
    and no warning.
    """
    report = measure(
        np.zeros(2000),
        np.zeros(2000),
        sequence_id=np.repeat(np.arange(40), 50),
        mask=np.ones(2000),
        resamples=100,
    )
    assert [CauseName.NUMERICS] == [cause.name for cause in report.causes]


def test_a_short_sequence_does_not_lend_its_neighbour_its_logprobs() -> None:
    """The correlation with the next place is taken within sequences: sequences of one token have
    none.
    """
    rng = np.random.default_rng(0)
    logits = bank(300, rng)
    rollout = logits[:, 0] - np.log(np.exp(logits).sum(axis=1))
    report = measure(
        rollout, np.roll(rollout, 1), sequence_id=np.arange(300), mask=np.ones(300), resamples=100
    )
    assert "off by one" not in {cause.name for cause in report.causes}
