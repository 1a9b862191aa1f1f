"""Invariance: whether a call is answered alike, to the last bit, alone and beside others.

Engines have modes that promise it. The inverse is asked too: without the mode something must differ
on the same calls, else nothing was shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from rollproof.core.engine_contract import StreamMode
from rollproof.core.engine_protocol import EngineSettings, Query
from rollproof.core.records import EngineOutput, Scalar
from rollproof.core.subjects import EngineSubject
from rollproof.errors import EngineError

__all__ = ["INVARIANT", "Alone", "Mode", "alone_and_beside"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """How an engine is asked for invariance: ``extra`` options and ``environment`` variables of its
    process.

    ``below``: where a step of the engine has so many tokens or more, a call may be answered
    otherwise, for the reason ``known``; where no step has, it is not.
    """

    name: str
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    below: int | None = None
    known: str = ""

    def of(self, settings: EngineSettings) -> EngineSettings:
        """``settings`` in this mode."""
        return replace(settings, extra={**settings.extra, **self.extra})


INVARIANT: Mapping[str, Mode] = MappingProxyType(
    {
        "vllm": Mode(
            name="VLLM_BATCH_INVARIANT=1",
            environment={"VLLM_BATCH_INVARIANT": "1"},
            below=256,
            known=(
                "vLLM 0.26 sums the squares of a row on up to 1024 threads, in a step of 256 tokens"
                " or more on 256, also in the mode (vllm#48271, docs/track-record.md)"
            ),
        ),
        "sglang": Mode(
            name="enable_deterministic_inference", extra={"enable_deterministic_inference": True}
        ),
    }
)
"""The mode of each engine that has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """``probes`` calls were sent alone and beside others; ``differing`` tells of each that was
    answered otherwise, and what differs.
    """

    probes: int
    differing: Mapping[int, str]


async def alone_and_beside(
    engine: EngineSubject,
    prompts: Sequence[tuple[int, ...]],
    *,
    probes: int = 8,
    tokens: int = 48,
    temperature: float = 0.0,
) -> Alone:
    """Send the first ``probes`` of ``prompts`` one by one, then all prompts at once, to an engine
    that is started and shares no prefixes.

    Raises ``EngineError`` where a call is not answered with one sample.
    """
    alone = [
        await _answer(engine, f"alone{number:03d}-", prompt, tokens, temperature)
        for number, prompt in enumerate(prompts[:probes])
    ]
    beside = await asyncio.gather(
        *(
            _answer(engine, f"beside{number:03d}-", prompt, tokens, temperature)
            for number, prompt in enumerate(prompts)
        )
    )
    found = {
        number: _difference(one, other)
        for number, (one, other) in enumerate(zip(alone, beside, strict=False))
    }
    return Alone(
        probes=len(alone), differing={number: what for number, what in found.items() if what}
    )


async def _answer(
    engine: EngineSubject, handle: str, prompt: tuple[int, ...], tokens: int, temperature: float
) -> EngineOutput:
    query = Query(
        handle=handle,
        prompt_ids=prompt,
        max_tokens=tokens,
        temperature=temperature,
        seed=1,
        stream=StreamMode.FINAL,
    )
    outputs = await engine.generate(query, lambda _: None)
    if len(outputs) != 1:
        raise EngineError(
            f"The engine answered the call {handle!r} with {len(outputs)} samples, and one was"
            " asked for."
        )
    return outputs[0]


def _difference(one: EngineOutput, other: EngineOutput) -> str:
    """What differs between two answers, in words; empty where nothing does. Logprobs and routes are
    compared bit by bit.
    """
    told = []
    if one.token_ids != other.token_ids:
        first = next(
            (
                place
                for place, pair in enumerate(zip(one.token_ids, other.token_ids, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(one.token_ids), len(other.token_ids)),
        )
        told.append(f"tokens from {first} on")
    for name in ("logprobs", "routes"):
        left, right = getattr(one, name), getattr(other, name)
        if (left is None) != (right is None):
            told.append(f"{name} are there only once")
        elif left is not None and right is not None:
            same = left.shape == right.shape and np.array_equal(
                left, right, equal_nan=name == "logprobs"
            )
            told += [] if same else [name]
    return ", ".join(told)
