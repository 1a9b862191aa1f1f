"""Load: many calls at once, aborted at random and resumed, while the weights change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollproof.core.contract import KvPolicy, Provenance
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import FinishReason
from rollproof.core.trace import Trace
from rollproof.engines.engine_targets import EngineTarget
from rollproof.engines.experiments import Setting
from rollproof.engines.session import SentCall, Serving, Session
from rollproof.engines.version_attribution import attributed
from rollproof.errors import EngineError
from rollproof.judging.report import Report
from rollproof.verification.engines import EngineRun, judged

__all__ = ["Load", "judge_load", "run_load"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The size of the load.

    Attributes:
        requests: requests at once.
        aborted: probability that a call is aborted, at a random token.
        updates: weight updates meanwhile.
        longest_prompt: bound of the prompts, in tokens.
        longest_response: bound of the responses, in tokens.
    """

    requests: int = 256
    aborted: float = 0.4
    updates: int = 3
    longest_prompt: int = 60
    longest_response: int = 48


def judge_load(
    target: EngineTarget,
    load: Load | None = None,
    *,
    expected: Mapping[str, str] | None = None,
    seed: int = 0,
    run: EngineRun | None = None,
) -> Report:
    """Run the load on a new engine with room for all calls, and judge the trace.

    If the engine dies meanwhile, that is judged too.

    Args:
        target: the engine.
        load: the size of the load.
        expected: ids of checks that are known to fail, with the reason.
        seed: seed of prompts and aborts.
        run: collects traces, notes and seconds.

    Raises:
        EngineStartError: the engine does not start.
    """
    began = time.perf_counter()
    size = load or Load()
    # room for all calls: a scheduler that queues them would serialise the load
    settings = replace(target.settings[Setting.MAIN], max_batch=size.requests, prefill_chunk=512)
    run = run if run is not None else EngineRun()

    async def main() -> Trace:
        engine = target.make(settings)
        try:
            with run.spending("starting"):
                await engine.start()
            start = time.perf_counter()
            serving = Serving(
                version=settings.version,
                label=settings.label,
                checkpoints=target.checkpoints[Setting.MAIN],
            )
            session = Session(
                engine,
                "load",
                serving,
                seed=seed,
                deadline=target.deadline,
                lull=target.lull,
                max_batch=settings.max_batch,
            )
            try:
                await run_load(session, size)
            except EngineError as error:
                session.record_failure(f"load: {type(error).__name__}: {error}")
                run.notes.append(f"load broke off: {str(error).splitlines()[0]}")
            finally:
                await session.close()
            run.seconds["load"] = time.perf_counter() - start
            oracle = target.oracle(engine, target.checkpoints[Setting.MAIN])
            with run.spending("reference"):
                return attributed(session.trace(target.name), oracle)
        finally:
            with run.spending("stopping"):
                await engine.stop()

    if target.virtual:
        from rollproof.simulation.virtual_loop import run as on_virtual_clock

        run.traces.append(on_virtual_clock(main))
    else:
        run.traces.append(asyncio.run(main()))
    return judged(
        f"{target.name}, {size.requests} calls at once",
        run,
        expected=expected,
        seed=seed,
        started=began,
    )


async def run_load(session: Session, load: Load | None = None) -> None:
    """Run clients that send, abort and resume, and a trainer that pauses and updates the engine."""
    size = load or Load()
    # Updates clear the cache, so a resumed call computes its KV again, and the engine returns the
    # rows of that last prefill.
    session.kv_policy = KvPolicy.RECOMPUTE
    session.provenance = Provenance.LATEST_PREFILL
    done = 0
    moved = asyncio.Event()

    async def client() -> None:
        nonlocal done
        prompt = session.prompt(int(session.draw.integers(1, size.longest_prompt)))
        budget = int(session.draw.integers(1, size.longest_response))
        call = session.send(prompt, budget)
        while True:
            if session.draw.random() < size.aborted:
                await call.wait_for_tokens(int(session.draw.integers(0, budget + 1)))
                if not call.done:
                    await session.abort(call)
            await session.wait_for(call)
            left = _left(call)
            if not left:
                break
            # the client sends prompt and tokens again, as a resuming rollout does
            call = session.continue_call(call, left, offset=False)
        await session.finish(call)
        done += 1
        moved.set()

    async def trainer() -> None:
        for number in range(size.updates):
            # spread over the run, with load left after the last update
            while done < size.requests * (number + 1) // (size.updates + 2):
                moved.clear()
                await moved.wait()
            await session.pause(PauseMode.ABORT, clear_cache=True)
            await session.update(session.serving.other(), clear_cache=True)
            await session.resume()

    await asyncio.gather(trainer(), *(client() for _ in range(size.requests)))


def _left(call: SentCall) -> int:
    """Return the tokens that are left of an aborted call's budget; 0 if it ended by itself."""
    if (
        call.refused is not None
        or not call.outputs
        or call.outputs[0].finish_reason is not FinishReason.ABORT
    ):
        return 0
    return call.query.max_tokens - len(call.outputs[0].token_ids)
