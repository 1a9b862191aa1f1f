"""Stacks that split a rollout, against the public API alone: proxies that prefill on one server and
decode on another, and stacks that hand over each turn of a conversation as a sample of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import rollproof
from rollproof.core.records import IntArray
from rollproof.fakes.engine.fleet import Fleet

__all__ = ["CORRECT", "FAULTY", "OneDecodeServer"]


def _contract(**changes: Any) -> rollproof.Contract:
    fields: dict[str, Any] = {
        "rows": "T-1",
        "provenance": "as-sampled",
        "resume": "client",
        "abort_surfaces": False,
        "versions": "min-max",
        "logprobs": "raw",
        "kv_policy": "recompute",
        "filler": "none",
        "dtype": "uint8",
        "multimodal": True,
        "sampling": "forwarded",
        "missing_logprobs": "nan",
        "layer_axis": "all",
        "num_layers": 4,
        "moe_layers": (1, 2, 3),
        "num_experts": 16,
        "top_k": 2,
    }
    return rollproof.Contract(**{**fields, **changes})


@dataclass
class _Turn:
    """A turn of the model: its context, and what was sampled so far."""

    request: rollproof.Request
    context: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    rows: IntArray | None = None
    reason: str = ""
    calls: int = 0

    @property
    def sent(self) -> tuple[int, ...]:
        return (*self.context, *self.ids)

    @property
    def left(self) -> int | None:
        budget, prompt = self.request.budget, len(self.request.prompt_ids)
        return None if budget is None else budget - (len(self.sent) - prompt)

    def take(self, output: Any) -> None:
        """Append the tokens of a reply, with their logprobs and labels."""
        count = len(output.token_ids)
        self.ids += output.token_ids
        self.logprobs += [np.nan] * count if output.logprobs is None else output.logprobs.tolist()
        shown = [
            label for span in output.spans for label in [span.version] * (span.end - span.start)
        ]
        self.labels += shown or [output.version] * count

    def take_rows(self, *parts: IntArray) -> None:
        """Append rows."""
        self.rows = np.concatenate([*(() if self.rows is None else (self.rows,)), *parts])

    @property
    def captured(self) -> int:
        return 0 if self.rows is None else len(self.rows)


class _Client:
    """What all have in common: one call after another until a turn has ended."""

    flavours = ("vllm",)
    contract = _contract()

    def start(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.servers: Sequence[Any] = [fleet.servers[name] for name in sorted(fleet.servers)]

    async def update_weights(self, version: int | None) -> None:
        await self.fleet.sync(version)

    def stop(self) -> None:
        """Nothing to free."""

    async def run(self, turn: _Turn) -> None:
        """Sample until the turn ends."""
        while not turn.reason:
            before = len(turn.ids)
            with contextlib.suppress(ConnectionError, RuntimeError):
                await self.step(turn)
            if not turn.reason and len(turn.ids) == before:
                await asyncio.sleep(1.0)

    async def step(self, turn: _Turn) -> None:
        """Call an engine once."""
        output = await self.ask(self.servers, turn, turn.left, turn.captured)
        if output.token_ids:
            if output.routes is not None:
                turn.take_rows(output.routes[turn.captured - output.routes_start :])
            turn.take(output)
            self.end(turn, output)

    async def ask(
        self, servers: Sequence[Any], turn: _Turn, budget: int | None, routes_start: int = 0
    ) -> Any:
        """Send the turn so far to one of the servers."""
        request = turn.request
        turn.calls += 1
        # prefill and decode calls take turns: each kind must reach all servers of its own
        return await servers[turn.calls // 2 % len(servers)].generate(
            prompt_ids=list(turn.sent),
            max_tokens=budget,
            request_id=f"{request.request_id}:{len(turn.context)}:{turn.calls}",
            sampling=dict(request.sampling),
            media=request.media,
            want_routes=request.want_routes,
            want_logprobs=request.want_logprobs,
            routes_start=routes_start,
        )

    def end(self, turn: _Turn, output: Any) -> None:
        """Note why the turn has ended, if it has."""
        policy = self.fleet.policy
        if policy.eos_every is not None and output.token_ids[-1] == policy.eos_id:
            turn.reason = "stop"
        elif turn.left == 0:
            turn.reason = "length"
        elif str(output.finish_reason) != "abort":
            turn.reason = str(output.finish_reason)


def _sample(
    request: rollproof.Request, turns: Sequence[_Turn], masked: bool = False
) -> rollproof.Rollout:
    """Return the sample of consecutive turns; its prompt is the context of the first."""
    prompt = turns[0].context
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    rows = None
    for turn in turns:
        answer = turn.context[len(prompt) + len(ids) :]
        ids += [*answer, *turn.ids]
        logprobs += [np.nan] * len(answer) + turn.logprobs
        mask += [0] * len(answer) + [1] * len(turn.ids)
        if turn.rows is not None:
            rows = turn.rows if rows is None else np.concatenate([rows, turn.rows[len(rows) :]])
    labels = [label for turn in turns for label in turn.labels]
    known = None not in labels
    return rollproof.Rollout(
        request_id=request.request_id,
        prompt_ids=prompt,
        response_ids=tuple(ids),
        logprobs=np.array(logprobs) if request.want_logprobs else None,
        loss_mask=np.array(mask) if masked else None,
        routes=rows if request.want_routes else None,
        finish_reason=rollproof.FinishReason(turns[-1].reason),
        min_version=min(labels) if known else None,
        max_version=max(labels) if known else None,
    )


class _Proxy(_Client):
    """Prefills on every second server, and decodes on the others."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self.prefill, self.decode = self.servers[::2], self.servers[1::2] or self.servers

    async def rollout(self, request: rollproof.Request) -> _Turn:
        turn = _Turn(request, request.prompt_ids)
        await self.run(turn)
        return turn

    def to_record(self, native: _Turn) -> rollproof.Rollout:
        return _sample(native.request, [native])


class DiscardsFirstToken(_Proxy):
    """Throws the token of the prefill call away, as vLLM's example proxy does. The prompt's rows
    are those of the prefill call, the response's those of the decode call.
    """

    async def step(self, turn: _Turn) -> None:
        prompt = len(turn.sent)
        first = await self.ask(self.prefill, turn, 1)
        if not first.token_ids:
            return
        output = await self.decoded(turn)
        if output.token_ids:
            self.merge(turn, prompt, first, output)
            self.end(turn, output)

    async def decoded(self, turn: _Turn) -> Any:
        return await self.ask(self.decode, turn, turn.left)

    def merge(self, turn: _Turn, prompt: int, first: Any, output: Any) -> None:
        if output.routes is not None and first.routes is not None:
            start = max(turn.captured, prompt)
            rest = output.routes[start - output.routes_start :]
            turn.take_rows(self.prompt_rows(first.routes, prompt)[turn.captured :], rest)
        turn.take(output)

    def prompt_rows(self, rows: IntArray, prompt: int) -> IntArray:
        return rows[:prompt]


class DecodesWithoutPromptRows(DiscardsFirstToken):
    """Asks the decode server for the rows after the prompt alone."""

    async def decoded(self, turn: _Turn) -> Any:
        return await self.ask(self.decode, turn, turn.left, len(turn.sent))


class HandsFirstTokenOver(_Proxy):
    """Keeps the token of the prefill call, and decodes after it, as SGLang does."""

    async def step(self, turn: _Turn) -> None:
        prompt = len(turn.sent)
        first = await self.ask(self.prefill, turn, 1)
        if not first.token_ids:
            return
        turn.take(first)
        if first.routes is not None:
            turn.take_rows(first.routes[turn.captured : prompt])
        self.end(turn, first)
        if turn.reason == "length" and turn.left != 0:
            turn.reason = ""
        while not turn.reason:
            try:
                output = await self.ask(self.decode, turn, turn.left, prompt)
            except (ConnectionError, RuntimeError):
                await asyncio.sleep(1.0)
                continue
            if output.token_ids:
                if output.routes is not None:
                    turn.take_rows(output.routes[turn.captured - output.routes_start :])
                turn.take(output)
                self.end(turn, output)
            return


class OneDecodeServer(HandsFirstTokenOver):
    """Prefills on all servers but one, if there are several."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self.prefill, self.decode = self.servers[1:] or self.servers, self.servers[:1]


class PromptRowDropped(DiscardsFirstToken):
    """Loses the last row of the prompt where the two are joined."""

    def prompt_rows(self, rows: IntArray, prompt: int) -> IntArray:
        return rows[: prompt - 1]


class FirstTokenTwice(DiscardsFirstToken):
    """Has the token of the prefill call in front of those of the decode call."""

    def to_record(self, native: _Turn) -> rollproof.Rollout:
        native.ids.insert(0, native.ids[0])
        native.logprobs.insert(0, native.logprobs[0])
        return super().to_record(native)


class _Steps(_Client):
    """Runs conversations, turn by turn."""

    contract = _contract(multi_turn=True, loss_mask=True)

    async def rollout(self, request: rollproof.Request) -> list[_Turn]:
        turns = [_Turn(request, request.prompt_ids)]
        await self.run(turns[0])
        for answer in request.turns:
            turn = turns[-1]
            full = turn.left is not None and turn.left <= len(answer)
            if turn.reason != "stop" or full:
                break
            turns.append(_Turn(request, (*turn.sent, *answer), rows=self.known_rows(turn)))
            await self.run(turns[-1])
        return turns

    def known_rows(self, turn: _Turn) -> IntArray | None:
        """Return the rows for which the next turn does not ask."""
        return None

    def to_record(self, native: list[_Turn]) -> rollproof.Rollout:
        return _sample(native[0].request, native, masked=True)


class LastTurn(_Steps):
    """Hands the last turn over: its prompt is everything before."""

    def to_record(self, native: list[_Turn]) -> rollproof.Rollout:
        return super().to_record(native[-1:])


class LastTurnWithEarlierRows(LastTurn):
    """Asks for the rows of a turn alone, and takes those of its context from earlier turns."""

    def known_rows(self, turn: _Turn) -> IntArray | None:
        return turn.rows


class LastTwoTurns(_Steps):
    """Hands the last two turns over as one sample."""

    def to_record(self, native: list[_Turn]) -> rollproof.Rollout:
        return super().to_record(native[-2:])


class JoinedTurns(_Steps):
    """Joins the samples of all turns for the record, rows and all."""


class LastRowDropped(LastTurn):
    """Loses a row of the turn."""

    def to_record(self, native: list[_Turn]) -> rollproof.Rollout:
        turn = native[-1]
        turn.rows = None if turn.rows is None else turn.rows[:-1]
        return super().to_record(native)


class OtherToken(LastTurn):
    """Has another token at the end of a turn than was sampled."""

    def to_record(self, native: list[_Turn]) -> rollproof.Rollout:
        native[-1].ids[-1] += 1
        return super().to_record(native)


class ContextRespelt(LastTurn):
    """Has another token in the context than the call sent."""

    def to_record(self, native: list[_Turn]) -> rollproof.Rollout:
        turn = native[-1]
        if len(native) > 1:
            turn.context = (*turn.context[:-1], turn.context[-1] + 1)
        return super().to_record(native)


CORRECT = (
    DiscardsFirstToken,
    DecodesWithoutPromptRows,
    HandsFirstTokenOver,
    LastTurn,
    LastTurnWithEarlierRows,
    LastTwoTurns,
    JoinedTurns,
)
FAULTY = {
    PromptRowDropped: "routes.rows",
    FirstTokenTwice: "stitch.tokens",
    LastRowDropped: "routes.rows",
    OtherToken: "stitch.tokens",
    ContextRespelt: "stitch.prompt",
}
