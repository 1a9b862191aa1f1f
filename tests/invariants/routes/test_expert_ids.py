"""Route checks of values: what no router can have chosen is found, and chance is never blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.rollout import Reply, Result
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import Judgement
from rollproof.verification.traces import judge
from tests.support.made_up_samples import hint_of_made_up
from tests.support.routed_requests import REGISTRY, RoutedRequest, Segment, failing, only_finding


def _by_engine(story: RoutedRequest, rows: np.ndarray) -> Judgement:
    """The engine itself returned ``rows``, and the stack handed them over faithfully."""
    trace = story.trace(rows)
    events = [
        replace(e, output=replace(e.output, routes=rows)) if isinstance(e, Reply) else e
        for e in trace.events
    ]
    return judge(replace(trace, events=tuple(events)), REGISTRY)


def _single_call(**changes: Any) -> RoutedRequest:
    return RoutedRequest(segments=(Segment(5),), changes=changes, with_truth=False)


def test_a_layer_that_was_never_captured_is_found() -> None:
    """Zeros in every row of one layer: the layer is named, and the check of distinct experts stays
    silent.
    """
    story = _single_call(num_layers=6, moe_layers=(1, 2, 3, 4, 5))
    rows = story.good().copy()
    rows[:, [2, 4]] = 0
    finding = only_finding(_by_engine(story, rows), "routes.live")
    assert finding.observed == "expert 0 in all 9 rows of 2 of 5 MoE layers (layer 2, 4)"
    assert "vLLM #44116" in finding.hint


def test_rows_that_are_all_zero_are_found() -> None:
    """The monolithic kernel: right shape, nothing captured anywhere."""
    story = _single_call()
    assert only_finding(_by_engine(story, story.good() * 0), "routes.live").observed.startswith(
        "expert 0 in all 9 rows of 3 of 3 MoE layers"
    )


def test_one_row_copied_to_all_tokens_is_found() -> None:
    """Distinct experts in every cell, and no token differs from another."""
    story = _single_call(num_layers=4, moe_layers=(0, 1, 2, 3))
    finding = only_finding(_by_engine(story, story.good()[:1].repeat(9, axis=0)), "routes.live")
    assert finding.observed == "one and the same row 9 times, in all 4 MoE layers"
    assert "captured once, for example under a CUDA graph" in finding.hint


def test_a_made_up_row_is_not_blamed_on_the_capture() -> None:
    """No engine was called: the same symptom, and no hint at its capture."""
    finding = hint_of_made_up("routes.live", lambda rows: rows[:1].repeat(len(rows), axis=0))
    assert finding.observed == "one and the same row 8 times, in all 3 MoE layers"
    assert "stitch.sampled-by-engine" in finding.hint
    assert "CUDA graph" not in finding.hint


def test_equal_rows_are_not_blamed_on_an_engine_whose_rows_differ() -> None:
    """The tokens are not those of the reply, so that the rows cannot be compared one by one; the
    engine's own rows differ from each other.
    """
    story = _single_call(num_layers=4, moe_layers=(0, 1, 2, 3))
    trace = story.trace(story.good()[:1].repeat(9, axis=0))
    result = trace.events[-1]
    assert isinstance(result, Result)
    assert result.rollout is not None
    first, *others = result.rollout.response_ids
    wrong = replace(result.rollout, response_ids=(first + 1, *others))
    events = [*trace.events[:-1], replace(result, rollout=wrong)]
    (finding,) = judge(replace(trace, events=tuple(events)), REGISTRY)["routes.live"].findings
    assert finding.hint.startswith("The rows that the engines returned differ from token to token")


@pytest.mark.parametrize(
    "story",
    [
        _single_call(num_experts=2, top_k=2),
        _single_call(num_experts=2, top_k=1, num_layers=1, moe_layers=(0,)),
        RoutedRequest(segments=(Segment(1),), prompt=2, with_truth=False),
        RoutedRequest(
            segments=(Segment(1),),
            prompt=1,
            with_truth=False,
            changes={"num_experts": 64, "top_k": 1},
        ),
    ],
    ids=["all experts chosen", "two experts", "two rows", "one row"],
)
def test_equal_rows_of_a_small_sample_are_no_fault(story: RoutedRequest) -> None:
    """Where chance or the model explains equal rows, nothing is said."""
    assert failing(_by_engine(story, story.good()[:1].repeat(len(story.good()), axis=0))) == set()


@pytest.mark.parametrize(("prompt", "found"), [(10, False), (11, True)])
def test_one_expert_in_all_of_22_rows_is_no_choice(prompt: int, found: bool) -> None:
    """Eight experts: 21 rows of expert 0 have a chance of 2**-63."""
    story = RoutedRequest(
        segments=(Segment(12),), prompt=prompt, with_truth=False, changes={"top_k": 1}
    )
    rows = story.good().copy()
    rows[:, 1] = 0
    judged = _by_engine(story, rows)
    assert ({"routes.live"} if found else set()) == failing(judged)
    if found:
        assert "MoE layers with only expert 0" == judged["routes.live"].findings[0].title


@pytest.mark.parametrize(("tokens", "found"), [(1, False), (2, True)])
def test_five_equal_rows_are_chance_and_six_are_not(tokens: int, found: bool) -> None:
    """28 choices in each of three layers: four repetitions have a chance of 2**-58, five of
    2**-72.
    """
    story = RoutedRequest(segments=(Segment(tokens),), with_truth=False)
    rows = story.good()[:1].repeat(len(story.good()), axis=0)
    assert ({"routes.live"} if found else set()) == failing(_by_engine(story, rows))


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ((0, 8), "An id beyond the last expert"),
        ((-1, 8), "A kernel marks padded tokens"),
        ((0, -1), "A kernel marks padded tokens"),
    ],
)
def test_the_hint_is_that_of_the_id_out_of_range(cell: tuple[int, int], words: str) -> None:
    """Expert 0 next to it is an ordinary one."""
    story = _single_call(dtype="int32")
    rows = story.good().copy()
    rows[3, 2] = cell
    finding = only_finding(_by_engine(story, rows), "routes.in-range")
    assert finding.hint.startswith(words)


def test_repeated_ids_that_exist_are_misread() -> None:
    """Neither zeros nor marks: the hint names what makes one id of two."""
    story = _single_call()
    rows = story.good().copy()
    rows[3, 2] = 7
    finding = only_finding(_by_engine(story, rows), "routes.distinct")
    assert finding.hint.startswith("The ids are not what a top-k returns")


def test_a_collapsed_router_of_one_expert_is_no_dead_layer_in_a_short_sample() -> None:
    """top_k = 1: expert 0 for a few tokens is a legal choice; for very many it is not believed."""
    short = RoutedRequest(segments=(Segment(1),), prompt=3, with_truth=False, changes={"top_k": 1})
    assert failing(_by_engine(short, short.good() * 0)) == set()
    long = RoutedRequest(segments=(Segment(12),), prompt=11, with_truth=False, changes={"top_k": 1})
    assert failing(_by_engine(long, long.good() * 0)) == {"routes.live"}


def test_equal_rows_of_a_repeated_token_are_no_fault() -> None:
    """A sequence of one token over and over may choose the same experts everywhere."""
    story = _single_call(num_layers=4, moe_layers=(0, 1, 2, 3))
    story.ids = (7,) * 10
    assert failing(_by_engine(story, story.good()[:1].repeat(9, axis=0))) == set()


def test_prompt_rows_of_zeros_are_repetitions_of_expert_0() -> None:
    """Rows that an engine never finalised: some rows zero, no layer dead."""
    story = _single_call()
    rows = story.good().copy()
    rows[:4] = 0
    finding = only_finding(_by_engine(story, rows), "routes.distinct")
    assert (
        finding.observed
        == "experts [0, 0] at position 0; so in 4 rows of 9 (positions 0-3), in 3 of 3 MoE layers"
    )
    assert finding.expected == "2 distinct experts"
    assert "SGLang #23885" in finding.hint


def test_an_engine_that_repeats_an_expert_is_found_in_the_sample() -> None:
    """The stack is faithful, the engine is not: position, layer, and how many layers."""
    story = _single_call()
    rows = story.good().copy()
    rows[6, 1] = 5
    finding = only_finding(_by_engine(story, rows), "routes.distinct")
    assert (
        finding.observed
        == "experts [5, 5] at position 6; so in 1 row of 9 (position 6), in 1 of 3 MoE layers"
    )
    assert finding.where["layer"] == 1


@pytest.mark.parametrize(("value", "words"), [(8, "fused shared expert"), (-1, "padded token")])
def test_ids_out_of_range_are_found(value: int, words: str) -> None:
    """Beyond the last expert, and a kernel's mark for padding."""
    story = _single_call(dtype="int32")
    rows = story.good().copy()
    rows[3, 2, 0] = value
    finding = only_finding(_by_engine(story, rows), "routes.in-range")
    assert finding.expected == "ids from 0 to 7"
    assert words in finding.hint


def test_rows_that_the_engine_filled_as_declared_are_no_choice() -> None:
    """An engine that marks tokens without a capture by -1, under a contract that declares it:
    neither range nor repetition.
    """
    story = _single_call(dtype="int32", filler="minus-one")
    rows = story.good().copy()
    rows[2] = -1
    assert failing(_by_engine(story, rows)) == set()


def test_top_1_has_nothing_to_repeat() -> None:
    """The check of distinct experts does not apply to top_k = 1, and says why."""
    story = _single_call(top_k=1)
    result = _by_engine(story, story.good())["routes.distinct"]
    assert (result.verdict, result.reason) == (
        Verdict.NOT_APPLICABLE,
        "top_k is 1: one expert is always distinct",
    )
