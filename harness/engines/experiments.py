"""Experiments: what the conformance run does with an engine, one trace each.

An experiment is a coroutine function over a ``Bench``. It says when something happens by the tokens
that were seen, never by the clock, so that it means the same on a fake and on a real engine; what
it found is read off the trace, by checks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeAlias

from rollproof.core.contract import Contract, KvPolicy, Provenance
from rollproof.core.engine_contract import EngineTerms, PausedCalls, PauseMode, StreamMode
from rollproof.core.records import FinishReason
from rollproof.engines.session import Asked, Bench
from rollproof.errors import SubjectError

__all__ = ["Experiment", "Setting", "experiments_for"]

_Run: TypeAlias = "Callable[[Bench], Awaitable[None]]"
_FREEZING = (PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE)


class Setting(StrEnum):
    """The engine that an experiment is run on."""

    MAIN = "main"
    """Chunked prefill, a prefix cache, and room for every call."""
    CROWDED = "crowded"
    """Less KV cache than the calls need, so that some are preempted; of a model with several groups
    of KV cache, where one is named.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One experiment. ``about`` is what a reader is told, ``run`` does it on an engine of
    ``setting``.
    """

    name: str
    about: str
    run: _Run
    setting: Setting = Setting.MAIN


def experiments_for(contract: Contract) -> Iterator[Experiment]:
    """The experiments that an engine of ``contract`` can be put to, in the order in which they are
    run.

    What it does not offer by its terms (a way of streaming, a pause, an offset) is left out. Raises
    ``SubjectError`` without terms.
    """
    terms = contract.engine
    if terms is None:
        raise SubjectError(
            "The engine's contract has no `engine` terms: a driver must know how its calls behave."
        )
    yield Experiment(name="plain", about="calls of several lengths at once", run=_plain)
    yield Experiment(
        name="cached", about="the same prompts again, from the prefix cache", run=_cached
    )
    if terms.samples:
        yield Experiment(name="samples", about="several samples of one prompt", run=_samples)
    yield Experiment(name="temperature", about="logprobs at a temperature", run=_temperature)
    if terms.stream_modes:
        yield Experiment(name="streams", about="every way of streaming", run=_streams)
    if contract.has_routes:
        yield Experiment(
            name="opt-in", about="calls that ask for routes beside calls that do not", run=_opt_in
        )
    if contract.has_routes and terms.routes_start:
        yield Experiment(name="offset", about="rows from a position on", run=_offset)
    if terms.aborts:
        yield from _abort_experiments(contract, terms)
    yield Experiment(name="refusals", about="calls that cannot be served", run=_refusals)
    yield from _pause_experiments(terms)
    yield Experiment(name="update-idle", about="a weight update between calls", run=_updated_idle)
    # last of its setting: an engine that does not survive it is no use for the others
    yield Experiment(
        name="identity", about="an update to the weights that the engine has", run=_identity
    )
    yield Experiment(
        name="crowded",
        about="more calls than the KV cache holds",
        run=_crowded,
        setting=Setting.CROWDED,
    )
    yield Experiment(
        name="temperature-crowded",
        about="logprobs at a temperature, where the setting has another mode",
        run=_temperature,
        setting=Setting.CROWDED,
    )
    yield Experiment(
        name="crowded-again",
        about="the same calls once more, with prefixes cached",
        run=_crowded,
        setting=Setting.CROWDED,
    )
    if set(terms.stream_modes) - {StreamMode.FINAL}:
        yield Experiment(
            name="streams-crowded",
            about="every way of streaming, of the setting's own",
            run=_streams,
            setting=Setting.CROWDED,
        )
    yield Experiment(
        name="update-crowded",
        about="a weight update between calls, by the setting's own way of loading",
        run=_updated_idle,
        setting=Setting.CROWDED,
    )


def _abort_experiments(contract: Contract, terms: EngineTerms) -> Iterator[Experiment]:
    yield Experiment(
        name="resent",
        about="aborts in the middle, resumed by sending everything again",
        run=partial(_broken_off, offset=False),
    )
    if contract.has_routes and terms.routes_start:
        yield Experiment(
            name="resumed",
            about="aborts in the middle, resumed from the missing row on",
            run=partial(_broken_off, offset=True),
        )
    yield Experiment(name="early", about="an abort before the first token", run=_early)
    yield Experiment(name="queued", about="an abort in the waiting queue", run=_queued)


def _pause_experiments(terms: EngineTerms) -> Iterator[Experiment]:
    for mode in terms.pause_modes:
        for clear in (True, False):
            if clear and mode is PauseMode.IN_PLACE:
                continue  # by its name it leaves everything in place
            yield Experiment(
                name=f"update-{mode}{'-cleared' if clear else ''}",
                about=f"a weight update under pause {mode}, {'KV cleared' if clear else 'KV kept'}",
                run=partial(_updated, mode=mode, clear=clear),
            )
    if PauseMode.ABORT in terms.pause_modes:
        yield Experiment(name="parked", about="calls sent to a paused engine", run=_parked)


async def _plain(bench: Bench) -> None:
    lengths = ((1, 8), (5, 1), (31, 8), (70, 6))
    await bench.finish(*[bench.ask(bench.prompt(prompt), tokens) for prompt, tokens in lengths])


async def _cached(bench: Bench) -> None:
    short, long = bench.prompt(40), bench.prompt(100)
    first = [bench.ask(short, 6, seed=11), bench.ask(long, 6, seed=12)]
    await bench.finish(*first)
    again = [bench.ask(short, 6, seed=11), bench.ask(long + bench.prompt(9), 6, seed=12)]
    await bench.finish(*again)
    await bench.clear_cache()
    await bench.finish(bench.ask(short, 6, seed=11))


async def _samples(bench: Bench) -> None:
    await bench.finish(bench.ask(bench.prompt(40), 5, samples=3))


async def _temperature(bench: Bench) -> None:
    await bench.finish(
        *[
            bench.ask(bench.prompt(12), 8, temperature=temperature)
            for temperature in (0.6, 1.0, 1.4)
        ]
    )


async def _streams(bench: Bench) -> None:
    asked = [bench.ask(bench.prompt(9), 6, stream=mode) for mode in bench.terms.stream_modes]
    await bench.finish(*asked)
    modes = [
        mode
        for mode in bench.terms.stream_modes
        if mode is not StreamMode.FINAL and bench.terms.aborts
    ]
    cut = [bench.ask(bench.prompt(9), 30, stream=mode) for mode in modes]
    for one in cut:
        await one.sampled(3)
        await bench.abort(one)
    await bench.finish(*cut)


async def _opt_in(bench: Bench) -> None:
    wishes = (True, False, True, False)
    await bench.finish(
        *[
            bench.ask(bench.prompt(10 + 9 * place), 5, want_routes=wish)
            for place, wish in enumerate(wishes)
        ]
    )


async def _offset(bench: Bench) -> None:
    prompt = bench.prompt(40)
    await bench.finish(*[bench.ask(prompt, 5, routes_start=start) for start in (0, 1, 25, 39, 40)])


async def _broken_off(bench: Bench, *, offset: bool) -> None:
    bench.provenance = Provenance.AS_SAMPLED if offset else Provenance.LATEST_PREFILL
    asked = [bench.ask(bench.prompt(length), 16) for length in (7, 33, 64)]
    for one in asked:
        await one.sampled(int(bench.draw.integers(1, 8)))
        await bench.abort(one)
    if not any(_left(one) for one in asked):
        bench.missed("every call had ended when its abort came, or the engine does not abort")
    again = [bench.go_on(one, left, offset=offset) for one in asked if (left := _left(one))]
    await bench.finish(*again, *[one for one in asked if not _left(one)])


async def _early(bench: Bench) -> None:
    """Two long prompts are computed one behind the other: when the first has a token, the second
    has none, and is aborted.

    A short call beside one long prompt would not do: SGLang computes all of the prompt before it
    samples on.
    """
    bench.provenance = Provenance.LATEST_PREFILL
    length = bench.terms.max_length - 40
    first = bench.ask(bench.prompt(length), 24)
    late = bench.ask(bench.prompt(length), 6)
    await first.sampled(1)
    await bench.abort(late)
    if late.outputs and late.outputs[0].token_ids:
        bench.missed("the call had its first token before the abort")
    await bench.finish(
        late if late.refused or not _left(late) else bench.go_on(late, _left(late), offset=False)
    )
    await bench.abort(first)
    await bench.finish(first)


async def _queued(bench: Bench) -> None:
    """As many calls run as the engine runs at once; one more has to wait, and is aborted there."""
    bench.provenance = Provenance.LATEST_PREFILL
    running = [bench.ask(bench.prompt(3), 24) for _ in range(bench.max_batch)]
    for one in running:
        await one.sampled(1)
    waiting = bench.ask(bench.prompt(8), 6)
    await running[0].sampled(3)
    await bench.abort(waiting)
    for one in running:
        await bench.abort(one)
    await bench.finish(
        *running, bench.go_on(waiting, _left(waiting), offset=False) if _left(waiting) else waiting
    )


async def _refusals(bench: Bench) -> None:
    """A prompt that takes several steps comes first: what is sent behind it is computed in one
    batch with its end.

    Alone in its batch a call without a budget is another case: SGLang samples nothing at all then.
    """
    beside = bench.ask(bench.prompt(bench.terms.max_length - 56), 3)
    long = bench.prompt(bench.terms.max_length + 4)
    bad = [
        bench.ask(bench.prompt(5), 0),
        bench.ask((), 4),
        bench.ask(long, 4),
        bench.ask(bench.prompt(8), 3, routes_start=9),
    ]
    await bench.finish(beside, *bad)
    await bench.finish(bench.ask(bench.prompt(6), 3))


async def _identity(bench: Bench) -> None:
    prompt = bench.prompt(36)
    await bench.finish(bench.ask(prompt, 8, seed=7))
    await bench.update(bench.serving.version, clear_cache=True)
    await bench.finish(bench.ask(prompt, 8, seed=7))


async def _updated(bench: Bench, *, mode: PauseMode, clear: bool) -> None:
    """Calls are in flight when the weights change; one of their prompts is asked for once more
    afterwards.
    """
    recomputed = clear and (mode not in _FREEZING or mode in bench.terms.recomputing)
    bench.kv_policy = KvPolicy.RECOMPUTE if recomputed else KvPolicy.KEEP
    bench.provenance = Provenance.LATEST_PREFILL if mode is PauseMode.ABORT else None
    prompts = [bench.prompt(40), bench.prompt(70)]
    asked = [bench.ask(prompt, 12) for prompt in prompts]
    for one in asked:
        await one.sampled(4)
    await bench.pause(mode, clear_cache=clear)
    await bench.update(bench.serving.other(), clear_cache=clear)
    await bench.resume()
    await bench.ended(*asked)
    resumed = [
        (
            bench.go_on(one, left, offset=False)
            if (left := _left(one)) and mode is PauseMode.ABORT
            else one
        )
        for one in asked
    ]
    await bench.finish(*resumed)
    await bench.finish(bench.ask(prompts[0], 5))


async def _updated_idle(bench: Bench) -> None:
    """Nothing is in flight when the weights change; then the same prompts are asked for again."""
    prompts = [bench.prompt(36), bench.prompt(50)]
    await bench.finish(*[bench.ask(prompt, 4) for prompt in prompts])
    await bench.update(bench.serving.other(), clear_cache=True)
    await bench.finish(*[bench.ask(prompt, 4) for prompt in prompts])


async def _parked(bench: Bench) -> None:
    beside = bench.ask(bench.prompt(6), 20)
    await beside.sampled(2)
    await bench.pause(PauseMode.ABORT, clear_cache=False)
    sent = [bench.ask(bench.prompt(5 + place), 4) for place in range(2)]
    await bench.linger()
    if bench.terms.paused_calls is PausedCalls.PARK:
        await bench.abort(
            sent[0], wait=False
        )  # whether it is answered now or after the resume is the engine's
        await bench.linger()
    await bench.resume()
    await bench.finish(beside, *sent)


async def _crowded(bench: Bench) -> None:
    """A preemption says that every block of the pool was handed out: of a hybrid model, each group
    of its KV cache was in use, and slots far beyond those of one group were read (vLLM #40692 sized
    the buffer of routes by one group).
    """
    before = await bench.count("start")
    prompts = [bench.prompt(40, shared=number) for number in range(bench.max_batch)]
    await bench.finish(*[bench.ask(prompt, 30) for prompt in prompts])
    after = await bench.count("end")
    if not after.get("preemptions", 0.0) > before.get("preemptions", 0.0):
        bench.missed("no call was preempted, or the engine does not count it")
    await bench.finish(*[bench.ask(prompt, 4) for prompt in prompts[:3]])


def _left(asked: Asked) -> int:
    """Tokens that are left of a call's budget where it was aborted; 0 where it ended by itself."""
    if (
        asked.refused is not None
        or not asked.outputs
        or asked.outputs[0].finish_reason is not FinishReason.ABORT
    ):
        return 0
    return asked.query.max_tokens - len(asked.outputs[0].token_ids)
