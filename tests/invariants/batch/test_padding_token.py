"""Samples that contain the token with which the stack pads, as those of a model without a padding
token of its own do: only they show a conversion that finds padding by token.
"""

from __future__ import annotations

import pytest

from rollproof.fakes.known_bugs import KNOWN_BUGS
from rollproof.fakes.trainers.reference_batches import Collator
from rollproof.verification.batch_cases import batch_cases
from rollproof.verification.batches import judge_batches
from tests.odd_stacks.faulty_batches import (
    AttentionFromPadId,
    MaskFromPadId,
    MaskFromTheRight,
)
from tests.support.padded_batches import padded_contract

_CASE = "the padding token as the end of sequence"
_BUGS = {bug.id: bug for bug in KNOWN_BUGS}


@pytest.mark.parametrize("bug", ["batch-mask-by-padding-token", "batch-length-by-padding-token"])
def test_padding_found_by_token_shows_only_where_a_sample_has_the_token(bug: str) -> None:
    """The other batches leave such a conversion without a finding, and that one does not."""
    cases = batch_cases(Collator.contract)
    without = [case for case in cases if case.name != _CASE]
    assert len(cases) - 1 == len(without)
    assert () == judge_batches(_BUGS[bug].make, cases=without).failed
    failed = {result.id for result in judge_batches(_BUGS[bug].make, cases=cases).failed}
    assert (
        set(_BUGS[bug].detected_by)
        <= failed
        <= {
            *_BUGS[bug].detected_by,
            *_BUGS[bug].may_fail,
        }
    )


def test_attention_by_token_is_no_cut_and_no_padding() -> None:
    """The finding names the padding token, and its place in the loss is no second fault."""
    (tokens,) = judge_batches(AttentionFromPadId).failed
    first = tokens.findings[0]
    assert "attention leaves out tokens of the sample" == first.title
    assert "attention 0 at 1 of 7 tokens: the padding token 2" == first.observed
    assert first.hint.startswith("Make the attention mask from lengths")


def test_a_loss_mask_by_token_is_named() -> None:
    """The hint names the padding token if that is what the loss leaves out, and nothing else."""
    (by_token,) = judge_batches(MaskFromPadId).failed
    assert "batch.loss-mask" == by_token.id
    assert by_token.findings[0].hint.startswith("Each of them is the padding token 2: make")
    by_side = {result.id: result for result in judge_batches(MaskFromTheRight).failed}
    assert not any(
        "padding token" in finding.hint for finding in by_side["batch.loss-mask"].findings
    )


@pytest.mark.parametrize(("pad_id", "expected"), [(None, 0), (0, 0), (151_643, 151_643)])
def test_samples_have_the_declared_padding_token(pad_id: int | None, expected: int) -> None:
    """It ends a sample that is padded, and is inside a prompt and a response too."""
    (case,) = (case for case in batch_cases(padded_contract(pad_id=pad_id)) if case.name == _CASE)
    short, longest, plain = case.samples
    assert expected == short.response_ids[-1]
    assert len(short.response_ids) < len(longest.response_ids)
    assert expected in longest.prompt_ids[1:]
    assert 2 == longest.response_ids.count(expected)
    assert expected not in plain.prompt_ids + plain.response_ids


def test_the_report_counts_such_samples() -> None:
    """A report of batches lists the situation, and one without the samples does not."""
    name = "samples in batches with the padding token inside"
    assert 2 == judge_batches(Collator).exercised[name]
    cases = [case for case in batch_cases(Collator.contract) if case.name != _CASE]
    exercised = judge_batches(Collator, cases=cases).exercised
    assert {"samples in batches": sum(len(case.samples) for case in cases)} == exercised
