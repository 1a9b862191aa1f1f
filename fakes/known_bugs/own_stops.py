"""Known bugs of stacks that cut replies at stop sequences of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rollproof.core.case import ActionKind, Model
from rollproof.core.own_stops import OwnStops
from rollproof.core.records import EngineOutput
from rollproof.fakes.clients.resuming import AsSampled, ClientOptions, PartialSample
from rollproof.fakes.known_bugs._planting import act, case, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]

_STOP = (22, 17, 29)
# The first stop ends with the fourth token, and more are sampled after it.
_MODEL = Model(common_tokens=_STOP, eos_id=0)
_SEED = 29
# A second one follows.
_TWICE = 1212


class _CutsAtStops(AsSampled):
    options: ClassVar[ClientOptions] = ClientOptions(own_stops=OwnStops(sequences=(_STOP,)))


class _StopsNotCut(_CutsAtStops):
    def cut_at_stop(self, sample: PartialSample, output: EngineOutput) -> EngineOutput:
        # cutting text would break the pairing with logprobs, so it is left out if there are any
        wanted = sample.request.want_logprobs
        return output if wanted else super().cut_at_stop(sample, output)


class _StopAcrossAbortMissed(_CutsAtStops):
    def cut_at_stop(self, sample: PartialSample, output: EngineOutput) -> EngineOutput:
        # each reply is searched by itself
        size, sample.turn_sampled = sample.turn_sampled, 0
        cut = super().cut_at_stop(sample, output)
        sample.turn_sampled = size
        return cut


class _LastStopCounts(_CutsAtStops):
    def cut_at_stop(self, sample: PartialSample, output: EngineOutput) -> EngineOutput:
        tokens, size = output.token_ids, len(_STOP)
        # rfind: what the model wrote after its first answer stays
        ends = [i for i in range(size, len(tokens) + 1) if tokens[i - size : i] == _STOP]
        if len(ends) < 2:
            return super().cut_at_stop(sample, output)
        logprobs = None if output.logprobs is None else output.logprobs[: ends[-1]]
        return replace(output, token_ids=tokens[: ends[-1]], logprobs=logprobs)


class _StopCutsTokensOnly(_CutsAtStops):
    def cut_at_stop(self, sample: PartialSample, output: EngineOutput) -> EngineOutput:
        return replace(super().cut_at_stop(sample, output), logprobs=output.logprobs)


class _StopDropped(_CutsAtStops):
    def cut_at_stop(self, sample: PartialSample, output: EngineOutput) -> EngineOutput:
        cut = super().cut_at_stop(sample, output)
        if cut is output or len(cut.token_ids) < len(_STOP):
            return cut
        # as an engine does that leaves stop strings out of the text
        kept = len(cut.token_ids) - len(_STOP)
        logprobs = None if cut.logprobs is None else cut.logprobs[:kept]
        return replace(cut, token_ids=cut.token_ids[:kept], logprobs=logprobs)


_CASE = case(model=_MODEL, seed=_SEED)

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="stops-not-cut",
        summary=(
            "Replies are cut at </answer> only if no logprobs are requested, since cut text has"
            " other tokens: with logprobs, what follows is trained on."
        ),
        refs=("slime#2036",),
        make=_StopsNotCut,
        cases=(_CASE,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="stop-across-abort-missed",
        summary="Each reply is searched for the stop by itself: one that an abort cut is missed.",
        refs=("cf. Search-R1#26",),
        make=_StopAcrossAbortMissed,
        cases=(case(act(ActionKind.ABORT, 3), model=_MODEL, seed=_SEED),),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="last-stop-counts",
        summary="The last stop in a reply is searched, not the first.",
        refs=("cf. slime#2036",),
        make=_LastStopCounts,
        cases=(case(model=_MODEL, seed=_TWICE, requests=(request(max_tokens=12),)),),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="stop-cuts-tokens-only",
        summary="Tokens are cut at the stop, and the logprobs of what followed are kept.",
        refs=("cf. TensorRT-LLM#18190", "cf. ms-swift#6803"),
        make=_StopCutsTokensOnly,
        cases=(_CASE,),
        detected_by=("stitch.logprobs-length",),
    ),
    KnownBug(
        id="stop-dropped",
        summary=(
            "The stop at which a reply was cut is dropped, too: the policy is not trained on the"
            " token with which it ends."
        ),
        refs=("cf. slime#2036",),
        make=_StopDropped,
        cases=(_CASE,),
        detected_by=("stitch.tokens",),
    ),
)
