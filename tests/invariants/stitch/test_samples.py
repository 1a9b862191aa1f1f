"""Stitch checks on samples: prompt, tokens, turns, the unbroken twin, and objects of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.rollout import Reply
from rollproof.core.records import FinishReason
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.judging.checks import Verdict
from tests.support.scripted_rollouts import (
    ScriptedCall,
    blamed,
    sample_of,
    script_rollout,
    with_sample,
)
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes, unknown

RESUMED = (
    ScriptedCall(tokens=(11, 12, 13)),
    ScriptedCall(tokens=(21, 22), version=1),
    ScriptedCall(tokens=(31, 32, 33), version=1, reason="length"),
)
SAMPLED = (11, 12, 13, 21, 22, 31, 32, 33)
_WITHOUT_THIRD = SAMPLED[:2] + SAMPLED[3:]

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


class TestTokens:
    """``stitch.tokens``."""

    ID = "stitch.tokens"

    @pytest.mark.parametrize(
        ("response", "title", "index", "hint"),
        [
            (
                SAMPLED[3:],
                "3 of 8 sampled tokens are missing from the response",
                0,
                "All that segment 0 sampled is gone",
            ),
            (
                SAMPLED[:3] + SAMPLED[5:],
                "2 of 8 sampled tokens are missing from the response",
                3,
                "All that segment 1 sampled is gone",
            ),
            (
                SAMPLED[:-1],
                "1 of 8 sampled tokens is missing from the response",
                7,
                "The loss begins in segment 2: the end of the reply to call 3 was cut off.",
            ),
            (
                (),
                "8 of 8 sampled tokens are missing from the response",
                0,
                "The loss begins in segment 0",
            ),
            (
                SAMPLED[:5] + SAMPLED[3:],
                "The response repeats 2 tokens that were sampled once",
                5,
                "appended twice",
            ),
            (
                (*SAMPLED, 33),
                "The response repeats 1 token that was sampled once",
                8,
                "appended twice",
            ),
            (
                (*SAMPLED, 0),
                "The response holds 1 token that no engine call of this request returned",
                8,
                "masked out",
            ),
            (
                (1, 2, *SAMPLED),
                "The response holds 2 of 2 tokens of the prompt",
                0,
                "`ids[-n:]` is the entire list if n is 0",
            ),
            (
                SAMPLED[3:5] + SAMPLED[:3] + SAMPLED[5:],
                "5 of 8 tokens are in another order than they were sampled",
                0,
                "order of their calls",
            ),
            (
                (11, 99, *SAMPLED[2:]),
                "1 of 8 tokens of the response is not what the engines sampled",
                1,
                "never ids from decoded text",
            ),
            (
                (11, 98, 99, *SAMPLED[3:]),
                "2 of 8 tokens of the response are not what the engines sampled",
                1,
                "begins in segment 0",
            ),
        ],
    )
    def test_each_kind_of_fault_is_named(
        self, response: tuple[int, ...], title: str, index: int, hint: str
    ) -> None:
        """Lost, repeated, added, reordered, replaced: the finding says which, how many and
        where.
        """
        finding = finds(self.ID, script_rollout(*RESUMED, sample={"response": response}))
        assert title == finding.title
        assert ("r0", index) == (finding.where["request"], finding.where["index"])
        assert hint in finding.hint
        assert finding.expected.startswith("8 tokens as sampled: [")
        segments = (0, 0, 0, 1, 1, 2, 2, 2)
        segment = segments[index] if index < len(segments) else None
        assert segment == finding.where.get("segment")
        assert finding.observed.startswith(f"{len(response) or 'no'} tokens: [")
        assert finding.observed.endswith(f"; the first difference is at response index {index}")

    def test_a_prompt_in_place_of_an_empty_response_is_named(self) -> None:
        """What no call sampled is not padding where it is the prompt."""
        finding = finds(
            self.ID,
            script_rollout(ScriptedCall(), sample={"response": (1, 2)}, abort_surfaces=True),
        )
        assert "The response holds 2 of 2 tokens of the prompt" == finding.title

    @pytest.mark.parametrize(
        "response", [SAMPLED[3:], SAMPLED[:-1], (*SAMPLED, 33), (11, 99, *SAMPLED[2:])]
    )
    def test_only_the_tokens_are_blamed(self, response: tuple[int, ...]) -> None:
        """Logprobs, masks and tags that fit what was sampled are not to blame for a wrong
        response.
        """
        for kind in ("sample", "min-max", "call", "span", "token"):
            assert {self.ID} == blamed(
                script_rollout(
                    *RESUMED, sample={"response": response}, versions=kind, loss_mask=True
                )
            )

    def test_tokens_of_another_request_are_traced_back(self) -> None:
        """The replies of two requests were mixed up."""
        story = script_rollout(
            ScriptedCall(tokens=(41, 42, 43), reason="stop"), request_id="r1", prompt=(3, 4)
        )
        finding = finds(
            self.ID,
            script_rollout(*RESUMED, sample={"response": (41, 42, *SAMPLED[2:])}, script=story),
        )
        assert (
            "Request r1 sampled these tokens: the replies of two requests were mixed up."
            == finding.hint
        )

    @pytest.mark.parametrize("own", [-3.0, -4.0])
    def test_a_sample_of_one_token_is_traced_back_by_its_logprob(self, own: float) -> None:
        """A token alone may be equal by chance; with the logprob of another request's it is not."""
        theirs = np.array([-3.0])
        part = ScriptedCall(tokens=(41,), reason="stop", output={"logprobs": theirs})
        story = script_rollout(part, request_id="r1", prompt=(3, 4), sample={"logprobs": theirs})
        swapped = script_rollout(
            ScriptedCall(tokens=(11,), reason="stop"),
            sample={"response": (41,), "logprobs": np.array([own])},
            script=story,
        )
        traced = "Request r1 sampled these tokens" in finds(self.ID, swapped).hint
        assert (own == -3.0) == traced

    def test_one_token_of_another_request_is_not_traced_back(self) -> None:
        """Two requests share single tokens by chance; two in a row are a trace. So it is with a
        reply that was lost.
        """
        for extra, named in (((41,), False), ((41, 42), True)):
            story = script_rollout(
                ScriptedCall(tokens=(41, 42), reason="stop"), request_id="r1", prompt=(3, 4)
            )
            sample = {"response": (*SAMPLED[:1], *extra, *SAMPLED[1:])}
            finding = finds(self.ID, script_rollout(*RESUMED, sample=sample, script=story))
            assert named is finding.hint.startswith("Request r1 sampled these tokens")
        parts = (
            ScriptedCall(tokens=(11,)),
            ScriptedCall(tokens=(88, 89), lost=True),
            ScriptedCall(tokens=(12,), reason="stop"),
        )
        finding = finds(self.ID, script_rollout(*parts, sample={"response": (11, 88, 12)}))
        assert "lost on its way" not in finding.hint

    @pytest.mark.parametrize(
        ("response", "kind"),
        [
            ((11, 12, 13, 14, 11), "tokens that no call returned"),
            ((11, 12, 13, 14, 2), "tokens that no call returned"),
            ((11, 12, 13, 14, 11, 99), "tokens that no call returned"),
            ((11, 12, 13, 14, 11, 12), "tokens are repeated"),
            ((11, 12, 13, 14, 14), "tokens are repeated"),
            ((11, 11, 12, 13, 14), "tokens are repeated"),
        ],
    )
    def test_one_token_is_repeated_only_beside_itself(
        self, response: tuple[int, ...], kind: str
    ) -> None:
        """Two in a row are a repetition wherever they are."""
        one = ScriptedCall(tokens=(11, 12, 13, 14), reason="stop")
        assert kind == finds(self.ID, script_rollout(one, sample={"response": response})).kind

    def test_a_token_of_a_reply_that_arrived_was_not_lost(self) -> None:
        """It stands in place of another one."""
        one = ScriptedCall(tokens=(11, 12, 13), reason="stop")
        finding = finds(self.ID, script_rollout(one, sample={"response": (11, 13, 13)}))
        assert finding.hint.startswith("The difference begins in")

    def test_the_end_of_an_aborted_reply_is_not_cut_by_the_stack(self) -> None:
        """What an abort left behind is lost on a resume: nothing shows a width of the stack."""
        hint = finds(self.ID, script_rollout(*RESUMED, sample={"response": _WITHOUT_THIRD})).hint
        assert hint.startswith("The loss begins in segment 0; aborted calls return tokens too")

    def test_tokens_of_a_lost_reply_are_traced_back(self) -> None:
        """What never arrived cannot stand in the sample."""
        parts = (
            ScriptedCall(tokens=(11,)),
            ScriptedCall(tokens=(88, 89), lost=True),
            ScriptedCall(tokens=(12,), reason="stop"),
        )
        finding = finds(self.ID, script_rollout(*parts, sample={"response": (11, 88, 89, 12)}))
        assert "They are in the reply to call 2 that was lost on its way" in finding.hint

    def test_tokens_from_before_a_restart_are_explained(self) -> None:
        """They were sampled, delivered, and then given up; a plain loss after a restart stays a
        plain loss.
        """
        parts = (
            ScriptedCall(tokens=(11, 12)),
            ScriptedCall(lost=True),
            ScriptedCall(tokens=(21, 22), restart=True, reason="stop"),
        )
        finding = finds(self.ID, script_rollout(*parts, sample={"response": (11, 12, 21, 22)}))
        assert "The response is not what was sampled since call 3 started again" == finding.title
        assert finding.hint.startswith("Call 3 sent 2 tokens of 4")
        lost = finds(self.ID, script_rollout(*parts, sample={"response": (21,)}))
        assert "1 of 2 sampled tokens is missing from the response" == lost.title

    def test_one_token_from_before_a_restart_is_looked_for_alike(self) -> None:
        """The response holds it, or lacks it."""
        parts = (
            ScriptedCall(tokens=(11,)),
            ScriptedCall(lost=True),
            ScriptedCall(tokens=(21, 22), restart=True, reason="stop"),
        )
        for response, kind in (
            ((11, 21, 22), "tokens from before a restart"),
            ((21,), "sampled tokens are missing"),
        ):
            assert (
                kind == finds(self.ID, script_rollout(*parts, sample={"response": response})).kind
            )

    def test_a_response_may_be_cut_at_the_budget(self) -> None:
        """An agent loop cuts what its turns overshot."""
        parts = (
            ScriptedCall(tokens=(11, 12, 13), reason="stop"),
            ScriptedCall(observed=(91,), tokens=(21, 22, 23), reason="stop"),
        )
        cut = {
            "response": (11, 12, 13, 91, 21),
            "logprobs": None,
            "finish_reason": FinishReason.LENGTH,
        }
        passes(self.ID, script_rollout(*parts, budget=5, sample=cut), resumed_samples=1)
        short = {**cut, "response": (11, 12, 13, 91)}
        finds(self.ID, script_rollout(*parts, budget=5, sample=short))

    def test_the_last_words_of_the_environment_may_be_left_off(self) -> None:
        """The policy did not answer them."""
        story = script_rollout(
            ScriptedCall(tokens=(11, 12), reason="stop"),
            ScriptedCall(observed=(91, 92), lost=True),
            sample={"response": (11, 12), "logprobs": None},
        )
        passes(self.ID, story)

    def test_what_comes_before_the_last_words_of_the_environment_is_judged(self) -> None:
        """They are left off, and the logprobs of the policy's tokens are not the engine's."""
        story = script_rollout(
            ScriptedCall(tokens=(11, 12), reason="stop"),
            ScriptedCall(observed=(91, 92), lost=True),
            sample={"response": (11, 12), "logprobs": np.array([-7.0, -8.0])},
        )
        assert "2 of 2 logprobs are not" in finds("stitch.logprobs-paired", story).title

    def test_stripped_stop_tokens_are_named(self) -> None:
        """The last token of each turn that ended naturally is gone, the last turn's or not."""
        parts = (
            ScriptedCall(tokens=(11, 5), reason="stop"),
            ScriptedCall(observed=(91,), tokens=(12, 5), reason="stop"),
        )
        for response, lost in (
            ((11, 91, 12), "2 of 5 sampled tokens are"),
            ((11, 91, 12, 5), "1 of 5 sampled tokens is"),
        ):
            finding = finds(self.ID, script_rollout(*parts, sample={"response": response}))
            assert f"{lost} missing from the response" == finding.title
            assert "sampled tokens are missing" == finding.kind
            assert "Stop tokens were stripped" in finding.hint

    def test_other_lost_tokens_are_no_stop_tokens(self) -> None:
        """The last token of a turn that an abort or the budget ended, or the first of one."""
        for reason, response in (("length", (11,)), ("stop", (5,))):
            one = ScriptedCall(tokens=(11, 5), reason=reason)
            finding = finds(self.ID, script_rollout(one, sample={"response": response}))
            assert "sampled tokens are missing" == finding.kind
            assert "Stop tokens" not in finding.hint

    def test_a_reply_without_tokens_has_no_stop_token(self) -> None:
        """The last token is that of an aborted call, and got lost on the resume."""
        parts = (ScriptedCall(tokens=(11, 12)), ScriptedCall(reason="stop"))
        finding = finds(self.ID, script_rollout(*parts, sample={"response": (11,)}))
        assert finding.hint.startswith("The loss begins in segment 0; aborted calls return tokens")

    @pytest.mark.parametrize(
        ("response", "cut"),
        [((11,), True), ((11, 12), True), ((11, 13), False), ((13,), False), ((12, 13), False)],
    )
    def test_only_the_end_of_a_reply_is_cut_off(self, response: tuple[int, ...], cut: bool) -> None:
        """Tokens from its beginning or its middle are lost in another way."""
        one = ScriptedCall(tokens=(11, 12, 13), reason="length")
        hint = finds(self.ID, script_rollout(one, sample={"response": response})).hint
        assert cut is ("the end of the reply to call 1 was cut off" in hint)
        assert cut is not ("aborted calls return tokens too" in hint)

    @pytest.mark.parametrize(
        ("prompt", "extra", "of_prompt"),
        [
            ((1, 2, 3), (1, 2, 3), "3 of 3 tokens"),
            ((1, 2, 3), (2, 3), "2 of 3 tokens"),
            ((1, 2, 3), (1, 2), None),
            ((1, 2, 3), (3,), None),
            ((3,), (3,), "1 of 1 token"),
        ],
    )
    def test_the_end_of_the_prompt_is_named(
        self, prompt: tuple[int, ...], extra: tuple[int, ...], of_prompt: str | None
    ) -> None:
        """One token of several may be there by chance."""
        one = ScriptedCall(tokens=(11, 12), reason="stop")
        story = script_rollout(one, prompt=prompt, sample={"response": (*extra, 11, 12)})
        finding = finds(self.ID, story)
        if of_prompt is None:
            assert "tokens that no call returned" == finding.kind
        else:
            assert f"The response holds {of_prompt} of the prompt" == finding.title

    def test_an_own_end_token_is_named_at_the_end_alone(self) -> None:
        """One more token at the end may be an end of sequence of the stack's own; one inside the
        response, or two of them, are not.
        """
        one = ScriptedCall(tokens=(11, 12), reason="stop")
        for response, own in (
            ((11, 12, 7), True),
            ((11, 7, 12), False),
            ((11, 12, 7, 8), False),
        ):
            hint = finds(self.ID, script_rollout(one, sample={"response": response})).hint
            assert own is hint.startswith("An end-of-sequence token that the stack adds itself")

    def test_samples_are_counted_by_kind(self) -> None:
        """A sample of one call does not put resuming to the test."""
        assert {"single-call samples": 1} == check(self.ID, CORRECT["one call"]).exercised
        assert {"resumed samples": 1} == check(self.ID, CORRECT["resumed twice"]).exercised

    def test_without_calls_a_recording_shows_nothing(self) -> None:
        """A recording without calls of the request shows nothing about its tokens. In a driven run,
        of which every call is known, no engine sampled them.
        """
        story = TraceScript(driven=False)
        story.submit().result((1, 2, 3))
        unknown(self.ID, story, "no engine call of the request was recorded")
        driven = TraceScript()
        driven.submit().result((1, 2, 3))
        (finding,) = check(self.ID, driven).findings
        assert "tokens that no engine sampled" == finding.kind

    def test_an_unanswered_call_leaves_room_for_doubt(self) -> None:
        """A call without reply and without fault may have sampled what the sample holds beyond the
        rest.
        """
        story = TraceScript()
        story.submit()
        story.reply(story.call((1, 2)), (3,), "abort")
        story.call((1, 2, 3))
        story.result((3, 4), finish_reason=FinishReason.STOP)
        unknown(self.ID, story, "the outcome of an engine call was not recorded")

    def test_tokens_with_an_error_may_be_kept_or_dropped(self) -> None:
        """An engine that fails in the middle leaves it to the stack."""
        parts = (
            ScriptedCall(tokens=(11, 12), reason="error"),
            ScriptedCall(tokens=(21,), reason="stop", restart=True),
        )
        assert set() == blamed(script_rollout(*parts))
        unknown(
            self.ID,
            script_rollout(ScriptedCall(tokens=(11, 12), reason="error"), sample={"response": ()}),
            "together with an error",
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


class TestMatchesUnbroken:
    """``stitch.matches-unbroken``."""

    ID = "stitch.matches-unbroken"
    POLICY = CodedPolicy(
        seed=7, vocab=64, num_layers=1, moe_layers=(0,), num_experts=4, top_k=2, eos_every=None
    )

    def _tokens(self, count: int, version: int = 0) -> tuple[int, ...]:
        ids: tuple[int, ...] = (1, 2)
        for _ in range(count):
            ids += (self.POLICY.next_token(version, self.POLICY.start_state(ids)),)
        return ids[2:]

    def test_a_resumed_rollout_is_the_unbroken_one(self) -> None:
        """Three calls sample what one would have."""
        a = self._tokens(6)
        story = script_rollout(
            ScriptedCall(tokens=a[:2]),
            ScriptedCall(),
            ScriptedCall(tokens=a[2:5]),
            ScriptedCall(tokens=a[5:], reason="length"),
            budget=6,
        )
        assert Verdict.PASS == check(self.ID, story, self.POLICY).verdict

    def test_an_engine_that_goes_on_elsewhere_is_found(self) -> None:
        """The second call was continued from stale KV: its tokens are well-formed, delivered, and
        wrong.
        """
        a = self._tokens(6)
        story = script_rollout(
            ScriptedCall(tokens=a[:2]),
            ScriptedCall(tokens=(a[2], 63, *a[4:]), reason="length"),
            budget=6,
        )
        finding = check(self.ID, story, self.POLICY).findings[0]
        assert finding.title.endswith(
            "of a resumed rollout differ from the unbroken run, although the weights stayed the"
            " same"
        )
        assert (3, 1, 0) == (
            finding.where["index"],
            finding.where["segment"],
            finding.where["version"],
        )
        assert {self.ID} == blamed(story, self.POLICY)

    def test_the_first_of_several_differing_tokens_is_shown(self) -> None:
        """And what surrounds it; the others are counted."""
        a = self._tokens(20)
        wrong = (*a[:5], 63, *a[6:18], 62, a[19])
        story = script_rollout(
            ScriptedCall(tokens=wrong[:2]),
            ScriptedCall(tokens=wrong[2:], reason="length"),
            budget=20,
        )
        finding = check(self.ID, story, self.POLICY).findings[0]
        shown = f"[..., {', '.join(map(str, wrong[2:8]))}, ...]; differs at response index 5"
        assert finding.observed.startswith(shown)
        assert f"[..., {', '.join(map(str, self._expected(wrong)[2:8]))}, ...]" in finding.expected

    def _expected(self, ids: tuple[int, ...]) -> list[int]:
        """What the policy samples after each prefix of a sample."""
        return self.POLICY.choices(0, (1, 2, *ids), 2).tolist()

    def test_it_needs_one_version_and_a_resume(self) -> None:
        """Across an update, and in a single call, there is no unbroken twin to compare with."""
        a = self._tokens(4)
        for story in (
            script_rollout(ScriptedCall(tokens=a, reason="length"), budget=4),
            script_rollout(
                ScriptedCall(tokens=a[:2]), ScriptedCall(tokens=(5, 6), version=1, reason="length")
            ),
        ):
            assert Verdict.UNKNOWN == check(self.ID, story, self.POLICY).verdict

    def test_calls_of_one_token_leave_nothing_to_compare(self) -> None:
        """The first token of each call may be drawn; a call of two tokens shows one that is not."""
        a = self._tokens(3)
        single = [
            ScriptedCall(tokens=(token,), reason="length", call={"max_tokens": 1}) for token in a
        ]
        result = check(self.ID, script_rollout(*single, budget=3), self.POLICY)
        assert (Verdict.NOT_APPLICABLE, True) == (
            result.verdict,
            "each call samples one token" in result.reason,
        )
        double = ScriptedCall(tokens=a[1:], reason="length", call={"max_tokens": 2})
        story = script_rollout(single[0], double, budget=3)
        assert Verdict.PASS == check(self.ID, story, self.POLICY).verdict

    def test_the_first_token_of_a_resumed_call_is_compared(self) -> None:
        """The engine says that no draw gave it, so it is the one that the weights choose."""
        a = self._tokens(4)
        for token, verdict in ((a[2], Verdict.PASS), (62, Verdict.FAIL)):
            after = self._after(token)
            story = script_rollout(
                ScriptedCall(tokens=a[:2], reply={"true_draw": 0}),
                ScriptedCall(tokens=(token, after), reason="length", reply={"true_draw": 0}),
                budget=4,
            )
            result = check(self.ID, story, self.POLICY)
            assert verdict == result.verdict
            shown = [finding.where["index"] for finding in result.findings]
            assert ([2] if verdict is Verdict.FAIL else []) == shown

    def _after(self, token: int) -> int:
        """Return what the policy samples after two of its own tokens and ``token``."""
        ids = (1, 2, *self._tokens(2), token)
        return self.POLICY.next_token(0, self.POLICY.start_state(ids))

    def test_the_first_token_is_compared_with_its_draw(self) -> None:
        """A stack may sample anew; another draw than the one that it requested is found."""
        a = self._tokens(2)
        drawn = self.POLICY.drawn(0, (1, 2, *a), 3)
        assert self.POLICY.drawn(0, (1, 2, *a), 0) != drawn
        for draw, verdict in (
            (3, Verdict.PASS),
            (None, Verdict.PASS),
            (0, Verdict.FAIL),
        ):
            story = script_rollout(
                ScriptedCall(tokens=a, reply={"true_draw": 0}),
                ScriptedCall(
                    tokens=(drawn, self._after(drawn)),
                    reason="length",
                    reply={"true_draw": draw},
                ),
                budget=4,
            )
            assert verdict == check(self.ID, story, self.POLICY).verdict

    def test_calls_of_one_token_with_known_draws_are_compared(self) -> None:
        """Every token is a first one, and each is known."""
        a = self._tokens(3)
        for last, verdict in ((a[2], Verdict.PASS), (62, Verdict.FAIL)):
            single = [
                ScriptedCall(
                    tokens=(token,),
                    reason="length",
                    call={"max_tokens": 1},
                    reply={"true_draw": 0},
                )
                for token in (*a[:2], last)
            ]
            story = script_rollout(*single, budget=3)
            assert verdict == check(self.ID, story, self.POLICY).verdict

    def test_a_conversation_has_no_unbroken_twin(self) -> None:
        """What the environment says is no choice of the policy."""
        a = self._tokens(4)
        story = script_rollout(
            ScriptedCall(tokens=a[:2]),
            ScriptedCall(tokens=a[2:3], reason="stop"),
            ScriptedCall(observed=(91, 92), tokens=(5, 6), reason="length"),
            budget=40,
            request={"turns": ((91, 92),)},
        )
        assert Verdict.UNKNOWN == check(self.ID, story, self.POLICY).verdict

    def test_an_abort_that_wins_over_the_end_is_nobodys_fault(self) -> None:
        """A client does not know which token ends a sequence: it goes on after an abort, as it
        must.
        """
        story = script_rollout(
            ScriptedCall(tokens=(self.POLICY.eos_id,)), ScriptedCall(tokens=(5,), reason="stop")
        )
        result = check(self.ID, story, self.POLICY)
        assert (
            Verdict.UNKNOWN,
            (
                "a call was aborted on its end-of-sequence token: a client cannot know that"
                " the turn had ended"
            ),
        ) == (
            result.verdict,
            result.reason,
        )

    def test_without_a_policy_nothing_is_known(self) -> None:
        """Real engines have no oracle."""
        unknown(self.ID, script_rollout(*RESUMED), "the trace has no coded policy")
        unresumed = script_rollout(ScriptedCall(tokens=(11,), reason="stop"), resume="engine")
        inapplicable(self.ID, unresumed, "no client continues an aborted call (resume='engine')")


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
