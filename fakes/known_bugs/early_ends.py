"""Known bugs of samples that end before their budget, or on its last token, by another reason."""

from __future__ import annotations

from dataclasses import replace

from rollproof.core.records import EngineOutput, FinishReason, Request
from rollproof.fakes.clients.reference_clients import AsSampled, PartialSample
from rollproof.fakes.known_bugs._planting import CLEAN, LAST, case, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]

_PORTION = 4


class _PortionEndsSample(AsSampled):
    def next_budget(self, sample: PartialSample) -> int | None:
        left = super().next_budget(sample)
        # the loop that would go on after a portion is missing
        return _PORTION if left is None else min(_PORTION, left)


class _DefaultLength(AsSampled):
    """Samples as many tokens as an HTTP server does that is told no number."""

    def next_budget(self, sample: PartialSample) -> int | None:
        left = super().next_budget(sample)
        return 16 - len(sample.response) if left is None else left


class _LastAbortSurfaces(AsSampled):
    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        return output.finish_reason

    async def run(self, sample: PartialSample) -> bool:
        while True:
            # the loop ends as soon as nothing is left, whatever the engine said
            output = await self.attempt(sample, sample.ids, self.next_budget(sample))
            self.absorb(sample, len(sample.ids), output)
            sample.finish = output.finish_reason
            if sample.finish is not FinishReason.ABORT or self.next_budget(sample) == 0:
                return True
            await self.wait()


_UNLIMITED: Request = replace(request(), max_tokens=None)


BUGS = (
    KnownBug(
        id="portion-ends-sample",
        summary="A call samples at most four tokens, and its length counts as the sample's end.",
        refs=("cf. AReaL#858",),
        make=_PortionEndsSample,
        cases=(CLEAN,),
        detected_by=("stitch.finish-length",),
    ),
    KnownBug(
        id="default-length",
        summary=(
            "A request without max_tokens is cut at a default of 16 tokens that nobody configured."
        ),
        refs=("cf. verl#7207",),
        make=_DefaultLength,
        cases=(case(requests=(_UNLIMITED,)),),
        detected_by=("stitch.finish-length",),
    ),
    KnownBug(
        id="last-abort-surfaces",
        summary=(
            "An abort on the last token of the budget is delivered as aborted, although the sample"
            " is complete."
        ),
        refs=("cf. slime#2260",),
        make=_LastAbortSurfaces,
        cases=(LAST,),
        detected_by=("lifecycle.aborts-do-not-surface",),
    ),
)
