"""``versions.bounds``: what encloses the versions that sampled, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollproof.core.events.rollout import Weights
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import check, finds, passes

ID = "versions.bounds"
OLD, NEW = (
    ScriptedCall(tokens=(11, 12, 13), version=1),
    ScriptedCall(tokens=(21, 22), version=2, reason="stop"),
)


@pytest.mark.parametrize(("low", "high"), [(1, 2), (0, 2), (1, 9), (-1, 100)])
def test_bounds_may_be_wider_than_what_sampled(low: int, high: int) -> None:
    """They are counters of the trainer's side: one may name weights that sampled nothing, or an
    update that is only about to be.
    """
    story = script_rollout(
        OLD, NEW, versions="bounds", sample={"min_version": low, "max_version": high}
    )
    passes(ID, story, samples_across_versions=1)
    assert set() == blamed(story)


@pytest.mark.parametrize(
    ("low", "high", "title", "hint"),
    [
        (2, 2, "sampled by weights older than its lower bound", "a rollout that began then"),
        (2, 3, "sampled by weights older than its lower bound", "while the engines still sampled"),
        (1, 1, "sampled by weights newer than its upper bound", "a rollout that ended by then"),
        (0, 0, "sampled by weights newer than its upper bound", "when the engines already sampled"),
    ],
)
def test_a_bound_that_does_not_hold_is_found(low: int, high: int, title: str, hint: str) -> None:
    """On either side, with what usually causes it."""
    story = script_rollout(
        OLD, NEW, versions="bounds", sample={"min_version": low, "max_version": high}
    )
    finding = finds(ID, story)
    assert title in finding.title
    assert hint in finding.hint
    assert f"min {low}, max {high}" == finding.observed
    assert {ID} == blamed(story)


def test_the_text_names_the_tokens_outside() -> None:
    """And nothing of those inside."""
    finding = finds(
        ID, script_rollout(OLD, NEW, versions="bounds", sample={"min_version": 2, "max_version": 2})
    )
    assert "bounds that enclose version 1 for tokens 0-2" == finding.expected
    assert (0, 2) == (finding.where["index"], finding.where["version"])


def test_bounds_that_are_not_there_are_unknown_here_and_found_elsewhere() -> None:
    """``versions.present`` reports them."""
    story = script_rollout(
        OLD, NEW, versions="bounds", sample={"min_version": 1, "max_version": None}
    )
    assert {"versions.present"} == blamed(story)
    assert "unknown" == check(ID, story).verdict


def test_names_are_ordered_by_publication() -> None:
    """A bound in words that was never published cannot be placed."""
    named = {1: "zebra", 2: "ape"}
    passes(
        ID,
        script_rollout(
            OLD,
            NEW,
            versions="bounds",
            labels=named,
            sample={"min_version": "zebra", "max_version": "ape"},
        ),
    )
    finds(
        ID,
        script_rollout(
            OLD,
            NEW,
            versions="bounds",
            labels=named,
            sample={"min_version": "ape", "max_version": "ape"},
        ),
    )
    unplaced = script_rollout(
        OLD,
        NEW,
        versions="bounds",
        labels=named,
        sample={"min_version": "zebra", "max_version": "cat"},
    )
    assert "unknown" == check(ID, unplaced).verdict


def test_either_name_of_equal_weights_will_do() -> None:
    """Weights 1 were published again as 7: tokens that they sampled lie within 7 to 7."""
    story = script_rollout(
        OLD,
        ScriptedCall(tokens=(21,), version=1, reason="stop"),
        versions="bounds",
        sample={"min_version": 7, "max_version": 7},
    ).trace()
    events = list(story.events)
    events.insert(-1, Weights(server_id="s0", version=1, label=7, loaded=False))
    assert "fail" == check(ID, story).verdict
    assert "pass" == check(ID, story.with_events(events)).verdict


def test_weights_of_which_the_stack_was_not_told_are_not_its_to_bound() -> None:
    """The schedule updates one server without the stack, so that its counter cannot know."""
    case = {"actions": [{"do": "skew"}]}
    story = script_rollout(OLD, NEW, versions="bounds", sample={"min_version": 1, "max_version": 1})
    trace = story.trace()
    skewed = replace(trace, header=replace(trace.header, case=case))
    assert "unknown" == check(ID, skewed).verdict
    assert "fail" == check(ID, trace).verdict


def test_labels_that_only_the_case_published_are_not_the_stacks_to_count() -> None:
    """The stack loaded weights without a label, and the case published one for them."""
    story = script_rollout(OLD, NEW, versions="bounds", sample={"min_version": 1, "max_version": 1})
    for by_harness, verdict in ((True, "unknown"), (False, "fail")):
        events = [
            replace(event, by_harness=by_harness)
            if isinstance(event, Weights) and event.version == 2
            else event
            for event in story.trace().events
        ]
        assert verdict == check(ID, story.trace().with_events(events)).verdict


def test_bounds_are_asked_for_also_where_engines_show_no_version() -> None:
    """They are counters of the stack's own."""
    part = ScriptedCall(tokens=(11,), version=1, shown=None, reason="stop")
    passes(
        "versions.present",
        script_rollout(part, versions="bounds", sample={"min_version": 1, "max_version": 1}),
        tags=1,
    )
