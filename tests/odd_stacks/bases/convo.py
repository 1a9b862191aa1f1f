"""Convo: an agent loop over a gateway. The gateway resumes within a turn; the loop keeps messages and compiles the sample from them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace as NS

import numpy as np

import rollproof
from tests.odd_stacks.bases.thin import MODEL, labels_of


def terms(**changes):
    base = dict(
        rows="T-1",
        provenance="as-sampled",
        resume="client",
        abort_surfaces=False,
        versions="span",
        logprobs="raw",
        loss_mask=True,
        masked=(),
        multi_turn=True,
        answer_template=False,
        multimodal=True,
        sampling="forwarded",
        missing_logprobs="masked",
        kv_policy="recompute",
        filler="none",
        dtype="uint8",
        **MODEL,
    )
    return rollproof.Contract(**{**base, **changes})


class Gateway:
    """complete(): one turn of the model, resumed until it ends."""

    def __init__(self, fleet):
        self.fleet, self.servers, self.serial = fleet, list(fleet.servers.values()), 0

    async def complete(self, chat, context, budget):
        turn = NS(ids=[], lps=[], vers=[], reason=None)
        while turn.reason is None:
            out = await self.call(
                chat, turn, context + turn.ids, None if budget is None else budget - len(turn.ids)
            )
            if out is None or not out.token_ids:
                await asyncio.sleep(1)
            if out is not None:
                self.merge(chat, turn, out)
                turn.reason = self.why(turn, budget, out)
        return turn

    async def call(self, chat, turn, context, budget):
        self.serial += 1
        try:
            return await self.servers[(self.serial + chat.salt) % len(self.servers)].generate(
                prompt_ids=context,
                max_tokens=budget,
                request_id=f"{chat.request.request_id}/{self.serial}",
                **self.extras(chat, turn),
            )
        except (ConnectionError, RuntimeError):
            return None

    def extras(self, chat, turn):
        r = chat.request
        return {
            "sampling": dict(r.sampling),
            "media": r.media,
            "want_routes": r.want_routes,
            "want_logprobs": r.want_logprobs,
        }

    def merge(self, chat, turn, out):
        if out.token_ids:
            turn.ids += out.token_ids
            turn.lps += (
                [None] * len(out.token_ids) if out.logprobs is None else out.logprobs.tolist()
            )
            turn.vers += labels_of(out)
            self.tape(chat, out)

    def tape(self, chat, out):
        if out.routes is not None:
            chat.tape.extend(np.array(row) for row in out.routes[len(chat.tape) :])

    def why(self, turn, budget, out):
        reason, p = str(out.finish_reason), self.fleet.policy
        if reason == "abort":
            if out.token_ids and p.eos_every is not None and out.token_ids[-1] == p.eos_id:
                return "stop"
            return "length" if budget is not None and len(turn.ids) >= budget else None
        return reason


class Convo:
    flavours = ("vllm",)
    contract = terms()
    gateway = Gateway

    def start(self, fleet):
        self.fleet, self.gate = fleet, self.gateway(fleet)
        self.setup()

    def setup(self):
        pass

    async def rollout(self, request):
        chat = NS(
            request=request,
            messages=[NS(role="user", ids=list(request.prompt_ids))],
            tape=[],
            answered=0,
            reason=None,
            salt=len(request.request_id),
        )
        while True:
            turn = await self.gate.complete(chat, self.flat(chat), self.room(chat))
            chat.messages.append(
                NS(role="assistant", ids=turn.ids, lps=turn.lps, vers=turn.vers, reason=turn.reason)
            )
            chat.reason = turn.reason
            answer = self.environment(chat, turn)
            if answer is None:
                return self.compile(chat)
            chat.messages.append(NS(role="tool", ids=list(answer)))
            chat.answered += 1

    def flat(self, chat):
        return [i for m in chat.messages for i in m.ids]

    def used(self, chat):
        return sum(len(m.ids) for m in chat.messages[1:])

    def room(self, chat):
        return None if chat.request.budget is None else chat.request.budget - self.used(chat)

    def environment(self, chat, turn):
        """The tool's answer, or None: the conversation is over."""
        if turn.reason != "stop" or chat.answered >= len(chat.request.turns):
            return None
        answer = chat.request.turns[chat.answered]
        room = self.room(chat)
        return answer if room is None or room > len(answer) else None

    def mask(self, chat, m, index):
        if m.role == "tool":
            return [0] * len(m.ids)
        return (
            [0 if x is None else 1 for x in m.lps]
            if chat.request.want_logprobs
            else [1] * len(m.ids)
        )

    def compile(self, chat):
        r, ids, lps, mask, spans = chat.request, [], [], [], []
        for k, m in enumerate(chat.messages[1:]):
            at = len(ids)
            ids += m.ids
            mask += self.mask(chat, m, k)
            lps += (
                [0.0] * len(m.ids) if m.role == "tool" else [0.0 if x is None else x for x in m.lps]
            )
            if m.role == "assistant":
                spans += self.spans(m, at, chat)
        return {
            "request_id": r.request_id,
            "prompt_ids": r.prompt_ids,
            "response_ids": tuple(ids),
            "finish_reason": chat.reason,
            "logprobs": np.array(lps) if r.want_logprobs else None,
            "loss_mask": np.array(mask, dtype=int),
            "routes": self.routes(chat),
            "spans": tuple(spans),
        }

    def routes(self, chat):
        return np.stack(chat.tape) if chat.request.want_routes and chat.tape else None

    def spans(self, m, at, chat):
        found, begin = [], 0
        for i in range(1, len(m.ids) + 1):
            if i == len(m.ids) or m.vers[i] != m.vers[begin]:
                found.append(rollproof.Span(start=at + begin, end=at + i, version=m.vers[begin]))
                begin = i
        return found

    async def update_weights(self, version):
        await self.fleet.sync(version)

    def to_record(self, d):
        return rollproof.Rollout(
            **{**d, "finish_reason": rollproof.FinishReason(d["finish_reason"])}
        )

    def stop(self):
        pass
