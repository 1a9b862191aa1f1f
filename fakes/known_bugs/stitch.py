"""Known bugs of stitching: tokens, logprobs, masks, budgets and ends of a resumed rollout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.case import ActionKind, Case, Model
from rollproof.contract import Contract, MissingLogprobs
from rollproof.fakes.calls import EngineCall
from rollproof.fakes.engine import FakeEngine
from rollproof.fakes.fleet import Fleet
from rollproof.fakes.known_bugs.planting import ABORTED, CLEAN, EMPTY, ENDING, SYNCED, TURNS, act, case, on_engine, request
from rollproof.fakes.managers import AsSampled, Sample
from rollproof.known_bug import KnownBug
from rollproof.records import EngineOutput, FinishReason, IntArray, Rollout, Scalar
from rollproof.trace import Call

__all__ = ["BUGS"]

_ABORT = ActionKind.ABORT


class _Retokenised(AsSampled):
    def finished(self, sample: Sample) -> Rollout:
        rollout = super().finished(sample)
        *head, last = rollout.prompt_ids
        return replace(rollout, prompt_ids=(*head, last + 1))


class _LastSegmentOnly(AsSampled):
    def absorb(self, sample: Sample, sent: int, output: EngineOutput) -> None:
        super().absorb(sample, sent, output)
        self._last = len(output.token_ids)

    def finished(self, sample: Sample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None
        return replace(rollout, response_ids=rollout.response_ids[-self._last :], logprobs=rollout.logprobs[-self._last :])


class _ChunkMergedTwice(AsSampled):
    def merge_tokens(self, sample: Sample, output: EngineOutput) -> None:
        super().merge_tokens(sample, output)
        if output.finish_reason is FinishReason.ABORT:
            self._end = len(sample.response)

    def finished(self, sample: Sample) -> Rollout:
        rollout, end = super().finished(sample), self._end
        assert rollout.logprobs is not None
        ids, values = rollout.response_ids, rollout.logprobs
        return replace(rollout, response_ids=(*ids[:end], *ids[end - 1 :]), logprobs=np.insert(values, end, values[end - 1]))


class _RestartsFromPrompt(AsSampled):
    def resume_prompt(self, sample: Sample) -> tuple[int, ...]:
        return sample.request.prompt_ids

    def routes_start(self, sample: Sample) -> int:
        return 0


class _ResumesRetokenised(AsSampled):
    def resume_prompt(self, sample: Sample) -> tuple[int, ...]:
        ids = sample.ids
        return (*ids[:-1], ids[-1] ^ 1) if sample.response else ids


class _AsksAfterStop(AsSampled):
    def finish_reason(self, sample: Sample, output: EngineOutput) -> FinishReason:
        return FinishReason.LENGTH if self.next_budget(sample) == 0 else FinishReason.ABORT


class _ContextOffByOne(FakeEngine):
    def _enqueue(self, call: Call, rid: str | None) -> EngineCall:
        queued = super()._enqueue(call, rid)
        if len(call.prompt_ids) > 3:
            queued.state = self.policy.start_state(call.prompt_ids[:-1])
        return queued


class _ForgetsTemperature(AsSampled):
    def sampling_for(self, sample: Sample) -> dict[str, Scalar]:
        return super().sampling_for(sample) if sample.attempts <= 1 else {}


class _ForgetsMedia(AsSampled):
    async def call(self, server_id: str, sample: Sample, sent: tuple[int, ...], budget: int | None) -> EngineOutput:
        if sample.response:
            sample.request = replace(sample.request, media=None)
        return await super().call(server_id, sample, sent, budget)


class _WritesBudgetToCaller(AsSampled):
    def sampling_for(self, sample: Sample) -> dict[str, Scalar]:
        caller: dict[str, Any] = sample.request.sampling  # type: ignore[assignment]
        caller["max_tokens"] = self.next_budget(sample)
        return caller


class _FullBudgetAgain(AsSampled):
    def next_budget(self, sample: Sample) -> int | None:
        return sample.request.budget


class _NoBudget(AsSampled):
    def next_budget(self, sample: Sample) -> int | None:
        return sample.request.max_tokens


class _Overshoots(FakeEngine):
    def _enqueue(self, call: Call, rid: str | None) -> EngineCall:
        queued = super()._enqueue(call, rid)
        queued.limit += 2
        return queued


class _IgnoresReason(AsSampled):
    def finish_reason(self, sample: Sample, output: EngineOutput) -> FinishReason:
        return FinishReason.STOP


class _LengthBeforeStop(AsSampled):
    def finish_reason(self, sample: Sample, output: EngineOutput) -> FinishReason:
        return FinishReason.LENGTH if self.next_budget(sample) == 0 else super().finish_reason(sample, output)


class _CompletedForStop(AsSampled):
    def finish_reason(self, sample: Sample, output: EngineOutput) -> FinishReason:
        reason = super().finish_reason(sample, output)
        return FinishReason.STOP if reason is FinishReason.LENGTH else reason


class _GivesUpAsLength(AsSampled):
    def finish_reason(self, sample: Sample, output: EngineOutput) -> FinishReason:
        return FinishReason.LENGTH if sample.attempts >= 2 else super().finish_reason(sample, output)


class _ShrinkingLimit(AsSampled):
    def finish_reason(self, sample: Sample, output: EngineOutput) -> FinishReason:
        left = self.next_budget(sample)
        return FinishReason.LENGTH if left is not None and len(sample.response) >= left else super().finish_reason(sample, output)


class _EmptyAbortCosts(AsSampled):
    def next_budget(self, sample: Sample) -> int | None:
        left = super().next_budget(sample)
        return left if left is None or sample.response else left - sample.attempts


class _DropsLogprobs(AsSampled):
    def finished(self, sample: Sample) -> Rollout:
        return replace(super().finished(sample), logprobs=None)


class _ForgetsLogprobsFlag(AsSampled):
    async def call(self, server_id: str, sample: Sample, sent: tuple[int, ...], budget: int | None) -> EngineOutput:
        if sample.response:
            sample.request = replace(sample.request, want_logprobs=False)
        return await super().call(server_id, sample, sent, budget)

    def finished(self, sample: Sample) -> Rollout:
        sample.request = replace(sample.request, want_logprobs=True)
        return super().finished(sample)


class _SkipsAbortedLogprobs(AsSampled):
    def merge_logprobs(self, sample: Sample, output: EngineOutput) -> None:
        if output.finish_reason is not FinishReason.ABORT:
            super().merge_logprobs(sample, output)


class _PadsLogprobs(AsSampled):
    def finished(self, sample: Sample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None
        padded = np.full(len(rollout.logprobs), np.nan)
        padded[: self._kept] = rollout.logprobs[-self._kept :]
        return replace(rollout, logprobs=padded)

    def absorb(self, sample: Sample, sent: int, output: EngineOutput) -> None:
        super().absorb(sample, sent, output)
        self._kept = len(output.token_ids)


class _SentinelLogprob(AsSampled):
    def merge_logprobs(self, sample: Sample, output: EngineOutput) -> None:
        super().merge_logprobs(sample, output)
        if len(sample.logprobs) > len(output.token_ids):
            sample.logprobs[-len(output.token_ids)] = float("-inf")


class _Probabilities(AsSampled):
    def finished(self, sample: Sample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None
        return replace(rollout, logprobs=np.exp(rollout.logprobs))


class _ShiftedLogprobs(AsSampled):
    def finished(self, sample: Sample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None
        return replace(rollout, logprobs=np.roll(rollout.logprobs, 1))


class _KeepsOldLogprobs(AsSampled):
    """After a retry, the first values of the list are those of the attempt that was given up."""

    def absorb(self, sample: Sample, sent: int, output: EngineOutput) -> None:
        stale = sample.attempts == 1 and output.finish_reason is FinishReason.ABORT
        if stale:
            self._stale = [] if output.logprobs is None else output.logprobs.tolist()
            return
        super().absorb(sample, sent, output)
        if sample.attempts == 2:
            sample.logprobs[: len(self._stale)] = self._stale


class _Bfloat16(AsSampled):
    def merge_logprobs(self, sample: Sample, output: EngineOutput) -> None:
        super().merge_logprobs(sample, output)
        bits = np.array(sample.logprobs, dtype=np.float32).view(np.uint32)
        sample.logprobs[:] = (bits & np.uint32(0xFFFF0000)).view(np.float32).tolist()


class _SilentOnAbort(FakeEngine):
    """Returns no logprobs with the first call of a rollout."""

    async def _answer(self, call: EngineCall) -> EngineOutput:
        call.want_logprobs = call.prompt_len > 3
        return await super()._answer(call)


class _ZeroForMissing(AsSampled):
    def start(self, fleet: Fleet) -> None:
        for server in fleet.servers.values():
            server.__class__ = _SilentOnAbort
        super().start(fleet)

    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), missing_logprobs=MissingLogprobs.NAN)

    def merge_logprobs(self, sample: Sample, output: EngineOutput) -> None:
        super().merge_logprobs(sample, output)
        sample.logprobs[:] = [0.0 if value != value else value for value in sample.logprobs]


class _MaskOfFirstSegment(AsSampled):
    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), loss_mask=True)

    def merge_tokens(self, sample: Sample, output: EngineOutput) -> None:
        had = len(sample.response)
        super().merge_tokens(sample, output)
        if had:
            self._cut = had

    def loss_mask(self, sample: Sample) -> IntArray | None:
        mask = super().loss_mask(sample)
        return mask if mask is None else mask[: self._cut]


class _AttentionMask(AsSampled):
    def loss_mask(self, sample: Sample) -> IntArray | None:
        mask = super().loss_mask(sample)
        return mask if mask is None else np.ones_like(mask)


_WARM = request(sampling={"temperature": 0.7})
_SEEN = request(media="image-1")
_LIMITED = request(max_tokens=None, limit=6)
_EXACT_STOP = case(requests=(request(max_tokens=2),), model=Model(eos_every=3), seed=1)


def _aborted(*requests: Any, **fields: Any) -> Case:
    return case(act(_ABORT, 3), requests=requests, **fields)


_VALUES = ("stitch.logprobs-paired",)

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="prompt-retokenised",
        summary="A retry renders the prompt anew from text, and one token comes out different.",
        refs=("slime#1861",),
        make=_Retokenised,
        cases=(CLEAN,),
        kills=("stitch.prompt",),
    ),
    KnownBug(
        id="last-segment-only",
        summary="Only what the last call returned is handed over; what the abort had returned is gone.",
        refs=("ROLL user_defined_rollout_loop.py", "xtuner#1917"),
        make=_LastSegmentOnly,
        cases=(ABORTED,),
        kills=("stitch.tokens",),
    ),
    KnownBug(
        id="chunk-merged-twice",
        summary="The last chunk of an aborted stream repeats its last token, and the client appends it again.",
        refs=("sglang#34488",),
        make=_ChunkMergedTwice,
        cases=(ABORTED,),
        kills=("stitch.tokens",),
    ),
    KnownBug(
        id="restarts-from-prompt",
        summary="After an abort the client sends the bare prompt again instead of what was sampled so far.",
        refs=("slime#2128",),
        make=_RestartsFromPrompt,
        cases=(ABORTED,),
        kills=("stitch.resume-prompt", "stitch.tokens"),
    ),
    KnownBug(
        id="resumes-retokenised",
        summary="The response so far goes through text before it is sent on, and its last token comes back as another.",
        refs=("slime#1861",),
        make=_ResumesRetokenised,
        cases=(ABORTED,),
        kills=("stitch.resume-prompt",),
    ),
    KnownBug(
        id="asks-after-stop",
        summary="The resume loop ends on the budget alone, so it asks for more behind an end-of-sequence token.",
        refs=("AReaL#858",),
        make=_AsksAfterStop,
        cases=(case(model=ENDING, seed=1, requests=(request(max_tokens=7),)),),
        kills=("stitch.no-call-after-end",),
    ),
    KnownBug(
        id="context-off-by-one",
        summary="The engine continues a resumed call from a context without its last token.",
        refs=("vllm#39568",),
        make=on_engine(_ContextOffByOne),
        cases=(ABORTED,),
        kills=("stitch.matches-unbroken",),
    ),
    KnownBug(
        id="temperature-forgotten",
        summary="The resuming call is made with default sampling parameters.",
        refs=("verl#4348",),
        make=_ForgetsTemperature,
        cases=(_aborted(_WARM),),
        kills=("stitch.sampling-params",),
    ),
    KnownBug(
        id="media-forgotten",
        summary="The resuming call carries no images.",
        refs=("verl#4842", "verl#5160"),
        make=_ForgetsMedia,
        cases=(_aborted(_SEEN),),
        kills=("stitch.media",),
    ),
    KnownBug(
        id="caller-parameters-mutated",
        summary="What is left of the budget is written into the caller's own sampling parameters.",
        refs=("verl#7207",),
        make=_WritesBudgetToCaller,
        cases=(ABORTED,),
        kills=("stitch.caller-objects",),
    ),
    KnownBug(
        id="budget-granted-again",
        summary="Every resume grants the whole budget again.",
        refs=("verl#7207", "slime#2260"),
        make=_FullBudgetAgain,
        cases=(ABORTED,),
        kills=("stitch.budget-granted",),
    ),
    KnownBug(
        id="budget-unstated",
        summary="Without an explicit max_tokens no budget is sent, although a response length is configured.",
        refs=("verl#7207",),
        make=_NoBudget,
        cases=(case(requests=(_LIMITED,), model=ENDING, seed=1),),
        kills=("stitch.budget-granted",),
    ),
    KnownBug(
        id="engine-overshoots",
        summary="Accepted draft tokens are not cut at the end, so a reply holds more tokens than it was granted.",
        refs=("sglang#39826",),
        make=on_engine(_Overshoots),
        cases=(CLEAN,),
        kills=("stitch.budget-total",),
    ),
    KnownBug(
        id="reason-ignored",
        summary="The client does not look at the finish reason, so an aborted fragment becomes a finished turn.",
        refs=("TRL async_rollout_worker.py", "whitecircle/halo#8"),
        make=_IgnoresReason,
        cases=(ABORTED,),
        kills=("stitch.finish-reason", "lifecycle.aborts-do-not-surface"),
    ),
    KnownBug(
        id="length-before-stop",
        summary="The length is asked for before the engine's reason: an answer that ends on the last token counts as cut.",
        refs=("verl#7207",),
        make=_LengthBeforeStop,
        cases=(_EXACT_STOP,),
        kills=("stitch.finish-reason",),
    ),
    KnownBug(
        id="cut-shown-as-stop",
        summary="A response that was cut by its budget is handed over as stopped.",
        refs=("verl vllm_async_server.py",),
        make=_CompletedForStop,
        cases=(CLEAN,),
        kills=("stitch.finish-reason",),
    ),
    KnownBug(
        id="gives-up-as-length",
        summary="After too many aborts the client gives up, and says that the sample reached its length.",
        refs=("AReaL inf_bridge.py",),
        make=_GivesUpAsLength,
        cases=(case(act(_ABORT, 2), act(_ABORT, 3)),),
        kills=("stitch.finish-length", "lifecycle.aborts-do-not-surface"),
    ),
    KnownBug(
        id="shrinking-limit",
        summary="The loop compares the length so far with a budget that it shrinks itself, and ends early.",
        refs=("AReaL#858",),
        make=_ShrinkingLimit,
        cases=(ABORTED,),
        kills=("stitch.finish-length", "lifecycle.aborts-do-not-surface"),
    ),
    KnownBug(
        id="empty-abort-costs",
        summary="An abort before the first token takes a token off the budget.",
        refs=("verl#5936",),
        make=_EmptyAbortCosts,
        cases=(EMPTY,),
        kills=("stitch.zero-token-segments",),
        also=("stitch.finish-length",),
    ),
    KnownBug(
        id="logprobs-dropped",
        summary="The rollout's logprobs are not carried into the sample.",
        refs=("slime#1995", "slime#2124"),
        make=_DropsLogprobs,
        cases=(CLEAN,),
        kills=("stitch.logprobs-present",),
    ),
    KnownBug(
        id="logprobs-not-asked-for",
        summary="The resuming call does not ask for logprobs.",
        refs=("slime#1995",),
        make=_ForgetsLogprobsFlag,
        cases=(ABORTED,),
        kills=("stitch.logprobs-present",),
    ),
    KnownBug(
        id="logprobs-padded",
        summary="After a resume the list holds the last segment's logprobs and is filled up to the response's length.",
        refs=("slime#1861",),
        make=_PadsLogprobs,
        cases=(ABORTED,),
        kills=("stitch.logprobs-present", "stitch.logprobs-paired"),
    ),
    KnownBug(
        id="logprobs-segment-missing",
        summary="A segment without logprobs adds none, so the values of later tokens move up.",
        refs=("verl llm_server.py (0.9.1)", "AReaL#1554"),
        make=_SkipsAbortedLogprobs,
        cases=(ABORTED,),
        kills=("stitch.logprobs-length",),
    ),
    KnownBug(
        id="logprob-sentinel",
        summary="The first token of a resumed segment gets a sentinel in place of its logprob.",
        refs=("AReaL#1554",),
        make=_SentinelLogprob,
        cases=(ABORTED,),
        kills=("stitch.logprobs-valid",),
    ),
    KnownBug(
        id="probabilities-for-logprobs",
        summary="Probabilities are stored where logprobs are meant.",
        refs=("verl debug/metrics.py",),
        make=_Probabilities,
        cases=(CLEAN,),
        kills=("stitch.logprobs-valid",),
    ),
    KnownBug(
        id="logprobs-shifted",
        summary="Logprobs stand one token too late.",
        refs=("sglang#18190", "rllm#503"),
        make=_ShiftedLogprobs,
        cases=(CLEAN, SYNCED),
        kills=_VALUES,
    ),
    KnownBug(
        id="logprobs-of-first-try",
        summary="A retried sample keeps the logprobs of the attempt that was given up.",
        refs=("slime#1861",),
        make=_KeepsOldLogprobs,
        cases=(SYNCED,),
        kills=_VALUES,
        also=("stitch.resume-prompt",),
    ),
    KnownBug(
        id="logprobs-in-bfloat16",
        summary="Logprobs are rounded to bfloat16 on their way.",
        refs=("slime#245",),
        make=_Bfloat16,
        cases=(CLEAN,),
        kills=_VALUES,
    ),
    KnownBug(
        id="zero-for-missing-logprob",
        summary="A logprob that the engine did not return becomes 0.0: probability one.",
        refs=("OpenRLHF agent.py",),
        make=_ZeroForMissing,
        cases=(ABORTED,),
        kills=("stitch.logprobs-missing",),
    ),
    KnownBug(
        id="mask-of-first-segment",
        summary="The loss mask is built before the resume and not extended by it.",
        refs=("slime#1440", "slime#1445", "miles#556"),
        make=_MaskOfFirstSegment,
        cases=(ABORTED,),
        kills=("stitch.mask-shape",),
    ),
    KnownBug(
        id="attention-mask-as-loss-mask",
        summary="The attention mask is used as loss mask, so the environment's tokens are trained on.",
        refs=("verl#2543", "rllm#503"),
        make=_AttentionMask,
        cases=(TURNS,),
        kills=("stitch.mask-environment",),
    ),
)
"""Known bugs of stitching."""
