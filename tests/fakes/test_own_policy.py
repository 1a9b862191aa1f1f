"""Engines answer with the values of a user's subclass of the coded policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import EngineOptions
from rollproof.core.records import EngineOutput, IntArray, LogprobArray, Version
from rollproof.core.trace import Recorder
from rollproof.fakes.coded.policy import CodedPolicy, PrefixState, VersionSpan
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.flavours import FLAVOURS
from tests.support.engine_driver import on_clock

SIZES: dict[str, Any] = {
    "seed": 3,
    "vocab": 64,
    "num_layers": 2,
    "moe_layers": (0, 1),
    "num_experts": 8,
    "top_k": 2,
}


class Levelled(CodedPolicy):
    """Every logprob is -1."""

    def logprobs_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> LogprobArray:
        return np.full(stop - start, -1.0)


class Stuck(CodedPolicy):
    """All rows are those of the first token."""

    def routes_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> IntArray:
        return np.repeat(super().routes_spans(spans, ids, 0, 1), stop - start, axis=0)


class Mixin:
    def next_token(self, version: Version, state: PrefixState) -> int:
        return 7


class Seven(Mixin, CodedPolicy):
    """Says 7."""


class Nines(CodedPolicy):
    """Samples 9 after each token that it extends a sequence by, and starts with a coded one."""

    def extend(self, state: PrefixState, token: int) -> PrefixState:
        return (-1, state[1] + 1)

    def next_token(self, version: Version, state: PrefixState) -> int:
        return 9 if state[0] == -1 else super().next_token(version, state)


def answers(policy: CodedPolicy, calls: int) -> list[EngineOutput]:
    """Return the outputs of ``calls`` calls in one batch."""

    async def run() -> list[EngineOutput]:
        engine = FakeEngine(
            "s0",
            policy,
            FLAVOURS["vllm"],
            EngineOptions(),
            Recorder(asyncio.get_running_loop().time),
        )
        return list(
            await asyncio.gather(
                *(engine.generate(prompt_ids=(5, 6 + i), max_tokens=3) for i in range(calls))
            )
        )

    return on_clock(run)


@pytest.mark.parametrize("calls", [1, 8])
def test_an_engine_answers_with_the_overridden_methods(calls: int) -> None:
    """Each overridden method changes its own values; the others stay the coded ones."""
    levelled, stuck, seven, nines = (
        answers(kind(**SIZES), calls) for kind in (Levelled, Stuck, Seven, Nines)
    )
    coded = answers(CodedPolicy(**SIZES), calls)

    for i in range(calls):
        outputs = [policy[i] for policy in (levelled, stuck, seven, nines, coded)]
        tokens = coded[i].token_ids
        assert [tokens, tokens, (7, 7, 7), (tokens[0], 9, 9)] == [
            output.token_ids for output in outputs[:4]
        ]
        logprobs = [
            None if output.logprobs is None else output.logprobs.tolist() for output in outputs
        ]
        routes = [None if output.routes is None else output.routes.tolist() for output in outputs]
        assert [[-1.0] * 3, logprobs[4]] == logprobs[:2]
        assert routes[4] is not None
        assert [routes[4], routes[4][:1] * 4] == routes[:2]
