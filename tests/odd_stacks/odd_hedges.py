"""Callers that send two copies of each call, wait for both and use one of the replies."""

from __future__ import annotations

import asyncio

from tests.odd_stacks.bases.convo import Convo, Gateway
from tests.odd_stacks.bases.thin import Thin


class FirstOfBoth(Thin):
    """A copy whose server died is sent again, to the next one; the reply of the first copy is
    used.
    """

    async def ask(self, run, sent, left):
        run.attempt += 1
        copies = [self.copy(run, number, sent, left) for number in range(2)]
        replies = [out for out in await asyncio.gather(*copies) if out is not None]
        if not replies:
            await self.after_failure(run)
            return None
        return self.pick(replies)

    async def copy(self, run, number, sent, left):
        for attempt in range(4):
            server = self.servers[(run.attempt + number + attempt) % len(self.servers)]
            try:
                return await self.post(run, f"{number}.{attempt}", server, sent, left)
            except ConnectionError:
                await asyncio.sleep(1)
        return None

    async def post(self, run, suffix, server, sent, left):
        return await server.generate(
            prompt_ids=sent,
            max_tokens=left,
            request_id=f"{self.key(run)}.{suffix}",
            sampling=self.params(run),
            media=run.request.media,
            **self.wants(run),
        )

    def pick(self, replies):
        return replies[0]


class SecondOfBoth(FirstOfBoth):
    """The reply of the second copy is used."""

    def pick(self, replies):
        return replies[-1]


class LongestOfBoth(FirstOfBoth):
    """The longer reply is used."""

    def pick(self, replies):
        return max(replies, key=lambda out: len(out.token_ids))


class LongestWithoutHandles(LongestOfBoth):
    """The calls have no handles of their own."""

    async def post(self, run, suffix, server, sent, left):
        return await server.generate(
            prompt_ids=sent,
            max_tokens=left,
            sampling=self.params(run),
            media=run.request.media,
            **self.wants(run),
        )


class TimedCopies(LongestOfBoth):
    """A copy that takes too long is cancelled and sent again."""

    async def post(self, run, suffix, server, sent, left):
        call = super().post(run, suffix, server, sent, left)
        try:
            return await asyncio.wait_for(call, 6 * 2 ** int(suffix[-1]))
        except TimeoutError:
            raise ConnectionError from None


class HedgingGateway(Gateway):
    async def call(self, chat, turn, context, budget):
        copies = [self.copy(chat, turn, context, budget) for _ in range(2)]
        replies = [out for out in await asyncio.gather(*copies) if out is not None]
        return max(replies, key=lambda out: len(out.token_ids)) if replies else None

    async def copy(self, chat, turn, context, budget):
        for _ in range(3):
            out = await super().call(chat, turn, context, budget)
            if out is not None:
                return out
            await asyncio.sleep(1)
        return None


class HedgedConversation(Convo):
    """Each turn of the model is called for twice."""

    gateway = HedgingGateway
