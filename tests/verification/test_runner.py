"""Runner: what a subject does becomes a trace; what it cannot be run with becomes a clear error."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import Action, ActionKind, Trigger
from rollproof.core.error_text import describe_error
from rollproof.core.events.rollout import Gauge, Result
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout, as_tokens
from rollproof.core.trace import Trace
from rollproof.errors import SubjectError
from rollproof.fakes.clients.reference_clients import REFERENCES, AsSampled, PartialSample
from rollproof.simulation.mutation_guard import lend
from rollproof.store import dump_trace
from rollproof.verification.runner import run_case
from tests.support.runner_case import CASE, result_of


def _bytes(trace: Trace, path: Path) -> bytes:
    dump_trace(trace, path)
    return path.read_bytes()


@pytest.mark.parametrize("name", list(REFERENCES))
def test_one_case_gives_one_trace_byte_for_byte(name: str, tmp_path: Path) -> None:
    """The same case run twice gives identical traces, in every byte of their JSON form."""
    busy = replace(
        CASE,
        requests=(*CASE.requests, Request(request_id="r1", prompt_ids=(13,), max_tokens=6)),
        servers=2,
        actions=(*CASE.actions, Action(when=Trigger(request="r1", tokens=3), do=ActionKind.ABORT)),
    )

    assert _bytes(run_case(REFERENCES[name], busy), tmp_path / "a") == _bytes(
        run_case(REFERENCES[name], busy), tmp_path / "b"
    )


def test_another_seed_gives_another_trace(tmp_path: Path) -> None:
    """The property above is not vacuous: values depend on the seed."""
    assert _bytes(run_case(AsSampled, CASE), tmp_path / "a") != _bytes(
        run_case(AsSampled, replace(CASE, seed=1)), tmp_path / "b"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (lambda routes: routes.tolist(), np.uint8),
        (lambda routes: list(map(np.ndarray.tolist, routes)), np.uint8),
        (lambda routes: routes.astype(np.int64), np.int64),
        (lambda routes: list(routes.astype(np.int64)), np.int64),
        (lambda routes: (routes.astype(np.int64) + 300).tolist(), np.int64),
    ],
)
def test_routes_in_plain_lists_have_the_declared_type(given: Any, expected: Any) -> None:
    """Lists have no type: they take the declared one if it holds their numbers. Arrays keep
    theirs.
    """

    class Listed(AsSampled):
        def to_record(self, native: Any) -> Rollout:
            record = super().to_record(native)
            assert isinstance(record, Rollout) and record.routes is not None
            return replace(record, routes=given(record.routes))

    rollout = result_of(run_case(Listed, CASE)).rollout
    assert rollout is not None and rollout.routes is not None
    assert expected == rollout.routes.dtype


def test_what_a_rollout_raises_is_an_outcome() -> None:
    """An exception of the stack becomes the request's result, with its class and text."""

    class Raises(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            raise KeyError("weight_version")

    line = Raises.rollout.__code__.co_firstlineno + 1
    expected = f"KeyError: 'weight_version' (test_runner.py:{line}, in rollout)"
    assert expected == result_of(run_case(Raises, CASE)).error


def test_a_deadlocked_rollout_is_a_hang_that_says_what_it_awaits() -> None:
    """A rollout that waits for ever ends the run at once, and names the function that waits."""

    class Waits(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            await asyncio.get_running_loop().create_future()
            return None

    result = result_of(run_case(Waits, CASE))

    assert result.hung
    assert result.error is not None
    assert result.error.startswith("nothing is scheduled any more; it awaits ")
    assert "rollout (test_runner.py:" in result.error


def test_a_polling_rollout_is_bounded_by_the_virtual_deadline() -> None:
    """A rollout that polls for ever is cut at the case's deadline, in no real time."""

    class Polls(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            while True:  # noqa: ASYNC110 - polling for ever is what is tested
                await asyncio.sleep(1)

    result = result_of(run_case(Polls, CASE))

    assert result.hung
    assert "the virtual deadline of 500 s passed; it awaits _run_request (runner.py" in str(
        result.error
    )


def test_a_busy_rollout_is_a_hang() -> None:
    """A rollout that spins without letting time pass is cut off, too."""

    class Spins(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            while True:  # noqa: ASYNC110 - spinning is what is tested
                await asyncio.sleep(0)

    assert "busy loop" in str(result_of(run_case(Spins, CASE)).error)


def test_changes_to_the_callers_objects_are_recorded() -> None:
    """What a stack writes into the objects that it was handed is in the result."""

    class Writes(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            params = lend("sampling_params", {"max_tokens": 4})
            params["max_tokens"] = 1
            request.sampling["n"] = 2  # type: ignore[index]
            return await super().rollout(request)

    changed = result_of(run_case(Writes, CASE)).caller_changed

    assert "request: 'sampling' went from {'top_p': 1.0} to {'top_p': 1.0, 'n': 2}" == changed[0]
    assert "sampling_params: 'max_tokens' went from 4 to 1" == changed[1]


def test_routes_of_replies_that_are_written_to_are_recorded() -> None:
    """Writing is seen whenever it happens and whoever does it; writing into a copy, and another
    shape of the same array, is not writing.
    """

    class Writes(AsSampled):
        def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
            assert output.routes is not None
            super().merge_routes(sample, sent, output)
            self.kept = output.routes

        def stop(self) -> None:
            self.kept[1] = 0

    class Sorts(AsSampled):
        def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
            assert output.routes is not None
            own = output.routes.copy()
            own[..., ::-1].sort(axis=-1)
            super().merge_routes(sample, sent, output)
            output.routes.shape = (len(own), -1)

    assert ("routes of call 2: 1 of 2 rows have other values",) == result_of(
        run_case(Writes, CASE)
    ).caller_changed
    assert () == result_of(run_case(Sorts, CASE)).caller_changed


def test_arrays_that_change_after_they_were_handed_over_are_recorded() -> None:
    """A sample that aliases a buffer which is reused is seen at the end of the run."""
    shared = np.zeros((5, 3, 2), np.uint8)

    class Aliases(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            shared[:] = 0
            return await super().rollout(request)

        def to_record(self, native: Rollout) -> Rollout:
            return replace(native, routes=shared.copy())

        def stop(self) -> None:
            shared[:] = 7

    assert ("routes",) == result_of(run_case(Aliases, CASE)).later_changed


@pytest.mark.parametrize(("label", "kept"), [("r1", "r1"), ("7c1e", "r0"), ("r0", "r0")])
def test_the_id_of_another_request_is_kept(label: str, kept: str) -> None:
    """An id of the stack's own making is replaced by the request's; that of another request is for
    the checks to see.
    """

    class Labels(AsSampled):
        def to_record(self, native: Rollout) -> Rollout:
            return replace(
                native, request_id=label if native.request_id == "r0" else native.request_id
            )

    both = replace(
        CASE, requests=(*CASE.requests, Request(request_id="r1", prompt_ids=(7, 8), max_tokens=4))
    )
    results = {
        event.request_id: event.rollout
        for event in run_case(Labels, both)
        if isinstance(event, Result)
    }
    assert {"r0": kept, "r1": "r1"} == {
        name: rollout and rollout.request_id for name, rollout in results.items()
    }


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (("zzz", "zzz", "zzz"), ("r0", "r0", "r0")),
        (("a", "b", "a"), ("r0", "r1", "r0")),
        (("", "", ""), ("r0", "r1", "r2")),
    ],
    ids=["one name for all", "two samples of one name", "no names"],
)
def test_a_name_of_the_stacks_own_stands_for_the_request_that_had_it_first(
    names: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    """So that the trace does not depend on the name, and shows which samples share one."""

    class Labels(AsSampled):
        def to_record(self, native: Rollout) -> Rollout:
            return replace(native, request_id=names[int(native.request_id[1:])])

    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(7 + i, 8), max_tokens=4) for i in range(3)
    )
    events = run_case(Labels, replace(CASE, requests=requests, actions=())).events
    assert dict(zip(("r0", "r1", "r2"), kept, strict=True)) == {
        event.request_id: event.rollout and event.rollout.request_id
        for event in events
        if isinstance(event, Result)
    }


def test_a_sync_subject_is_accepted() -> None:
    """Every method may be sync; a rollout that returns nothing is a dropped sample."""

    class Drops(AsSampled):
        def rollout(self, request: Request) -> Any:
            return None

    result = result_of(run_case(Drops, CASE))

    assert (None, None, False) == (result.rollout, result.error, result.hung)


def _returns(native: Any) -> type[AsSampled]:
    class Returns(AsSampled):
        def to_record(self, _native: Rollout) -> Any:
            return native(_native) if callable(native) else native

    return Returns


@pytest.mark.parametrize(
    ("native", "message"),
    [
        (7, "must return a Rollout, not int"),
        (
            lambda r: replace(r, routes=np.zeros((2, 3))),
            r"routes must be integers \(rows, layers, top_k\), not an array of float64 \(2, 3\)",
        ),
        (
            lambda r: replace(r, logprobs=[0.0, "x"]),
            r"logprobs\[1\] must be numbers or None, not str 'x'",
        ),
        (lambda r: replace(r, logprobs=np.zeros(1, np.longdouble)), "logprobs must fit float64"),
        (
            lambda r: replace(r, response_ids=[1, None]),
            r"response_ids\[1\] must be integers, not None",
        ),
        (
            lambda r: replace(r, response_ids=(2**63,)),
            "response_ids must be integers of 64 bits",
        ),
        (
            lambda r: replace(r, prompt_ids=None),
            "prompt_ids is None: every request has a prompt",
        ),
        (
            lambda r: replace(r, finish_reason="done"),
            r"finish_reason must be one of \['stop', .*\], not 'done'",
        ),
        (lambda r: replace(r, finish_reason=[]), "finish_reason must be str or null, not a list"),
        (lambda r: replace(r, routes_start=1.5), "routes_start must be int, not 1.5"),
        (lambda r: replace(r, routes_start=-1), "routes_start must be a position >= 0, not -1"),
        (lambda r: replace(r, routes_start=2**70), "routes_start must fit 64 bits"),
        (lambda r: replace(r, version=1.5), "version must be int or str or null, not 1.5"),
        (lambda r: replace(r, version=[1]), "version must be int or str or null"),
        (
            lambda r: replace(r, spans=((0, 1, 2),)),
            r"spans\[0\] must be an object with the fields of Span",
        ),
        (lambda r: replace(r, token_versions=1), "token_versions must be a list or tuple"),
        (
            lambda r: replace(r, call_versions=None),
            "call_versions must be a list or tuple, not None",
        ),
        (lambda r: replace(r, extra={"reward": object()}), r"extra\.?\[reward\] must be"),
        (lambda r: as_tokens("abc"), ": token_ids must be a sequence of integers"),
        (lambda r: {}[r], "raised KeyError"),
    ],
)
def test_unusable_records_are_refused(native: Any, message: str) -> None:
    """A ``to_record`` that returns a wrong type, rank or range is told so, with its own name and
    that of the field.
    """
    with pytest.raises(SubjectError, match=rf"_returns\.<locals>\.Returns\.to_record.*{message}"):
        run_case(_returns(native), CASE)


def test_records_are_brought_into_the_types_that_traces_hold(tmp_path: Path) -> None:
    """Narrow floats, a plain finish reason and a subclass of ``Rollout`` are no fault: the trace
    holds what they mean.
    """

    class Extended(Rollout):
        """A user's own."""

    def narrow(rollout: Rollout) -> Rollout:
        values = {field.name: getattr(rollout, field.name) for field in fields(Rollout)}
        assert rollout.logprobs is not None
        return Extended(
            **{**values, "logprobs": rollout.logprobs.astype(np.float32), "finish_reason": "length"}
        )

    trace = run_case(_returns(narrow), CASE)
    rollout = result_of(trace).rollout

    assert rollout is not None and rollout.logprobs is not None
    assert (Rollout, np.float64, FinishReason.LENGTH) == (
        type(rollout),
        rollout.logprobs.dtype,
        rollout.finish_reason,
    )
    dump_trace(trace, tmp_path / "trace.json")


def test_records_take_numbers_in_every_form(tmp_path: Path) -> None:
    """Lists, jagged arrays, numpy scalars and None for no tokens: the trace holds the same as for
    arrays, and later changes of a list are found.
    """
    kept: list[list[float]] = []

    def lists(rollout: Rollout) -> Rollout:
        assert rollout.routes is not None and rollout.logprobs is not None
        if not kept:
            kept.append(rollout.logprobs.tolist())
        return replace(
            rollout,
            prompt_ids=np.array(rollout.prompt_ids),
            response_ids=list(rollout.response_ids),
            logprobs=kept[0],
            loss_mask=[True] * len(rollout.response_ids),
            routes=[rollout.routes[:1].tolist(), rollout.routes[1:]],
            routes_start=np.int64(rollout.routes_start),
            call_versions=[np.int64(1)],
        )

    plain = result_of(run_case(AsSampled, CASE)).rollout
    trace = run_case(_returns(lists), CASE)
    rollout = result_of(trace).rollout
    nothing = result_of(run_case(_returns(lambda r: replace(r, response_ids=None)), CASE)).rollout

    assert rollout is not None and plain is not None and nothing is not None
    assert (plain.prompt_ids, plain.response_ids) == (rollout.prompt_ids, rollout.response_ids)
    for name in ("logprobs", "routes"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(rollout, name))
    assert ((1,), 0, ()) == (rollout.call_versions, rollout.routes_start, nothing.response_ids)
    assert () == result_of(trace).later_changed
    dump_trace(trace, tmp_path / "trace.json")

    class Changes(AsSampled):
        def to_record(self, native: Rollout) -> Rollout:
            return replace(lists(native), logprobs=changing)

        def stop(self) -> None:
            changing[0] = -9.0

    changing = list(kept[0])
    assert ("logprobs",) == result_of(run_case(Changes, CASE)).later_changed


def test_a_subject_without_its_methods_is_refused() -> None:
    """What is missing is named, and so is what a subject has."""

    class Empty:
        def start(self, fleet: Any) -> None: ...

    with pytest.raises(
        SubjectError, match=r"without \['rollout', 'update_weights', 'to_record', 'stop'\]"
    ):
        run_case(Empty, CASE)


def test_a_subject_without_a_contract_is_refused() -> None:
    """A contract is asked for, never guessed."""

    class NoContract(AsSampled):
        def start(self, fleet: Any) -> None:
            self.fleet = fleet

    with pytest.raises(
        SubjectError, match="must have a `contract` of type Contract after start, not None"
    ):
        run_case(NoContract, CASE)


def test_a_factory_that_raises_is_told_in_our_words() -> None:
    """A constructor that fails is a clear error that names the factory."""

    def broken() -> Any:
        raise ValueError("no model path")

    with pytest.raises(
        SubjectError, match="broken could not be created: ValueError: no model path"
    ):
        run_case(broken, CASE)


def _rollout_that(act: Any) -> type[AsSampled]:
    class Acts(AsSampled):
        def rollout(self, request: Request) -> Any:
            act()

    return Acts


async def _nothing() -> None:
    return


def _connect() -> None:
    with socket.socket() as made:
        made.connect(("127.0.0.1", 1))


def _own_loop() -> None:
    work = _nothing()
    try:
        asyncio.run(work)
    finally:
        work.close()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: threading.Thread(target=print).start(), "uses a thread"),
        (_connect, "opened a socket"),
        (_own_loop, "creates its own event loop.*Make `rollout` async"),
        (
            lambda: asyncio.get_running_loop().add_reader(0, print),
            r"opened a connection \(loop\.add_reader\).*Use the handles that `fleet`",
        ),
        (
            lambda: asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print),
            "sets a signal handler on the event loop",
        ),
        (
            lambda: asyncio.get_running_loop().stop(),
            "stops the event loop.*leave the loop to the program that starts the stack",
        ),
    ],
)
def test_what_cannot_run_on_a_virtual_clock_is_refused_with_advice(act: Any, message: str) -> None:
    """Threads, sockets and loops of a subject's own are detected, and the way out is named."""
    with pytest.raises(SubjectError, match=message):
        run_case(_rollout_that(act), CASE)


def test_a_retry_without_a_pause_cannot_outrun_the_clock() -> None:
    """A client that asks a dead server again and again, without a wait, is a hang; it does not run
    for ever in real time.
    """

    class Insists(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            self.fleet.servers["s0"].kill()
            while True:
                try:
                    await self.fleet.servers["s0"].generate(prompt_ids=[1], max_tokens=1)
                except ConnectionError:
                    continue

    result = result_of(run_case(Insists, CASE))

    assert result.hung
    assert "the virtual deadline of 500 s passed" in str(result.error)


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (
            lambda: asyncio.create_subprocess_exec("true"),
            r"starts a process \(loop\.subprocess_exec\).*Give the subject a stand-in",
        ),
        (
            lambda: asyncio.create_subprocess_shell("true"),
            r"starts a process \(loop\.subprocess_shell\)",
        ),
        (
            lambda: asyncio.open_connection("localhost", 1),
            r"opened a connection \(loop\.create_connection\)",
        ),
        (
            lambda: asyncio.start_server(print, "localhost", 0),
            r"opened a connection \(loop\.create_server\)",
        ),
    ],
)
def test_what_a_loop_does_in_real_time_is_refused_with_advice(begin: Any, message: str) -> None:
    """Processes and connections of asyncio are no bare ``NotImplementedError``: the text says what
    to do instead.
    """

    class Begins(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            await begin()
            return None

    with pytest.raises(SubjectError, match=message):
        run_case(Begins, CASE)


@pytest.mark.parametrize(
    "bring", [_own_loop, lambda: asyncio.run(_nothing()), lambda: asyncio.Runner().run(_nothing())]
)
def test_a_loop_of_its_own_leaves_no_warnings(bring: Any) -> None:
    """The coroutine that a subject's own loop was to run is closed: Python does not warn of it when
    it is collected.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(SubjectError, match=r"rollout creates its own event loop"):
            run_case(_rollout_that(bring), CASE)
        gc.collect()

    assert [] == [str(warning.message) for warning in caught if warning.category is RuntimeWarning]


def test_an_exception_is_told_in_one_line() -> None:
    """Texts of several lines, or without end, or that cannot be made, become one line of bounded
    length.
    """

    class Unprintable(ValueError):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert "ValueError: one two" == describe_error(ValueError("one\n  two."))
    assert "KeyError" == describe_error(KeyError())
    assert "Unprintable" == describe_error(Unprintable())
    assert describe_error(ValueError("x" * 9999)).endswith("... (9,999 characters)")


def test_gauges_may_be_async() -> None:
    """As every other method; what is no mapping of numbers is refused."""

    async def gauges(self: AsSampled) -> dict[str, float]:
        return {"queue": 0}

    names = {
        event.name
        for event in run_case(type("Async", (AsSampled,), {"gauges": gauges}), CASE).events
        if isinstance(event, Gauge)
    }

    assert "queue" in names
    with pytest.raises(
        SubjectError, match="gauges must return a mapping of names to numbers, and raised TypeError"
    ):
        run_case(type("Bad", (AsSampled,), {"gauges": lambda self: 3}), CASE)
