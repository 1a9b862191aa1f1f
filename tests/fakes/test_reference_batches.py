"""The reference conversion loses nothing, so only the planted fault of a known bug is detected."""

from __future__ import annotations

import pytest

from rollproof.fakes.trainers.reference_batches import Collator, ColumnCollator, MaskCollator
from rollproof.judging.checks import Verdict
from rollproof.verification.batches import judge_batches, record_batches

_OF_COLUMNS = ("batch.columns", "batch.column-filler", "batch.values")
_OF_MASKS = ("batch.sampling-masks",)


@pytest.mark.parametrize(
    ("reference", "left_out"),
    [
        (Collator, (*_OF_COLUMNS, *_OF_MASKS)),
        (ColumnCollator, _OF_MASKS),
        (MaskCollator, _OF_COLUMNS),
    ],
)
def test_the_reference_passes_every_check_and_exercises_it(
    reference: type[Collator], left_out: tuple[str, ...]
) -> None:
    """All checks of batches pass on the references, and each is exercised by one of them; the
    self-test is detected.
    """
    report = judge_batches(reference)
    expected = {
        result.id: Verdict.NOT_APPLICABLE if result.id in left_out else Verdict.PASS
        for result in report.results
    }
    assert expected == {result.id: result.verdict for result in report.results}
    assert report.canary is not None and report.canary.red


def test_the_same_batches_come_out_twice() -> None:
    """One seed, one set of batches, byte for byte."""
    first, second = (record_batches(Collator, seed=3) for _ in range(2))
    assert [repr(event) for event in first] == [repr(event) for event in second]
