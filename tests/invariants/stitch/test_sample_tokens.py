"""``stitch.tokens``: the tokens of a sample, after resumes, lost replies and turns."""

from __future__ import annotations

import numpy as np
import pytest

from rollproof.core.records import FinishReason
from tests.support.scripted_rollouts import (
    RESUMED,
    SAMPLED,
    ScriptedCall,
    blamed,
    script_rollout,
)
from tests.support.trace_script import TraceScript, check, finds, passes, unknown

_WITHOUT_THIRD = SAMPLED[:2] + SAMPLED[3:]


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
        one_call = script_rollout(ScriptedCall(tokens=(11, 12), reason="stop"))
        assert {"single-call samples": 1} == check(self.ID, one_call).exercised
        assert {"resumed samples": 1} == check(self.ID, script_rollout(*RESUMED)).exercised

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
