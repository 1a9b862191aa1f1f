"""Known bugs of sampling masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.case import Action, ActionKind, Case
from rollproof.core.records import EngineOutput, FinishReason, Scalar
from rollproof.core.sampling_masks import SamplingMask
from rollproof.fakes.clients.mask_clients import AsSampledMasks
from rollproof.fakes.clients.resuming import PartialSample
from rollproof.fakes.coded.policy import CodedPolicy, VersionSpan
from rollproof.fakes.known_bugs._planting import CLEAN, ENDING, act, case, on_policy, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _SamplingMasksNotRequested(AsSampledMasks):
    def wants_masks(self, sample: PartialSample) -> bool:
        # only the first call sets the option
        return not sample.response


class _SamplingMasksDropped(AsSampledMasks):
    def joined_masks(self, sample: PartialSample) -> SamplingMask | None:
        return None


class _SamplingMasksOfAbortLost(AsSampledMasks):
    def new_masks(self, sample: PartialSample, output: EngineOutput) -> SamplingMask:
        # the masks of an aborted reply are in a part of the response that nobody reads
        if output.finish_reason is FinishReason.ABORT:
            return SamplingMask.none(len(output.token_ids))
        return super().new_masks(sample, output)


class _SamplingMasksOfLastCall(AsSampledMasks):
    """Replaces the list of masks by that of the last reply."""

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        if output.token_ids:
            self.masks(sample).clear()
        super().absorb(sample, sent, output)


class _SamplingMasksShifted(AsSampledMasks):
    def joined_masks(self, sample: PartialSample) -> SamplingMask | None:
        masks = SamplingMask.joined(self.masks(sample))
        if len(masks) < 2:
            return masks
        # the mask of the last token goes to the first, as labels do that are shifted once more
        end = len(masks)
        return SamplingMask.joined([masks.cut(end - 1, end), masks.cut(0, end - 1)])


class _SamplingMasksSlicedByTokens(AsSampledMasks):
    """Cuts the flat list of ids by the number of tokens before, and not by the sum of counts."""

    def new_masks(self, sample: PartialSample, output: EngineOutput) -> SamplingMask:
        masks = super().new_masks(sample, output)
        before = len(sample.response) - len(output.token_ids)
        return replace(masks, token_ids=np.roll(masks.token_ids, -before))


class _SamplingMasksReconstructed(AsSampledMasks):
    """Takes top_k ids around the token for its support; the token itself is always among them."""

    def new_masks(self, sample: PartialSample, output: EngineOutput) -> SamplingMask:
        masks = super().new_masks(sample, output)
        top_k = sample.request.sampling.get("top_k")
        if not masks.counts.any() or not isinstance(top_k, int):
            return masks
        return SamplingMask.from_lists(
            range(max(0, token - top_k + 1), token + 1) for token in output.token_ids
        )


class _SamplingMasksWithoutEnvironment(AsSampledMasks):
    """Appends nothing for the environment's tokens: masks of later turns come too early."""

    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        super().observe(sample, answer)
        self.masks(sample).pop()


class _SamplingMasksMadeUp(AsSampledMasks):
    def new_masks(self, sample: PartialSample, output: EngineOutput) -> SamplingMask:
        if output.sampling_mask is None:
            return SamplingMask.from_lists([token] for token in output.token_ids)
        return super().new_masks(sample, output)


class _SamplingMaskOfNextStep(CodedPolicy):
    def sampling_mask(
        self,
        spans: Iterable[VersionSpan],
        ids: Sequence[int],
        start: int,
        stop: int,
        sampling: Mapping[str, Scalar],
    ) -> SamplingMask | None:
        mask = super().sampling_mask(spans, ids, start, stop, sampling)
        if mask is None:
            return None
        # overlapped with the next step, the ids are copied when that has overwritten them
        return SamplingMask.joined([mask.cut(1, stop - start), mask.cut(0, 1)])


class _SamplingMasksNotGathered(CodedPolicy):
    def sampling_mask(
        self,
        spans: Iterable[VersionSpan],
        ids: Sequence[int],
        start: int,
        stop: int,
        sampling: Mapping[str, Scalar],
    ) -> SamplingMask | None:
        # the outputs of batch-sharded samplers are gathered without their masks
        return None


def _truncated(*actions: Action, **fields: Any) -> Case:
    return case(*actions, requests=(request(sampling={"top_p": 0.9, "top_k": 20}),), **fields)


_CLEAN = _truncated()
_ABORTED = _truncated(act(ActionKind.ABORT, 3))
_TURNS = case(
    model=ENDING,
    requests=(request(max_tokens=24, turns=((21, 22), (23, 24)), sampling={"top_k": 20}),),
    seed=1,
)

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="sampling-masks-not-requested",
        summary="Only the first call of a rollout requests sampling masks.",
        refs=("cf. sglang#33593",),
        make=_SamplingMasksNotRequested,
        cases=(_ABORTED,),
        detected_by=("stitch.sampling-masks-present",),
    ),
    KnownBug(
        id="sampling-masks-dropped",
        summary="The masks that engines returned do not reach the sample.",
        refs=("cf. prime-rl#3431", "cf. prime-rl#2979"),
        make=_SamplingMasksDropped,
        cases=(_CLEAN,),
        detected_by=("stitch.sampling-masks-present",),
    ),
    KnownBug(
        id="sampling-masks-not-gathered",
        summary="A sampler that is sharded by batch returns no masks, and replies succeed.",
        refs=("vllm#53826",),
        make=on_policy(_SamplingMasksNotGathered, AsSampledMasks),
        cases=(_CLEAN,),
        detected_by=("stitch.sampling-masks-present",),
    ),
    KnownBug(
        id="sampling-masks-of-abort-lost",
        summary="After a resume, the tokens of the aborted call have no masks.",
        refs=("cf. prime-rl#3431",),
        make=_SamplingMasksOfAbortLost,
        cases=(_ABORTED,),
        detected_by=("stitch.sampling-masks-present",),
    ),
    KnownBug(
        id="sampling-masks-of-last-call",
        summary="After a resume, a sample has the masks of its last call alone.",
        refs=("cf. prime-rl#3431",),
        make=_SamplingMasksOfLastCall,
        cases=(_ABORTED,),
        detected_by=("stitch.sampling-masks-length",),
    ),
    KnownBug(
        id="sampling-masks-without-environment",
        summary="The environment's tokens have no count, and masks of later turns come too early.",
        refs=("cf. prime-rl#2979",),
        make=_SamplingMasksWithoutEnvironment,
        cases=(_TURNS,),
        detected_by=("stitch.sampling-masks-length",),
    ),
    KnownBug(
        id="sampling-masks-shifted",
        summary="Every token has the mask of the token before.",
        refs=("cf. prime-rl#3431",),
        make=_SamplingMasksShifted,
        cases=(_CLEAN,),
        detected_by=("stitch.sampling-masks-paired",),
    ),
    KnownBug(
        id="sampling-masks-sliced-by-tokens",
        summary=(
            "On resume the flat list of ids is cut by the number of tokens, and not by the sum of"
            " their counts."
        ),
        refs=("cf. vllm#49577",),
        make=_SamplingMasksSlicedByTokens,
        cases=(_ABORTED,),
        detected_by=("stitch.sampling-masks-paired",),
    ),
    KnownBug(
        id="sampling-masks-reconstructed",
        summary=(
            "Supports are reconstructed after sampling, and repaired by adding the sampled token:"
            " other ids are missing or too many."
        ),
        refs=("cf. sglang#36630", "cf. sglang#35966"),
        make=_SamplingMasksReconstructed,
        cases=(_CLEAN,),
        detected_by=("stitch.sampling-masks-paired",),
    ),
    KnownBug(
        id="sampling-masks-made-up",
        summary="Tokens that were drawn among all tokens get a mask that holds them alone.",
        refs=("cf. sglang#35765",),
        make=_SamplingMasksMadeUp,
        cases=(CLEAN,),
        detected_by=("stitch.sampling-masks-paired",),
    ),
    KnownBug(
        id="sampling-mask-of-next-step",
        summary="The engine copies a step's support when the next step has overwritten it.",
        refs=("cf. sglang#36631",),
        make=on_policy(_SamplingMaskOfNextStep, AsSampledMasks),
        cases=(_CLEAN,),
        detected_by=("stitch.sampling-masks-sampled",),
    ),
)
