"""The experiments of engine conformance: each drives an engine, and gives one trace.

An experiment is a coroutine function over a ``Session``. Its actions depend on the number of tokens
that were seen, never on the clock, so that it means the same on a fake and on a real engine. Checks
judge the trace.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeAlias

from rollproof.core.contract import Contract, KvPolicy, Provenance
from rollproof.core.engine_contract import (
    EngineTerms,
    PausedCalls,
    PauseMode,
    SamplingOption,
    StreamMode,
)
from rollproof.core.records import FinishReason
from rollproof.engines.session import SentCall, Session
from rollproof.errors import SubjectError

__all__ = ["Experiment", "Setting", "experiments_for"]

_Run: TypeAlias = "Callable[[Session], Awaitable[None]]"
_FREEZING = (PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE)


class Setting(StrEnum):
    """The engine that an experiment is run on."""

    MAIN = "main"
    """Chunked prefill, a prefix cache, and room for every call."""
    CROWDED = "crowded"
    """Less KV cache than the calls need, so that some are preempted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One experiment: ``run`` does it on an engine of ``setting``, ``about`` describes it."""

    name: str
    about: str
    run: _Run
    setting: Setting = Setting.MAIN


def experiments_for(contract: Contract) -> Iterator[Experiment]:
    """Yield the experiments that fit an engine of ``contract``, in the order in which they run.

    What its terms do not offer (a stream mode, a pause, an offset) is left out. Raises
    ``SubjectError`` for a contract without terms.
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
    if terms.sampling:
        yield Experiment(
            name="sampling", about="top-p, top-k, min-p and penalties, one a call", run=_sampling
        )
    if terms.stream_modes:
        yield Experiment(name="streams", about="every stream mode", run=_streams)
    if contract.has_routes:
        yield Experiment(name="opt-in", about="calls with routes among calls without", run=_opt_in)
    if contract.has_routes and terms.routes_start:
        yield Experiment(name="offset", about="rows from a position on", run=_offset)
    if terms.aborts:
        yield from _abort_experiments(contract, terms)
    yield from _end_experiments(terms)
    yield Experiment(name="refusals", about="calls that cannot be served", run=_refusals)
    yield from _pause_experiments(terms)
    yield Experiment(name="update-idle", about="a weight update between calls", run=_updated_idle)
    # last of its setting: an engine that does not survive it is no use for the others
    yield Experiment(name="identity", about="an update to the same weights", run=_identity)
    yield Experiment(
        name="crowded",
        about="more calls than the KV cache holds",
        run=_crowded,
        setting=Setting.CROWDED,
    )
    yield Experiment(
        name="temperature-crowded",
        about="logprobs at a temperature, in the other logprobs mode",
        run=_temperature,
        setting=Setting.CROWDED,
    )
    if terms.sampling:
        yield Experiment(
            name="sampling-crowded",
            about="top-p, top-k, min-p and penalties, in the other logprobs mode",
            run=_sampling,
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
            about="every stream mode, on a small KV cache",
            run=_streams,
            setting=Setting.CROWDED,
        )
    yield Experiment(
        name="update-crowded",
        about="a weight update between calls, loaded as this setting loads",
        run=_updated_idle,
        setting=Setting.CROWDED,
    )


def _end_experiments(terms: EngineTerms) -> Iterator[Experiment]:
    if terms.end_token is not None:
        yield Experiment(name="ends", about="calls that end at the model's end token", run=_ends)
    if terms.stop_token is not None or terms.stop_string is not None:
        yield Experiment(
            name="stops", about="calls that end at a stop token or a stop string", run=_stops
        )
    if terms.spare_positions is not None:
        yield Experiment(
            name="limit", about="calls that end in the last places of the context", run=_limit
        )


def _abort_experiments(contract: Contract, terms: EngineTerms) -> Iterator[Experiment]:
    yield Experiment(
        name="resent",
        about="aborts in the middle, resumed by sending everything again",
        run=partial(_aborted, offset=False),
    )
    if contract.has_routes and terms.routes_start:
        yield Experiment(
            name="resumed",
            about="aborts in the middle, resumed from the missing row on",
            run=partial(_aborted, offset=True),
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
                about=f"a weight update in pause {mode}, KV {'cleared' if clear else 'retained'}",
                run=partial(_updated, mode=mode, clear=clear),
            )
    if PauseMode.ABORT in terms.pause_modes:
        yield Experiment(name="parked", about="calls sent to a paused engine", run=_parked)


async def _plain(session: Session) -> None:
    lengths = ((1, 8), (5, 1), (31, 8), (70, 6))
    await session.finish(
        *[session.send(session.prompt(prompt), tokens) for prompt, tokens in lengths]
    )


async def _cached(session: Session) -> None:
    short, long = session.prompt(40), session.prompt(100)
    first = [session.send(short, 6, seed=11), session.send(long, 6, seed=12)]
    await session.finish(*first)
    again = [session.send(short, 6, seed=11), session.send(long + session.prompt(9), 6, seed=12)]
    await session.finish(*again)
    await session.clear_cache()
    await session.finish(session.send(short, 6, seed=11))


async def _samples(session: Session) -> None:
    # enough tokens that two draws of one distribution do not agree by chance
    await session.finish(session.send(session.prompt(40), 24, samples=3))


async def _temperature(session: Session) -> None:
    await session.finish(
        *[
            session.send(session.prompt(12), 8, temperature=temperature)
            for temperature in (0.6, 1.0, 1.4)
        ]
    )


_SAMPLING = {
    SamplingOption.TOP_P: 0.6,
    SamplingOption.TOP_K: 2,
    SamplingOption.MIN_P: 0.3,
    SamplingOption.REPETITION_PENALTY: 1.4,
    SamplingOption.FREQUENCY_PENALTY: 0.9,
    SamplingOption.PRESENCE_PENALTY: 1.1,
}
"""A value of each sampling parameter that changes the distribution of nearly every token."""


async def _sampling(session: Session) -> None:
    # one parameter a call: engines apply several in different orders, and at a temperature every
    # mode of logprobs differs from the others
    await session.finish(
        *[
            session.send(
                session.prompt(12), 10, temperature=0.8, sampling={option: _SAMPLING[option]}
            )
            for option in session.terms.sampling
        ]
    )


async def _ends(session: Session) -> None:
    calls = [session.send(session.prompt(length), 60, ignore_end=False) for length in (4, 17, 33)]
    await session.finish(*calls)
    if not any(map(_stopped, calls)):
        session.record_miss("no call reached an end token within 60 tokens")


async def _stops(session: Session) -> None:
    """Repeat a greedy call, with one of its tokens as a stop token, and as a stop string."""
    prompt, seed = session.prompt(20), int(session.draw.integers(1 << 30))

    def call(*, tokens: tuple[int, ...] = (), texts: tuple[int, ...] = ()) -> SentCall:
        return session.send(
            prompt,
            12,
            temperature=0.0,
            seed=seed,
            ignore_end=not (tokens or texts),
            stop_tokens=tokens,
            stop_texts=texts,
        )

    first = call()
    await session.finish(first)
    tokens = first.outputs[0].token_ids if first.outputs else ()
    ends = session.terms.end_tokens
    # in the middle, so that a call that goes on is seen to go on
    middle = [
        token
        for place, token in enumerate(tokens)
        if 2 <= place <= 8 and token not in ends and token not in tokens[:place]
    ]
    if not middle:
        session.record_miss("the greedy call repeats itself, so no token of it can end it")
        return
    calls = []
    if session.terms.stop_token is not None:
        calls.append(call(tokens=(middle[-1],)))
    if session.terms.stop_string is not None:
        calls.append(call(texts=(middle[-1],)))
    await session.finish(*calls)
    if not any(map(_stopped, calls)):
        session.record_miss("no call reached its stop token")


async def _limit(session: Session) -> None:
    """Let calls end in the last places of the context, by their budget or by the context."""
    terms = session.terms
    calls = []
    for left in (12, 10, 7, 5, 2, 1):
        if left < terms.prompt_margin:
            continue
        prompt = session.prompt(terms.max_length - left)
        calls.append(session.send(prompt, left))
        if terms.excess_budget is not None and left in (10, 2):
            calls.append(session.send(prompt, left + 8))
    await session.finish(*calls)


async def _streams(session: Session) -> None:
    calls = [session.send(session.prompt(9), 6, stream=mode) for mode in session.terms.stream_modes]
    await session.finish(*calls)
    modes = [
        mode
        for mode in session.terms.stream_modes
        if mode is not StreamMode.FINAL and session.terms.aborts
    ]
    aborted = [session.send(session.prompt(9), 30, stream=mode) for mode in modes]
    for call in aborted:
        await call.wait_for_tokens(3)
        await session.abort(call)
    await session.finish(*aborted)


async def _opt_in(session: Session) -> None:
    requested = (True, False, True, False)
    await session.finish(
        *[
            session.send(session.prompt(10 + 9 * place), 5, want_routes=routes)
            for place, routes in enumerate(requested)
        ]
    )


async def _offset(session: Session) -> None:
    prompt = session.prompt(40)
    await session.finish(
        *[session.send(prompt, 5, routes_start=start) for start in (0, 1, 25, 39, 40)]
    )


async def _aborted(session: Session, *, offset: bool) -> None:
    session.provenance = Provenance.AS_SAMPLED if offset else Provenance.LATEST_PREFILL
    calls = [session.send(session.prompt(length), 16) for length in (7, 33, 64)]
    for call in calls:
        await call.wait_for_tokens(int(session.draw.integers(1, 8)))
        await session.abort(call)
    if not any(map(_remaining, calls)):
        session.record_miss(
            "every call had ended when its abort came, or the engine does not abort"
        )
    await session.finish(*[_resumed(session, call, offset=offset) for call in calls])


async def _early(session: Session) -> None:
    """Abort the second of two long prompts when the first one has its first token."""
    # a short call next to one long prompt would not do: SGLang computes all of the prompt before
    # it samples on
    session.provenance = Provenance.LATEST_PREFILL
    length = session.terms.max_length - 40
    first = session.send(session.prompt(length), 24)
    late = session.send(session.prompt(length), 6)
    await first.wait_for_tokens(1)
    await session.abort(late)
    if late.outputs and late.outputs[0].token_ids:
        session.record_miss("the call had its first token before the abort")
    await session.finish(_resumed(session, late))
    await session.abort(first)
    await session.finish(first)


async def _queued(session: Session) -> None:
    """Send one call more than the engine runs at once, and abort it while it waits."""
    session.provenance = Provenance.LATEST_PREFILL
    running = [session.send(session.prompt(3), 24) for _ in range(session.max_batch)]
    for call in running:
        await call.wait_for_tokens(1)
    waiting = session.send(session.prompt(8), 6)
    await running[0].wait_for_tokens(3)
    await session.abort(waiting)
    for call in running:
        await session.abort(call)
    await session.finish(*running, _resumed(session, waiting))


async def _refusals(session: Session) -> None:
    # a prompt that takes several steps comes first: the calls after it are computed in one batch
    # with its end. Alone in its batch, a call without a budget is another case: SGLang samples
    # nothing at all then
    first = session.send(session.prompt(session.terms.max_length - 56), 3)
    long = session.prompt(session.terms.max_length + 4)
    bad = [
        session.send(session.prompt(5), 0),
        session.send((), 4),
        session.send(long, 4),
        session.send(session.prompt(8), 3, routes_start=9),
    ]
    await session.finish(first, *bad)
    await session.finish(session.send(session.prompt(6), 3))


async def _identity(session: Session) -> None:
    prompt = session.prompt(36)
    await session.finish(session.send(prompt, 8, seed=7))
    await session.update(session.serving.version, clear_cache=True)
    await session.finish(session.send(prompt, 8, seed=7))


async def _updated(session: Session, *, mode: PauseMode, clear: bool) -> None:
    """Change the weights while calls are in flight, then send one of their prompts again."""
    recomputed = clear and (mode not in _FREEZING or mode in session.terms.recomputing)
    session.kv_policy = KvPolicy.RECOMPUTE if recomputed else KvPolicy.KEEP
    session.provenance = Provenance.LATEST_PREFILL if mode is PauseMode.ABORT else None
    prompts = [session.prompt(40), session.prompt(70)]
    calls = [session.send(prompt, 12) for prompt in prompts]
    for call in calls:
        await call.wait_for_tokens(4)
    await session.pause(mode, clear_cache=clear)
    await session.update(session.serving.other(), clear_cache=clear)
    await session.resume()
    await session.wait_for(*calls)
    if mode is PauseMode.ABORT:
        calls = [_resumed(session, call) for call in calls]
    await session.finish(*calls)
    await session.finish(session.send(prompts[0], 5))


async def _updated_idle(session: Session) -> None:
    """Change the weights while nothing is in flight, then send the same prompts again."""
    prompts = [session.prompt(36), session.prompt(50)]
    await session.finish(*[session.send(prompt, 4) for prompt in prompts])
    await session.update(session.serving.other(), clear_cache=True)
    await session.finish(*[session.send(prompt, 4) for prompt in prompts])


async def _parked(session: Session) -> None:
    running = session.send(session.prompt(6), 20)
    await running.wait_for_tokens(2)
    await session.pause(PauseMode.ABORT, clear_cache=False)
    sent = [session.send(session.prompt(5 + place), 4) for place in range(2)]
    await session.linger()
    if session.terms.paused_calls is PausedCalls.PARK:
        # the engine may reply now or after the resume
        await session.abort(sent[0], wait=False)
        await session.linger()
    await session.resume()
    await session.finish(running, *sent)


async def _crowded(session: Session) -> None:
    # a preemption means that every block of the pool was in use: in a hybrid model so was each
    # group of its KV cache, and slots far beyond those of one group were read (vLLM #40692 sized
    # the buffer of routes by one group)
    before = await session.count("start")
    prompts = [session.prompt(40, shared=number) for number in range(session.max_batch)]
    await session.finish(*[session.send(prompt, 30) for prompt in prompts])
    after = await session.count("end")
    if not after.get("preemptions", 0.0) > before.get("preemptions", 0.0):
        session.record_miss("no call was preempted, or the engine does not count it")
    await session.finish(*[session.send(prompt, 4) for prompt in prompts[:3]])


def _resumed(session: Session, call: SentCall, *, offset: bool = False) -> SentCall:
    """Continue a call that was aborted; return one that ended by itself as it is."""
    tokens = _remaining(call)
    return session.continue_call(call, tokens, offset=offset) if tokens else call


def _remaining(call: SentCall) -> int:
    """Return the rest of an aborted call's budget, in tokens; 0 if it ended by itself."""
    if (
        call.refused is not None
        or not call.outputs
        or call.outputs[0].finish_reason is not FinishReason.ABORT
    ):
        return 0
    return call.query.max_tokens - len(call.outputs[0].token_ids)


def _stopped(call: SentCall) -> bool:
    """Return whether a sample of the call ended by itself, before its budget."""
    return any(output.finish_reason is FinishReason.STOP for output in call.outputs)
