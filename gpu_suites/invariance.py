"""Batch invariance: whether a call gets the same answer, bit for bit, alone and in a batch.

Engines have modes that promise it. Without the mode something must differ on the same calls;
otherwise the comparison shows nothing.
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

__all__ = ["INVARIANT", "BatchComparison", "Mode", "compare_alone_and_batched"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """An engine's mode of batch invariance.

    Attributes:
        name: its name.
        extra: options of the engine.
        environment: environment variables of its process.
        below: tokens of a step from which the mode is known to break its promise.
        known: why it does.
    """

    name: str
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    below: int | None = None
    known: str = ""

    def of(self, settings: EngineSettings) -> EngineSettings:
        """Return ``settings`` in this mode."""
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
class BatchComparison:
    """The answers to calls that were sent alone and in a batch.

    Attributes:
        probes: number of calls.
        differing: the calls with different answers, and what differs.
    """

    probes: int
    differing: Mapping[int, str]


async def compare_alone_and_batched(
    engine: EngineSubject,
    prompts: Sequence[tuple[int, ...]],
    *,
    probes: int = 8,
    tokens: int = 48,
    temperature: float = 0.0,
) -> BatchComparison:
    """Send the first ``probes`` of ``prompts`` one by one, then all prompts at once.

    The engine is started and shares no prefixes. Raises ``EngineError`` if a call does not return
    one sample.
    """
    # one after the other, so that each is alone in its batch
    alone = [
        await _answer(engine, f"alone{number:03d}-", prompt, tokens, temperature)
        for number, prompt in enumerate(prompts[:probes])
    ]
    batched = await asyncio.gather(
        *(
            _answer(engine, f"batch{number:03d}-", prompt, tokens, temperature)
            for number, prompt in enumerate(prompts)
        )
    )
    differences = {
        number: _difference(single, other)
        for number, (single, other) in enumerate(zip(alone, batched, strict=False))
    }
    return BatchComparison(
        probes=len(alone), differing={number: text for number, text in differences.items() if text}
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
            f"The engine answered the call {handle!r} with {len(outputs)} samples instead of one."
        )
    return outputs[0]


def _difference(single: EngineOutput, other: EngineOutput) -> str:
    """Describe what differs between two answers, compared bit by bit; empty if nothing does."""
    differences = []
    if single.token_ids != other.token_ids:
        first = next(
            (
                place
                for place, pair in enumerate(zip(single.token_ids, other.token_ids, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(single.token_ids), len(other.token_ids)),
        )
        differences.append(f"tokens from {first} on")
    for name in ("logprobs", "routes"):
        left, right = getattr(single, name), getattr(other, name)
        if (left is None) != (right is None):
            differences.append(f"{name} are in only one of them")
        elif left is not None and right is not None:
            # NaN marks a logprob that the engine does not report; in both answers it is equal
            same = left.shape == right.shape and np.array_equal(
                left, right, equal_nan=name == "logprobs"
            )
            if not same:
                differences.append(name)
    return ", ".join(differences)
