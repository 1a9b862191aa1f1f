"""``versions.label-with-weights``: a server changes its weights and their label together."""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.events.rollout import Update, UpdatePhase
from rollproof.core.records import Span
from tests.support.trace_builder import contract
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes

ID = "versions.label-with-weights"


def _asked(script: TraceScript, version: int = 1, label: int | None = None) -> TraceScript:
    script.add(
        Update(version=version, label=version if label is None else label, phase=UpdatePhase.ASKED)
    )
    return script


def _running(**story: Any) -> tuple[TraceScript, int]:
    """A server with weights 0, a call that runs on it, and an update that was asked for."""
    script = TraceScript(versions="none", **story)
    script.weights(0).submit(max_tokens=8)
    call = script.call((1, 2))
    return _asked(script), call


class TestTooEarly:
    """The label comes before the weights."""

    def test_tokens_between_label_and_load_are_found(self) -> None:
        """The calls in flight were drained in between."""
        script, call = _running()
        script.weights(0, label=1, loaded=False, progress={call: 2})
        script.reply(call, (11, 12, 13, 14, 15), version=1).pause().weights(1)
        finding = finds(ID, script.resume())
        assert (
            "the label of an update was published before its weights were loaded" == finding.title
        )
        assert "no token while s0 shows version 1 and has version 0" == finding.expected
        assert (
            "3 tokens from event 5 to event 8, sampled by version 0 and shown as version 1"
            == finding.observed
        )
        assert {"server": "s0", "version": 0, "index": 5} == finding.where
        assert "when the calls in flight have drained" in finding.hint

    def test_tokens_of_calls_that_still_run_count(self) -> None:
        """A load into the running engine."""
        script, call = _running()
        script.weights(0, label=1, loaded=False, progress={call: 2})
        later = script.call((1, 3))
        script.weights(1, progress={call: 3, later: 1, 99: 5})
        assert finds(ID, script).observed.startswith("2 tokens from event 5 to event 8")

    def test_weights_that_never_come_are_found(self) -> None:
        """At the end, or when the server dies."""
        for end in (True, False):
            script, call = _running()
            script.weights(0, label=1, loaded=False, progress={call: 2}).reply(call, (1, 2, 3))
            if not end:
                script.fault("death", "s0")
            assert finds(ID, script).observed.startswith("1 token from event 5 to the end of the")

    def test_a_label_between_pause_and_load_passes(self) -> None:
        """Nothing is sampled in between: the calls have ended, or are frozen."""
        script, call = _running()
        script.pause(progress={call: 2}).weights(0, label=1, loaded=False, progress={call: 2})
        script.weights(1, progress={call: 2}).resume(progress={call: 2})
        script.reply(call, (11, 12, 13), version=1)
        passes(ID, script, labels_of_updates=1)

    def test_a_reply_that_was_on_its_way_is_no_token(self) -> None:
        """The call had ended before the label came, and its reply arrived late."""
        script, call = _running()
        script.weights(0, label=1, loaded=False, progress={}).reply(call, (11, 12), version=1)
        passes(ID, script.weights(1), labels_of_updates=1)

    def test_a_reply_without_new_tokens_is_no_fault(self) -> None:
        """The call was aborted with what it had."""
        script, call = _running()
        script.weights(0, label=1, loaded=False, progress={call: 2}).reply(call, (11, 12))
        passes(ID, script.weights(1), labels_of_updates=1)

    def test_a_call_that_was_cut_back_takes_no_tokens_from_another(self) -> None:
        """A preempted call reports fewer tokens than before."""
        script, call = _running()
        other = script.call((1, 3))
        script.weights(0, label=1, loaded=False, progress={call: 2, other: 2})
        script.weights(1, progress={call: 1, other: 3})
        assert finds(ID, script).observed.startswith("1 token from event")


def test_other_weights_under_the_label_of_an_update_are_found() -> None:
    """The previous checkpoint."""
    script, _ = _running()
    script.weights(0, label=1, identity=True)
    call = script.call((1, 3))
    finding = finds(ID, script.reply(call, (11, 12), version=1))
    assert "other weights were loaded under the label of an update" == finding.title
    assert "that is stored in the checkpoint" in finding.hint


class TestTooLate:
    """The label comes when its weights serve already."""

    def _late(self, *, pauses: bool = True, comes: bool = True) -> TraceScript:
        script, call = _running()
        if pauses:
            script.pause(progress={call: 2})
        script.weights(1, label=0, progress={call: 2})
        if pauses:
            script.resume(progress={call: 2})
        if comes:
            script.weights(1, label=1, loaded=False, progress={call: 4})
        return script

    def test_tokens_between_resume_and_label_are_found(self) -> None:
        """The server was paused, so that the label could have come before the resume."""
        finding = finds(ID, self._late())
        assert (
            "the label of an update was published after its weights had begun to serve"
            == finding.title
        )
        assert "no token while s0 shows version 0 and has version 1" == finding.expected
        assert finding.observed.startswith("2 tokens from event 6 to event 8")
        assert "while the server is still paused" in finding.hint

    def test_an_engine_that_is_loaded_while_it_serves_is_not_judged(self) -> None:
        """Its load and its label are two requests."""
        passes(ID, self._late(pauses=False), labels_of_updates=1)

    def test_a_stack_that_leaves_the_labels_alone_is_not_judged(self) -> None:
        """It shows no label of an update at all."""
        inapplicable(ID, self._late(comes=False), "the stack publishes none, or its own")

    def test_no_label_is_not_the_label_of_older_weights(self) -> None:
        """Two updates without a label, and one that is published later: nothing was claimed."""
        script = TraceScript(versions="none")
        script.weights(0, label=None).submit(max_tokens=8)
        call = script.call((1, 2))
        _asked(script).pause(progress={call: 2}).weights(1, label=None, progress={call: 2})
        script.resume(progress={call: 2})
        script.weights(1, label=1, loaded=False, progress={call: 4})
        passes(ID, script, labels_of_updates=1)

    def test_a_label_before_the_resume_passes(self) -> None:
        """As the requests of vLLM are meant to be sent."""
        script, call = _running()
        script.pause(progress={call: 2}).weights(1, label=0, progress={call: 2})
        script.weights(1, label=1, loaded=False, progress={call: 2}).resume(progress={call: 2})
        passes(ID, script.reply(call, (11, 12, 13), version=1), labels_of_updates=1)


def test_numbers_of_the_stack_are_its_own() -> None:
    """A counter of the stack may come to a number that an earlier update had."""
    script, _ = _running()
    script.weights(1)
    for phase in (UpdatePhase.ASKED, UpdatePhase.ENDED):
        script.add(Update(version=3, label=3, phase=phase))
    script.weights(3, label=2)
    _asked(script, 4).weights(4, label=3)
    passes(ID, script.reply(script.call((1, 3)), (11, 12), version=3), labels_of_updates=1)


@pytest.mark.parametrize("label", [1, "1"])
def test_the_spelling_of_a_label_does_not_matter(label: int | str) -> None:
    """SGLang's labels are strings."""
    script, call = _running()
    script.weights(0, label=label, loaded=False, progress={call: 2}).reply(call, (1, 2, 3))
    finds(ID, script)


def test_labels_of_the_harness_are_not_judged() -> None:
    """It publishes labels of its own, and revives servers with those that it finds."""
    script, call = _running()
    script.weights(0, label=1, loaded=False, progress={call: 2}, by_harness=True)
    inapplicable(ID, script.reply(call, (1, 2, 3)), "no server showed the label of an update")


class TestOwnLabels:
    """Labels of the stack's own: the loads of the whole trace show for which weights they are."""

    def _early(self, *, first: int | str = "step-0") -> tuple[TraceScript, int]:
        """An update publishes its label while old weights sample."""
        script = TraceScript(versions="none")
        script.weights(0, label=first).submit(max_tokens=8)
        call = script.call((1, 2))
        _asked(script).weights(0, label="step-1", loaded=False, progress={call: 1})
        return script, call

    @pytest.mark.parametrize("server", ["s0", "s1"])
    def test_a_label_that_is_later_loaded_with_other_weights_was_early(self, server: str) -> None:
        """By the same server, or by another one."""
        script, call = self._early()
        script.reply(call, (11, 12, 13)).weights(1, server, label="step-1")
        if server == "s1":
            script.weights(1, label="step-1")
        finding = finds(ID, script)
        assert (
            "the label of an update was published before its weights were loaded" == finding.title
        )
        assert 'no token while s0 shows version "step-1" and has version 0' == finding.expected
        assert finding.observed.startswith("2 tokens from event 5 to event ")
        assert "with the load, or between the load and the resume" in finding.hint

    def test_a_server_that_dies_before_the_load_was_early_if_another_one_loads_it(self) -> None:
        """Its tokens were sampled under the label all the same."""
        script, call = self._early()
        script.reply(call, (11, 12, 13)).fault("death", "s0")
        script.weights(0, "s1", label="step-0").weights(1, "s1", label="step-1")
        assert finds(ID, script).observed.startswith("2 tokens from event 5 to the end of the")

    def test_no_token_in_between_is_no_fault(self) -> None:
        """The calls in flight are frozen."""
        script, call = self._early()
        inapplicable(ID, script.weights(1, label="step-1", progress={call: 1}), "or its own")

    def test_a_label_that_is_never_loaded_is_not_judged(self) -> None:
        """It may be one of the weights that the server has."""
        script, call = self._early()
        inapplicable(ID, script.reply(call, (11, 12, 13)), "the stack publishes none, or its own")

    def test_a_label_of_several_weights_names_none(self) -> None:
        """Such as that of an epoch."""
        script, call = self._early()
        script.reply(call, (11, 12, 13)).weights(1, label="step-1")
        _asked(script, 2).weights(2, "s1", label="step-1")
        inapplicable(ID, script, "the stack publishes none, or its own")

    def test_a_label_that_is_older_than_the_update_names_none(self) -> None:
        """Such as "latest"."""
        script = TraceScript(versions="none")
        script.weights(0, "s1", label="step-1").weights(0, label="step-0").submit(max_tokens=8)
        call = script.call((1, 2))
        _asked(script).weights(0, label="step-1", loaded=False, progress={call: 1})
        script.reply(call, (11, 12, 13)).weights(1, label="step-1")
        inapplicable(ID, script, "the stack publishes none, or its own")

    def test_weights_that_no_update_asked_for_name_no_label(self) -> None:
        """Whether the label was there before them is not known."""
        script, call = self._early()
        script.reply(call, (11, 12, 13)).weights(7, label="step-1")
        inapplicable(ID, script, "the stack publishes none, or its own")

    def test_equal_weights_under_a_new_label_pass(self) -> None:
        """The update asked for the weights that are there."""
        script, call = self._early()
        script.reply(call, (11, 12, 13)).weights(0, label="step-1", identity=True)
        inapplicable(ID, script, "the stack publishes none, or its own")

    def test_a_label_that_follows_its_weights_is_not_early(self) -> None:
        """The next load leaves it in place for a moment, although its update was asked for
        before.
        """
        script = TraceScript(versions="none")
        script.weights(0, label="step-0").submit(max_tokens=8)
        call = script.call((1, 2))
        _asked(_asked(script), 2).weights(1, label="step-0", progress={call: 1})
        script.weights(1, label="step-1", loaded=False, progress={call: 2})
        script.weights(2, label="step-1", progress={call: 4})
        script.weights(2, label="step-2", loaded=False, progress={call: 5})
        inapplicable(ID, script, "the stack publishes none, or its own")

    def test_what_the_harness_publishes_is_no_evidence(self) -> None:
        """Neither its label nor its load."""
        for mine in (False, True):
            script = TraceScript(versions="none")
            script.weights(0, label="step-0").submit(max_tokens=8)
            call = script.call((1, 2))
            _asked(script).weights(
                0, label="step-1", loaded=False, progress={call: 1}, by_harness=not mine
            )
            script.reply(call, (11, 12, 13)).weights(1, label="step-1", by_harness=mine)
            inapplicable(ID, script, "the stack publishes none, or its own")


def test_engines_without_versions_are_not_judged() -> None:
    """Nobody sees their labels."""
    header = {"engine": contract(rows="none", versions="none")}
    script, call = _running(header=header)
    script.weights(0, label=1, loaded=False, progress={call: 2}).reply(call, (1, 2, 3))
    inapplicable(ID, script, "the engines show no version")


class TestEngineTags:
    """What ``versions.engine-tags`` says of the same faults."""

    TAGS = "versions.engine-tags"

    def test_a_label_that_was_published_for_other_weights_is_not_the_engines_doing(self) -> None:
        """The hint names the update."""
        script, call = _running()
        script.weights(0, label=1, loaded=False, progress={call: 0})
        script.reply(
            call, (11, 12), version=1, true_tokens=(Span(start=0, end=2, version=0),)
        ).result((11, 12))
        finding = finds(self.TAGS, script)
        assert "the engine shows a version that was published for other weights" == finding.kind
        assert "The update published its label" in finding.hint

    def test_a_label_that_was_read_late_is_the_engines_doing(self) -> None:
        """The same symptom, and the update was in order."""
        script, call = _running()
        script.weights(1).reply(
            call, (11, 12), version=1, true_tokens=(Span(start=0, end=2, version=0),)
        ).result((11, 12))
        finding = finds(self.TAGS, script)
        assert "the engine shows a version for tokens that it did not sample" == finding.kind
        assert "store the label with each token" in finding.hint

    def test_unlabelled_weights_under_the_label_of_an_update_are_judged_once(self) -> None:
        """``versions.unlabelled-update`` is about labels that were left in place."""
        script = TraceScript(versions="none")
        script.weights(0).weights(1, label=None).submit(max_tokens=8)
        _asked(script, 2).weights(1, label=2, loaded=False)
        call = script.call((1, 2))
        script.reply(
            call, (11, 12), version=2, true_tokens=(Span(start=0, end=2, version=1),)
        ).result((11, 12))
        assert 0 == check("versions.unlabelled-update", script).found
        assert 1 == check(ID, script).found
