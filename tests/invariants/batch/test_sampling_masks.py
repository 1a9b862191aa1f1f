"""Sampling masks in a batch: each at its token, none at prompt and padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rollproof.core.records import Rollout
from rollproof.core.sampling_masks import SamplingMask
from rollproof.fakes.trainers.reference_batches import MaskCollator
from rollproof.judging.checks import Finding
from rollproof.verification.batches import judge_batches

_Change = Callable[[SamplingMask], SamplingMask | None]


def _masks(change: _Change) -> Callable[[], MaskCollator]:
    """Return a conversion that changes each row's masks."""

    class Changed(MaskCollator):
        def sampling_mask(self, sample: Rollout) -> SamplingMask | None:
            row = super().sampling_mask(sample)
            return None if row is None else change(row)

    return Changed


def _first(factory: Callable[[], MaskCollator]) -> Finding:
    """Return the first finding of the only check that fails."""
    report = judge_batches(factory)
    assert ["batch.sampling-masks"] == [result.id for result in report.failed]
    return report.failed[0].findings[0]


@pytest.mark.parametrize(
    ("change", "message", "expected", "observed"),
    [
        (
            lambda row: None,
            "the sampling masks of a sample are gone",
            "7 counts, which add up to the ids",
            "none",
        ),
        (
            lambda row: row.cut(0, len(row) - 1),
            "sampling masks of another length than their row",
            "7 counts, which add up to the ids",
            "6 counts",
        ),
        (
            lambda row: SamplingMask.joined([row.cut(1, len(row)), row.cut(0, 1)]),
            "sampling masks are not at their tokens",
            "none at response index 0",
            "[14, 10014, 20014], the mask of response index 1; so at 4 of 4 tokens",
        ),
    ],
)
def test_a_wrong_mask_is_explained_by_what_it_is(
    change: _Change, message: str, expected: str, observed: str
) -> None:
    """The finding says what is there, and whose mask it is."""
    finding = _first(_masks(change))
    assert (message, expected, observed) == (finding.title, finding.expected, finding.observed)


def test_a_mask_at_the_prompt_is_no_tokens_own() -> None:
    """A trainer would renormalise over it."""
    finding = _first(
        _masks(lambda row: SamplingMask.joined([SamplingMask.from_lists([[1, 2]]), row.cut(1, 99)]))
    )
    assert "places without a sampled token have a sampling mask" == finding.title
    assert "2 ids; so at 1 place (0)" == finding.observed


def test_masks_in_another_order_pass() -> None:
    """A support is a set."""

    def reversed_ids(row: SamplingMask) -> SamplingMask:
        return SamplingMask.from_lists(row.ids_of(i)[::-1] for i in range(len(row)))

    assert 0 == judge_batches(_masks(reversed_ids)).exit_code


def test_a_short_mask_may_be_padded_with_counts_of_0() -> None:
    """It says that there is none: nothing false is trained on."""

    class Padded(MaskCollator):
        def check(self, sample: Rollout) -> None:
            mask = sample.sampling_mask
            short = mask is not None and len(mask) < len(sample.response_ids)
            super().check(replace(sample, sampling_mask=None) if short else sample)

    assert 0 == judge_batches(Padded).exit_code
