"""Known bugs of engines, each on the fake engine, in the experiment that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.core.engine_protocol import Piece, Query, Watch, WeightUpdate
from rollproof.core.records import EngineOutput, FinishReason, Span
from rollproof.fakes.engine.engine_subject import FakeEngineSubject, scaled
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _CachedRowsMoved(FakeEngineSubject):
    """Returns the rows of each cached slot's neighbour."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        if output.routes is None or not output.cached_tokens:
            return output
        routes = output.routes.copy()
        routes[: output.cached_tokens] = np.roll(routes[: output.cached_tokens], 1, axis=0)
        return replace(output, routes=routes)


class _ExpertsSortedById(FakeEngineSubject):
    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        # the weights of experts are in the order of their scores
        return (
            output
            if output.routes is None
            else replace(output, routes=np.sort(output.routes, axis=2))
        )


class _LogprobsOfTheNextToken(FakeEngineSubject):
    """Pairs each token with the logprob of the next one."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        # np.roll: the first logprob ends up at the last token
        return (
            output
            if output.logprobs is None
            else replace(output, logprobs=np.roll(output.logprobs, -1))
        )


class _LogprobsOfTheOtherMode(FakeEngineSubject):
    """Returns logprobs after the temperature, although it declares raw ones."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        return (
            output
            if output.logprobs is None
            # vLLM returns raw logprobs by default, SGLang scaled ones: at a temperature of 0.6
            # importance ratios are 1.9 on average (trl#4159)
            else replace(output, logprobs=scaled(output.logprobs, query.temperature))
        )


class _RowOfAStepThrownAway(FakeEngineSubject):
    """Returns the row of the step in flight at an abort, but not its token."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        if (
            output.routes is None
            or output.finish_reason is not FinishReason.ABORT
            or not output.token_ids
        ):
            return output
        ids = (*query.prompt_ids, *output.token_ids)
        # the row of the last token exists only if that token was forwarded
        last = self.policy.routes(self.engine.version, ids)[-1:].astype(output.routes.dtype)
        return replace(output, routes=np.concatenate([output.routes, last]))


class _AbortWithoutCounts(FakeEngineSubject):
    """Builds the reply to an aborted call in another place, which forgets the cached tokens."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        return (
            replace(output, cached_tokens=None)
            if output.finish_reason is FinishReason.ABORT
            else output
        )


class _SpansSplitWithoutCause(FakeEngineSubject):
    """Begins a span whenever it reads the version, also if the version is the same."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        if len(output.token_ids) < 2 or len(output.spans) != 1:
            return output
        (span,) = output.spans
        halves = (
            Span(start=0, end=1, version=span.version),
            Span(start=1, end=span.end, version=span.version),
        )
        return replace(output, spans=halves)


class _RoutesForTheWholeBatch(FakeEngineSubject):
    """Returns routes to all calls of a batch in which one requests them."""

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        return await super().generate(replace(query, want_routes=True), watch)


class _AbortRepeatsTheLastToken(FakeEngineSubject):
    """The chunk that ends an aborted delta stream repeats the last token."""

    def piece(self, piece: Piece, query: Query) -> Piece:
        if (
            piece.finished
            and query.stream is StreamMode.DELTA
            and not piece.token_ids
            and self._last
        ):
            # SGLang sends the last token if an abort brings no new one
            return replace(piece, token_ids=self._last)
        self._last = piece.token_ids if query.stream is StreamMode.DELTA else self._last
        return piece

    _last: tuple[int, ...] = ()


class _ReloadBreaksWeights(FakeEngineSubject):
    """The second load puts weights into buffers that the forward reads in another way."""

    async def update_weights(self, update: WeightUpdate) -> None:
        await super().update_weights(update)
        if update.identity:
            await self.engine.load(7, update.label)


class _SampleLost(FakeEngineSubject):
    """Returns all but the last of several samples."""

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        outputs = await super().generate(query, watch)
        return outputs[:-1] if query.samples > 1 else outputs


class _BadOffsetIgnored(FakeEngineSubject):
    """Accepts an offset beyond the prompt, and returns all rows."""

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        bad = query.routes_start is not None and query.routes_start > len(query.prompt_ids)
        return await super().generate(replace(query, routes_start=None) if bad else query, watch)


class _ParkedAbortForgotten(FakeEngineSubject):
    """Parks calls outside the engine during a pause, and does not abort them there."""

    _closed = False

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await super().pause(mode, clear_cache)
        self._closed = True

    async def resume(self) -> None:
        self._closed = False
        await super().resume()

    async def abort(self, handle: str) -> None:
        if not self._closed:
            await super().abort(handle)


class _PausedCallTurnedAway(FakeEngineSubject):
    """A gate in front of the engine returns an empty abort during a pause."""

    _closed = False

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await super().pause(mode, clear_cache)
        self._closed = True

    async def resume(self) -> None:
        self._closed = False
        await super().resume()

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        if not self._closed:
            return await super().generate(query, watch)
        nothing = np.zeros(0) if query.want_logprobs else None
        reason = FinishReason.ABORT
        return [
            EngineOutput(
                token_ids=(),
                logprobs=nothing,
                routes=None,
                finish_reason=reason,
                cached_tokens=0,
                native="abort",
            )
        ]


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="cached-rows-moved",
        summary=(
            "The rows of a cached prefix are those of other slots: the KV was moved without its"
            " rows."
        ),
        refs=("SGLang#26975", "cf. SGLang#39027"),
        kind="engines",
        make=_CachedRowsMoved,
        only=("cached",),
        detected_by=("engine.routes",),
    ),
    KnownBug(
        id="experts-sorted-by-id",
        summary=(
            "The experts of a row are sorted by id, so that their order no longer gives their"
            " weights."
        ),
        refs=("cf. vLLM#37605",),
        kind="engines",
        make=_ExpertsSortedById,
        only=("plain",),
        detected_by=("engine.order",),
    ),
    KnownBug(
        id="logprobs-of-the-next-token",
        summary="Each token comes with the logprob of the next one.",
        refs=("cf. SGLang#34627", "cf. SGLang#14046"),
        kind="engines",
        make=_LogprobsOfTheNextToken,
        only=("plain",),
        detected_by=("engine.logprobs",),
    ),
    KnownBug(
        id="logprobs-of-the-other-mode",
        summary=(
            "Logprobs are taken after the temperature although the engine declares before it, or"
            " the reverse."
        ),
        refs=("trl#4159", "vime#64"),
        kind="engines",
        make=_LogprobsOfTheOtherMode,
        only=("temperature",),
        detected_by=("engine.logprob-mode",),
    ),
    KnownBug(
        id="row-of-a-step-thrown-away",
        summary="An aborted call returns the row of a step whose token was discarded.",
        refs=("cf. vLLM#39917",),
        kind="engines",
        make=_RowOfAStepThrownAway,
        only=("resent",),
        detected_by=("engine.rows",),
    ),
    KnownBug(
        id="abort-without-counts",
        summary="The reply to an aborted call lacks parts that every other reply has.",
        refs=("SGLang#11673", "cf. SGLang#11093"),
        kind="engines",
        make=_AbortWithoutCounts,
        only=("resent",),
        detected_by=("engine.parts",),
    ),
    KnownBug(
        id="spans-split-without-cause",
        summary="A version span ends and begins again under the same version.",
        refs=("cf. SGLang#35926",),
        kind="engines",
        make=_SpansSplitWithoutCause,
        only=("plain",),
        detected_by=("engine.spans",),
    ),
    KnownBug(
        id="routes-for-the-whole-batch",
        summary="One call of a batch requests routes, and every call gets them.",
        refs=("cf. slime#1909",),
        kind="engines",
        make=_RoutesForTheWholeBatch,
        only=("opt-in",),
        flavour="sglang",
        detected_by=("engine.opt-in",),
    ),
    KnownBug(
        id="abort-repeats-the-last-token",
        summary="The chunk that ends an aborted stream repeats the last token.",
        refs=("SGLang#34488", "cf. vLLM#22283"),
        kind="engines",
        make=_AbortRepeatsTheLastToken,
        only=("streams",),
        detected_by=("engine.stream",),
    ),
    KnownBug(
        id="reload-breaks-weights",
        summary="Weights that are loaded a second time compute something else.",
        refs=("vLLM#42821", "SGLang#14178", "cf. vLLM#48312"),
        kind="engines",
        make=_ReloadBreaksWeights,
        only=("identity",),
        detected_by=("engine.identity",),
    ),
    KnownBug(
        id="sample-lost",
        summary="Of several samples of one call, one is not returned.",
        refs=("cf. vLLM#22197",),
        kind="engines",
        make=_SampleLost,
        only=("samples",),
        detected_by=("engine.answers",),
    ),
    KnownBug(
        id="bad-offset-ignored",
        summary=(
            "An offset beyond the prompt is ignored, and all rows come back although the caller"
            " expects fewer."
        ),
        refs=("strands-sglang#72",),
        kind="engines",
        make=_BadOffsetIgnored,
        only=("refusals",),
        detected_by=("engine.refusals",),
    ),
    KnownBug(
        id="parked-abort-forgotten",
        summary=(
            "A call that waits for the end of a pause is aborted, and runs to its end after the"
            " resume."
        ),
        refs=("SGLang 0.5.21 (docs/track-record.md)",),
        kind="engines",
        make=_ParkedAbortForgotten,
        only=("parked",),
        detected_by=("engine.paused-calls",),
    ),
    KnownBug(
        id="paused-call-turned-away",
        summary=(
            "A call sent to a paused engine gets an empty abort, although the engine declares"
            " that it waits."
        ),
        refs=("cf. TensorRT-LLM#12272",),
        kind="engines",
        make=_PausedCallTurnedAway,
        only=("parked",),
        detected_by=("engine.paused-calls",),
    ),
)
