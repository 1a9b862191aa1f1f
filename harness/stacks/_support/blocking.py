"""Code of a process that blocks while it waits for another, such as a trainer for its servers."""

from __future__ import annotations

import _thread
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from queue import SimpleQueue

__all__ = ["BlockingProcess"]


class BlockingProcess:
    """A stand-in for a process whose code blocks in calls of other processes.

    What it waits for takes virtual time, in which the loop runs on: servers and rollout workers are
    processes of their own. Everything else that it does takes none, so that a case gives one trace:
    either its code runs or the loop does.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[Awaitable[None] | _Ended] = SimpleQueue()
        self._answers: SimpleQueue[BaseException | None] = SimpleQueue()

    async def run(self, code: Callable[[], object]) -> None:
        """Run ``code``, in a thread; what it gives to ``wait`` is awaited here. Raises what it
        raises.
        """
        context = copy_context()

        def main() -> None:
            try:
                context.run(code)
            except BaseException as error:  # noqa: BLE001 - handed to who waits
                self._asked.put(_Ended(error))
            else:
                self._asked.put(_Ended(None))

        # not a threading.Thread, which a virtual loop refuses: this one never runs beside the loop
        _thread.start_new_thread(main, ())
        while True:
            request = self._asked.get()
            if isinstance(request, _Ended):
                if request.error is not None:
                    raise request.error
                return
            # a cancellation too: otherwise the thread would wait for ever
            answer: BaseException | None = None
            try:
                await request
            except BaseException as error:  # noqa: BLE001 - handed to who waits
                answer = error
            self._answers.put(answer)

    def wait(self, work: Awaitable[None]) -> None:
        """Block the code that ``run`` runs until ``work`` is done. Raises what that raises."""
        self._asked.put(work)
        error = self._answers.get()
        if error is not None:
            raise error


class _Ended:
    """The code has ended, by ``error`` if there is one."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
