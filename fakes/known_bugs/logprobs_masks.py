"""Known bugs of logprobs and loss masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollproof.core.contract import Contract, MissingLogprobs
from rollproof.core.records import EngineOutput, FinishReason, IntArray, Rollout
from rollproof.fakes.clients.reference_clients import AsSampled, ClientOptions, PartialSample
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.known_bugs._planting import ABORTED, CLEAN, SYNCED, TURNS, case, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _LogprobsDropped(AsSampled):
    def finished(self, sample: PartialSample) -> Rollout:
        return replace(super().finished(sample), logprobs=None)


class _LogprobsNotAskedFor(AsSampled):
    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        # only the first call sets the option
        if sample.response:
            sample.request = replace(sample.request, want_logprobs=False)
        return await super().call(server_id, sample, sent, budget)

    def finished(self, sample: PartialSample) -> Rollout:
        sample.request = replace(sample.request, want_logprobs=True)
        return super().finished(sample)


class _LogprobsShared(AsSampled):
    """Samples are views of one list, which every rollout starts again."""

    def __init__(self, options: ClientOptions | None = None) -> None:
        super().__init__(options)
        self._shared = np.zeros(64)

    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None
        view = self._shared[: len(rollout.logprobs)]
        view[:] = rollout.logprobs
        return replace(rollout, logprobs=view)


class _LogprobsSegmentMissing(AsSampled):
    def merge_logprobs(self, sample: PartialSample, output: EngineOutput) -> None:
        # as if an aborted reply had no logprobs, and its tokens got no placeholder
        if output.finish_reason is not FinishReason.ABORT:
            super().merge_logprobs(sample, output)


class _LogprobsPadded(AsSampled):
    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None
        padded = np.full(len(rollout.logprobs), np.nan)
        # values of the last segment at the places of the first
        padded[: self._last] = rollout.logprobs[-self._last :]
        return replace(rollout, logprobs=padded)

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        super().absorb(sample, sent, output)
        self._last = len(output.token_ids)


class _LogprobSentinel(AsSampled):
    def merge_logprobs(self, sample: PartialSample, output: EngineOutput) -> None:
        super().merge_logprobs(sample, output)
        if len(sample.logprobs) > len(output.token_ids):
            # as if it were the first token of a prompt, which has no logprob
            sample.logprobs[-len(output.token_ids)] = float("-inf")


class _ProbabilitiesForLogprobs(AsSampled):
    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None
        return replace(rollout, logprobs=np.exp(rollout.logprobs))


class _LogprobsShifted(AsSampled):
    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None
        return replace(rollout, logprobs=np.roll(rollout.logprobs, 1))


class _LogprobsOfFirstTry(AsSampled):
    """After a retry, the first values of the list are those of the abandoned attempt."""

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        stale = sample.attempts == 1 and output.finish_reason is FinishReason.ABORT
        if stale:
            self._stale = [] if output.logprobs is None else output.logprobs.tolist()
            return
        super().absorb(sample, sent, output)
        if sample.attempts == 2:
            sample.logprobs[: len(self._stale)] = self._stale


class _LogprobsInBfloat16(AsSampled):
    def merge_logprobs(self, sample: PartialSample, output: EngineOutput) -> None:
        super().merge_logprobs(sample, output)
        # bfloat16 is the upper half of float32
        bits = np.array(sample.logprobs, dtype=np.float32).view(np.uint32)
        sample.logprobs[:] = (bits & np.uint32(0xFFFF0000)).view(np.float32).tolist()


class _SilentOnAbort(FakeEngine):
    """Returns no logprobs with the first call of a rollout."""

    async def _answer(self, call: InflightCall) -> EngineOutput:
        call.want_logprobs = call.prompt_len > 3
        return await super()._answer(call)


class _ZeroForMissingLogprob(AsSampled):
    def start(self, fleet: Fleet) -> None:
        for server in fleet.servers.values():
            server.__class__ = _SilentOnAbort
        super().start(fleet)

    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), missing_logprobs=MissingLogprobs.NAN)

    def merge_logprobs(self, sample: PartialSample, output: EngineOutput) -> None:
        super().merge_logprobs(sample, output)
        sample.logprobs[:] = [0.0 if value != value else value for value in sample.logprobs]


class _MaskOfFirstSegment(AsSampled):
    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), loss_mask=True)

    def merge_tokens(self, sample: PartialSample, output: EngineOutput) -> None:
        before = len(sample.response)
        super().merge_tokens(sample, output)
        if before:
            self._cut = before

    def loss_mask(self, sample: PartialSample) -> IntArray | None:
        mask = super().loss_mask(sample)
        # the mask ends where the second segment begins
        return mask if mask is None else mask[: self._cut]


class _ResumedTokensMasked(AsSampled):
    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), loss_mask=True)

    def merge_tokens(self, sample: PartialSample, output: EngineOutput) -> None:
        before = len(sample.response)
        super().merge_tokens(sample, output)
        # the mask of what the call sent covers what it returned
        if before:
            sample.mask[before:] = [0] * len(output.token_ids)


class _AttentionMaskAsLossMask(AsSampled):
    def loss_mask(self, sample: PartialSample) -> IntArray | None:
        mask = super().loss_mask(sample)
        # every token is attended to, also those of the environment
        return mask if mask is None else np.ones_like(mask)


_VALUES = ("stitch.logprobs-paired",)

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="logprobs-dropped",
        summary="The rollout's logprobs are not copied into the sample.",
        refs=("slime#1995", "slime#2124"),
        make=_LogprobsDropped,
        cases=(CLEAN,),
        detected_by=("stitch.logprobs-present",),
    ),
    KnownBug(
        id="logprobs-not-asked-for",
        summary="The resuming call does not request logprobs.",
        refs=("slime#1995",),
        make=_LogprobsNotAskedFor,
        cases=(ABORTED,),
        detected_by=("stitch.logprobs-present",),
    ),
    KnownBug(
        id="logprobs-padded",
        summary=(
            "After a resume the list contains only the last segment's logprobs, padded to the"
            " response's length."
        ),
        refs=("slime#1861",),
        make=_LogprobsPadded,
        cases=(ABORTED,),
        detected_by=("stitch.logprobs-present", "stitch.logprobs-paired"),
    ),
    KnownBug(
        id="logprobs-segment-missing",
        summary="A segment without logprobs adds none, so the values of later tokens move up.",
        refs=("verl llm_server.py (0.9.1)", "AReaL#1554"),
        make=_LogprobsSegmentMissing,
        cases=(ABORTED,),
        detected_by=("stitch.logprobs-length",),
    ),
    KnownBug(
        id="logprobs-shared",
        summary=(
            "Samples share one list of logprobs, so the next request changes those of the one"
            " before."
        ),
        refs=("cf. slime#1861",),
        make=_LogprobsShared,
        cases=(case(requests=(request(), request("r1", (31, 32, 33))), arrivals=(0.0, 20.0)),),
        detected_by=("stitch.handed-over",),
    ),
    KnownBug(
        id="logprob-sentinel",
        summary="The first token of a resumed segment gets a sentinel in place of its logprob.",
        refs=("AReaL#1554",),
        make=_LogprobSentinel,
        cases=(ABORTED,),
        detected_by=("stitch.logprobs-valid",),
    ),
    KnownBug(
        id="probabilities-for-logprobs",
        summary="Probabilities are stored in place of logprobs.",
        refs=("verl debug/metrics.py",),
        make=_ProbabilitiesForLogprobs,
        cases=(CLEAN,),
        detected_by=("stitch.logprobs-valid",),
    ),
    KnownBug(
        id="logprobs-shifted",
        summary="Logprobs are shifted by one token: each one belongs to the token before.",
        refs=("ms-swift#8196", "prime-rl#1525"),
        make=_LogprobsShifted,
        cases=(CLEAN, SYNCED),
        detected_by=_VALUES,
    ),
    KnownBug(
        id="logprobs-of-first-try",
        summary="A retried sample keeps the logprobs of the attempt that was given up.",
        refs=("slime#1861",),
        make=_LogprobsOfFirstTry,
        cases=(SYNCED,),
        detected_by=_VALUES,
        may_fail=("stitch.resume-prompt",),
    ),
    KnownBug(
        id="logprobs-in-bfloat16",
        summary="Logprobs are rounded to bfloat16.",
        refs=("slime#245",),
        make=_LogprobsInBfloat16,
        cases=(CLEAN,),
        detected_by=_VALUES,
    ),
    KnownBug(
        id="zero-for-missing-logprob",
        summary="A logprob that the engine did not return becomes 0.0, which is probability one.",
        refs=("OpenRLHF agent.py", "vime#70", "SkyRL#758"),
        make=_ZeroForMissingLogprob,
        cases=(ABORTED,),
        detected_by=("stitch.logprobs-missing",),
    ),
    KnownBug(
        id="mask-of-first-segment",
        summary="The loss mask is built before the resume and not extended after it.",
        refs=("slime#1440", "slime#1445", "miles#556"),
        make=_MaskOfFirstSegment,
        cases=(ABORTED,),
        detected_by=("stitch.mask-shape",),
    ),
    KnownBug(
        id="resumed-tokens-masked",
        summary="What a resumed call returns is masked out, as what the call sent.",
        refs=("cf. slime sglang_rollout.py (mask_offpolicy_in_partial_rollout)",),
        make=_ResumedTokensMasked,
        cases=(ABORTED,),
        detected_by=("stitch.mask",),
    ),
    KnownBug(
        id="attention-mask-as-loss-mask",
        summary=(
            "The attention mask is used as the loss mask, so the environment's tokens are trained"
            " on."
        ),
        refs=("verl#2543", "rllm#503"),
        make=_AttentionMaskAsLossMask,
        cases=(TURNS,),
        detected_by=("stitch.mask-environment",),
    ),
)
