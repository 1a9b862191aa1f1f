"""Control of the fake engine: aborts, callers that leave, pauses, deaths."""

from __future__ import annotations

import asyncio

import pytest

from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Abort, Admit, Fault, Pause, Reply, Resume
from rollproof.core.records import FinishReason
from rollproof.fakes.engine.exceptions import ServerDied
from tests.support.engine_driver import PROMPT, EngineDriver, on_clock, spans

A, B = 0, 1


def test_abort_mid_decode_returns_what_there_is() -> None:
    """The reply has all tokens so far, as many logprobs, and rows for prompt + response - 1."""

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(6, request_id="mine")
        await bench.steps(2)
        assert await bench.engine.abort("mine") == (1,)
        output = call.result()
        assert (len(output.token_ids), output.finish_reason) == (2, FinishReason.ABORT)
        assert output.logprobs is not None
        assert output.routes is not None
        assert (len(output.logprobs), len(output.routes)) == (2, 5)

    on_clock(main)


@pytest.mark.parametrize("queued", [False, True])
def test_abort_before_the_first_token(queued: bool) -> None:
    """A call without sampled tokens, running or waiting, returns no tokens."""

    async def main() -> None:
        bench = EngineDriver(max_batch=1)
        other = bench.call(9, (1, 1), request_id="other") if queued else None
        call = bench.call(6, request_id="mine")
        await asyncio.sleep(0.5)
        await bench.engine.abort("mine")
        output = call.result()
        assert (output.token_ids, output.routes, output.spans) == ((), None, ())
        assert output.logprobs is not None
        assert (len(output.logprobs), output.finish_reason) == (0, FinishReason.ABORT)
        assert len(bench.events(Admit)) == 1
        await (other if other is not None else asyncio.sleep(0))
        assert set(bench.engine.gauges().values()) == {0.0}

    on_clock(main)


def test_abort_after_the_last_token_finds_nothing() -> None:
    """A call that has ended is not in flight: an abort changes nothing and returns no call."""

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(2)
        await bench.steps(2)
        assert await bench.engine.abort() == ()
        assert await bench.engine.abort_call(1) == ()
        assert call.result().finish_reason is FinishReason.LENGTH

    on_clock(main)


def test_abort_of_one_call_leaves_the_others() -> None:
    """Only the call with the given handle ends."""

    async def main() -> None:
        bench = EngineDriver()
        calls = [bench.call(4, (9, number), request_id=f"call {number}") for number in range(3)]
        await bench.steps(1)
        await bench.engine.abort("call 1")
        outputs = await asyncio.gather(*calls)
        assert [output.finish_reason for output in outputs] == [
            FinishReason.LENGTH,
            FinishReason.ABORT,
            FinishReason.LENGTH,
        ]

    on_clock(main)


def test_a_caller_that_gives_up_frees_its_place() -> None:
    """A cancelled call leaves the batch without a reply: the trace does not know its outcome."""

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(6)
        await bench.steps(2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert bench.events(Reply) == []
        assert set(bench.engine.gauges().values()) == {0.0}
        assert len((await bench.call(2)).token_ids) == 2

    on_clock(main)


def test_an_abort_finds_no_call_whose_caller_hangs_up() -> None:
    """A client that times out cancels its wait and aborts the call in the same moment."""

    async def main() -> None:
        bench = EngineDriver()
        gone, other = bench.call(6), bench.call(6, (9, 9))
        await bench.steps(2)
        gone.cancel()
        assert len(await bench.engine.abort()) == 1
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert (await other).finish_reason is FinishReason.ABORT
        assert [event.call_id for event in bench.events(Reply)] == list(
            bench.events(Abort)[0].call_ids
        )

    on_clock(main)


def test_pause_abort_ends_everything_and_parks_new_calls() -> None:
    """Running and waiting calls return before the pause is acknowledged; a new call runs only after
    the resume.
    """

    async def main() -> None:
        bench = EngineDriver(max_batch=1)
        running, waiting = bench.call(6), bench.call(6, (9, 9))
        await bench.steps(2)
        await bench.engine.pause(PauseMode.ABORT)
        assert [len(call.result().token_ids) for call in (running, waiting)] == [2, 0]
        assert bench.events(Pause)[0].progress == {}
        parked = bench.call(3)
        await bench.steps(5)
        assert not parked.done()
        await bench.engine.resume()
        await parked
        kinds = [event.kind for event in bench.recorder.events]
        assert kinds == [
            "call",
            "call",
            "admit",
            "reply",
            "reply",
            "pause",
            "call",
            "resume",
            "admit",
            "reply",
        ]

    on_clock(main)


def test_pause_wait_drains() -> None:
    """Running calls reach their end before the pause is acknowledged; waiting calls do not
    start.
    """

    async def main() -> None:
        bench = EngineDriver(max_batch=1)
        running, waiting = bench.call(4), bench.call(2, (9, 9))
        await bench.steps(1)
        await bench.engine.pause(PauseMode.WAIT)
        assert (running.done(), running.result().finish_reason, waiting.done()) == (
            True,
            FinishReason.LENGTH,
            False,
        )
        assert bench.events(Pause)[0].time == 4.0
        await bench.engine.resume()
        assert len((await waiting).token_ids) == 2

    on_clock(main)


def test_pause_wait_ends_with_the_resume_that_overtakes_it() -> None:
    """A drain that a resume cuts short is not acknowledged: the server is not paused."""

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(6)
        await bench.steps(1)
        pausing = asyncio.ensure_future(bench.engine.pause(PauseMode.WAIT))
        await bench.steps(1)
        await bench.engine.resume()
        await pausing
        assert (bench.events(Pause), bench.engine.paused) == ([], False)
        await call

    on_clock(main)


def test_a_drain_that_was_cut_short_is_not_acknowledged_for_the_pause_behind_it() -> None:
    """Two updates without a lock: the resume of one ends the drain of the other, and a third pause
    at the same instant drains again.
    """

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(6)
        await bench.steps(1)
        first = asyncio.ensure_future(bench.engine.pause(PauseMode.WAIT))
        await bench.steps(1)
        await bench.engine.resume()
        second = asyncio.ensure_future(bench.engine.pause(PauseMode.WAIT))
        await first
        assert ([], False) == (bench.events(Pause), call.done())
        await second
        assert ([{}], True) == ([event.progress for event in bench.events(Pause)], call.done())
        await bench.engine.resume()

    on_clock(main)


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_frozen_calls_go_on_after_the_resume(mode: PauseMode) -> None:
    """Such a pause samples nothing, and the call ends as if there had been none."""

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(6)
        await bench.steps(2)
        await bench.engine.pause(mode)
        await bench.steps(7)
        assert bench.engine.progress() == {1: 2}
        await bench.engine.resume()
        output = await call
        assert bench.policy.choices(A, [*PROMPT, *output.token_ids], len(PROMPT)).tolist() == list(
            output.token_ids
        )
        assert [(event.progress) for event in (*bench.events(Pause), *bench.events(Resume))] == [
            {1: 2},
            {1: 2},
        ]

    on_clock(main)


def test_two_pauses_end_with_one_resume() -> None:
    """Pausing a paused server is allowed, and one resume lets it run: pauses are a state, not a
    count.
    """

    async def main() -> None:
        bench = EngineDriver()
        await bench.engine.pause(PauseMode.ABORT)
        await bench.engine.pause(PauseMode.KEEP)
        call = bench.call(1)
        await bench.engine.resume()
        await call

    on_clock(main)


def test_a_dead_server_answers_nobody() -> None:
    """Calls in flight and new ones raise ``ServerDied``, a ``ConnectionError``; after the revival
    the server is empty and works.
    """

    async def main() -> None:
        bench = EngineDriver(max_batch=1)
        calls = [bench.call(6), bench.call(6, (9, 9))]
        await bench.steps(2)
        bench.engine.kill()
        for call in (*calls, bench.call(1)):
            with pytest.raises(ServerDied, match="Server s0 died") as raised:
                await call
            assert isinstance(raised.value, ConnectionError)
        with pytest.raises(ServerDied):
            await bench.engine.pause()
        bench.engine.revive(B, B)
        output = await bench.call(1)
        assert output.spans == spans((0, 1, B))
        assert [fault.what for fault in bench.events(Fault)] == ["death", "revive"]
        assert bench.events(Reply)[0].call_id == 4

    on_clock(main)


def test_a_drain_ends_with_the_server() -> None:
    """A caller that waits for a pause of a server that dies gets ``ServerDied``."""

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(6)
        await bench.steps(1)
        pausing = asyncio.ensure_future(bench.engine.pause(PauseMode.WAIT))
        await bench.steps(1)
        bench.engine.kill()
        for task in (call, pausing):
            with pytest.raises(ServerDied):
                await task

    on_clock(main)


@pytest.mark.parametrize("paused", [False, True])
def test_a_blocked_loop_does_not_stop_an_engine(paused: bool) -> None:
    """It is a process of its own: only a pause keeps its calls from sampling during a transfer."""

    async def main() -> None:
        bench = EngineDriver(transfer_steps=2)
        call = bench.call(6)
        await bench.steps(2)
        if paused:
            await bench.engine.pause(PauseMode.KEEP, clear_cache=False)
        bench.engine.run_while_blocked()
        bench.engine.load_now(1)
        await bench.engine.resume()
        await call
        sampled = 2 if paused else 4
        assert spans((0, sampled, 0), (sampled, 6, "mixed")) == bench.reply().true_tokens

    on_clock(main)
