"""Views: labels of versions, and what a view works out before and after its request ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollproof.core.events.rollout import Update, UpdatePhase, Weights
from rollproof.core.records import FinishReason
from rollproof.judging.checks import Collector, request_check
from rollproof.judging.judge import Tally
from rollproof.judging.registry import Registry
from rollproof.judging.request_view import RequestView
from rollproof.judging.weight_history import WeightHistory
from rollproof.verification.traces import judge_events
from tests.support.trace_builder import TraceBuilder, contract

_UPDATES = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.integers(0, 5), st.booleans()), max_size=12
)


class TestHistory:
    """Updates and what they published."""

    @given(_UPDATES, st.lists(st.integers(0, 12), max_size=4))
    def test_it_agrees_with_a_plain_search_whenever_it_is_asked(
        self, updates: list[tuple[int, int | None, bool]], looks: list[int]
    ) -> None:
        """Looking in between changes no answer."""
        history = WeightHistory()
        for i, (version, label, loaded) in enumerate(updates):
            history.updates.append(
                Weights(server_id="s", version=version, label=label, loaded=loaded)
            )
            if i in looks:
                assert history.labels is not None
        given = [(version, label) for version, label, _ in updates if label is not None]
        assert {label for _, label in given} == history.labels
        carried = [
            loaded and before is not None and before[0] != version and before[1] == label
            for before, (version, label, loaded) in zip([None, *updates], updates, strict=False)
        ]
        for version in range(5):
            theirs = [
                label
                for (weights, label, _), carries in zip(updates, carried, strict=True)
                if weights == version and label is not None and not carries
            ]
            shown = [
                label
                for (weights, label, _), carries in zip(updates, carried, strict=True)
                if weights == version and label is not None and carries
            ]
            assert set(theirs or shown) == set(history.labels_of(version))
            assert set(shown) - set(theirs or shown) == history.carried_of(version)
            if theirs:
                assert theirs[-1] == history.label_of(version)
        first = list(dict.fromkeys(label for _, label in given))
        assert [first.index(label) if label in first else None for label in range(6)] == [
            history.rank_of(label) for label in range(6)
        ]
        assert {
            version for version, label, loaded in updates if label is None and loaded
        } == history.unlabelled()

    def test_the_label_of_an_update_is_none_of_other_weights(self) -> None:
        """As they are loaded, it becomes that of its own weights."""
        history = WeightHistory()
        history.published(Weights(server_id="s", version=0, label=0))
        history.asked(Update(version=1, label=1, phase=UpdatePhase.ASKED))
        history.published(Weights(server_id="s", version=0, label="1", loaded=False))
        assert ([0], []) == (list(history.labels_of(0)), list(history.labels_of(1)))
        assert history.was_misplaced("s", 1)
        assert not history.was_misplaced("s", 0)
        history.published(Weights(server_id="s", version=1, label="1"))
        assert (["1"], frozenset()) == (list(history.labels_of(1)), history.carried_of(1))

    def test_a_label_that_the_harness_publishes_is_never_misplaced(self) -> None:
        """It comes from whatever the harness found."""
        history = WeightHistory()
        history.asked(Update(version=1, label=1, phase=UpdatePhase.ASKED))
        history.published(Weights(server_id="s", version=0, label=1, by_harness=True))
        assert [1] == list(history.labels_of(0))

    def test_an_update_without_a_label_may_leave_the_old_one(self) -> None:
        """At its end the weights have no label, whatever the server shows; before, one may come."""
        history = WeightHistory()
        history.published(Weights(server_id="s", version=0, label=0))
        history.asked(Update(version=1, label=None, phase=UpdatePhase.ASKED))
        history.published(Weights(server_id="s", version=1, label=0))
        assert ([0], frozenset()) == (list(history.labels_of(1)), history.unlabelled())
        history.asked(Update(version=1, label=None, phase=UpdatePhase.ENDED))
        assert ([], {1}) == (list(history.labels_of(1)), history.unlabelled())
        assert {0} == history.carried_of(1)
        history.published(Weights(server_id="s", version=1, label="own", loaded=False))
        assert ["own"] == list(history.labels_of(1))

    @pytest.mark.parametrize(
        ("label", "phase", "by_harness", "shown_last"),
        [
            (1, UpdatePhase.ENDED, False, 0),
            (None, UpdatePhase.FAILED, False, 0),
            (None, UpdatePhase.ENDED, True, 0),
            (None, UpdatePhase.ENDED, False, None),
        ],
        ids=[
            "a label was asked for",
            "it failed",
            "loaded by the harness",
            "the label was cleared",
        ],
    )
    def test_the_label_that_a_load_left_in_place_counts_otherwise(
        self, label: int | None, phase: UpdatePhase, by_harness: bool, shown_last: int | None
    ) -> None:
        """The weights may yet get a label, the stack may not have left it, or it is gone."""
        history = WeightHistory()
        history.published(Weights(server_id="s", version=0, label=0))
        history.asked(Update(version=1, label=label, phase=UpdatePhase.ASKED))
        history.published(Weights(server_id="s", version=1, label=0, by_harness=by_harness))
        history.published(Weights(server_id="s", version=1, label=shown_last, loaded=False))
        history.asked(Update(version=1, label=label, phase=phase))
        assert [0] == list(history.labels_of(1))

    def test_a_label_is_not_misplaced_for_weights_that_another_update_asked_for(self) -> None:
        """Two updates run, and a stack counts by itself."""
        history = WeightHistory()
        for version in (1, 2):
            history.asked(Update(version=version, label=version, phase=UpdatePhase.ASKED))
        history.published(Weights(server_id="s", version=2, label=1))
        assert [1] == list(history.labels_of(2))


def _story() -> TraceBuilder:
    """Request r1 ends while r0 is under way; r0 then samples more."""
    builder = TraceBuilder(contract(rows="none"))
    builder.weights(0).submit("r0", (1, 2)).submit("r1", (3, 4))
    builder.reply(builder.call((1, 2), "r0"), (11,), "abort")
    builder.reply(builder.call((3, 4), "r1"), (21,), "stop").result(
        (21,), "r1", (3, 4), finish_reason=FinishReason.STOP
    )
    builder.reply(builder.call((1, 2, 11), "r0"), (12,), "stop").result(
        (11, 12), "r0", (1, 2), finish_reason=FinishReason.STOP
    )
    return builder


def test_a_neighbour_looked_at_early_is_complete_when_it_is_judged() -> None:
    """What one request's check saw of another that was still open must not be what that other is
    judged by.
    """
    seen: dict[str, list[tuple[int, ...]]] = {}

    @request_check("test.looks", promise="", needs="", exercised_by="looks")
    def looks(view: RequestView, out: Collector) -> None:
        """Look at every neighbour's stitch, and leave something in its memo."""
        out.exercised("looks")
        seen.setdefault(view.request.request_id, []).append(view.stitched.response_ids)
        assert not view.memo
        for other in view.neighbours:
            seen.setdefault(other.request.request_id, []).append(other.stitched.response_ids)
            other.memo["seen"] = len(other.segments)

    trace = _story().trace()
    judge_events(trace.header, trace.events, Tally(Registry([looks])))
    assert [(11,), (11, 12)] == seen["r0"]
    assert [(21,), (21,)] == seen["r1"]


@pytest.mark.parametrize(("position", "segment"), [(1, None), (2, 0), (3, 1), (4, None)])
def test_segments_are_found_by_position(position: int, segment: int | None) -> None:
    """Prompt tokens, and positions after the end, belong to none."""
    found: list[int | None] = []

    @request_check("test.segment", promise="", needs="", exercised_by="looks")
    def look(view: RequestView, out: Collector) -> None:
        """Ask for the segment."""
        if view.request.request_id == "r0":
            found.append(view.segment_of(position))

    trace = _story().trace()
    judge_events(trace.header, trace.events, Tally(Registry([look])))
    assert [segment] == found
