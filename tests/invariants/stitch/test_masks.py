"""Stitch checks on the loss mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.core.case import Action, ActionKind, Case, Model, Trigger
from rollproof.core.events.rollout import Weights
from rollproof.core.records import EngineOutput, FinishReason, Request, Span
from rollproof.fakes.clients.reference_clients import PartialSample
from rollproof.invariants import default_registry
from rollproof.judging.checks import Verdict
from rollproof.verification.runner import run_case
from rollproof.verification.traces import judge
from tests.support.conversation_stacks import EndTokensMasked
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes, unknown

PARTS = (
    ScriptedCall(tokens=(11, 12), reason="stop"),
    ScriptedCall(observed=(91, 92, 93), tokens=(13,)),
    ScriptedCall(tokens=(14,), reason="stop"),
)
RIGHT = (1, 1, 0, 0, 0, 1, 1)


class LastTokensMasked(EndTokensMasked):
    """Masks out the last token of every reply."""

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        super().absorb(sample, sent, output)
        if output.token_ids:
            self.hide(sample, [len(sample.response) - 1])


def masked(mask: tuple[Any, ...] | None) -> TraceScript:
    """A two-turn rollout with another loss mask."""
    return script_rollout(
        *PARTS, loss_mask=True, sample={"loss_mask": None if mask is None else np.array(mask)}
    )


class TestShape:
    """``stitch.mask-shape``."""

    ID = "stitch.mask-shape"

    def test_a_mask_that_was_not_extended_is_found(self) -> None:
        """Built after the first call, kept through the resume."""
        finding = finds(self.ID, masked(RIGHT[:6]))
        assert "The loss mask has 6 entries for 7 tokens" == finding.title
        assert "6: [1, 1, 0, 0, 0, 1]" == finding.observed
        assert {self.ID} == blamed(masked(RIGHT[:6]))

    def test_a_declared_mask_must_be_there(self) -> None:
        """``None`` would train on everything."""
        assert (
            "The sample carries no loss mask, although its contract declares one"
            == finds(self.ID, masked(None)).title
        )
        assert {self.ID} == blamed(masked(None))

    def test_weights_are_no_mask(self) -> None:
        """Values other than 0 and 1."""
        finding = finds(self.ID, masked((1, 1, 0, 0, 0, 2, -1)))
        assert "2 of 7 entries of the loss mask are neither 0 nor 1" == finding.title
        assert finding.observed.endswith("at response index 5-6")

    def test_the_mask_is_shown_from_its_first_wrong_entry_on(self) -> None:
        """Of a long mask only the part around it."""
        mask = np.ones(40, dtype=np.int64)
        mask[[0, 20, 39]] = 2
        long = ScriptedCall(tokens=tuple(range(100, 140)), reason="stop")
        story = script_rollout(long, budget=40, loss_mask=True, sample={"loss_mask": mask})
        finding = finds(self.ID, story)
        assert finding.observed.startswith("[2, 1, 1, ")
        assert finding.observed.endswith("1, ...], at response index 0, 20, 39")
        assert 0 == finding.where["index"]

    def test_one_wrong_entry_is_one(self) -> None:
        """Not several."""
        finding = finds(self.ID, masked((1, 1, 0, 0, 0, 2, 1)))
        assert "1 of 7 entries of the loss mask is neither 0 nor 1" == finding.title

    def test_a_mask_of_the_sampled_tokens_fits_a_wrong_response(self) -> None:
        """The response lost a token, for which stitch.tokens is there; the mask did not."""
        one = ScriptedCall(tokens=(11, 12, 13), reason="stop")
        for mask, found in (((1, 1, 1), 0), ((1, 1), 0), ((1,), 1), ((1,) * 4, 1)):
            sample = {"response": (11, 13), "loss_mask": np.array(mask)}
            story = script_rollout(one, loss_mask=True, sample=sample)
            assert found == check(self.ID, story).found

    def test_no_tokens_need_no_mask(self) -> None:
        """An empty response may come without."""
        assert set() == blamed(
            script_rollout(ScriptedCall(reason="stop"), loss_mask=True, sample={"loss_mask": None})
        )

    def test_booleans_are_zeros_and_ones(self) -> None:
        """A mask of booleans says the same."""
        passes(self.ID, masked(tuple(bool(value) for value in RIGHT)), samples_with_a_loss_mask=1)

    def test_a_contract_without_a_mask_rules_it_out(self) -> None:
        """Where a stack makes its mask later there is none to judge here."""
        for name in (self.ID, TestEnvironment.ID, TestSampled.ID):
            assert Verdict.NOT_APPLICABLE == check(name, script_rollout(*PARTS)).verdict


class TestEnvironment:
    """``stitch.mask-environment``."""

    ID = "stitch.mask-environment"

    @pytest.mark.parametrize(
        ("mask", "wrong", "observed"),
        [((1,) * 7, 3, "2-4"), ((0, *RIGHT[:-1]), 1, "2"), ((*RIGHT[1:], 1), 1, "4")],
        ids=["attention mask", "shifted right", "shifted left"],
    )
    def test_trained_words_of_the_environment_are_found(
        self, mask: tuple[int, ...], wrong: int, observed: str
    ) -> None:
        """An attention mask, or one that is shifted by one token."""
        finding = finds(self.ID, masked(mask))
        assert f"{wrong} of 3 tokens of the environment would be trained on" == finding.title
        assert f"1 at response index {observed}" == finding.observed
        assert self.ID in blamed(masked(mask)) <= {self.ID, TestSampled.ID}

    def test_masks_of_sampled_tokens_are_another_checks(self) -> None:
        """Masking sampled tokens loses signal, and trains on nothing wrong."""
        passes(self.ID, masked((0, 0, 0, 0, 0, 1, 1)), tokens_of_the_environment=3)

    def test_words_that_the_sample_holds_in_part_are_judged(self) -> None:
        """A separator that is missing from the sample leaves the mask of the rest to judge."""
        missing = {
            "response": (11, 12, 92, 93, 13, 14),
            "loss_mask": np.array((1, 1, 0, 0, 1, 1)),
            "logprobs": np.zeros(6),
        }
        passes(
            self.ID,
            script_rollout(*PARTS, loss_mask=True, sample=missing),
            tokens_of_the_environment=2,
        )
        trained = {**missing, "loss_mask": np.array((1, 1, 0, 1, 1, 1))}
        finding = finds(self.ID, script_rollout(*PARTS, loss_mask=True, sample=trained))
        assert "1 at response index 3" == finding.observed

    def test_single_turns_have_no_environment(self) -> None:
        """Nothing is put to the test, and where no turns are declared nothing can be."""
        single = ScriptedCall(tokens=(11,), reason="stop")
        inapplicable(
            self.ID,
            script_rollout(single, loss_mask=True),
            "declares no turns of the environment (multi_turn)",
        )
        answered = script_rollout(single, loss_mask=True, multi_turn=True)
        unknown(self.ID, answered, "no turn was answered")


_TWO_VERSIONS = (Span(start=0, end=2, version=0), Span(start=2, end=4, version=1))
RESUMED = (
    ScriptedCall(tokens=(11, 12)),
    ScriptedCall(tokens=(13, 14, 15)),
    ScriptedCall(tokens=(16,), reason="stop"),
)
UPDATED = (
    ScriptedCall(tokens=(11, 12)),
    ScriptedCall(tokens=(13, 14), version=1, reason="stop"),
)
CUT = (
    ScriptedCall(tokens=(11, 12)),
    ScriptedCall(observed=(91,), tokens=(13, 14), reason="stop"),
)


def rollout(parts: tuple[ScriptedCall, ...], mask: tuple[int, ...], **more: Any) -> TraceScript:
    """A rollout of ``parts`` with the loss mask ``mask``."""
    return script_rollout(
        *parts, **{"loss_mask": True, "sample": {"loss_mask": np.array(mask)}, **more}
    )


class TestSampled:
    """``stitch.mask``."""

    ID = "stitch.mask"

    def test_masked_tokens_of_resumed_calls_are_found(self) -> None:
        """What resumed calls returned is masked as if it were what they sent."""
        story = rollout(RESUMED, (1, 1, 0, 0, 0, 0))
        finding = finds(self.ID, story)
        assert "4 of 6 sampled tokens are masked out of the loss" == finding.title
        assert "sampled tokens are masked out of the loss" == finding.kind
        assert (
            "loss mask 1 on every token that the policy sampled",
            "0 at response index 2-5",
        ) == (
            finding.expected,
            finding.observed,
        )
        assert {"request": "r0", "index": 2, "segment": 1} == finding.where
        assert "exactly what resumed calls returned" in finding.hint
        assert {self.ID} == blamed(story)

    @pytest.mark.parametrize(
        ("mask", "hint"),
        [
            ((0, 0, 0, 0, 0, 1), "before the last resume"),
            ((1, 0, 1, 1, 1, 1), "Declare in `masked`"),
            ((1, 1, 0, 0, 0, 1), "Declare in `masked`"),
        ],
        ids=["earlier calls", "one token", "the middle call"],
    )
    def test_other_masks_are_not_blamed_on_a_resume(self, mask: tuple[int, ...], hint: str) -> None:
        """The hint says what the masked tokens have in common, and nothing if that is nothing."""
        assert hint in finds(self.ID, rollout(RESUMED, mask)).hint

    def test_a_shifted_mask_is_told_apart(self) -> None:
        """Tokens of the environment are trained on in place of sampled ones."""
        assert "shifted against the tokens" in finds(self.ID, masked((0, *RIGHT[:-1]))).hint

    def test_sampled_tokens_are_counted(self) -> None:
        """Each sampled token with loss mask 1 is exercise."""
        passes(self.ID, masked(RIGHT), sampled_tokens_with_loss_mask_1=4)

    @pytest.mark.parametrize(
        ("reason", "parts", "mask", "counts"),
        [
            ("earlier-calls", RESUMED, (0, 0, 0, 0, 0, 1), (1, 5)),
            ("older-weights", UPDATED, (0, 0, 1, 1), (2, 2)),
            ("end", RESUMED, (1, 1, 1, 1, 1, 0), (5, 1)),
            ("aborted", CUT, (0, 0, 0, 1, 1), (2, 2)),
            ("aborted", RESUMED[:2], (0,) * 5, (0, 5)),
            (
                "truncated",
                (ScriptedCall(tokens=(11, 12, 13), reason="length"),),
                (0, 0, 0),
                (0, 3),
            ),
        ],
    )
    def test_declared_masks_pass(
        self,
        reason: str,
        parts: tuple[ScriptedCall, ...],
        mask: tuple[int, ...],
        counts: tuple[int, int],
    ) -> None:
        """What a stack leaves out on purpose is right once it is declared, and only then."""
        names = ("sampled_tokens_with_loss_mask_1", "sampled_tokens_masked_out_as_declared")
        expected = {name: count for name, count in zip(names, counts, strict=True) if count}
        passes(self.ID, rollout(parts, mask, masked=(reason,)), **expected)
        assert {self.ID} == blamed(rollout(parts, mask, masked=()))

    @pytest.mark.parametrize(
        ("reason", "parts", "mask"),
        [
            ("earlier-calls", RESUMED, (1, 1, 1, 1, 1, 0)),
            ("older-weights", UPDATED, (1, 1, 0, 0)),
            ("end", RESUMED, (1, 1, 1, 1, 0, 1)),
            ("aborted", CUT, (1, 1, 0, 0, 0)),
            ("aborted", CUT, (0, 1, 0, 1, 1)),
            ("truncated", RESUMED, (0,) * 6),
            (
                "truncated",
                (ScriptedCall(tokens=(11, 12, 13), reason="length"),),
                (1, 0, 0),
            ),
        ],
    )
    def test_a_declaration_excuses_nothing_else(
        self, reason: str, parts: tuple[ScriptedCall, ...], mask: tuple[int, ...]
    ) -> None:
        """Newer weights, a complete sample, a part of a turn: not what was declared."""
        assert (
            f", except for masked={reason}"
            in finds(self.ID, rollout(parts, mask, masked=(reason,))).expected
        )

    @pytest.mark.parametrize(
        ("reason", "parts", "mask"),
        [
            ("older-weights", UPDATED, (0, 0, 1, 1)),
            ("aborted", CUT, (0, 0, 0, 1, 1)),
            ("truncated", (ScriptedCall(tokens=(11, 12), reason="length"),), (0, 0)),
        ],
    )
    def test_an_undeclared_convention_is_asked_for(
        self, reason: str, parts: tuple[ScriptedCall, ...], mask: tuple[int, ...]
    ) -> None:
        """A mask that a declaration would explain is no fault, and the reason says what to
        declare.
        """
        out = check(self.ID, rollout(parts, mask))
        assert Verdict.FAIL != out.verdict
        if not any(mask):
            unknown(self.ID, rollout(parts, mask), f"declare masked=('{reason}'")

    def test_a_reply_without_tokens_has_no_end_token(self) -> None:
        """The token before it is that of an aborted call, whose mask nothing explains."""
        parts = (
            ScriptedCall(tokens=(11, 12)),
            ScriptedCall(reason="stop"),
            ScriptedCall(observed=(91,), tokens=(13,), reason="stop"),
        )
        finding = finds(self.ID, rollout(parts, (1, 0, 0, 0), masked=("end",)))
        assert "0 at response index 1" == finding.observed

    def test_tokens_without_a_logprob_are_judged_elsewhere(self) -> None:
        """A token without a logprob may be masked; stitch.logprobs-missing says how it is
        marked.
        """
        parts = (
            ScriptedCall(tokens=(11, 12), logprobs=False),
            ScriptedCall(tokens=(13,), reason="stop"),
        )
        passes(
            self.ID,
            rollout(parts, (0, 0, 1), missing_logprobs="masked"),
            sampled_tokens_with_loss_mask_1=1,
            sampled_tokens_masked_out_as_declared=2,
        )

    @pytest.mark.parametrize("asks", ["request", "call"])
    def test_tokens_whose_logprob_nobody_requested_are_judged(self, asks: str) -> None:
        """There is none to want them masked for."""
        parts = (
            ScriptedCall(
                tokens=(11, 12), logprobs=False, call={"want_logprobs": asks == "request"}
            ),
            ScriptedCall(tokens=(13,), reason="stop"),
        )
        story = rollout(
            parts,
            (0, 0, 1),
            missing_logprobs="masked",
            request={"want_logprobs": asks == "call"},
        )
        assert "0 at response index 0-1" == finds(self.ID, story).observed

    def test_each_cut_turn_is_masked_as_a_whole(self) -> None:
        """A later turn as well as the first."""
        parts = (
            ScriptedCall(tokens=(11,), reason="stop"),
            ScriptedCall(observed=(91,), tokens=(12, 13)),
            ScriptedCall(observed=(92,), tokens=(14,), reason="stop"),
        )
        passes(self.ID, rollout(parts, (1, 0, 0, 0, 0, 1), masked=("aborted",)))
        part = rollout(parts, (1, 0, 0, 1, 0, 1), masked=("aborted",))
        assert "0 at response index 2" == finds(self.ID, part).observed

    def test_without_a_resume_no_call_is_an_earlier_one(self) -> None:
        """A turn of its own is no resume."""
        parts = (
            ScriptedCall(tokens=(11,), reason="stop"),
            ScriptedCall(observed=(91,), tokens=(12,), reason="stop"),
        )
        finds(self.ID, rollout(parts, (0, 0, 1), masked=("earlier-calls",)))

    @pytest.mark.parametrize(
        "parts",
        [
            UPDATED,
            (ScriptedCall(), *UPDATED),
            (
                ScriptedCall(
                    tokens=(11, 12, 13, 14),
                    reason="stop",
                    output={"spans": _TWO_VERSIONS},
                    reply={"true_tokens": _TWO_VERSIONS},
                ),
            ),
        ],
        ids=["two calls", "an empty call before them", "one call"],
    )
    def test_weights_older_than_those_of_the_last_token_are_older(
        self, parts: tuple[ScriptedCall, ...]
    ) -> None:
        """Also if the server went back to them before the sample was delivered."""
        trace = rollout(parts, (0, 0, 1, 1), masked=("older-weights",)).trace()
        back = Weights(server_id="s0", version=0, label=0)
        passes(self.ID, trace.with_events([*trace.events[:-1], back, trace.events[-1]]))

    def test_every_call_of_older_weights_is_older(self) -> None:
        """The last one is not, although it was the third."""
        parts = (
            ScriptedCall(tokens=(11, 12)),
            ScriptedCall(tokens=(13, 14), version=1),
            ScriptedCall(tokens=(15,), version=2, reason="stop"),
        )
        passes(self.ID, rollout(parts, (0, 0, 0, 0, 1), masked=("older-weights",)))
        every = finds(self.ID, rollout(parts, (0,) * 5, masked=("older-weights",)))
        assert "0 at response index 4" == every.observed

    @pytest.mark.parametrize("unknown_part", ["label", "weights"])
    def test_weights_that_may_be_older_are_older(self, unknown_part: str) -> None:
        """The engine shows no label, or nobody knows which weights it really had."""
        truth: dict[str, Any] = {"reply": {"true_tokens": None}}
        if unknown_part == "label":
            parts = (
                ScriptedCall(tokens=(11, 12), shown=None),
                ScriptedCall(tokens=(13, 14), reason="stop"),
            )
            story = rollout(parts, (0, 0, 1, 1), masked=("older-weights",), labels={0: None})
        else:
            parts = (
                ScriptedCall(tokens=(11, 12), **truth),
                ScriptedCall(tokens=(13, 14), version=1, reason="stop", **truth),
            )
            story = rollout(parts, (0, 0, 1, 1), masked=("older-weights",))
        passes(self.ID, story)

    @pytest.mark.parametrize(
        ("reason", "engine", "finish", "explained"),
        [
            ("truncated", "stop", "length", True),
            ("truncated", "abort", "stop", True),
            ("truncated", "stop", "stop", False),
            ("aborted", "stop", "abort", True),
            ("aborted", "stop", "error", True),
            ("aborted", "abort", "stop", True),
            ("aborted", "stop", "stop", False),
        ],
    )
    def test_the_stack_or_the_engine_says_that_a_sample_is_incomplete(
        self, reason: str, engine: str, finish: str, explained: bool
    ) -> None:
        """Either is enough for its mask."""
        part = ScriptedCall(tokens=(11, 12, 13), reason=engine)
        sample = {"loss_mask": np.zeros(3, dtype=np.int64), "finish_reason": FinishReason(finish)}
        story = script_rollout(part, loss_mask=True, masked=(reason,), sample=sample)
        assert int(not explained) == check(self.ID, story).found

    def test_a_response_that_was_cut_is_truncated(self) -> None:
        """Whatever it says of its end."""
        part = ScriptedCall(tokens=(11, 12, 13), reason="stop")
        sample = {
            "response": (11, 12),
            "logprobs": np.array([-0.25, -0.75]),
            "loss_mask": np.zeros(2, dtype=np.int64),
        }
        more: dict[str, Any] = {"loss_mask": True, "budget": 2, "sample": sample}
        passes(self.ID, script_rollout(part, masked=("truncated",), **more))
        finds(self.ID, script_rollout(part, masked=("end",), **more))

    def test_the_hint_knows_a_turn_from_a_resume(self) -> None:
        """A call after an answer of the environment resumes nothing; and one word of the
        environment that is trained on shows a shift.
        """
        parts = (
            ScriptedCall(tokens=(11,)),
            ScriptedCall(tokens=(12,), reason="stop"),
            ScriptedCall(observed=(91,), tokens=(13,), reason="stop"),
        )
        hint = finds(self.ID, rollout(parts, (1, 0, 0, 1), masked=())).hint
        assert "exactly what resumed calls returned" in hint
        shifted = finds(self.ID, rollout(parts, (1, 0, 1, 1), masked=())).hint
        assert "shifted against the tokens" in shifted

    @pytest.mark.parametrize("kind", [ActionKind.ABORT, ActionKind.SYNC])
    def test_an_abort_right_after_an_end_token_leaves_it_one(self, kind: ActionKind) -> None:
        """The engine says abort, and the token says end: it may be masked as one, a token that is
        no end token may not.
        """
        request = Request(request_id="r0", prompt_ids=(11, 12), max_tokens=12, turns=((21,),))
        when = Trigger(request="r0", tokens=1, race=True)
        for every, stack, verdict in (
            (1, EndTokensMasked, Verdict.PASS),
            (1, LastTokensMasked, Verdict.PASS),
            (None, LastTokensMasked, Verdict.FAIL),
        ):
            case = Case(
                flavour="vllm",
                requests=(request,),
                actions=(Action(when=when, do=kind),),
                model=Model(eos_every=every),
            )
            assert verdict == judge(run_case(stack, case), default_registry())[self.ID].verdict

    def test_any_mask_can_be_declared(self) -> None:
        """A stack with rules of its own has none of it judged."""
        story = rollout(RESUMED, (0, 1, 0, 1, 0, 1), masked=("any",))
        assert Verdict.NOT_APPLICABLE == check(self.ID, story).verdict

    def test_a_mask_of_another_length_is_not_judged(self) -> None:
        """stitch.mask-shape reports it."""
        unknown(self.ID, rollout(RESUMED, (0, 1, 0)), "not exercised")
