"""Callers that are unusual and keep their contracts: hedges, timeouts, pools, batches."""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib

from tests.odd_stacks.bases.thin import Run, Thin


class HedgeCancelsTheLoser(Thin):
    """A call that takes longer than three seconds is sent to a second server, too; the first reply
    wins, the other call is aborted by its handle and its reply thrown away.
    """

    calls = 0

    async def ask(self, run, sent, left):
        run.attempt += 1
        order = (
            self.servers[run.attempt % len(self.servers) :]
            + self.servers[: run.attempt % len(self.servers)]
        )
        running = []
        for server in order[:2]:
            self.calls += 1
            key = f"{run.request.request_id}:h{self.calls}"
            task = asyncio.ensure_future(
                server.generate(
                    prompt_ids=sent,
                    max_tokens=left,
                    request_id=key,
                    sampling=self.params(run),
                    media=run.request.media,
                    **self.wants(run),
                )
            )
            running.append((task, server, key))
            done, _ = await asyncio.wait(
                [t for t, _, _ in running], timeout=3, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                break
        winner = None
        while winner is None and running:
            done, _ = await asyncio.wait(
                [t for t, _, _ in running], return_when=asyncio.FIRST_COMPLETED
            )
            for item in [r for r in running if r[0] in done]:
                running.remove(item)
                if winner is None and item[0].exception() is None:
                    winner = item[0].result()
        for task, server, key in running:
            with contextlib.suppress(ConnectionError):
                await server.abort(key)
        await asyncio.gather(*(t for t, _, _ in running), return_exceptions=True)
        if winner is None:
            await self.after_failure(run)
        return winner


class HealthMonitor(Thin):
    """A background task pings every server every four seconds (one token, inside fleet.internal());
    rollouts prefer the servers that answered last time.
    """

    def prepare(self):
        self.healthy = set(range(len(self.servers)))
        self.monitor = asyncio.ensure_future(self.watch())

    async def watch(self):
        while True:
            await asyncio.sleep(4)
            for i, s in enumerate(self.servers):
                try:
                    with self.fleet.internal():
                        await s.generate(
                            prompt_ids=[1], max_tokens=1, want_routes=False, want_logprobs=False
                        )
                    self.healthy.add(i)
                except (ConnectionError, RuntimeError):
                    self.healthy.discard(i)

    def server(self, run):
        good = sorted(self.healthy) or range(len(self.servers))
        return self.servers[list(good)[run.attempt % len(good)]]

    async def stop(self):
        self.monitor.cancel()
        await asyncio.gather(self.monitor, return_exceptions=True)


class StopTokensOfItsOwn(Thin):
    """The stack passes stop tokens of its own (the model's end token and 5 more ids), and ends by
    stop at any of them.
    """

    def prepare(self):
        p = self.fleet.policy
        self.ends = frozenset(
            {3, 17, 40, 41, 42} | ({p.eos_id} if p.eos_every is not None else set())
        )

    def wants(self, run):
        return {**super().wants(run), "ends": self.ends}

    def ended(self, out):
        return bool(out.token_ids) and out.token_ids[-1] in self.ends


class BackoffWithJitter(Thin):
    """Exponential backoff with jitter after failures and empty aborts, from 0.5 up to 8 seconds."""

    def prepare(self):
        self.dice = random.Random(7)

    async def step(self, run):
        n = len(run.ids)
        await super().step(run)
        run.quiet = 0 if len(run.ids) > n else getattr(run, "quiet", 0) + 1

    @property
    def pause(self):
        return self.dice.uniform(0.5, 1.0)

    async def after_failure(self, run):
        await asyncio.sleep(min(8, 0.5 * 2 ** getattr(run, "quiet", 0)) * self.dice.uniform(1, 1.5))


class AClientAServerClient:
    def __init__(self, server):
        self.server, self.sent = server, 0

    async def post(self, **body):
        self.sent += 1
        return await self.server.generate(**body)


class AClientAServer(Thin):
    """One client object for each server; a request sticks to the client that its id hashes to, and
    moves to the next one only when that one fails.
    """

    def prepare(self):
        self.clients = [AClientAServerClient(s) for s in self.servers]

    async def ask(self, run, sent, left):
        home = zlib.crc32(run.request.request_id.encode()) + getattr(run, "moves", 0)
        client = self.clients[home % len(self.clients)]
        run.attempt += 1
        try:
            return await client.post(
                prompt_ids=sent,
                max_tokens=left,
                request_id=self.key(run),
                sampling=self.params(run),
                media=run.request.media,
                **self.wants(run),
            )
        except ConnectionError:
            run.moves = getattr(run, "moves", 0) + 1
            await self.after_failure(run)


class BatchingClient(Thin):
    """Calls are collected for one second and sent together by a dispatcher task; each names its
    request in its handle, and gets its own reply by a future.
    """

    def prepare(self):
        self.basket, self.dispatcher = [], None

    async def ask(self, run, sent, left):
        run.attempt += 1
        ready = asyncio.get_running_loop().create_future()
        self.basket.append(
            (
                self.server(run),
                dict(
                    prompt_ids=sent,
                    max_tokens=left,
                    request_id=self.key(run),
                    sampling=self.params(run),
                    media=run.request.media,
                    **self.wants(run),
                ),
                ready,
            )
        )
        if self.dispatcher is None:
            self.dispatcher = asyncio.ensure_future(self.dispatch())
        out = await ready
        if out is None:
            await self.after_failure(run)
        return out

    async def dispatch(self):
        await asyncio.sleep(1)
        basket, self.basket, self.dispatcher = self.basket, [], None

        async def one(server, body, ready):
            try:
                ready.set_result(await server.generate(**body))
            except (ConnectionError, RuntimeError):
                ready.set_result(None)

        await asyncio.gather(*(one(*item) for item in basket))


class ThreeTokensACall(Thin):
    """Chunked generation: no call asks for more than three tokens, and the loop goes on after a
    length that is only the chunk's.
    """

    def left(self, run):
        rest = super().left(run)
        return None if rest is None else min(3, rest)

    def verdict(self, run, out):
        reason = super().verdict(run, out)
        unfinished = run.request.budget is not None and len(run.ids) < run.request.budget
        return "" if reason == "length" and unfinished else reason


class JudgeBehindTheSameServers(Thin):
    """After a rollout a judge model behind the same servers scores it, within the rollout's own task
    and before it returns, inside fleet.internal().
    """

    async def rollout(self, request):
        sample = await super().rollout(request)
        async with self.fleet.internal():
            for s in self.servers:
                try:
                    verdict = await s.generate(
                        prompt_ids=[*request.prompt_ids, *sample["response_ids"]][:8],
                        max_tokens=1,
                        want_routes=False,
                    )
                    self.score = len(verdict.token_ids)
                    break
                except (ConnectionError, RuntimeError):
                    continue
        return sample


class CircuitBreaker(Thin):
    """A server that failed twice in a row is left alone for six seconds; if all are, the one that
    has rested longest is tried after a second.
    """

    def prepare(self):
        self.strikes, self.closed_until = (
            dict.fromkeys(range(len(self.servers)), 0),
            dict.fromkeys(range(len(self.servers)), 0.0),
        )

    async def ask(self, run, sent, left):
        now = asyncio.get_running_loop().time()
        open_ = [i for i in self.closed_until if self.closed_until[i] <= now]
        if not open_:
            await asyncio.sleep(1)
            open_ = [min(self.closed_until, key=self.closed_until.get)]
        i = open_[(run.attempt + len(run.request.request_id)) % len(open_)]
        run.attempt += 1
        try:
            out = await self.servers[i].generate(
                prompt_ids=sent,
                max_tokens=left,
                request_id=self.key(run),
                sampling=self.params(run),
                media=run.request.media,
                **self.wants(run),
            )
            self.strikes[i] = 0
            return out
        except ConnectionError:
            self.strikes[i] += 1
            if self.strikes[i] >= 2:
                self.closed_until[i] = asyncio.get_running_loop().time() + 6
            await self.after_failure(run)


class OneCallAServer(Thin):
    """Every server gets one call at a time (a lock each); requests wait in the client. Gauges count
    the waiting and the calling.
    """

    def prepare(self):
        self.locks = {s.server_id: asyncio.Lock() for s in self.servers}
        self.counts = {"waiting": 0.0, "calling": 0.0}

    def gauges(self):
        return dict(self.counts)

    async def ask(self, run, sent, left):
        server = min(
            self.servers, key=lambda s: (not s.alive, self.locks[s.server_id].locked(), s.server_id)
        )
        self.counts["waiting"] += 1
        async with self.locks[server.server_id]:
            self.counts["waiting"] -= 1
            self.counts["calling"] += 1
            run.attempt += 1
            try:
                return await server.generate(
                    prompt_ids=sent,
                    max_tokens=left,
                    request_id=self.key(run),
                    sampling=self.params(run),
                    media=run.request.media,
                    **self.wants(run),
                )
            except ConnectionError:
                pass
            finally:
                self.counts["calling"] -= 1
        await self.after_failure(run)
        return None


class TimeoutsKeepTokens(Thin):
    """A call that takes longer than five seconds (more after every attempt that brought nothing) is
    aborted by its handle; the tokens that the abort brings are kept, and the next call goes
    on from there on another server.
    """

    async def ask(self, run, sent, left):
        server = self.server(run)
        run.attempt += 1
        key = self.key(run)
        call = asyncio.ensure_future(
            server.generate(
                prompt_ids=sent,
                max_tokens=left,
                request_id=key,
                sampling=self.params(run),
                media=run.request.media,
                **self.wants(run),
            )
        )
        await asyncio.wait([call], timeout=5 * 2 ** getattr(run, "quiet", 0))
        if not call.done():
            with contextlib.suppress(ConnectionError):
                await server.abort(key)
        try:
            out = await call
            run.quiet = 0 if out.token_ids else getattr(run, "quiet", 0) + 1
            return out
        except (ConnectionError, RuntimeError):
            await self.after_failure(run)


class SupervisedState(Thin):
    """A supervisor task owns the state of all rollouts and starts one short task for each call; the
    rollout coroutine only waits for its state to be final.
    """

    def prepare(self):
        self.inbox = asyncio.Queue()
        self.supervisor, self.tasks = asyncio.ensure_future(self.supervise()), set()

    async def supervise(self):
        while True:
            run, final = await self.inbox.get()
            task = asyncio.ensure_future(self.advance(run, final))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def advance(self, run, final):
        try:
            await self.step(run)
        except Exception as error:
            final.set_exception(error)
            return
        if run.reason:
            final.set_result(run)
        else:
            self.inbox.put_nowait((run, final))

    async def rollout(self, request):
        final = asyncio.get_running_loop().create_future()
        self.inbox.put_nowait((Run(request), final))
        return self.result(await final)

    async def stop(self):
        self.supervisor.cancel()
        await asyncio.gather(self.supervisor, return_exceptions=True)


class OneTokenACall(Thin):
    """Every call samples one token, each on another server; its length is no end of the sample."""

    def left(self, run):
        return 1

    def verdict(self, run, out):
        reason = super().verdict(run, out)
        budget = run.request.budget
        spent = budget is not None and len(run.ids) >= budget
        return "" if reason == "length" and not spent else reason
