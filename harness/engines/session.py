"""Bench: one experiment on an engine, recorded as a trace.

An experiment asks, aborts, pauses and updates through the bench, which stamps everything that the
engine shows. What is true is not known here: it is found afterwards, by an independent reference
(``rollproof.engines.version_attribution``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from rollproof.core.contract import Contract, KvPolicy, Provenance, ResumeBy
from rollproof.core.engine_contract import EngineTerms, PauseMode, StreamMode
from rollproof.core.engine_protocol import Piece, Query, WeightUpdate
from rollproof.core.events.rollout import (
    Abort,
    Admit,
    Call,
    Chunk,
    Fault,
    Gauge,
    Pause,
    Reply,
    Result,
    Resume,
    Submit,
    Weights,
)
from rollproof.core.records import EngineOutput, IntArray, Request, Rollout, Scalar, Span, as_tokens
from rollproof.core.subjects import EngineSubject
from rollproof.core.trace import Header, Recorder, Trace
from rollproof.engines.adapter_guard import answers, guarded
from rollproof.errors import EngineHung, EngineRefused, SubjectError
from rollproof.invariants.engine.engine_calls import BROKEN_OFF

__all__ = ["SERVER", "Asked", "Bench", "Serving"]

SERVER = "e0"
"""The id of the engine in a trace."""
_T = TypeVar("_T")


@dataclass(slots=True)
class Serving:
    """What an engine serves as it goes from one experiment to the next: weights ``version`` under
    ``label``, the n-th of its labels.

    ``checkpoints`` are the folders of the versions that it may be given.
    """

    version: str
    label: str
    checkpoints: Mapping[str, Path]
    labels: int = 0

    def next_label(self) -> str:
        """A label that this engine has not shown."""
        self.labels += 1
        return f"w{self.labels}"

    def other(self) -> str:
        """A version that it does not serve. Raises ``SubjectError`` where there is none."""
        for name in self.checkpoints:
            if name != self.version:
                return name
        raise SubjectError(
            "A target needs checkpoints of two versions, to update from one to the other; there is"
            f" {self.version!r} alone."
        )


@dataclass(eq=False)
class Asked:
    """A call that was sent: one request per sample (``requests``), each with its own ``calls``
    entry in the trace.

    ``outputs`` are there once ``task`` is done; ``refused`` is the engine's error where it refused.
    """

    query: Query
    requests: tuple[str, ...]
    calls: tuple[int, ...]
    before: tuple[EngineOutput, ...] = ()
    seen: list[int] = field(default_factory=list)
    outputs: tuple[EngineOutput, ...] = ()
    refused: str | None = None
    deadline: float | None = None
    task: asyncio.Task[None] | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        """Whether the engine has answered, or refused."""
        return self.task is not None and self.task.done()

    async def sampled(self, tokens: int) -> None:
        """Wait until every sample has so many tokens, or the call has ended. Raises ``EngineHung``
        past ``deadline`` (seconds).
        """
        try:
            async with asyncio.timeout(self.deadline):
                while min(self.seen) < tokens and not self.done:
                    self.moved.clear()
                    await self.moved.wait()
        except TimeoutError:
            raise EngineHung(
                f"{self.query.handle!r} has {min(self.seen)} of {tokens} tokens after"
                f" {self.deadline:g} s."
            ) from None

    async def ended(self) -> None:
        """Wait until the engine has answered."""
        assert self.task is not None
        await self.task


class Bench:
    """Drives ``engine`` in one experiment of ``name``. ``deadline`` bounds the seconds that a wait
    may take, ``lull`` is waited after a pause before the tokens are counted, so that those that are
    on their way arrive.

    ``kv_policy`` and ``provenance`` are the conventions of this experiment: whether its updates let
    KV be computed anew, and whether its client keeps rows (and asks for the missing ones) or takes
    those of the last call.
    """

    def __init__(
        self,
        engine: EngineSubject,
        name: str,
        serving: Serving,
        *,
        seed: int = 0,
        deadline: float = 120.0,
        lull: float = 0.0,
        vocab: int = 512,
        max_batch: int = 8,
    ) -> None:
        self.engine = engine
        self.name = name
        self.serving = serving
        self.draw: np.random.Generator = np.random.default_rng([seed, *name.encode()])
        self.kv_policy: KvPolicy = KvPolicy.RECOMPUTE
        self.provenance: Provenance | None = None
        self.max_batch: int = max_batch
        self.misses: list[str] = []
        self._deadline, self._lull, self._vocab = deadline, lull, vocab
        loop = asyncio.get_running_loop()
        start = loop.time()
        self._recorder = Recorder(lambda: round(loop.time() - start, 6))
        self._asked: list[Asked] = []
        self._finished: set[str] = set()
        self._recorder.record(
            Weights(server_id=SERVER, version=serving.version, label=serving.label, flushed=False)
        )

    @property
    def contract(self) -> Contract:
        """What the engine declares."""
        return self.engine.contract

    def prompt(self, length: int, *, shared: int | None = None) -> tuple[int, ...]:
        """A random prompt, ids from 3: of this experiment's own, or number ``shared`` of those that
        all experiments have.
        """
        draw = self.draw if shared is None else np.random.default_rng([shared, length])
        return tuple(int(token) for token in draw.integers(3, self._vocab, length))

    def ask(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        temperature: float = 1.0,
        seed: int | None = None,
        samples: int = 1,
        want_routes: bool = True,
        want_logprobs: bool = True,
        routes_start: int | None = None,
        stream: StreamMode | None = None,
        after: Asked | None = None,
    ) -> Asked:
        """Send a call. It gets a seed of its own unless one is given. ``after`` is the call of the
        same request that it continues.
        """
        number = len(self._asked)
        requests = (
            after.requests
            if after is not None
            else tuple(f"{self.name}-{number}.{i}" for i in range(samples))
        )
        query = Query(
            handle=f"{self.name}-{number}-",
            prompt_ids=tuple(prompt),
            max_tokens=tokens,
            temperature=temperature,
            seed=int(self.draw.integers(1 << 30)) if seed is None else seed,
            samples=samples,
            want_routes=want_routes,
            want_logprobs=want_logprobs,
            routes_start=routes_start,
            stream=stream or self.stream,
        )
        calls = tuple(1000 * number + i + 1 for i in range(samples))
        before = (*after.before, *after.outputs) if after is not None else ()
        asked = Asked(
            query=query,
            requests=requests,
            calls=calls,
            before=before,
            seen=[0] * samples,
            deadline=self._deadline,
        )
        for request, call in zip(requests, calls, strict=True):
            if after is None:
                self._recorder.record(Submit(request=_request(request, query, requests)))
            self._recorder.record(_call(call, request, query))
        self._asked.append(asked)
        asked.task = asyncio.get_running_loop().create_task(
            self._generate(asked), name=query.handle
        )
        return asked

    @property
    def stream(self) -> StreamMode:
        """The mode in which progress is seen: cumulative chunks, where the engine has them."""
        modes = self.terms.stream_modes
        return next(
            (mode for mode in (StreamMode.CUMULATIVE, StreamMode.DELTA) if mode in modes),
            StreamMode.FINAL,
        )

    @property
    def terms(self) -> EngineTerms:
        """What the engine declares about its calls. Raises ``SubjectError`` where it declares
        nothing.
        """
        terms = self.contract.engine
        if terms is None:
            raise SubjectError(
                "The engine's contract has no `engine` terms: a driver must know how its calls"
                " behave."
            )
        return terms

    def go_on(self, asked: Asked, tokens: int, *, offset: bool) -> Asked:
        """Continue a request as a client does: prompt and what was sampled as the new prompt,
        ``tokens`` more to sample.

        With ``offset`` only the rows that are missing are asked for, else all of them.
        """
        (last,) = asked.outputs
        prompt = asked.query.prompt_ids + last.token_ids
        start = (
            sum(len(one.routes) for one in (*asked.before, last) if one.routes is not None)
            if offset
            else None
        )
        return self.ask(
            prompt, tokens, routes_start=start, after=asked, temperature=asked.query.temperature
        )

    async def abort(self, asked: Asked, *, wait: bool = True) -> None:
        """Abort a call, and wait for its reply unless told not to."""
        self._recorder.record(
            Abort(
                server_id=SERVER,
                wanted=asked.query.handle,
                call_ids=() if asked.done else asked.calls,
            )
        )
        await self._guarded(lambda: self.engine.abort(asked.query.handle), "abort()")
        if wait:
            await self.ended(asked)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause the engine."""
        await self._guarded(lambda: self.engine.pause(mode, clear_cache), f"pause({mode})")
        await asyncio.sleep(self._lull)
        self._recorder.record(
            Pause(server_id=SERVER, mode=mode, clear_cache=clear_cache, progress=self._progress())
        )

    async def resume(self) -> None:
        """Resume the engine."""
        await asyncio.sleep(self._lull)
        self._recorder.record(Resume(server_id=SERVER, progress=self._progress()))
        await self._guarded(self.engine.resume, "resume()")

    async def update(self, version: str, *, clear_cache: bool) -> None:
        """Give the engine the weights ``version``, those that it has already being an identity
        update, under a new label.
        """
        identity = version == self.serving.version
        label = self.serving.next_label()
        update = WeightUpdate(
            path=self.serving.checkpoints[version],
            version=version,
            label=label,
            identity=identity,
            clear_cache=clear_cache,
        )
        await self._guarded(
            lambda: self.engine.update_weights(update), f"update_weights({version})"
        )
        self.serving.version, self.serving.label = version, label
        self._recorder.record(
            Weights(
                server_id=SERVER,
                version=version,
                label=label,
                identity=identity,
                flushed=clear_cache,
                progress=self._progress(),
            )
        )

    async def linger(self) -> None:
        """Give the engine time to do what it should not do now."""
        await asyncio.sleep(10 * self._lull)

    def missed(self, what: str) -> None:
        """Note that the experiment did not bring about what it is for."""
        self.misses.append(f"{self.name}: {what}")

    def broken_off(self, why: str) -> None:
        """Note that the experiment could not be brought to its end."""
        self._recorder.record(Fault(what=BROKEN_OFF, server_id=SERVER, detail=why))

    async def close(self) -> None:
        """Give up what is still in flight; its callers are gone. What other calls came to has been
        recorded, or is told by one of them.
        """
        tasks = [one.task for one in self._asked if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def clear_cache(self) -> None:
        """Have the engine forget what calls share."""
        await self._guarded(self.engine.clear_cache, "clear_cache()")

    async def count(self, phase: str) -> Mapping[str, float]:
        """Read the engine's counters into the trace."""
        counts = await self._guarded(self.engine.counters, "counters()")
        if not isinstance(counts, Mapping):
            raise SubjectError(
                "An engine's counters() must return a mapping of names to numbers, not"
                f" {type(counts).__name__}."
            )
        for name, value in counts.items():
            self._recorder.record(Gauge(name=f"{SERVER}/{name}", value=value, phase=phase))
        return counts

    async def ended(self, *asked: Asked) -> None:
        """Wait until calls are answered. What outlasts the deadline is recorded as hanging."""
        for one in asked:
            try:
                async with asyncio.timeout(self._deadline):
                    await asyncio.shield(one.ended())
            except TimeoutError:
                for request in one.requests:
                    self._result(
                        request,
                        Result(
                            request_id=request,
                            hung=True,
                            error=f"no reply within {self._deadline:g} s",
                        ),
                    )
                raise EngineHung(
                    f"The engine did not answer the call {one.query.handle!r} of experiment"
                    f" {self.name!r} within {self._deadline:g} s."
                ) from None

    async def finish(self, *asked: Asked) -> None:
        """Wait until calls are answered, and hand their requests' samples over."""
        await self.ended(*asked)
        for one in asked:
            for place, request in enumerate(one.requests):
                if one.refused is not None:
                    self._result(request, Result(request_id=request, error=one.refused))
                elif place < len(one.outputs):
                    self._result(
                        request,
                        Result(request_id=request, rollout=self._rollout(one, request, place)),
                    )

    def header(self, subject: str) -> Header:
        """The header of this experiment's trace: the client resumes, by the conventions of the
        experiment.
        """
        engine = replace(self.contract, kv_policy=self.kv_policy)
        provenance = self.provenance or Provenance.AS_SAMPLED
        client = replace(
            engine, resume=ResumeBy.CLIENT, provenance=provenance if engine.has_routes else None
        )
        return Header(
            subject=subject, contract=client, engine=engine, profile=self.name, about="engines"
        )

    def trace(self, subject: str) -> Trace:
        """What was recorded."""
        return self._recorder.trace(self.header(subject))

    async def _guarded(self, ask: Callable[[], Awaitable[_T]], what: str) -> _T:
        return await guarded(ask, what, self._deadline)

    async def _generate(self, asked: Asked) -> None:
        def watch(piece: Piece) -> None:
            if piece.sampled and not asked.seen[piece.sample]:
                self._recorder.record(Admit(call_id=asked.calls[piece.sample], server_id=SERVER))
            asked.seen[piece.sample] = max(piece.sampled, asked.seen[piece.sample])
            if asked.query.stream is not StreamMode.FINAL:
                tokens = as_tokens(piece.token_ids, what="Piece.token_ids")
                self._recorder.record(
                    Chunk(
                        call_id=asked.calls[piece.sample],
                        token_ids=tokens,
                        rows=piece.rows,
                        finished=piece.finished,
                    )
                )
            asked.moved.set()

        try:
            outputs = await answers(lambda: self.engine.generate(asked.query, watch))
        except EngineRefused as error:
            asked.refused = f"{error.kind or type(error).__name__}: {error}"
            return
        finally:
            asked.moved.set()
        asked.outputs = outputs[: asked.query.samples]
        for place, output in enumerate(outputs):
            self._recorder.record(
                Reply(call_id=asked.calls[min(place, len(asked.calls) - 1)], output=output)
            )

    def _progress(self) -> dict[int, int]:
        return {
            call: seen
            for one in self._asked
            if not one.done
            for call, seen in zip(one.calls, one.seen, strict=True)
        }

    def _result(self, request: str, result: Result) -> None:
        if request not in self._finished:
            self._finished.add(request)
            self._recorder.record(result)

    def _rollout(self, asked: Asked, request: str, place: int) -> Rollout:
        """The sample as a client makes it of the replies: as the engine gave them, neither cut nor
        padded.
        """
        outputs = (*asked.before, asked.outputs[place])
        tokens = tuple(token for one in outputs for token in one.token_ids)
        prompt = asked.query.prompt_ids[
            : len(asked.query.prompt_ids) - sum(len(one.token_ids) for one in asked.before)
        ]
        logprobs = [one.logprobs for one in outputs if one.logprobs is not None]
        return Rollout(
            request_id=request,
            prompt_ids=prompt,
            response_ids=tokens,
            finish_reason=outputs[-1].finish_reason,
            logprobs=np.concatenate(logprobs) if logprobs else None,
            routes=self._routes(outputs),
            routes_start=outputs[0].routes_start,
            spans=_spans(outputs),
            version=outputs[-1].version,
        )

    def _routes(self, outputs: Sequence[EngineOutput]) -> IntArray | None:
        arrays = [one.routes for one in outputs if one.routes is not None and one.token_ids]
        if not arrays:
            return None
        return np.concatenate(arrays) if self.provenance is Provenance.AS_SAMPLED else arrays[-1]


def _request(name: str, query: Query, group: tuple[str, ...]) -> Request:
    return Request(
        request_id=name,
        prompt_ids=query.prompt_ids,
        max_tokens=query.max_tokens,
        sampling=_sampling(query),
        want_logprobs=query.want_logprobs,
        want_routes=query.want_routes,
        group=group[0] if len(group) > 1 else None,
    )


def _call(number: int, request: str, query: Query) -> Call:
    return Call(
        call_id=number,
        request_id=request,
        server_id=SERVER,
        prompt_ids=query.prompt_ids,
        max_tokens=query.max_tokens,
        sampling=_sampling(query),
        want_routes=query.want_routes,
        want_logprobs=query.want_logprobs,
        routes_start=query.routes_start or 0,
        stream=query.stream,
    )


def _sampling(query: Query) -> dict[str, Scalar]:
    return {"temperature": query.temperature, "seed": query.seed}


def _spans(outputs: Sequence[EngineOutput]) -> tuple[Span, ...]:
    spans: list[Span] = []
    start = 0
    for one in outputs:
        spans += [
            Span(start=start + s.start, end=start + s.end, version=s.version)
            for s in one.spans
            if s.end > s.start
        ]
        start += len(one.token_ids)
    return tuple(spans)
