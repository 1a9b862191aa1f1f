"""Stitch checks on samples: prompt, request, what an engine sampled, and objects of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.rollout import Reply
from rollproof.core.records import FinishReason
from rollproof.judging.checks import Verdict
from tests.support.scripted_rollouts import (
    RESUMED,
    ScriptedCall,
    blamed,
    sample_of,
    script_rollout,
    with_sample,
)
from tests.support.trace_script import TraceScript, check, finds, passes, unknown

CORRECT: dict[str, TraceScript] = {
    "one call": script_rollout(ScriptedCall(tokens=(11, 12), reason="stop")),
    "no tokens at all": script_rollout(ScriptedCall(), ScriptedCall(reason="stop")),
    "resumed twice": script_rollout(*RESUMED),
    "empty abort first": script_rollout(ScriptedCall(), *RESUMED),
    "empty abort in the middle": script_rollout(RESUMED[0], ScriptedCall(version=1), *RESUMED[1:]),
    "empty abort last": script_rollout(
        *RESUMED, ScriptedCall(version=1, call={"max_tokens": 1}), budget=9, abort_surfaces=True
    ),
    "empty abort without any field": script_rollout(
        ScriptedCall(output={"version": None}, reply={"true_tokens": None}), *RESUMED
    ),
    "stop on the exact budget": script_rollout(
        ScriptedCall(tokens=(11, 12)), ScriptedCall(tokens=(13,), reason="stop"), budget=3
    ),
    "abort on the last token of the budget": script_rollout(
        *RESUMED[:2], sample={"finish_reason": FinishReason.LENGTH}, budget=5
    ),
    "completed for stop": script_rollout(
        ScriptedCall(tokens=(11,), reason="stop"), sample={"finish_reason": FinishReason.COMPLETED}
    ),
    "completed for length": script_rollout(
        *RESUMED, sample={"finish_reason": FinishReason.COMPLETED}
    ),
    "an engine that says completed": script_rollout(
        ScriptedCall(tokens=(11,), reason="completed"), sample={"finish_reason": FinishReason.STOP}
    ),
    "no budget": script_rollout(
        ScriptedCall(tokens=(11,)), ScriptedCall(tokens=(12,), reason="stop"), budget=None
    ),
    "the engine's own limit": script_rollout(
        ScriptedCall(tokens=(11,)), ScriptedCall(tokens=(12,), reason="length"), budget=None
    ),
    "a limit of the configuration": script_rollout(*RESUMED, budget=8, request={"limit": 8}),
    "turns": script_rollout(
        ScriptedCall(tokens=(11, 12), reason="stop"),
        ScriptedCall(observed=(91, 92), tokens=(13,)),
        ScriptedCall(tokens=(14,), reason="stop"),
        request={"turns": ((91, 92),)},
        loss_mask=True,
    ),
    "turns that only calls tell": script_rollout(
        ScriptedCall(tokens=(11,), reason="stop"),
        ScriptedCall(observed=(91,), tokens=(12,), reason="stop"),
        recorded=False,
        driven=False,
    ),
    "lost reply, retried": script_rollout(
        ScriptedCall(tokens=(11,)),
        ScriptedCall(tokens=(12, 13), lost=True),
        ScriptedCall(tokens=(14, 15), reason="stop"),
    ),
    "lost first reply": script_rollout(
        ScriptedCall(tokens=(12, 13), lost=True), ScriptedCall(tokens=(14, 15), reason="stop")
    ),
    "started again after a death": script_rollout(
        ScriptedCall(tokens=(11, 12)),
        ScriptedCall(lost=True),
        ScriptedCall(tokens=(21, 22, 23), restart=True),
        ScriptedCall(tokens=(24,), reason="stop"),
    ),
    "all logprobs missing, marked": script_rollout(
        ScriptedCall(tokens=(11,), logprobs=False, reason="stop"), missing_logprobs="nan"
    ),
    "a segment without logprobs, masked": script_rollout(
        ScriptedCall(tokens=(11,), logprobs=False),
        ScriptedCall(tokens=(12,), reason="stop"),
        missing_logprobs="masked",
        loss_mask=True,
        sample={"loss_mask": np.array([0, 1])},
    ),
    "no logprobs wanted": script_rollout(
        ScriptedCall(tokens=(11,), reason="stop", logprobs=False, call={"want_logprobs": False}),
        request={"want_logprobs": False},
        sample={"logprobs": None},
    ),
    "logprobs in 32 bits": script_rollout(
        *RESUMED,
        sample={
            "logprobs": np.asarray(sample_of(script_rollout(*RESUMED).trace()).logprobs).astype(
                "f4"
            )
        },
    ),
    "an end-of-sequence token of the stack's own, masked": script_rollout(
        ScriptedCall(tokens=(11, 12), reason="stop"),
        loss_mask=True,
        sample={
            "response": (11, 12, 0),
            "logprobs": np.array([-0.25, -0.75, 0.0]),
            "loss_mask": np.array([1, 1, 0]),
        },
    ),
    "labels as text": script_rollout(*RESUMED, labels={0: "step-0", 1: "step-1"}, versions="token"),
    "aborted and handed over": script_rollout(RESUMED[0], abort_surfaces=True, resume="none"),
    "granted in portions": script_rollout(
        ScriptedCall(tokens=(11, 12), reason="length", call={"max_tokens": 2}),
        ScriptedCall(tokens=(13, 14), reason="length", call={"max_tokens": 2}),
        budget=4,
    ),
    "a declared limit of the stack's own": script_rollout(
        ScriptedCall(tokens=(11, 12), reason="length", call={"max_tokens": 2}),
        budget=8,
        limits={"response": 2},
    ),
}


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_rollout_is_never_blamed(name: str) -> None:
    """Unusual is not wrong: no check on stitching or versions finds anything in these."""
    assert set() == blamed(CORRECT[name])


def test_a_duplicate_reply_changes_nothing() -> None:
    """The second delivery of a reply is not a second reply."""
    events = []
    for event in script_rollout(*RESUMED).trace().events:
        events.append(event)
        if isinstance(event, Reply):
            events.append(replace(event, duplicate=True))
    assert set() == blamed(script_rollout(*RESUMED).trace().with_events(events))


class TestPrompt:
    """``stitch.prompt``."""

    ID = "stitch.prompt"

    def test_a_cut_prompt_is_found(self) -> None:
        """A prompt that lost its first token."""
        story = script_rollout(*RESUMED, prompt=(1, 2, 3))
        trace = story.trace()
        spoiled = with_sample(trace, replace(sample_of(trace), prompt_ids=(2, 3)))
        finding = finds(self.ID, spoiled)
        assert "The sample carries a prompt of 2 tokens that is not its request's" == finding.title
        assert "[2, 3]; the first difference is at position 0" == finding.observed
        assert {self.ID} == blamed(spoiled)

    def test_the_prompt_of_another_request_is_named(self) -> None:
        """Two samples that were swapped."""
        story = script_rollout(
            ScriptedCall(tokens=(11,), reason="stop"), request_id="r0", prompt=(1, 2)
        )
        story = script_rollout(
            ScriptedCall(tokens=(12,), reason="stop"), request_id="r1", prompt=(3, 4), script=story
        )
        trace = story.trace()
        assert (
            "but that of request r0"
            in finds(
                self.ID, with_sample(trace, replace(sample_of(trace), prompt_ids=(1, 2)))
            ).title
        )

    def test_nothing_is_said_without_a_sample(self) -> None:
        """A dropped sample is not a passed one."""
        story = TraceScript()
        story.submit().result()
        unknown(self.ID, story, "no sample was delivered")
        story = TraceScript()
        story.submit()
        unknown(self.ID, story, "the request never ended")


class TestRequestId:
    """``stitch.request-id``."""

    ID = "stitch.request-id"

    def _with_neighbour(
        self, label: str, *, other: dict[str, Any] | None = None, mine: dict[str, Any] | None = None
    ) -> TraceScript:
        """A request r0 with a sample that carries ``label``, and a request r1."""
        part = ScriptedCall(tokens=(11,), reason="stop")
        story = script_rollout(part, request_id="r1", prompt=(3, 4), request=other)
        trace = script_rollout(part, script=story, request=mine).trace()
        return with_sample(trace, replace(sample_of(trace), request_id=label))

    def test_the_id_of_another_request_is_found(self) -> None:
        """Everything else in the sample is right."""
        story = self._with_neighbour("r1")
        finding = finds(self.ID, story)
        assert "The sample of request r0 carries the id of request r1" == finding.title
        assert ("request id 'r0'", "request id 'r1'") == (finding.expected, finding.observed)
        assert {self.ID} == blamed(story)

    @pytest.mark.parametrize("label", ["r0", "7c1e", ""])
    def test_ids_of_the_stacks_own_making_pass(self, label: str) -> None:
        """Its own, and one that no request has."""
        passes(self.ID, self._with_neighbour(label), samples_with_other_requests_in_the_run=1)

    def test_members_of_a_group_may_share_an_id(self) -> None:
        """Stacks give the samples of one prompt the same label."""
        passes(self.ID, self._with_neighbour("r1", other={"group": "g"}, mine={"group": "g"}))
        finds(self.ID, self._with_neighbour("r1", other={"group": "g"}, mine={"group": "h"}))

    def test_a_request_alone_cannot_be_mistaken(self) -> None:
        """No other request, no other id."""
        unknown(
            self.ID,
            script_rollout(ScriptedCall(tokens=(11,), reason="stop")),
            "not exercised: no samples with other requests in the run occurred",
        )


class TestSampledByEngine:
    """``stitch.sampled-by-engine``."""

    ID = "stitch.sampled-by-engine"

    @staticmethod
    def _second(tokens: tuple[int, ...], **fields: Any) -> TraceScript:
        """Request r1 without a call, with a sample of ``tokens``, after r0 with one."""
        driven = fields.pop("driven", True)
        first = script_rollout(
            ScriptedCall(tokens=(11, 12, 13), reason="length"),
            budget=3,
            driven=driven,
            loss_mask=True,
        )
        return script_rollout(
            request_id="r1",
            script=first,
            sample={
                "response": tokens,
                "logprobs": (-1.0,) * len(tokens),
                "finish_reason": FinishReason.LENGTH,
                "loss_mask": np.array(fields.pop("mask", [1] * len(tokens))),
            },
            budget=3,
        )

    def test_a_sample_with_a_call_passes(self) -> None:
        """One reply is enough; whether its tokens are the sample's is stitch.tokens' to say."""
        passes(
            self.ID,
            script_rollout(ScriptedCall(tokens=(11,), reason="stop")),
            samples_with_engine_calls=1,
        )

    def test_a_made_up_sample_is_found(self) -> None:
        """No engine was called, and no other request received these tokens."""
        finding = finds(self.ID, self._second((7, 8, 9)))
        assert "A sample of 3 tokens came from no engine call of its request" == finding.title
        assert "a sample that no engine sampled" == finding.kind
        assert "[7, 8, 9]; no engine was called for this request" == finding.observed
        assert finding.hint.startswith("A mock, a cache or a default answered instead of an engine")

    def test_the_reply_to_another_request_is_found(self) -> None:
        """The finding names the request that received the tokens, and the hint is another."""
        finding = finds(self.ID, self._second((11, 12, 13)))
        assert "the sample of another request" == finding.kind
        assert finding.title.endswith("no engine call of its request, but from request r0")
        assert "[11, 12, 13]; request r0 received these tokens, and they were used twice" == (
            finding.observed
        )
        assert finding.hint.startswith("Each sample of a prompt (n > 1) needs a draw of its own")

    def test_a_sample_of_internal_calls_is_found(self) -> None:
        """The finding says that the calls that brought it were made inside fleet.internal()."""
        finding = finds(self.ID, self._hidden((11, 12, 13)))
        assert finding.title == (
            "A sample of 3 tokens came from no engine call of its request: its calls were made"
            " inside fleet.internal()"
        )
        assert "a sample of internal calls" == finding.kind
        assert "[11, 12, 13]; 2 calls inside fleet.internal() brought these tokens" == (
            finding.observed
        )
        assert finding.hint.startswith("A call inside fleet.internal() belongs to no request.")

    @pytest.mark.parametrize("tokens", [(7, 8, 9), (11, 12, 14), (11, 12, 13, 14)])
    def test_internal_calls_are_not_blamed_for_other_tokens(self, tokens: tuple[int, ...]) -> None:
        """A health check with the prompt of the request says nothing of a sample that it did not
        bring.
        """
        finding = finds(self.ID, self._hidden(tokens))
        assert "a sample that no engine sampled" == finding.kind
        assert "internal" not in f"{finding.title} {finding.observed} {finding.hint}"

    @pytest.mark.parametrize(
        ("tokens", "mask", "internal"),
        [
            ((11, 12, 13, 14), (1, 1, 1, 0), True),
            ((11, 12, 13, 14), (0, 0, 0, 1), False),
            ((11, 12, 13, 14), (1, 1, 1), False),
            ((11, 12, 13), (1, 1), True),
        ],
    )
    def test_internal_calls_brought_what_is_trained_on(
        self, tokens: tuple[int, ...], mask: tuple[int, ...], internal: bool
    ) -> None:
        """A token behind the end of a mask may be trained on."""
        finding = finds(self.ID, self._hidden(tokens, loss_mask=np.array(mask)))
        assert internal == (finding.kind == "a sample of internal calls")

    @staticmethod
    def _hidden(tokens: tuple[int, ...], **sample: Any) -> TraceScript:
        """A request with two internal calls, that brought 11, 12 and 13, with another sample."""
        internal = {"request_id": "", "internal": True}
        return script_rollout(
            ScriptedCall(tokens=(11, 12), call=internal),
            ScriptedCall(tokens=(13,), reason="length", call=internal),
            sample={"response": tokens, "logprobs": (-1.0,) * len(tokens), **sample},
        )

    def test_a_recording_is_not_judged(self) -> None:
        """It may have missed the call."""
        story = self._second((7, 8, 9), driven=False)
        result = check(self.ID, story)
        assert (Verdict.PASS, 0) == (result.verdict, result.found)
        alone = TraceScript(driven=False)
        alone.submit()
        alone.result(prompt=(1, 2), response=(7,), logprobs=(-1.0,))
        unknown(self.ID, alone, "a recording may miss engine calls")

    def test_what_is_not_trained_on_is_not_judged(self) -> None:
        """Stacks fill up a batch with dummies, and an empty sample needs no engine."""
        for story in (self._second((7, 8), mask=[0, 0]), self._second(())):
            passes(self.ID, story, samples_with_engine_calls=1)


class TestObjects:
    """``stitch.caller-objects`` and ``stitch.handed-over``."""

    def test_a_changed_parameter_is_found(self) -> None:
        """The budget was written into the caller's own dictionary."""
        finding = finds(
            "stitch.caller-objects",
            script_rollout(*RESUMED, event={"caller_changed": ("request: sampling",)}),
        )
        assert "The stack changed 1 object of its caller: request: sampling" == finding.title
        assert "verl #7207" in finding.hint

    def test_what_an_engine_returned_is_not_the_callers(self) -> None:
        """Writing into the routes of a reply is judged by another check."""
        passes(
            "stitch.caller-objects",
            script_rollout(*RESUMED, event={"caller_changed": ("routed_experts: values",)}),
        )

    def test_lists_that_go_on_changing_are_found(self) -> None:
        """The sample shares its list with the client."""
        finding = finds(
            "stitch.handed-over",
            script_rollout(*RESUMED, event={"later_changed": ("logprobs", "routes")}),
        )
        assert "logprobs of the sample changed after delivery" == finding.title

    @pytest.mark.parametrize("check_id", ["stitch.caller-objects", "stitch.handed-over"])
    def test_a_recording_watches_nothing(self, check_id: str) -> None:
        """If objects were not compared, the absence of changes is no pass."""
        passes(check_id, script_rollout(*RESUMED))
        unknown(check_id, script_rollout(*RESUMED, driven=False), "a recording does not")
