"""``stitch.matches-unbroken``: a resumed rollout beside one that nothing interrupted."""

from __future__ import annotations

from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.judging.checks import Verdict
from tests.support.scripted_rollouts import (
    RESUMED,
    ScriptedCall,
    blamed,
    script_rollout,
)
from tests.support.trace_script import check, inapplicable, unknown


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
