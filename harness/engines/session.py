"""Run one experiment on an engine, and record what the engine shows as a trace.

An experiment sends calls, aborts, pauses and updates through a ``Session``. What is true is not
known here: an independent reference finds it afterwards
(``rollproof.engines.version_attribution``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from rollproof.core.contract import Contract, KvPolicy, MissingLogprobs, Provenance, ResumeBy
from rollproof.core.engine_contract import EngineTerms, PauseMode, SamplingOption, StreamMode
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
from rollproof.engines.adapter_guard import checked_outputs, guarded
from rollproof.errors import EngineHung, EngineRefused, SubjectError
from rollproof.invariants.engine.engine_calls import BROKEN_OFF

__all__ = ["SERVER", "SentCall", "Serving", "Session"]

SERVER = "e0"
"""The id of the engine in a trace."""
_T = TypeVar("_T")


@dataclass(slots=True)
class Serving:
    """The weights that an engine serves, carried from one experiment to the next.

    Attributes:
        version: the version of the weights.
        label: what the engine calls it.
        checkpoints: the folders of the versions that an update can load.
        labels: how many labels were used so far.
    """

    version: str
    label: str
    checkpoints: Mapping[str, Path]
    labels: int = 0

    def next_label(self) -> str:
        """Return a label that this engine has not shown."""
        self.labels += 1
        return f"w{self.labels}"

    def other(self) -> str:
        """Return a version that it does not serve. Raises ``SubjectError`` if there is none."""
        for name in self.checkpoints:
            if name != self.version:
                return name
        raise SubjectError(
            "A target needs checkpoints of two versions, to update from one to the other; there is"
            f" {self.version!r} alone."
        )


@dataclass(eq=False)
class SentCall:
    """A call that was sent: one request per sample, each with a call of its own in the trace.

    Attributes:
        query: what the adapter got.
        requests: the request of each sample.
        calls: the call of each sample in the trace.
        before: replies to the earlier calls of a request that this one continues.
        seen: sampled tokens of each sample so far.
        outputs: the replies, once ``task`` is done.
        refused: the engine's error if it refused.
        deadline: seconds that a wait for tokens may take.
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
        """Whether the engine has replied, or refused."""
        return self.task is not None and self.task.done()

    async def wait_for_tokens(self, tokens: int) -> None:
        """Wait until every sample has so many tokens, or the call has ended.

        Raises ``EngineHung`` after ``deadline`` seconds.
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

    async def wait(self) -> None:
        """Wait until the engine has replied."""
        assert self.task is not None
        await self.task


class Session:
    """Drives ``engine`` in the experiment ``name``.

    Args:
        engine: the adapter.
        name: name of the experiment; it seeds the prompts, too.
        serving: the weights that the engine has.
        seed: seed of the prompts and of the calls.
        deadline: seconds that a wait may take.
        lull: seconds to wait after a pause before tokens are counted, so that those in transit
            arrive.
        vocab: prompts have token ids below this.
        max_batch: how many calls the engine runs at once.

    An experiment sets ``kv_policy`` (whether its updates recompute KV) and ``provenance`` (whether
    its client retains rows and requests the missing ones, or takes those of the last call).
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
        self._sent: list[SentCall] = []
        self._finished: set[str] = set()
        self._recorder.record(
            Weights(server_id=SERVER, version=serving.version, label=serving.label, flushed=False)
        )

    @property
    def contract(self) -> Contract:
        """What the engine declares."""
        return self.engine.contract

    def prompt(self, length: int, *, shared: int | None = None) -> tuple[int, ...]:
        """Return a random prompt with token ids from 3 on.

        ``shared`` is the number of a prompt that all experiments have.
        """
        draw = self.draw if shared is None else np.random.default_rng([shared, length])
        return tuple(int(token) for token in draw.integers(3, self._vocab, length))

    def send(
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
        ignore_end: bool = True,
        stop_tokens: Sequence[int] = (),
        stop_texts: Sequence[int] = (),
        sampling: Mapping[SamplingOption, float] | None = None,
        after: SentCall | None = None,
    ) -> SentCall:
        """Send a call; without ``seed`` it gets one of its own.

        ``stop_texts`` are tokens whose text is a stop string. ``after`` is the call of the same
        request that it continues.
        """
        number = len(self._sent)
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
            ignore_end=ignore_end,
            stop_token_ids=tuple(stop_tokens),
            stop=tuple((self.terms.token_text or "").format(token) for token in stop_texts),
            sampling=dict(sampling or {}),
        )
        own = () if ignore_end else self.terms.end_tokens
        ends = own if self.terms.end_token is not None or ignore_end else None
        calls = tuple(1000 * number + i + 1 for i in range(samples))
        before = (*after.before, *after.outputs) if after is not None else ()
        sent = SentCall(
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
            self._recorder.record(
                replace(
                    _call(call, request, query),
                    end_tokens=ends,
                    stop_token_ids=query.stop_token_ids,
                    stop_string_tokens=tuple(stop_texts),
                )
            )
        self._sent.append(sent)
        sent.task = asyncio.get_running_loop().create_task(self._generate(sent), name=query.handle)
        return sent

    @property
    def stream(self) -> StreamMode:
        """The mode that shows progress: cumulative chunks if the engine has them."""
        modes = self.terms.stream_modes
        return next(
            (mode for mode in (StreamMode.CUMULATIVE, StreamMode.DELTA) if mode in modes),
            StreamMode.FINAL,
        )

    @property
    def terms(self) -> EngineTerms:
        """What the engine declares about its calls. Raises ``SubjectError`` without terms."""
        terms = self.contract.engine
        if terms is None:
            raise SubjectError(
                "The engine's contract has no `engine` terms: a driver must know how its calls"
                " behave."
            )
        return terms

    def continue_call(self, call: SentCall, tokens: int, *, offset: bool) -> SentCall:
        """Continue a request as a client does, for ``tokens`` more tokens.

        The prompt is that of ``call`` and what was sampled. With ``offset`` only the missing rows
        are requested, else all of them.
        """
        (last,) = call.outputs
        prompt = call.query.prompt_ids + last.token_ids
        start = None
        if offset:
            outputs = (*call.before, last)
            start = sum(len(output.routes) for output in outputs if output.routes is not None)
        return self.send(
            prompt, tokens, routes_start=start, after=call, temperature=call.query.temperature
        )

    async def abort(self, call: SentCall, *, wait: bool = True) -> None:
        """Abort a call, and ``wait`` for its reply."""
        self._recorder.record(
            Abort(
                server_id=SERVER,
                wanted=call.query.handle,
                call_ids=() if call.done else call.calls,
            )
        )
        await self._guarded(lambda: self.engine.abort(call.query.handle), "abort()")
        if wait:
            await self.wait_for(call)

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
        """Give the engine the weights ``version`` under a new label.

        It is an identity update if the engine has those weights already.
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

    def record_miss(self, situation: str) -> None:
        """Note that the experiment did not reach the situation that it is for."""
        self.misses.append(f"{self.name}: {situation}")

    def record_failure(self, reason: str) -> None:
        """Record that the experiment could not be finished."""
        self._recorder.record(Fault(what=BROKEN_OFF, server_id=SERVER, detail=reason))

    async def close(self) -> None:
        """Cancel the calls that are still in flight; nobody waits for them any more."""
        tasks = [call.task for call in self._sent if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def clear_cache(self) -> None:
        """Clear the engine's prefix cache."""
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

    async def wait_for(self, *calls: SentCall) -> None:
        """Wait until calls are answered. One that outlasts the deadline is recorded as hanging, and
        raises ``EngineHung``.
        """
        for call in calls:
            try:
                async with asyncio.timeout(self._deadline):
                    await asyncio.shield(call.wait())
            except TimeoutError:
                for request in call.requests:
                    self._result(
                        request,
                        Result(
                            request_id=request,
                            hung=True,
                            error=f"no reply within {self._deadline:g} s",
                        ),
                    )
                raise EngineHung(
                    f"The engine did not answer the call {call.query.handle!r} of experiment"
                    f" {self.name!r} within {self._deadline:g} s."
                ) from None

    async def finish(self, *calls: SentCall) -> None:
        """Wait until calls are answered, and record the samples of their requests."""
        await self.wait_for(*calls)
        for call in calls:
            for place, request in enumerate(call.requests):
                if call.refused is not None:
                    self._result(request, Result(request_id=request, error=call.refused))
                elif place < len(call.outputs):
                    self._result(
                        request,
                        Result(request_id=request, rollout=self._rollout(call, request, place)),
                    )

    def header(self, subject: str) -> Header:
        """Return the header of this experiment's trace: the client resumes, by the conventions of
        the experiment.
        """
        engine = replace(self.contract, kv_policy=self.kv_policy)
        provenance = self.provenance or Provenance.AS_SAMPLED
        client = replace(
            engine,
            resume=ResumeBy.CLIENT,
            provenance=provenance if engine.has_routes else None,
            missing_logprobs=MissingLogprobs.NAN,
        )
        return Header(
            subject=subject, contract=client, engine=engine, profile=self.name, about="engines"
        )

    def trace(self, subject: str) -> Trace:
        """Return what was recorded."""
        return self._recorder.trace(self.header(subject))

    async def _guarded(self, operation: Callable[[], Awaitable[_T]], name: str) -> _T:
        return await guarded(operation, name, self._deadline)

    async def _generate(self, call: SentCall) -> None:
        def watch(piece: Piece) -> None:
            if piece.sampled and not call.seen[piece.sample]:
                self._recorder.record(Admit(call_id=call.calls[piece.sample], server_id=SERVER))
            call.seen[piece.sample] = max(piece.sampled, call.seen[piece.sample])
            if call.query.stream is not StreamMode.FINAL:
                tokens = as_tokens(piece.token_ids, what="Piece.token_ids")
                self._recorder.record(
                    Chunk(
                        call_id=call.calls[piece.sample],
                        token_ids=tokens,
                        rows=piece.rows,
                        finished=piece.finished,
                    )
                )
            call.moved.set()

        try:
            outputs = await checked_outputs(lambda: self.engine.generate(call.query, watch))
        except EngineRefused as error:
            call.refused = f"{error.kind or type(error).__name__}: {error}"
            return
        finally:
            call.moved.set()
        call.outputs = outputs[: call.query.samples]
        for place, output in enumerate(outputs):
            self._recorder.record(
                Reply(call_id=call.calls[min(place, len(call.calls) - 1)], output=output)
            )

    def _progress(self) -> dict[int, int]:
        return {
            number: seen
            for call in self._sent
            if not call.done
            for number, seen in zip(call.calls, call.seen, strict=True)
        }

    def _result(self, request: str, result: Result) -> None:
        if request not in self._finished:
            self._finished.add(request)
            self._recorder.record(result)

    def _rollout(self, call: SentCall, request: str, place: int) -> Rollout:
        """Join the replies to a sample as a client does: neither cut nor padded."""
        outputs = (*call.before, call.outputs[place])
        tokens = tuple(token for output in outputs for token in output.token_ids)
        earlier = sum(len(output.token_ids) for output in call.before)
        prompt = call.query.prompt_ids[: len(call.query.prompt_ids) - earlier]
        # the missing logprobs of a segment are marked, so that the others keep their places
        returned = any(output.logprobs is not None for output in outputs)
        logprobs = [
            np.full(len(output.token_ids), np.nan) if output.logprobs is None else output.logprobs
            for output in outputs
        ]
        return Rollout(
            request_id=request,
            prompt_ids=prompt,
            response_ids=tokens,
            finish_reason=outputs[-1].finish_reason,
            logprobs=np.concatenate(logprobs) if returned else None,
            routes=self._routes(outputs),
            routes_start=outputs[0].routes_start,
            spans=_spans(outputs),
            version=outputs[-1].version,
        )

    def _routes(self, outputs: Sequence[EngineOutput]) -> IntArray | None:
        arrays = [
            output.routes for output in outputs if output.routes is not None and output.token_ids
        ]
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
    return {
        "temperature": query.temperature,
        "seed": query.seed,
        **{str(option): value for option, value in query.sampling.items()},
    }


def _spans(outputs: Sequence[EngineOutput]) -> tuple[Span, ...]:
    spans: list[Span] = []
    start = 0
    for output in outputs:
        spans += [
            Span(start=start + span.start, end=start + span.end, version=span.version)
            for span in output.spans
            if span.end > span.start
        ]
        start += len(output.token_ids)
    return tuple(spans)
