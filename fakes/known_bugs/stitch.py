"""Known bugs of stitching: the tokens, calls, budgets and ends of a resumed rollout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.case import ActionKind, Case, Model
from rollproof.core.contract import Contract
from rollproof.core.events.rollout import Call
from rollproof.core.limits import AnswerCut, RolloutLimits
from rollproof.core.records import (
    EngineOutput,
    FinishReason,
    Request,
    Rollout,
    Scalar,
    Version,
)
from rollproof.fakes.clients.reference_clients import (
    AsSampled,
    AsSampledLimits,
    ClientOptions,
    PartialSample,
)
from rollproof.fakes.coded.policy import CodedPolicy, PrefixState
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.known_bugs._planting import (
    ABORTED,
    CLEAN,
    EMPTY,
    ENDING,
    TURNS,
    act,
    case,
    on_engine,
    on_policy,
    request,
)
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _PromptRetokenised(AsSampled):
    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        # tokenise(detokenise(ids)) is not ids: a merge across the border gives another id
        *head, last = rollout.prompt_ids
        return replace(rollout, prompt_ids=(*head, last + 1))


class _LastSegmentOnly(AsSampled):
    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        super().absorb(sample, sent, output)
        self._last = len(output.token_ids)

    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None
        # the segments before the last call are lost
        return replace(
            rollout,
            response_ids=rollout.response_ids[-self._last :],
            logprobs=rollout.logprobs[-self._last :],
        )


class _ChunkMergedTwice(AsSampled):
    def merge_tokens(self, sample: PartialSample, output: EngineOutput) -> None:
        super().merge_tokens(sample, output)
        if output.finish_reason is FinishReason.ABORT:
            self._end = len(sample.response)

    def finished(self, sample: PartialSample) -> Rollout:
        rollout, end = super().finished(sample), self._end
        assert rollout.logprobs is not None
        ids, values = rollout.response_ids, rollout.logprobs
        # ids[end - 1] appears at the end of the aborted chunk and again at the start of the next
        return replace(
            rollout,
            response_ids=(*ids[:end], *ids[end - 1 :]),
            logprobs=np.insert(values, end, values[end - 1]),
        )


class _RestartsFromPrompt(AsSampled):
    def resume_prompt(self, sample: PartialSample) -> tuple[int, ...]:
        # the response so far is missing
        return sample.request.prompt_ids

    def routes_start(self, sample: PartialSample) -> int:
        return 0


class _ResumesRetokenised(AsSampled):
    def resume_prompt(self, sample: PartialSample) -> tuple[int, ...]:
        ids = sample.ids
        # as if the last token came back from text as another one
        return (*ids[:-1], ids[-1] ^ 1) if sample.response else ids


class _AsksAfterStop(AsSampled):
    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        # a stop of the engine counts as an abort
        return FinishReason.LENGTH if self.next_budget(sample) == 0 else FinishReason.ABORT


class _ContextOffByOne(FakeEngine):
    def _enqueue(self, call: Call, rid: str | None) -> InflightCall:
        queued = super()._enqueue(call, rid)
        if len(call.prompt_ids) > 3:
            # the first call has three prompt tokens: only later calls lose their last one
            queued.state = self.policy.start_state(call.prompt_ids[:-1])
        return queued


class _FirstTokenMisread(CodedPolicy):
    def draw(self, version: Version, state: PrefixState, number: int) -> int:
        total, length = state
        # the first call has three prompt tokens: only later calls read the scores of another row
        return super().draw(version, (total + (length > 3), length), number)


class _AnswersCountedAsTurns(AsSampledLimits):
    @property
    def limits(self) -> RolloutLimits:
        declared = super().limits
        return replace(declared, turns=(declared.turns or 0) + 1)


class _LaterTurnsCut(AsSampled):
    def next_budget(self, sample: PartialSample) -> int | None:
        left = super().next_budget(sample)
        # the tool loop builds the parameters of later turns from the engine's defaults
        return left if left is None or not sample.turn else min(left, 2 - sample.turn_sampled)


class _ToolOutputRetokenised(AsSampled):
    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        # as if the last token came back from text as another one
        super().observe(sample, (*answer[:-1], answer[-1] + 1))


class _TurnSeparatorDropped(AsSampled):
    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        # a chat template begins each turn with a separator that the model never samples
        super().observe(sample, answer[1:])


class _SeparatorMissingInSample(AsSampled):
    def __init__(self, options: ClientOptions | None = None) -> None:
        super().__init__(options)
        self._joints: list[int] = []

    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        self._joints.append(len(sample.response))
        super().observe(sample, answer)

    def finished(self, sample: PartialSample) -> Rollout:
        # the engine got the separators, the trainer does not
        for joint in reversed(self._joints):
            lists: tuple[list[Any], ...] = (sample.response, sample.mask)
            for values in (*lists, sample.logprobs, sample.labels):
                del values[joint]
        return super().finished(sample)


class _ConversationRepeated(AsSampled):
    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        # the new prompt is the complete conversation, and it is appended to the old one
        super().observe(sample, (*sample.ids, *answer))


class _ToolAnswerCutOnWrongSide(AsSampled):
    def declared(self, fleet: Fleet) -> Contract:
        limits = RolloutLimits(answer=2, answer_keeps=AnswerCut.START)
        return replace(super().declared(fleet), limits=limits)

    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        super().observe(sample, answer[-2:])


class _TemperatureForgotten(AsSampled):
    def sampling_for(self, sample: PartialSample) -> dict[str, Scalar]:
        # only the first attempt passes them on
        return super().sampling_for(sample) if sample.attempts <= 1 else {}


class _SamplingDropped(AsSampled):
    def sampling_for(self, sample: PartialSample) -> dict[str, Scalar]:
        return {}


class _SamplingReplaced(AsSampled):
    """Merges the stack's defaults over the caller's parameters, not under them."""

    def sampling_for(self, sample: PartialSample) -> dict[str, Scalar]:
        return {**super().sampling_for(sample), "temperature": 1.0}


class _IdOfAnotherRequest(AsSampled):
    """Reads the id from a variable that every rollout overwrites when it begins."""

    async def rollout(self, request: Request) -> Rollout | None:
        self._id = request.request_id
        rollout = await super().rollout(request)
        return None if rollout is None else replace(rollout, request_id=self._id)


class _OneTokenTooFew(AsSampled):
    def next_budget(self, sample: PartialSample) -> int | None:
        left = super().next_budget(sample)
        return left if left is None else left - 1


class _MediaForgotten(AsSampled):
    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        if sample.response:
            # only calls that resume lose their images
            sample.request = replace(sample.request, media=None)
        return await super().call(server_id, sample, sent, budget)


class _CallerParametersMutated(AsSampled):
    def sampling_for(self, sample: PartialSample) -> dict[str, Scalar]:
        caller: dict[str, Any] = sample.request.sampling  # type: ignore[assignment]
        # the caller's own dictionary, not a copy of it
        caller["max_tokens"] = self.next_budget(sample)
        return caller


class _BudgetGrantedAgain(AsSampled):
    def next_budget(self, sample: PartialSample) -> int | None:
        # the response so far is not subtracted
        return sample.request.budget


class _BudgetUnstated(AsSampled):
    def next_budget(self, sample: PartialSample) -> int | None:
        # ``budget`` also knows the configured response length
        return sample.request.max_tokens


class _EngineOvershoots(FakeEngine):
    def _enqueue(self, call: Call, rid: str | None) -> InflightCall:
        queued = super()._enqueue(call, rid)
        # as if two draft tokens were accepted beyond the limit
        queued.limit += 2
        return queued


class _ReasonIgnored(AsSampled):
    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        return FinishReason.STOP


class _LengthBeforeStop(AsSampled):
    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        # the budget is compared first: a stop on the last token becomes a length
        return (
            FinishReason.LENGTH
            if self.next_budget(sample) == 0
            else super().finish_reason(sample, output)
        )


class _CutShownAsStop(AsSampled):
    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        reason = super().finish_reason(sample, output)
        # trainers mask or penalise cut answers, so the difference matters
        return FinishReason.STOP if reason is FinishReason.LENGTH else reason


class _GivesUpAsLength(AsSampled):
    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        return (
            FinishReason.LENGTH if sample.attempts >= 2 else super().finish_reason(sample, output)
        )


class _NeverAsked(AsSampled):
    async def run(self, sample: PartialSample) -> bool:
        sample.finish = FinishReason.LENGTH
        # with another rollout open there is no free slot
        return self._open > 1 or await super().run(sample)


class _ShrinkingLimit(AsSampled):
    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        # the budget shrinks while the response grows: they meet in the middle
        left = self.next_budget(sample)
        return (
            FinishReason.LENGTH
            if left is not None and len(sample.response) >= left
            else super().finish_reason(sample, output)
        )


class _EmptyAbortCosts(AsSampled):
    def next_budget(self, sample: PartialSample) -> int | None:
        left = super().next_budget(sample)
        return left if left is None or sample.response else left - sample.attempts


def _aborted(*requests: Any, **fields: Any) -> Case:
    return case(act(_ABORT, 3), requests=requests, **fields)


_ABORT = ActionKind.ABORT
_WARM = request(sampling={"temperature": 0.7})
_SEEN = request(media="image-1")
_LIMITED = request(max_tokens=None, limit=6)
_LONG_ANSWERS = case(
    model=ENDING, requests=(request(max_tokens=24, turns=((21, 22, 25), (23, 24))),), seed=1
)
_EXACT_STOP = case(requests=(request(max_tokens=2),), model=Model(eos_every=3), seed=1)

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="prompt-retokenised",
        summary="A retry tokenises the prompt again from text, and one token comes out different.",
        refs=("slime#1861",),
        make=_PromptRetokenised,
        cases=(CLEAN,),
        detected_by=("stitch.prompt",),
    ),
    KnownBug(
        id="last-segment-only",
        summary=(
            "The sample contains only the tokens of the last call; those of the aborted call are"
            " lost."
        ),
        refs=("ROLL user_defined_rollout_loop.py", "xtuner#1917"),
        make=_LastSegmentOnly,
        cases=(ABORTED,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="chunk-merged-twice",
        summary=(
            "The last chunk of an aborted stream repeats its last token, and the client appends"
            " it again."
        ),
        refs=("sglang#34488",),
        make=_ChunkMergedTwice,
        cases=(ABORTED,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="restarts-from-prompt",
        summary=(
            "After an abort the client sends the bare prompt again, without the tokens sampled so"
            " far."
        ),
        refs=("slime#2128",),
        make=_RestartsFromPrompt,
        cases=(ABORTED,),
        detected_by=("stitch.resume-prompt", "stitch.tokens"),
    ),
    KnownBug(
        id="resumes-retokenised",
        summary=(
            "The response so far is detokenised and tokenised again for the resuming call, and"
            " its last token changes."
        ),
        refs=("slime#1861",),
        make=_ResumesRetokenised,
        cases=(ABORTED,),
        detected_by=("stitch.resume-prompt",),
    ),
    KnownBug(
        id="asks-after-stop",
        summary=(
            "The resume loop checks only the budget, so it calls the engine again after an"
            " end-of-sequence token."
        ),
        refs=("cf. AReaL#858",),
        make=_AsksAfterStop,
        cases=(case(model=ENDING, seed=1, requests=(request(max_tokens=7),)),),
        detected_by=("stitch.no-call-after-end",),
    ),
    KnownBug(
        id="answers-counted-as-turns",
        summary=(
            "A limit on the turns of the model counts the environment's answers, so that a rollout"
            " gets one turn more."
        ),
        refs=("cf. verl tool_agent_loop.py",),
        make=_AnswersCountedAsTurns,
        cases=(
            case(
                model=Model(eos_every=1),
                requests=(request(max_tokens=14, turns=((21,),) * 4),),
            ),
        ),
        detected_by=("stitch.limits-kept",),
    ),
    KnownBug(
        id="context-off-by-one",
        summary="The engine continues a resumed call from a context without its last token.",
        refs=("vllm#39568",),
        make=on_engine(_ContextOffByOne),
        cases=(ABORTED,),
        detected_by=("stitch.matches-unbroken",),
    ),
    KnownBug(
        id="first-token-misread",
        summary=(
            "The engine samples the first token of a resumed call from the scores of another row."
        ),
        refs=("cf. vllm#39568",),
        make=on_policy(_FirstTokenMisread),
        cases=(ABORTED,),
        detected_by=("stitch.matches-unbroken",),
    ),
    KnownBug(
        id="tool-output-retokenised",
        summary="A tool's output is detokenised and tokenised again, which changes its tokens.",
        refs=("slime#1861", "SkyRL#2078"),
        make=_ToolOutputRetokenised,
        cases=(TURNS,),
        detected_by=("stitch.environment-tokens",),
    ),
    KnownBug(
        id="turn-separator-dropped",
        summary="The separator between two turns is in no call and not in the sample.",
        refs=("verl#6921",),
        make=_TurnSeparatorDropped,
        cases=(_LONG_ANSWERS,),
        detected_by=("stitch.environment-tokens",),
    ),
    KnownBug(
        id="separator-missing-in-sample",
        summary="The engine gets the separator between two turns, and the sample lacks it.",
        refs=("cf. verl#6921",),
        make=_SeparatorMissingInSample,
        cases=(TURNS,),
        detected_by=("stitch.environment-tokens",),
    ),
    KnownBug(
        id="conversation-repeated",
        summary="A tool's answer is appended together with the conversation before it.",
        refs=("open-instruct#1233",),
        make=_ConversationRepeated,
        cases=(case(model=ENDING, requests=(request(max_tokens=60, turns=((21, 22),)),), seed=1),),
        detected_by=("stitch.environment-tokens",),
    ),
    KnownBug(
        id="tool-answer-cut-on-wrong-side",
        summary="A tool's answer that is too long loses its start, and the end was to be cut.",
        refs=("cf. verl tool_agent_loop.py (tool_response_truncate_side)",),
        make=_ToolAnswerCutOnWrongSide,
        cases=(_LONG_ANSWERS,),
        detected_by=("stitch.environment-tokens",),
    ),
    KnownBug(
        id="temperature-forgotten",
        summary="The resuming call uses default sampling parameters.",
        refs=("cf. TRL#6947",),
        make=_TemperatureForgotten,
        cases=(_aborted(_WARM),),
        detected_by=("stitch.sampling-params",),
    ),
    KnownBug(
        id="sampling-dropped",
        summary=(
            "No call has the caller's sampling parameters, so the engine samples with its own"
            " defaults."
        ),
        refs=("NeMo-RL#3776", "cf. NeMo-RL#3497"),
        make=_SamplingDropped,
        cases=(_aborted(_WARM),),
        detected_by=("stitch.sampling-forwarded",),
    ),
    KnownBug(
        id="sampling-replaced",
        summary="The stack's default temperature replaces the caller's in every call.",
        refs=("cf. NeMo-RL#3776", "cf. NeMo-RL#3497"),
        make=_SamplingReplaced,
        cases=(_aborted(_WARM),),
        detected_by=("stitch.sampling-forwarded",),
    ),
    KnownBug(
        id="id-of-another-request",
        summary="Samples get the id of the request that began last.",
        refs=("cf. vllm#394",),
        make=_IdOfAnotherRequest,
        cases=(case(requests=(request(), request("r1", (31, 32, 33)))),),
        detected_by=("stitch.request-id",),
    ),
    KnownBug(
        id="one-token-too-few",
        summary=(
            "Every call gets one token less than the rest of the budget, and the sample claims to"
            " have reached its length."
        ),
        refs=("cf. AReaL#858",),
        make=_OneTokenTooFew,
        cases=(case(requests=(request(max_tokens=2), request("r1", (31, 32, 33), max_tokens=8))),),
        detected_by=("stitch.budget-used",),
        may_fail=("stitch.finish-length",),
    ),
    KnownBug(
        id="media-forgotten",
        summary="The resuming call has no images.",
        refs=("verl#4842", "verl#5160"),
        make=_MediaForgotten,
        cases=(_aborted(_SEEN),),
        detected_by=("stitch.media",),
    ),
    KnownBug(
        id="caller-parameters-mutated",
        summary="The rest of the budget is written into the caller's own sampling parameters.",
        refs=("verl#7207",),
        make=_CallerParametersMutated,
        cases=(ABORTED,),
        detected_by=("stitch.caller-objects",),
    ),
    KnownBug(
        id="budget-granted-again",
        summary="Every resume gets the full budget again.",
        refs=("verl#7207", "slime#2260", "slime#2122"),
        make=_BudgetGrantedAgain,
        cases=(ABORTED,),
        detected_by=("stitch.budget-granted",),
    ),
    KnownBug(
        id="budget-unstated",
        summary=(
            "Without an explicit max_tokens no budget is sent, although a response length is"
            " configured."
        ),
        refs=("verl#7207",),
        make=_BudgetUnstated,
        cases=(case(requests=(_LIMITED,), model=ENDING, seed=1),),
        detected_by=("stitch.budget-granted",),
    ),
    KnownBug(
        id="engine-overshoots",
        summary=(
            "Accepted draft tokens are not cut at the end, so a reply has more tokens than its"
            " budget."
        ),
        refs=("sglang#39826",),
        make=on_engine(_EngineOvershoots),
        cases=(CLEAN,),
        detected_by=("stitch.budget-total",),
    ),
    KnownBug(
        id="reason-ignored",
        summary=(
            "The client ignores the finish reason, so an aborted fragment becomes a finished turn."
        ),
        refs=("TRL async_rollout_worker.py", "whitecircle/halo#8"),
        make=_ReasonIgnored,
        cases=(ABORTED,),
        detected_by=("stitch.finish-reason", "lifecycle.aborts-do-not-surface"),
    ),
    KnownBug(
        id="length-before-stop",
        summary=(
            "The length is checked before the engine's reason: an answer that ends on the last"
            " token counts as cut."
        ),
        refs=("cf. verl#7207",),
        make=_LengthBeforeStop,
        cases=(_EXACT_STOP,),
        detected_by=("stitch.finish-reason",),
    ),
    KnownBug(
        id="cut-shown-as-stop",
        summary="A response that was cut by its budget is returned as stopped.",
        refs=("verl vllm_async_server.py",),
        make=_CutShownAsStop,
        cases=(CLEAN,),
        detected_by=("stitch.finish-reason",),
    ),
    KnownBug(
        id="gives-up-as-length",
        summary=(
            "After too many aborts the client gives up and claims that the sample reached its"
            " length."
        ),
        refs=("AReaL inf_bridge.py",),
        make=_GivesUpAsLength,
        cases=(case(act(_ABORT, 2), act(_ABORT, 3)),),
        detected_by=("stitch.finish-length", "lifecycle.aborts-do-not-surface"),
    ),
    KnownBug(
        id="never-asked",
        summary=(
            "A request that finds no free slot makes no call, and comes back as an empty answer"
            " that reached its length."
        ),
        refs=("cf. AReaL#858",),
        make=_NeverAsked,
        cases=(case(requests=(request(), request("r1", (31, 32)))),),
        detected_by=("stitch.finish-reason",),
    ),
    KnownBug(
        id="shrinking-limit",
        summary=(
            "The loop compares the length so far with a budget that it reduces itself, and ends"
            " early."
        ),
        refs=("AReaL#858",),
        make=_ShrinkingLimit,
        cases=(ABORTED,),
        detected_by=("stitch.finish-length", "lifecycle.aborts-do-not-surface"),
    ),
    KnownBug(
        id="later-turns-cut",
        summary=(
            "Every turn after an answer of the environment is sampled under a smaller max_tokens"
            " than the caller's budget leaves."
        ),
        refs=("cf. SkyRL#406", "cf. verl#6404"),
        make=_LaterTurnsCut,
        cases=(case(model=Model(eos_every=6), requests=TURNS.requests, seed=1),),
        detected_by=("stitch.turn-budget",),
        may_fail=("stitch.finish-length",),
    ),
    KnownBug(
        id="empty-abort-costs",
        summary="An abort before the first token reduces the budget by one token.",
        refs=("cf. verl#5936",),
        make=_EmptyAbortCosts,
        cases=(EMPTY,),
        detected_by=("stitch.zero-token-segments",),
        may_fail=("stitch.finish-length",),
    ),
)
