"""A policy of the user's own: what it says of one sequence is what engines answer, alone and
together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import EngineOptions
from rollproof.core.records import EngineOutput, IntArray, LogprobArray, Version
from rollproof.core.trace import Recorder
from rollproof.fakes.coded.hashing import hashes_of_many
from rollproof.fakes.coded.policy import CodedPolicy, State, Stretch, VersionSpan
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
    def next_token(self, version: Version, state: State) -> int:
        return 7


class Seven(Mixin, CodedPolicy):
    """Says 7."""


class Drawn(CodedPolicy):
    """Says 9."""

    def draw(self, version: Version, state: State, count: int) -> tuple[list[int], State]:
        return [9] * count, self.start_state([9])


def answers(policy: CodedPolicy, calls: int) -> list[EngineOutput]:
    """Of that many calls at once."""

    async def asked() -> list[EngineOutput]:
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

    return on_clock(asked)


@pytest.mark.parametrize("calls", [1, 8])
def test_an_engine_answers_what_a_subclass_says_of_one_sequence(calls: int) -> None:
    """Whichever of the methods for one it overrides; the others stay the coded ones."""
    levelled, stuck, seven, drawn = (
        answers(kind(**SIZES), calls) for kind in (Levelled, Stuck, Seven, Drawn)
    )
    coded = answers(CodedPolicy(**SIZES), calls)

    for i in range(calls):
        outputs = [kind[i] for kind in (levelled, stuck, seven, drawn, coded)]
        assert [coded[i].token_ids, coded[i].token_ids, (7, 7, 7), (9, 9, 9)] == [
            output.token_ids for output in outputs[:4]
        ]
        logprobs = [
            None if output.logprobs is None else output.logprobs.tolist() for output in outputs
        ]
        routes = [None if output.routes is None else output.routes.tolist() for output in outputs]
        assert [[-1.0] * 3, logprobs[4]] == logprobs[:2]
        assert routes[4] is not None
        assert [routes[4], routes[4][:1] * 4] == routes[:2]


def test_of_two_overrides_the_nearer_one_counts() -> None:
    """A method for many of the subclass itself is asked, and gives way to a method for one of a
    subclass of that.
    """

    class Many(Levelled):
        def logprobs_many(
            self, stretches: Sequence[Stretch], hashes: object = None
        ) -> list[LogprobArray]:
            return [np.full(stop - start, -2.0) for _, _, start, stop in stretches]

    @dataclass(frozen=True, slots=True)
    class Nearer(Many):
        def logprobs_spans(
            self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
        ) -> LogprobArray:
            return np.full(stop - start, -3.0)

    class Plain(Nearer):
        pass

    for kind, value in ((Levelled, -1.0), (Many, -2.0), (Nearer, -3.0), (Plain, -3.0)):
        (output,) = answers(kind(**SIZES), 1)
        assert output.logprobs is not None
        assert [value] * 3 == output.logprobs.tolist()


def test_hashes_need_not_be_given() -> None:
    """Who asks for many has the same without them."""
    policy = CodedPolicy(**SIZES)
    stretches: list[Stretch] = [([(0, 9, 1)], [5, 6, 7], 0, 3), ([(0, 9, 1)], [8, 9], 1, 2)]
    hashes = hashes_of_many([ids for _, ids, _, _ in stretches])

    for many in (policy.logprobs_many, policy.routes_many):
        assert [one.tolist() for one in many(stretches, hashes)] == [
            one.tolist() for one in many(stretches)
        ]
