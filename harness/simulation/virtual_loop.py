"""An asyncio event loop with virtual time, which passes only when nothing else can happen.

Sleeping is free, one seed gives one trace byte for byte, and a hang is detected at once: when no
callback is ready and no timer is set, nothing will ever happen again. Threads and sockets would
bring real time back, so they are refused with advice; work for an executor runs inline.

Why our own: looptime 0.9 also gives identical traces, at a thirtieth of the speed (it spins idle
rounds before each jump), and lets executors run on real threads; ``benchmarks/clock.py`` compares
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import socket
import threading
from asyncio import base_events
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop
from itertools import count
from typing import Any, TypeAlias, TypeVar

from rollproof.errors import SubjectError
from rollproof.simulation.memory_network import Network
from rollproof.simulation.watchdog import GivenUp, Watchdog

__all__ = ["DEADLOCK", "News", "Stalled", "Stuck", "VirtualLoop", "describe_wait", "guarded", "run"]

_T = TypeVar("_T")
News: TypeAlias = "tuple[int, tuple[int, ...]]"
"""Something that happened in an instant: the id of a call that was answered, and its prompt."""
_SPIN_LIMIT = 20_000
DEADLOCK = "nothing is scheduled any more"
"""Why a loop stalled that had nothing left to do. It is detected at once, other hangs only after
much time.
"""


class Stalled(RuntimeError):
    """Nothing can happen any more: no callback is ready and no timer is set, or callbacks spin
    without time passing.
    """


class Stuck(Stalled):
    """A step of the loop did not end, and was given up after much real time."""


class _NumberedTask(asyncio.Task[_T]):
    """A task whose hash is its number, so that sets of tasks have the same order in every run.

    ``asyncio.wait`` returns sets, and the hash of other tasks is their address: a stack that goes
    through such a set (prime-rl's ``Dispatcher``) would act in another order each time.
    """

    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        # before the base class, which puts the task into a set
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class _CausedHandle(asyncio.Handle):
    """A callback, with the news of this instant that led to it."""

    __slots__ = ("news",)

    news: frozenset[News]


_NO_NEWS: frozenset[News] = frozenset()


class VirtualLoop(base_events.BaseEventLoop):
    """An event loop whose ``time()`` starts at 0.0 and jumps from timer to timer.

    Attributes:
        ending: Set while tasks that are left over are cancelled.
        turns: The number of rounds of callbacks.
        watchdog: Ends a round that takes far too long in real time.
        network: Servers that listen in memory, if there are any. Clients connect to no others.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool

    def __init__(self, jumps: int | None = None) -> None:
        super().__init__()
        self._now = 0.0
        self._spins = 0
        self._tasks_made = count()
        self.set_task_factory(self._make_task)
        self._jumps_left = math.inf if jumps is None else jumps
        self._news: list[News] = []
        self._known = _NO_NEWS
        self._clock_resolution = 1e-9
        self.ending: bool = False
        self.turns: int = 0
        self.watchdog: Watchdog | None = None
        self.network: Network | None = None

    def _make_task(
        self, _loop: asyncio.AbstractEventLoop, coro: Any, **options: Any
    ) -> asyncio.Task[Any]:
        return _NumberedTask(next(self._tasks_made), coro, loop=self, **options)

    def bound(self, jumps: int) -> None:
        """Let time pass at most ``jumps`` times more."""
        self._jumps_left = jumps

    @property
    def idle(self) -> bool:
        """Whether nothing is scheduled: no callback is ready, and no timer is set."""
        return not any(not handle.cancelled() for handle in (*self._ready, *self._scheduled))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def learn(self, news: News) -> None:
        """Note that the running callback brings ``news``, which may lead to whatever it schedules
        in this instant.
        """
        self._news.append(news)
        self._known |= {news}

    def unaware_of(self) -> tuple[News, ...]:
        """Return the news of this instant that did not lead to the running callback.

        A timer that fires in the instant of a reply was set before it: what the timer does is no
        answer to the reply.
        """
        return tuple(news for news in self._news if news not in self._known)

    def pass_time(self, timeout: float | None) -> None:
        """Jump ahead. Raises ``Stalled`` if there is nothing to wait for, or time never passes."""
        if timeout is None:
            raise Stalled(DEADLOCK)
        if timeout <= 0:
            self._spins += 1
            if self._spins > _SPIN_LIMIT:
                raise Stalled(
                    f"{_SPIN_LIMIT} rounds of callbacks passed without any time passing (a busy"
                    " loop)"
                )
            return
        self._spins = 0
        self._now += timeout
        self._news.clear()
        self._jumps_left -= 1
        if self._jumps_left < 0:
            raise Stalled(
                f"timers went on firing without an end, up to virtual second {self._now:g}"
                " (something is retried for ever)"
            )

    def call_soon(  # type: ignore[override]  # as for call_soon_threadsafe
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """Run ``callback`` in the next round."""
        # leaner than the supertype's: the time of a small case is mostly spent in the loop
        if self.is_closed() or self.get_debug():
            return super().call_soon(callback, *args, context=context)
        handle = _CausedHandle(callback, args, self, context)
        handle.news = self._known
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        """One round: let time pass where nothing is ready, then run what is. The supertype's,
        without sockets and debugging.
        """
        ready, scheduled = self._ready, self._scheduled
        self.turns += 1
        if self.watchdog is not None and self.watchdog.message is not None and not self.ending:
            raise Stuck(self.watchdog.message)
        while scheduled and scheduled[0]._cancelled:
            heappop(scheduled)
        if ready or self._stopping:
            self.pass_time(0.0)
        else:
            self.pass_time(max(0.0, scheduled[0].when() - self._now) if scheduled else None)
        if scheduled:
            end = self._now + self._clock_resolution
            while scheduled and scheduled[0].when() < end:
                ready.append(heappop(scheduled))
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                # a timer was set in an earlier instant, and knows nothing of this one
                self._known = handle.news if type(handle) is _CausedHandle else _NO_NEWS
                handle._run()
        self._known = _NO_NEWS

    def run_in_executor(  # type: ignore[override]  # the supertype's type variables say no more
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run ``func`` inline."""
        # a worker thread would make the order of events depend on real time
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - what a worker would hand back through its future
            future.set_exception(error)
        return future

    def call_soon_threadsafe(  # type: ignore[override]  # the supertype's type variable would say no more
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """As ``call_soon``. Raises ``SubjectError`` from another thread."""
        owner: int | None = self._thread_id  # type: ignore[attr-defined]  # set by BaseEventLoop while it runs
        if owner is not None and threading.get_ident() != owner:
            raise SubjectError(_THREAD_ADVICE)
        return self.call_soon(callback, *args, context=context)

    def add_signal_handler(  # type: ignore[override]  # as for call_soon
        self, sig: int, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Raises ``SubjectError``: a signal comes in real time."""
        raise SubjectError(_SIGNAL_ADVICE)

    async def create_connection(
        self,
        protocol_factory: Callable[[], Any],
        host: Any = None,
        port: Any = None,
        *,
        sock: Any = None,
        **_options: Any,
    ) -> tuple[Any, Any]:
        """Connect to a server in memory. Raises ``SubjectError`` if there is no network, as for
        every other use of sockets.
        """
        return self._network("create_connection").connect(protocol_factory, host, port, sock)

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """As ``create_connection``, for clients that connect a socket first."""
        self._network("sock_connect").reserve(sock, address)

    async def getaddrinfo(self, host: Any, port: Any, **_options: Any) -> list[tuple[Any, ...]]:
        """As ``create_connection``."""
        return self._network("getaddrinfo").resolve(host, port)

    def _network(self, what: str) -> Network:
        if self.network is None:
            raise SubjectError(_LOOP_ADVICE.format(what=what))
        return self.network

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there are no sockets, so there are no events."""

    def _write_to_self(self) -> None:
        """Do nothing: this loop never blocks, so there is nothing to wake up."""


_THREAD_ADVICE = (
    "The subject uses a thread. rollproof runs subjects on a virtual clock, where threads would"
    " bring real time back in and make runs unrepeatable. Make the method async, hand the work to"
    " `loop.run_in_executor` (which runs inline here), or record a real run with"
    " `rollproof.record(...)` and judge that."
)
_SOCKET_ADVICE = (
    "The subject opened a socket ({what}). rollproof runs subjects on a virtual clock with"
    " in-process fakes, where nothing answers on a socket in virtual time. Use the handles that"
    " `fleet` gives, or record a real run with `rollproof.record(...)` and judge that."
)
_LOOP_ADVICE = _SOCKET_ADVICE.replace("socket ({what})", "connection (loop.{what})")

_SIGNAL_ADVICE = (
    "The subject sets a signal handler on the event loop. rollproof runs subjects on a virtual"
    " clock, into which no signal can come. Leave handlers to the program that starts the stack, or"
    " make them optional, so that a test can do without."
)
_STOP_ADVICE = (
    "The subject stops the event loop. rollproof runs subjects on a virtual clock of its own, and"
    " judges what was going on only when that has ended: leave the loop to the program that starts"
    " the stack."
)
_PROCESS_ADVICE = (
    "The subject starts a process (loop.{what}). rollproof runs subjects on a virtual clock, which"
    " cannot wait for a process in real time. Give the subject a stand-in for what the process does"
    " (the engines of `fleet` answer in this process), or record a real run with"
    " `rollproof.record(...)` and judge that."
)


def _refusing(name: str, advice: str) -> Callable[..., Any]:
    def refuse(_self: VirtualLoop, *_args: Any, **_kwargs: Any) -> Any:
        raise SubjectError(advice.format(what=name))

    refuse.__name__ = name
    refuse.__doc__ = "Raises ``SubjectError``, with advice: there is no real time here to do it in."
    return refuse


_REFUSED: Mapping[str, tuple[str, ...]] = {
    _PROCESS_ADVICE: ("subprocess_exec", "subprocess_shell"),
    _LOOP_ADVICE: (
        "add_reader", "add_writer", "connect_accepted_socket", "connect_read_pipe",
        "connect_write_pipe",
        "create_datagram_endpoint", "create_server", "create_unix_connection", "create_unix_server",
        "getnameinfo", "sendfile", "sock_accept", "sock_recv", "sock_recv_into", "sock_recvfrom",
        "sock_recvfrom_into", "sock_sendall",
        "sock_sendfile", "sock_sendto", "start_tls",
    ),
}  # fmt: skip
"""Methods that work in real time. The base class raises a bare ``NotImplementedError``."""
for _advice, _names in _REFUSED.items():
    for _name in _names:
        setattr(VirtualLoop, _name, _refusing(_name, _advice))


_INSIDE: Counter[int] = Counter()
"""How many ``guarded`` blocks each thread is in."""
_PATCHED: list[tuple[type, str, Any]] = []
"""What is replaced while any thread is in one: owner, name, and the original attribute (``None``: a
base class has it).
"""
_PATCHING = threading.Lock()


@contextmanager
def guarded() -> Iterator[None]:
    """In this block, starting a Python thread or connecting a socket raises ``SubjectError`` with
    advice. Other threads are not affected.
    """
    own = threading.get_ident()
    with _PATCHING:
        if not _INSIDE:
            _guard(threading.Thread, "start", _THREAD_ADVICE)
            for name in ("connect", "connect_ex", "bind"):
                _guard(socket.socket, name, _SOCKET_ADVICE.format(what=f"socket.{name}"))
        _INSIDE[own] += 1
    try:
        yield
    finally:
        with _PATCHING:
            _INSIDE[own] -= 1
            if not _INSIDE[own]:
                del _INSIDE[own]
            while _PATCHED and not _INSIDE:
                owner, name, before = _PATCHED.pop()
                if before is not None:
                    setattr(owner, name, before)
                elif name in vars(owner):
                    # the C method of the base class is visible again
                    delattr(owner, name)


def _guard(owner: type, name: str, advice: str) -> None:
    """Let ``owner.name`` raise ``SubjectError`` in threads that are in a ``guarded`` block."""
    real = getattr(owner, name)

    def guard(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in _INSIDE:
            raise SubjectError(advice)
        return real(self, *args, **kwargs)

    _PATCHED.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, guard)


def run(
    main: Callable[[], Coroutine[Any, Any, _T]], jumps: int | None = None, *, seconds: float = 0.0
) -> _T:
    """Run ``main()`` on a new virtual loop and return its result; cancel tasks that are left over.

    Args:
        main: Makes the coroutine.
        jumps: How often time may pass; ``None``: without bound.
        seconds: Processor time that one step may take; 0: without bound.

    Raises:
        Stalled: ``main`` can never end.
        Stuck: A step does not end.
        SubjectError: The code stops the loop, or this is called in a running loop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise SubjectError(
            "rollproof runs its own event loop: call it from sync code, not from inside a running"
            " loop."
        )
    loop = VirtualLoop(jumps)
    task = loop.create_task(main())
    given_up_before: str | None = None
    with Watchdog(lambda: loop.turns, seconds, VirtualLoop._run_once.__code__) as loop.watchdog:
        try:
            asyncio.set_event_loop(loop)
            with guarded():
                result = loop.run_until_complete(task)
        except GivenUp:
            if loop.watchdog.message is None:
                # the step of a caller was given up
                raise
            raise Stuck(loop.watchdog.message) from None
        except RuntimeError as error:
            if isinstance(error, Stalled) or task.done():
                raise
            raise SubjectError(_STOP_ADVICE) from error
        finally:
            given_up_before = loop.watchdog.message
            _cancel_all(loop)
            if task.done() and not task.cancelled():
                # asyncio would log an exception that nobody retrieves
                task.exception()
            asyncio.set_event_loop(None)
            loop.close()
    if loop.watchdog.message is not None and given_up_before is None:
        # a task that was left over did not end
        raise Stuck(loop.watchdog.message)
    return result


def _cancel_all(loop: VirtualLoop) -> None:
    loop.ending = True
    left = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    for task in left:
        task.cancel()
    if left:
        loop.bound(1_000)
        loop.set_exception_handler(lambda _loop, _context: None)
        try:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        except (Stalled, GivenUp):
            # a task ignores its cancellation: the loop is closed all the same
            for task in asyncio.all_tasks(loop):
                _close(task)


def _close(task: asyncio.Task[Any]) -> None:
    """Close the coroutine of a task that does not end."""
    coroutine = task.get_coro()
    # Python would close it when it is collected, perhaps in another run, and report what it raises
    # as unraisable: under pytest in a test that has nothing to do with it.
    if inspect.iscoroutine(coroutine):
        with contextlib.suppress(Exception, asyncio.CancelledError, GeneratorExit):
            coroutine.close()


def describe_wait(task: asyncio.Task[Any]) -> str:
    """Return where a task waits: the functions down to the innermost await, as ``generate
    (llm.py:120) > sleep``.
    """
    names = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = (
            getattr(awaited, "cr_frame", None)
            or getattr(awaited, "gi_frame", None)
            or getattr(awaited, "ag_frame", None)
        )
        if frame is None:
            names.append(type(awaited).__name__)
            break
        code = frame.f_code
        names.append(f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return " > ".join(names[-5:]) or "nothing"
