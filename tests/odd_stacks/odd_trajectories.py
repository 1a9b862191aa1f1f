"""Unusual and correct stacks whose requests deliver several samples."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace as NS

from tests.odd_stacks.bases.candidates import Candidates
from tests.odd_stacks.bases.convo import Convo, terms
from tests.odd_stacks.bases.thin import promise


class Forgetful(Convo):
    """Rewrites its history before every turn: a turn loses its first half, its thoughts, and after
    two answers nothing is left but the last one. Each turn is a sample; the newest comes first.
    """

    contract = terms(samples="turn")

    async def rollout(self, request):
        chat = NS(
            request=request,
            messages=[NS(role="user", ids=list(request.prompt_ids))],
            tape=[],
            answered=0,
            spent=0,
            reason=None,
            salt=len(request.request_id),
        )
        rows = []
        while True:
            context = self.flat(chat)
            chat.tape = []
            turn = await self.gate.complete(chat, context, self.room(chat))
            chat.reason = turn.reason
            chat.spent += len(turn.ids)
            rows.insert(0, self.row(chat, context, turn))
            answer = self.environment(chat, turn)
            if answer is None:
                return rows
            chat.answered += 1
            chat.spent += len(answer)
            said = NS(role="tool", ids=list(answer))
            kept = NS(role="assistant", ids=turn.ids[len(turn.ids) // 2 :])
            old = chat.messages if chat.answered % 2 else chat.messages[:1]
            chat.messages = [*old, kept, said] if chat.answered % 2 else [*old, said]

    def used(self, chat):
        return chat.spent

    def row(self, chat, context, turn):
        said = NS(role="assistant", ids=turn.ids, lps=turn.lps, vers=turn.vers)
        alone = NS(
            request=replace(chat.request, prompt_ids=tuple(context)),
            messages=[None, said],
            tape=chat.tape,
            reason=turn.reason,
        )
        return self.compile(alone)

    def to_record(self, rows):
        return [super(Forgetful, self).to_record(row) for row in rows]


class BestTwo(Candidates):
    """Samples three candidates at once and delivers two of them: the shortest one is dropped."""

    contract = promise(samples="branch", drops_samples=True)

    async def rollout(self, request):
        found = await asyncio.gather(*(self.candidate(request, number) for number in range(3)))
        return sorted(found, key=lambda sample: len(sample["response_ids"]))[1:]

    def to_record(self, found):
        return [super(BestTwo, self).to_record(sample) for sample in found]
