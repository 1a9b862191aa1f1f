"""Streamed engine calls of one request, as one sequence of tokens and endings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from rollproof.core.engine_contract import StreamMode
from rollproof.core.records import EngineOutput
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.http.engine_backend import CallSpec, EngineBackend

__all__ = ["EndedCall", "SampledToken", "abort_unfinished", "last_logprob", "stream_calls"]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of call ``index``; ``logprobs`` holds its logprob if the call wants any."""

    index: int
    token: int
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class EndedCall:
    """The end of call ``index``; ``sent`` of its tokens were announced before."""

    index: int
    output: EngineOutput
    sent: int

    @property
    def unsent_tokens(self) -> tuple[int, ...]:
        """The tokens that come with the end."""
        return self.output.token_ids[self.sent :]

    @property
    def unsent_logprobs(self) -> list[float]:
        """Their logprobs; none if the call wants none."""
        logprobs = self.output.logprobs
        return [] if logprobs is None else logprobs.tolist()[self.sent :]


async def stream_calls(
    request: Request,
    specs: Sequence[CallSpec],
    backend: EngineBackend,
    *,
    unique: bool = False,
    hold_last: bool = True,
) -> AsyncGenerator[SampledToken | EndedCall]:
    """Run the calls at once, and yield their tokens and ends as they come.

    The calls that still run when the generator is closed are aborted, as the real servers do for a
    client that leaves.

    Args:
        request: the HTTP request.
        specs: the calls.
        backend: their engine.
        unique: refuse a handle that is in use.
        hold_last: the last token that a call may sample comes with its end.
    """
    # The queue is not bounded, but a call is: a slow reader leaves at most its tokens here, while
    # the engine goes on for other calls as a real one does.
    ready: asyncio.Queue[SampledToken | int] = asyncio.Queue()
    sent = [0] * len(specs)

    def listener(index: int, spec: CallSpec) -> Callable[[InflightCall], None]:
        def on_token(call: InflightCall) -> None:
            if hold_last and len(call.ids) >= call.limit:
                return
            sent[index] = call.sampled
            logprobs = [last_logprob(call, backend)] if spec.logprobs else []
            ready.put_nowait(SampledToken(index, call.ids[-1], logprobs))

        return on_token

    def announcer(index: int) -> Callable[[object], None]:
        return lambda _task: ready.put_nowait(index)

    tasks = [
        asyncio.create_task(
            backend.generate(
                request,
                spec,
                stream=StreamMode.DELTA,
                on_token=listener(index, spec),
                unique=unique,
            )
        )
        for index, spec in enumerate(specs)
    ]
    # a callback runs after the call's last token was put, so ends keep their place in the queue
    for index, task in enumerate(tasks):
        task.add_done_callback(announcer(index))
    try:
        running = len(tasks)
        while running:
            event = await ready.get()
            if isinstance(event, SampledToken):
                yield event
            else:
                running -= 1
                yield EndedCall(event, tasks[event].result(), sent[event])
    finally:
        await abort_unfinished(specs, tasks, backend)


async def abort_unfinished(
    specs: Sequence[CallSpec],
    tasks: Sequence[asyncio.Task[object]],
    backend: EngineBackend,
) -> None:
    """Abort the calls that still run, and wait for all tasks."""
    rids = [spec.rid for spec, task in zip(specs, tasks, strict=True) if not task.done()]
    for rid in dict.fromkeys(rids):  # the samples of a vLLM request share their handle
        await backend.engine.abort(rid)
    await asyncio.gather(*tasks, return_exceptions=True)


def last_logprob(call: InflightCall, backend: EngineBackend) -> float:
    """Return the logprob of the token that was sampled last."""
    last = len(call.ids) - 1
    return float(
        backend.policy.logprobs_spans([(last, last + 1, call.key)], call.ids, last, last + 1)[0]
    )
