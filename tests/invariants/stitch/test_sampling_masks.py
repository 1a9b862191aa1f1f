"""Checks on sampling masks: every position is blamed on the one check that its fault belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import ActionKind, Case
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Reply, Result
from rollproof.core.records import Rollout
from rollproof.core.sampling_masks import SamplingMask
from rollproof.core.trace import Trace
from rollproof.fakes.clients.mask_clients import AsSampledMasks
from rollproof.fakes.clients.resuming import AsSampled, PartialSample
from rollproof.fakes.known_bugs._planting import ENDING, act, case, request
from rollproof.verification.runner import run_case
from tests.support.scripted_rollouts import blamed
from tests.support.trace_script import finds, inapplicable, passes, unknown

PAIRED = "stitch.sampling-masks-paired"
PRESENT = "stitch.sampling-masks-present"
SAMPLED = "stitch.sampling-masks-sampled"
LENGTH = "stitch.sampling-masks-length"


def _case(*aborts: int, **sampling: Any) -> Case:
    return case(
        *(act(ActionKind.ABORT, tokens) for tokens in aborts),
        requests=(request(sampling=sampling or {"top_k": 20}),),
    )


def _trace(
    change: Callable[[SamplingMask], SamplingMask | None] = lambda mask: mask,
    run: Case | None = None,
) -> Trace:
    """Return the trace of the reference with ``change`` made to the masks of its sample."""

    class Client(AsSampledMasks):
        def joined_masks(self, sample: PartialSample) -> SamplingMask | None:
            mask = super().joined_masks(sample)
            assert mask is not None
            return change(mask)

    return run_case(Client, run or _case(3))


def _changed(trace: Trace, kind: type[Event], change: Callable[[Any], Any]) -> Trace:
    return trace.with_events(
        [change(event) if isinstance(event, kind) else event for event in trace.events]
    )


def _lists(mask: SamplingMask) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(mask.token_ids, mask.offsets[1:-1])]


def _put(index: int, ids: list[int]) -> Callable[[SamplingMask], SamplingMask]:
    def change(mask: SamplingMask) -> SamplingMask:
        lists = _lists(mask)
        return SamplingMask.from_lists([*lists[:index], ids, *lists[index + 1 :]])

    return change


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}, {"top_k": 1}],
)
def test_masks_of_their_tokens_pass(sampling: dict[str, Any]) -> None:
    """After a resume, with every filter, with ties above top_k, and in a greedy call."""
    trace = _trace(run=_case(3, **sampling))
    passes(PAIRED, trace, tokens_of_resumed_samples=6)
    passes(SAMPLED, trace, sampled_tokens_with_a_mask_of_their_own=6)
    passes(LENGTH, trace, samples_with_sampling_masks=1)
    assert set() == blamed(trace)


def test_the_order_of_ids_means_nothing() -> None:
    """A support is a set."""
    reversed_ids = _trace(
        lambda mask: SamplingMask.from_lists(ids[::-1] for ids in _lists(mask)), _case()
    )
    passes(PAIRED, reversed_ids)


def test_tokens_of_the_environment_have_none() -> None:
    """Their counts are 0, and a mask that a stack gives them is its own affair."""
    turns = case(
        model=ENDING,
        requests=(request(max_tokens=24, turns=((21, 22),), sampling={"top_k": 20}),),
        seed=1,
    )
    trace = _trace(run=turns)
    assert set() == blamed(trace)
    sample = next(event.rollout for event in trace.events if isinstance(event, Result))
    assert sample is not None
    assert sample.loss_mask is not None
    assert sample.sampling_mask is not None
    environment = np.flatnonzero(sample.loss_mask == 0)
    assert [0, 0] == sample.sampling_mask.counts[environment].tolist()
    assert set() == blamed(_trace(_put(int(environment[0]), [21]), turns))


@pytest.mark.parametrize(
    ("change", "blame"),
    [
        (_put(4, []), PRESENT),
        (_put(4, [1, 2]), PAIRED),
        (lambda mask: mask.cut(0, 5), LENGTH),
        (lambda mask: SamplingMask.joined([mask, mask.cut(0, 1)]), LENGTH),
        (lambda mask: None, PRESENT),
    ],
)
def test_each_wrong_mask_is_blamed_on_one_check(
    change: Callable[[SamplingMask], SamplingMask | None], blame: str
) -> None:
    """Absent, another's, or of another length: one fault, one finding."""
    trace = _trace(change)
    assert {blame} == blamed(trace)
    finds(blame, trace)


def test_the_mask_of_another_token_is_named() -> None:
    """The finding says whose mask it is, and that it lacks the token."""
    trace = _trace(lambda mask: SamplingMask.joined([mask.cut(1, 6), mask.cut(0, 1)]))
    finding = finds(PAIRED, trace)
    assert "6 of 6 sampling masks are not what the engine returned" in finding.title
    assert ", the mask of response index 1, without the sampled token" in finding.observed
    assert finding.observed.endswith("differs at response index 0-5")
    assert 0 == finding.where["index"]


def test_a_reconstructed_support_is_no_captured_one() -> None:
    """It holds the token, and other ids than the sampler's."""
    finding = finds(PAIRED, _trace(lambda mask: _put(2, [*_lists(mask)[2], 100_000])(mask)))
    assert "1 of 6 sampling masks is not what the engine returned" in finding.title
    assert "without the sampled token" not in finding.observed
    assert "reconstructed after sampling" in finding.hint


def test_masks_are_made_up_where_all_tokens_may_be_drawn() -> None:
    """The engine returned none, because no token was left out."""
    finding = finds(PAIRED, _trace(_put(1, [7]), _case(temperature=0.7)))
    assert "1 of 6 tokens has a sampling mask, although the engine returned none" == finding.title


def test_a_greedy_support_needs_no_engine() -> None:
    """A stack that makes the singletons itself, and requests none, is right."""

    class Client(AsSampledMasks):
        def wants_masks(self, sample: PartialSample) -> bool:
            return False

        def finished(self, sample: PartialSample) -> Rollout:
            own = SamplingMask.from_lists([token] for token in sample.response)
            return replace(super().finished(sample), sampling_mask=own)

    assert set() == blamed(run_case(Client, _case(3, temperature=0.0)))


def test_masks_that_were_not_recorded_prove_nothing() -> None:
    """Without the engines' masks, the sample's are judged by their tokens alone."""

    def without(reply: Reply) -> Reply:
        return replace(reply, output=replace(reply.output, sampling_mask=None))

    assert set() == blamed(_changed(_trace(), Reply, without))
    finding = finds(SAMPLED, _changed(_trace(_put(3, [1, 2])), Reply, without))
    assert "1 of 6 sampled tokens is not in its sampling mask" == finding.title
    assert finding.observed == "[1, 2]; so at response index 3"


def test_an_engine_that_returns_none_is_named() -> None:
    """The call requested masks, and its reply is complete."""

    def without(reply: Reply) -> Reply:
        return replace(reply, output=replace(reply.output, sampling_mask=None))

    trace = _changed(_trace(lambda mask: SamplingMask.none(6), _case()), Reply, without)
    finding = finds(PRESENT, trace)
    assert "The engine returned no sampling mask for 6 tokens" in finding.title
    assert {PRESENT} == blamed(trace)


def test_counts_that_do_not_fit_their_ids_are_a_finding() -> None:
    """A file may hold what no record of a subject can."""

    def forged(result: Result) -> Result:
        assert result.rollout is not None
        broken = SamplingMask(counts=np.array([3, -1]), token_ids=np.arange(2))
        return replace(result, rollout=replace(result.rollout, sampling_mask=broken))

    trace = _changed(_trace(), Result, forged)
    assert {LENGTH} == blamed(trace)
    finding = finds(LENGTH, trace)
    assert ("counts that add up to 2 ids", "[3, -1]") == (finding.expected, finding.observed)
    unknown(PAIRED, trace, "sampling masks and tokens do not align")


def test_a_stack_without_masks_is_not_judged() -> None:
    """The contract rules the checks out."""
    trace = run_case(AsSampled, _case())
    for check in (PRESENT, LENGTH, PAIRED, SAMPLED):
        inapplicable(check, trace, "the contract declares no sampling masks")
