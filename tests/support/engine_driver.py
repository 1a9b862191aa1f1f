"""A fake engine on a test bench: made, driven and looked at in a few words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from rollproof.core.case import EngineOptions, Model
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Reply
from rollproof.core.records import EngineOutput, IntArray, Span
from rollproof.core.trace import Recorder
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.flavours import FLAVOURS, Flavour
from rollproof.simulation import virtual_loop

__all__ = ["PROMPT", "EngineDriver", "on_clock", "pure", "spans"]

PROMPT = (5, 6, 7, 8)
"""Prompt of the calls that do not say otherwise."""

_T = TypeVar("_T")
_E = TypeVar("_E", bound=Event)


def on_clock(main: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run ``main()`` on a virtual clock."""
    return virtual_loop.run(main)


class EngineDriver:
    """One engine with version 0, a recorder, and calls that run as tasks. A step takes one virtual
    second.
    """

    def __init__(
        self, flavour: str | Flavour = "vllm", *, model: Model | None = None, **options: Any
    ) -> None:
        self.flavour = FLAVOURS[flavour] if isinstance(flavour, str) else flavour
        self.recorder = Recorder(asyncio.get_running_loop().time)
        self.policy = CodedPolicy.from_model(
            model or Model(num_layers=4, moe_layers=(1, 2, 3), num_experts=64, top_k=4), 3
        )
        self.engine = FakeEngine(
            "s0", self.policy, self.flavour, EngineOptions(**options), self.recorder
        )

    def call(
        self, tokens: int | None = 6, prompt: Sequence[int] = PROMPT, **more: Any
    ) -> asyncio.Task[EngineOutput]:
        """Start a call; it is sent when the loop next runs."""
        return asyncio.ensure_future(
            self.engine.generate(prompt_ids=prompt, max_tokens=tokens, **more)
        )

    async def steps(self, count: float) -> None:
        """Let ``count`` steps pass, and half of one: the tokens of the last are sampled, and
        nothing else happens meanwhile.
        """
        await asyncio.sleep(count + 0.5)

    def events(self, kind: type[_E]) -> list[_E]:
        """What was recorded of one kind."""
        return [event for event in self.recorder.events if isinstance(event, kind)]

    def reply(self, call_id: int = 1) -> Reply:
        """The first reply to a call."""
        return next(event for event in self.events(Reply) if event.call_id == call_id)

    def rows(self, version: int | str, ids: Sequence[int], start: int = 0) -> IntArray:
        """Rows of ``ids`` but the last, under pure weights, as the flavour lays them out."""
        columns = list(self.policy.moe_layers) if self.flavour.layer_axis == "moe" else slice(None)
        return self.policy.routes(version, ids[:-1], start)[:, columns].astype(
            self.flavour.dtype(self.policy.num_experts)
        )


def pure(
    policy: CodedPolicy, version: int | str, ids: Sequence[int], rows: IntArray, start: int = 0
) -> np.ndarray:
    """``(rows,)`` bool: whether each row, from position ``start`` on, is what pure weights
    ``version`` choose there.
    """
    want = policy.routes(version, ids, 0)[start : start + len(rows)]
    return np.all(rows == want, axis=(1, 2))


def spans(*parts: tuple[int, int, Any]) -> tuple[Span, ...]:
    """Spans from ``(start, end, version)``."""
    return tuple(Span(start=start, end=end, version=version) for start, end, version in parts)
