"""Rollouts that a real engine samples for the gap, without or across a real weight update."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.core.engine_protocol import Piece, Query, Watch, WeightUpdate
from rollproof.core.records import EngineOutput, FinishReason, IntArray, LogprobArray
from rollproof.core.subjects import EngineSubject
from rollproof.errors import EngineError, EngineHung, SubjectError
from rollproof.invariants.engine.independent_forward import moe_rows

__all__ = [
    "Sample",
    "Segment",
    "Unit",
    "bounded",
    "prompts_of",
    "sample",
    "sample_across",
    "units_of",
]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """Response tokens that one version sampled.

    Attributes:
        start: the first token.
        end: the token after the last.
        version: the version.
        routes: ``(rows, MoE layers, top_k)`` from position 0 on, as the call returned them.
    """

    start: int
    end: int
    version: str
    routes: IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """A finished sequence.

    Attributes:
        number: its number.
        prompt_ids: the prompt.
        response_ids: the response.
        logprobs: ``(response,)``, as the engine reported them.
        segments: the segments, in order.
    """

    number: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: LogprobArray
    segments: tuple[Segment, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt_ids + self.response_ids

    @property
    def versions(self) -> list[str]:
        """The version of each response token."""
        return [
            segment.version for segment in self.segments for _ in range(segment.start, segment.end)
        ]

    @property
    def since_resume(self) -> IntArray:
        """``(response,)``: tokens since the weight update in the sequence, -1 before it."""
        out = np.full(len(self.response_ids), -1, dtype=np.int64)
        for segment in self.segments[1:]:
            out[segment.start : segment.end] = np.arange(segment.end - segment.start)
        return out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unit:
    """Tokens that a trainer scores at once.

    Attributes:
        sample: number of the sample.
        version: the version to score under.
        ids: prompt and response up to ``end``.
        start: first position that is scored.
        end: position after the last.
        routes: ``(tokens - 1, MoE layers, top_k)``.
    """

    sample: int
    version: str
    ids: tuple[int, ...]
    start: int
    end: int
    routes: IntArray


def prompts_of(
    count: int, *, vocab: int, seed: int = 0, shortest: int = 8, longest: int = 64
) -> list[tuple[int, ...]]:
    """Draw random prompts, with ids from 3."""
    draw = np.random.default_rng([seed, count])
    return [
        tuple(
            int(token) for token in draw.integers(3, vocab, int(draw.integers(shortest, longest)))
        )
        for _ in range(count)
    ]


def units_of(samples: Sequence[Sample]) -> Iterator[Unit]:
    """Yield the segments of each version with their context.

    So the trainer scores a token under the weights that sampled it.
    """
    for sample_ in samples:
        sent = len(sample_.prompt_ids)
        for segment in sample_.segments:
            ids = sample_.ids[: sent + segment.end]
            if segment.end > segment.start:
                yield Unit(
                    sample=sample_.number,
                    version=segment.version,
                    ids=ids,
                    start=sent + segment.start,
                    end=sent + segment.end,
                    # without the row of the last token: only a later segment can forward it, under
                    # other weights
                    routes=segment.routes[: len(ids) - 1],
                )


async def sample(
    engine: EngineSubject, prompts: Sequence[tuple[int, ...]], *, tokens: int, version: str = "A"
) -> list[Sample]:
    """Sample ``tokens`` tokens for each prompt, all at once, at temperature 1.

    The engine is started and serves ``version``.
    """
    outputs = await asyncio.gather(
        *(_generate(engine, f"gap{i:05d}-", prompt, tokens) for i, prompt in enumerate(prompts))
    )
    return [
        _joined(engine.contract, number, prompt, [(output, version)])
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


async def sample_across(
    engine: EngineSubject,
    prompts: Sequence[tuple[int, ...]],
    *,
    tokens: int,
    update: Path,
    mode: PauseMode,
    versions: tuple[str, str] = ("A", "B"),
) -> list[Sample]:
    """Sample as ``sample`` does, and update the weights to checkpoint ``update`` meanwhile.

    With ``PauseMode.ABORT`` the calls end, the cache is cleared, and each call is sent again with
    its tokens (KV is recomputed). With another mode the calls pause and continue over their KV.
    """
    # half of the calls begin later, so that the boundaries are spread
    old, new = versions
    seen = [0] * len(prompts)
    moved = asyncio.Event()

    def watching(number: int) -> Watch:
        def watch(piece: Piece) -> None:
            seen[number] = max(seen[number], piece.sampled)
            moved.set()

        return watch

    async def until(numbers: Sequence[int], count: int) -> None:
        while min(seen[number] for number in numbers) < count and not all(
            task.done() for task in tasks
        ):
            moved.clear()
            await asyncio.wait_for(moved.wait(), 120)

    # two groups that start apart have their boundaries at different positions
    early, late = list(range(0, len(prompts), 2)), list(range(1, len(prompts), 2))
    tasks: list[asyncio.Task[EngineOutput]] = []
    order: list[int] = []
    for numbers, count in ((early, tokens // 4), (late, tokens // 4)):
        for number in numbers:
            work = _generate(engine, f"cut{number:05d}-", prompts[number], tokens, watching(number))
            tasks.append(asyncio.create_task(work))
            order.append(number)
        await until(numbers, count)
    await engine.pause(mode, clear_cache := mode is PauseMode.ABORT)
    await asyncio.sleep(0.3)  # until tokens in flight have arrived
    paused_at = list(seen)
    await engine.update_weights(
        WeightUpdate(path=update, version=new, label="w1", clear_cache=clear_cache)
    )
    await engine.resume()
    first = dict(zip(order, await asyncio.gather(*tasks), strict=True))
    if mode is not PauseMode.ABORT:
        return [
            _paused_sample(
                engine.contract,
                number,
                prompts[number],
                first[number],
                min(paused_at[number], tokens),
                versions,
            )
            for number in range(len(prompts))
        ]
    again = {
        number: asyncio.create_task(
            _generate(
                engine,
                f"back{number:05d}-",
                prompts[number] + output.token_ids,
                tokens - len(output.token_ids),
            )
        )
        for number, output in first.items()
        if output.finish_reason is FinishReason.ABORT and len(output.token_ids) < tokens
    }
    second = dict(zip(again, await asyncio.gather(*again.values()), strict=True))
    return [
        _joined(
            engine.contract,
            number,
            prompts[number],
            [(first[number], old), *([(second[number], new)] if number in second else [])],
        )
        for number in range(len(prompts))
    ]


async def bounded(
    work: Coroutine[Any, Any, _T], engine: EngineSubject, deadline: float, task: str
) -> _T:
    """Return the result of ``work``, a coroutine of the ``task``.

    Raises ``EngineHung`` with the end of the engine's log after ``deadline`` seconds.
    """
    try:
        return await asyncio.wait_for(work, deadline)
    except TimeoutError:
        tail = getattr(getattr(engine, "process", None), "log_tail", None)
        log = f" The end of its log:\n{tail()}" if tail is not None else ""
        raise EngineHung(f"{task} was not done after {deadline:g} s.{log}") from None


async def _generate(
    engine: EngineSubject,
    handle: str,
    prompt: tuple[int, ...],
    tokens: int,
    watch: Watch | None = None,
) -> EngineOutput:
    stream = StreamMode.FINAL if watch is None else StreamMode.CUMULATIVE
    query = Query(handle=handle, prompt_ids=prompt, max_tokens=tokens, stream=stream)
    outputs = await engine.generate(query, watch or (lambda _: None))
    if len(outputs) != 1:
        raise SubjectError(
            f"The engine answered the call {handle!r} with {len(outputs)} samples instead of one."
        )
    return outputs[0]


def _joined(
    contract: Contract,
    number: int,
    prompt: tuple[int, ...],
    calls: Sequence[tuple[EngineOutput, str]],
) -> Sample:
    """Return the sample of one call, or of a call and its continuation.

    An aborted call without tokens has no segment.
    """
    segments: list[Segment] = []
    tokens: tuple[int, ...] = ()
    logprobs: list[LogprobArray] = []
    for output, version in calls:
        if not output.token_ids:
            continue
        routes, own = _routes_and_logprobs(contract, output, number)
        segments.append(
            Segment(
                start=len(tokens),
                end=len(tokens) + len(output.token_ids),
                version=version,
                routes=routes,
            )
        )
        tokens += output.token_ids
        logprobs.append(own)
    if not tokens:
        raise EngineError(f"The engine returned no token for sequence {number}.")
    return Sample(
        number=number,
        prompt_ids=prompt,
        response_ids=tokens,
        logprobs=np.concatenate(logprobs),
        segments=tuple(segments),
    )


def _paused_sample(
    contract: Contract,
    number: int,
    prompt: tuple[int, ...],
    output: EngineOutput,
    paused_at: int,
    versions: tuple[str, str],
) -> Sample:
    """Return the sample of a call that was paused after ``paused_at`` tokens for an update."""
    routes, logprobs = _routes_and_logprobs(contract, output, number)
    count = len(output.token_ids)
    cuts = [0, *([paused_at] if 0 < paused_at < count else []), count]
    names = (
        versions
        if 0 < paused_at < count
        else ((versions[1],) if paused_at == 0 else (versions[0],))
    )
    segments = tuple(
        Segment(start=start, end=end, version=name, routes=routes)
        for start, end, name in zip(cuts[:-1], cuts[1:], names, strict=True)
    )
    return Sample(
        number=number,
        prompt_ids=prompt,
        response_ids=output.token_ids,
        logprobs=logprobs,
        segments=segments,
    )


def _routes_and_logprobs(
    contract: Contract, output: EngineOutput, number: int
) -> tuple[IntArray, LogprobArray]:
    if (
        output.routes is None
        or output.logprobs is None
        or len(output.logprobs) != len(output.token_ids)
    ):
        raise EngineError(
            "The engine returned no routes, or not a logprob for each token, for sequence"
            f" {number}: there is nothing to compare."
        )
    return moe_rows(contract, output.routes), output.logprobs
