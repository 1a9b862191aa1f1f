"""The reference conversion loses nothing, so only the planted fault of a known bug is detected."""

from __future__ import annotations

from rollproof.fakes.trainers.reference_batches import Collator
from rollproof.judging.checks import Verdict
from rollproof.verification.batches import judge_batches, record_batches


def test_the_reference_passes_every_check_and_exercises_it() -> None:
    """All checks of batches pass on the reference; each is exercised, and the self-test is
    detected.
    """
    report = judge_batches(Collator)
    assert {result.id: Verdict.PASS for result in report.results} == {
        result.id: result.verdict for result in report.results
    }
    assert report.canary is not None and report.canary.red


def test_the_same_batches_come_out_twice() -> None:
    """One seed, one set of batches, byte for byte."""
    first, second = (record_batches(Collator, seed=3) for _ in range(2))
    assert [repr(event) for event in first] == [repr(event) for event in second]
