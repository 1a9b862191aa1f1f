"""Known bugs of engines that are driven directly: each on the fake engine, in the experiment that
shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.core.engine_protocol import Piece, Query, Watch, WeightUpdate
from rollproof.core.records import EngineOutput, FinishReason, Span
from rollproof.core.trace import Trace
from rollproof.fakes.engine.engine_subject import FakeEngineSubject, scaled
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS", "recorded"]


def recorded(engine: type[FakeEngineSubject], experiment: str, flavour: str = "vllm") -> Trace:
    """The attributed trace of one experiment on an engine of ``flavour``."""
    from rollproof.engines.engine_targets import fake_target
    from rollproof.verification.engines import run_experiments

    return run_experiments(
        fake_target(flavour, make=lambda settings: engine(settings, flavour)), only=[experiment]
    ).traces[0]


class _CachedRowsMoved(FakeEngineSubject):
    """Keeps the rows of cached blocks under the wrong slots: each is that of its neighbour."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        if output.routes is None or not output.cached_tokens:
            return output
        routes = output.routes.copy()
        routes[: output.cached_tokens] = np.roll(routes[: output.cached_tokens], 1, axis=0)
        return replace(output, routes=routes)


class _SortedById(FakeEngineSubject):
    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        return (
            output
            if output.routes is None
            else replace(output, routes=np.sort(output.routes, axis=2))
        )


class _LogprobsOfNext(FakeEngineSubject):
    """Pairs each token with the logprob of the one after it."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        return (
            output
            if output.logprobs is None
            else replace(output, logprobs=np.roll(output.logprobs, -1))
        )


class _OtherMode(FakeEngineSubject):
    """Returns logprobs after the temperature, and says raw."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        return (
            output
            if output.logprobs is None
            else replace(output, logprobs=scaled(output.logprobs, query.temperature))
        )


class _RowOfLastToken(FakeEngineSubject):
    """On an abort the step in flight is not taken back: its row comes along, and its token does
    not.
    """

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        if (
            output.routes is None
            or output.finish_reason is not FinishReason.ABORT
            or not output.token_ids
        ):
            return output
        ids = (*query.prompt_ids, *output.token_ids)
        last = self.policy.routes(self.engine.version, ids)[-1:].astype(output.routes.dtype)
        return replace(output, routes=np.concatenate([output.routes, last]))


class _BareAbort(FakeEngineSubject):
    """The reply to an aborted call is built in another place, which forgets the count of cached
    tokens.
    """

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        return (
            replace(output, cached_tokens=None)
            if output.finish_reason is FinishReason.ABORT
            else output
        )


class _SplitSpans(FakeEngineSubject):
    """Begins a span at every step that it looks at the version, also where it is the same."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        if len(output.token_ids) < 2 or len(output.spans) != 1:
            return output
        (span,) = output.spans
        halves = (
            Span(start=0, end=1, version=span.version),
            Span(start=1, end=span.end, version=span.version),
        )
        return replace(output, spans=halves)


class _RoutesForAll(FakeEngineSubject):
    """One call of the batch asks for routes, and all get them."""

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        return await super().generate(replace(query, want_routes=True), watch)


class _LastTokenTwice(FakeEngineSubject):
    """The chunk that ends an aborted delta stream repeats the last token."""

    def piece(self, piece: Piece, query: Query) -> Piece:
        if (
            piece.finished
            and query.stream is StreamMode.DELTA
            and not piece.token_ids
            and self._last
        ):
            return replace(piece, token_ids=self._last)
        self._last = piece.token_ids if query.stream is StreamMode.DELTA else self._last
        return piece

    _last: tuple[int, ...] = ()


class _ReloadBreaks(FakeEngineSubject):
    """Weights that are loaded a second time end up in buffers that the forward does not read as it
    did.
    """

    async def update_weights(self, update: WeightUpdate) -> None:
        await super().update_weights(update)
        if update.identity:
            await self.engine.load(7, update.label)


class _SampleLost(FakeEngineSubject):
    """Of several samples the last is not returned."""

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        outputs = await super().generate(query, watch)
        return outputs[:-1] if query.samples > 1 else outputs


class _BadOffsetIgnored(FakeEngineSubject):
    """An offset beyond the prompt is not refused, and all rows are returned."""

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        bad = query.routes_start is not None and query.routes_start > len(query.prompt_ids)
        return await super().generate(replace(query, routes_start=None) if bad else query, watch)


class _AbortForgotten(FakeEngineSubject):
    """Calls that come during a pause wait outside the engine, where an abort does not look."""

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


class _TurnedAway(FakeEngineSubject):
    """A gate in front of the engine answers calls during a pause with an empty abort."""

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


def _bug(
    id: str,
    summary: str,
    refs: Sequence[str],
    kills: str,
    engine: type[FakeEngineSubject],
    experiment: str,
    flavour: str = "vllm",
    also: Sequence[str] = (),
) -> KnownBug:
    record: Callable[[], Trace] = partial(recorded, engine, experiment, flavour)
    return KnownBug(
        id=id, summary=summary, refs=tuple(refs), kills=(kills,), record=record, also=tuple(also)
    )


BUGS: tuple[KnownBug, ...] = (
    _bug(
        "cached-rows-moved",
        "The rows of a cached prefix are those of other slots: the KV was moved and they were not.",
        ("SGLang#26975", "cf. SGLang#39027"),
        "engine.routes",
        _CachedRowsMoved,
        "cached",
    ),
    _bug(
        "experts-sorted-by-id",
        "The experts of a row are sorted by id, so that their weights cannot be told by place.",
        ("cf. vLLM#37605",),
        "engine.order",
        _SortedById,
        "plain",
    ),
    _bug(
        "logprobs-of-the-next-token",
        "Each token comes with the logprob of the token after it.",
        ("cf. SGLang#34627", "cf. SGLang#14046"),
        "engine.logprobs",
        _LogprobsOfNext,
        "plain",
    ),
    _bug(
        "logprobs-of-the-other-mode",
        "Logprobs are taken after the temperature where the engine says before it, or the other way"
        " round.",
        ("trl#4159", "vime#64"),
        "engine.logprob-mode",
        _OtherMode,
        "temperature",
    ),
    _bug(
        "row-of-a-step-thrown-away",
        "An aborted call returns the row of a step whose token was thrown away.",
        ("cf. vLLM#39917",),
        "engine.rows",
        _RowOfLastToken,
        "resent",
    ),
    _bug(
        "abort-without-counts",
        "The reply to an aborted call lacks parts that every other reply has.",
        ("SGLang#11673", "cf. SGLang#11093"),
        "engine.parts",
        _BareAbort,
        "resent",
    ),
    _bug(
        "spans-split-without-cause",
        "A version span ends and begins again under the same version.",
        ("cf. SGLang#35926",),
        "engine.spans",
        _SplitSpans,
        "plain",
    ),
    _bug(
        "routes-for-the-whole-batch",
        "One call of a batch asks for routes, and every call gets them.",
        ("cf. slime#1909",),
        "engine.opt-in",
        _RoutesForAll,
        "opt-in",
        "sglang",
    ),
    _bug(
        "abort-repeats-the-last-token",
        "The chunk that ends an aborted stream repeats the last token.",
        ("SGLang#34488", "cf. vLLM#22283"),
        "engine.stream",
        _LastTokenTwice,
        "streams",
    ),
    _bug(
        "reload-breaks-weights",
        "Weights that are loaded a second time compute something else.",
        ("vLLM#42821", "SGLang#14178", "cf. vLLM#48312"),
        "engine.identity",
        _ReloadBreaks,
        "identity",
    ),
    _bug(
        "sample-lost",
        "Of several samples of one call, one is not returned.",
        ("cf. vLLM#22197",),
        "engine.answers",
        _SampleLost,
        "samples",
    ),
    _bug(
        "bad-offset-ignored",
        "An offset beyond the prompt is ignored, and all rows come back where the caller counts on"
        " fewer.",
        ("strands-sglang#72",),
        "engine.refusals",
        _BadOffsetIgnored,
        "refusals",
    ),
    _bug(
        "parked-abort-forgotten",
        "A call that waits for the end of a pause is aborted, and runs to its end after the"
        " resume.",
        ("SGLang 0.5.21 (docs/track-record.md)",),
        "engine.paused-calls",
        _AbortForgotten,
        "parked",
    ),
    _bug(
        "paused-call-turned-away",
        "A call sent to a paused engine is answered with an empty abort where the engine says that"
        " it waits.",
        ("cf. TensorRT-LLM#12272",),
        "engine.paused-calls",
        _TurnedAway,
        "parked",
    ),
)
"""Faults of the family ``engine``."""
