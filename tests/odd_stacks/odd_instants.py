"""Callers whose timers fire in the very instant in which something else happens: a reply, an abort,
an update, a death. Steps of the fakes take one second, and so do these timers.
"""

from __future__ import annotations

import asyncio
import contextlib

from tests.odd_stacks.bases.control import Control
from tests.odd_stacks.bases.convo import Convo, Gateway
from tests.odd_stacks.bases.thin import Thin


class Copies(Thin):
    """Sends copies of a call; each has a handle of its own."""

    def copy(self, run, sent, left, number):
        server = self.servers[(run.attempt + number) % len(self.servers)]
        key = f"{self.key(run)}.{number}"
        call = server.generate(
            prompt_ids=sent,
            max_tokens=left,
            request_id=key,
            sampling=self.params(run),
            media=run.request.media,
            **self.wants(run),
        )
        task = asyncio.ensure_future(call)
        task.key, task.server = key, server
        return task

    async def drop(self, tasks):
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def replies(self, tasks):
        return [t.result() for t in tasks if t.done() and not t.cancelled() and not t.exception()]


class HedgeInTheInstant(Copies):
    """The copy is sent after two seconds, and the reply of the copy is used if there is one."""

    patience = 2

    async def ask(self, run, sent, left):
        run.attempt += 1
        tasks = [self.copy(run, sent, left, 0)]
        await asyncio.wait(tasks, timeout=self.patience)
        if not self.replies(tasks):
            tasks.append(self.copy(run, sent, left, 1))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not self.replies(tasks):
                await asyncio.wait(tasks)
        # the losers are cancelled in the instant of the winner's reply
        await self.drop([t for t in tasks if not t.done()])
        found = self.replies(tasks)
        if not found:
            await self.after_failure(run)
            return None
        return found[-1]


class HedgeByTheClock(Copies):
    """The copy is sent by a timer that does not look whether the reply is there."""

    async def ask(self, run, sent, left):
        run.attempt += 1
        first = self.copy(run, sent, left, 0)
        second = asyncio.ensure_future(self.later(run, sent, left))
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        if not self.replies([first, second]):
            await asyncio.wait([first, second])
        await self.drop([t for t in (first, second) if not t.done()])
        found = self.replies([first, second])
        if not found:
            await self.after_failure(run)
            return None
        return found[0]

    async def later(self, run, sent, left):
        await asyncio.sleep(3)
        return await self.copy(run, sent, left, 1)


class CancelledInTheInstant(Copies):
    """A call is cancelled after three seconds and made again, whether or not its reply has just
    come; the fourth call is waited for.
    """

    async def ask(self, run, sent, left):
        run.attempt += 1
        task = self.copy(run, sent, left, 0)
        patience = None if run.attempt % 4 == 0 else 3
        await asyncio.wait([task], timeout=patience)
        if not task.done():
            await self.drop([task])
            return None
        found = self.replies([task])
        if not found:
            await self.after_failure(run)
            return None
        run.attempt += 3 - run.attempt % 4
        return found[0]


class HedgeAwaitsTheCopy(Copies):
    """A timer of three seconds sends the copy, and both are waited for, whichever came first: the
    reply of the copy counts.
    """

    async def ask(self, run, sent, left):
        run.attempt += 1
        first = self.copy(run, sent, left, 0)
        fires = asyncio.get_running_loop().create_future()
        timer = asyncio.get_running_loop().call_later(3, fires.set_result, None)
        await asyncio.wait([first, fires], return_when=asyncio.FIRST_COMPLETED)
        timer.cancel()
        tasks = [first]
        if fires.done():
            tasks.append(self.copy(run, sent, left, 1))
        await asyncio.wait(tasks)
        found = self.replies(tasks)
        if not found:
            await self.after_failure(run)
            return None
        return found[-1]


class AbortedInTheInstant(Copies):
    """A call is aborted by its handle after two seconds, whether or not its reply has just come, and
    what came is continued at once, on another server.
    """

    async def ask(self, run, sent, left):
        run.attempt += 1
        task = self.copy(run, sent, left, 0)
        await asyncio.wait([task], timeout=2 * (1 + run.attempt // 4))
        with contextlib.suppress(ConnectionError):
            await task.server.abort(task.key)
        await asyncio.wait([task])
        found = self.replies([task])
        if not found:
            await self.after_failure(run)
            return None
        return found[0]


class MovedInTheInstantOfADeath(Copies):
    """A watcher looks at the servers every second, and sends a copy of each call of a dead server to
    another one, in the instant of the death; the reply of either counts.
    """

    async def ask(self, run, sent, left):
        run.attempt += 1
        tasks = [self.copy(run, sent, left, 0)]
        while not tasks[-1].done():
            await asyncio.wait(tasks[-1:], timeout=1)
            if not (tasks[-1].done() or tasks[-1].server.alive or len(tasks) == 3):
                tasks.append(self.copy(run, sent, left, len(tasks)))
        await self.drop([t for t in tasks if not t.done()])
        found = self.replies(tasks)
        if not found:
            await self.after_failure(run)
            return None
        return found[-1]


class ResumedInTheInstantOfTheLoad(Control):
    """Whoever was aborted by an update calls again in the instant in which the servers have the
    weights, before they are resumed.
    """

    def prepare(self):
        super().prepare()
        self.loaded = asyncio.Event()
        self.loaded.set()

    async def step(self, run):
        while not self.loaded.is_set():
            await self.loaded.wait()
        await super().step(run)

    async def roll(self, weights, label, servers):
        self.loaded.clear()
        try:
            await self.each(servers, lambda s: s.pause("abort", clear_cache=True))
            await self.each(servers, lambda s: s.load(weights, label))
        finally:
            self.loaded.set()
            # the calls are made before the servers go on
            await asyncio.sleep(0)
            await self.each(servers, lambda s: s.resume())


class SpeakingInTheInstant(Gateway):
    """Each turn is called for again after two seconds; the first reply counts."""

    async def call(self, chat, turn, context, budget):
        first = asyncio.ensure_future(super().call(chat, turn, context, budget))
        await asyncio.wait([first], timeout=2)
        if first.done():
            return first.result()
        second = asyncio.ensure_future(super().call(chat, turn, context, budget))
        tasks = [first, second]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not any(t.done() and t.result() is not None for t in tasks):
            await asyncio.wait(tasks)
        for task in tasks:
            task.cancel()
        replies = await asyncio.gather(*tasks, return_exceptions=True)
        found = [out for out in replies if out is not None and not isinstance(out, BaseException)]
        return found[-1] if found else None


class ConversationInTheInstant(Convo):
    """The reply of the second copy is used if both are there."""

    gateway = SpeakingInTheInstant
