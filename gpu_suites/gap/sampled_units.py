"""Sampling: what the gap's suite has of each engine, sampled when it is first asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollproof.core.engine_contract import PauseMode
from rollproof.core.engine_protocol import EngineSettings
from rollproof.core.model_config import model_of
from rollproof.core.records import Scalar
from rollproof.core.subjects import EngineSubject
from rollproof.gpu_suites.engine_variants import gap_engine, on_gpu
from rollproof.gpu_suites.gap.engine_rollouts import (
    Sample,
    bounded,
    prompts_of,
    sample,
    sample_across,
)
from rollproof.gpu_suites.timing import Part, Spending

__all__ = ["ACROSS", "PATIENCE", "SEQUENCES", "TOKENS", "Rollouts"]

SEQUENCES: int = 128
TOKENS: int = 288
"""36,864 tokens: what a relative interval of a few percent takes (docs/gap.md)."""
PATIENCE: float = 240.0
"""Seconds that an engine may take for them: one that hangs ends its suite, and the next one runs."""
ACROSS: Mapping[str, Mapping[str, PauseMode]] = {
    "vllm": {"recompute": PauseMode.ABORT, "keep": PauseMode.KEEP},
    "sglang": {"recompute": PauseMode.ABORT, "keep": PauseMode.IN_PLACE},
}
"""The pause under which the weights change, by what becomes of the KV."""


@dataclass
class Rollouts:
    """What engines sampled, each started once per dtype; one that failed is told once, and what
    else needs it is skipped.

    The engines that are ``wanted`` in one dtype sample at the same time: on models so small that a
    card holds both. ``extra`` are further options of theirs.
    """

    checkpoints: dict[str, Path]
    spending: Spending
    wanted: frozenset[tuple[str, str]] = frozenset()
    across: bool = True
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    found: dict[tuple[str, str], dict[str, list[Sample]] | Exception] = field(default_factory=dict)
    told: set[tuple[str, str]] = field(default_factory=set)

    def of(self, engine: str, dtype: str) -> dict[str, list[Sample]]:
        """Samples by kind: ``whole``, and across an update with KV computed anew (``recompute``) or
        kept (``keep``).
        """
        key = (engine, dtype)
        if key not in self.found:
            names = [
                engine,
                *(name for name, kind in sorted(self.wanted) if kind == dtype and name != engine),
            ]
            with contextlib.ExitStack() as stack:
                for name in names:
                    stack.enter_context(on_gpu(name, dtype))
                for name, samples in zip(
                    names, asyncio.run(self._together(names, dtype)), strict=True
                ):
                    self.found[name, dtype] = samples
        found = self.found[key]
        if isinstance(found, Exception):
            if key in self.told:
                pytest.skip(f"{engine} in {dtype} sampled nothing: {str(found).splitlines()[0]}")
            self.told.add(key)
            raise found
        return found

    async def _together(
        self, names: list[str], dtype: str
    ) -> list[dict[str, list[Sample]] | Exception]:
        engines = {name: self._engine(name, dtype) for name in names}
        try:
            with self.spending.on(Part.STARTING):
                starts = await asyncio.gather(
                    *(engine.start() for engine in engines.values()), return_exceptions=True
                )
            with self.spending.on(Part.SAMPLING):
                work = [
                    self._kinds(name, engine) if start is None else _failed(start)
                    for (name, engine), start in zip(engines.items(), starts, strict=True)
                ]
                found = await asyncio.gather(*work, return_exceptions=True)
        finally:
            with self.spending.on(Part.STARTING):
                await asyncio.gather(*(engine.stop() for engine in engines.values()))
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, Exception):
                raise one
        return found  # type: ignore[return-value]  # what is no Exception has just been raised

    def _engine(self, name: str, dtype: str) -> EngineSubject:
        settings = EngineSettings(
            model=self.checkpoints["A"],
            dtype=dtype,
            max_length=1024,
            max_batch=SEQUENCES,
            prefill_chunk=2048,
            extra=self.extra,
        )
        return gap_engine(name, settings)

    async def _kinds(self, name: str, engine: EngineSubject) -> dict[str, list[Sample]]:
        model = model_of(self.checkpoints["A"])
        assert model is not None
        prompts = prompts_of(SEQUENCES, vocab=model.vocab)
        kinds = {
            "whole": await bounded(
                sample(engine, prompts, tokens=TOKENS), engine, PATIENCE, "sampling"
            )
        }
        served = ["A", "B"]
        for kind, mode in ACROSS[name].items() if self.across else ():
            await engine.clear_cache()
            old, new = served
            work = sample_across(
                engine,
                prompts[:64],
                tokens=TOKENS // 2,
                update=self.checkpoints[new],
                mode=mode,
                versions=(old, new),
            )
            kinds[kind] = await bounded(
                work, engine, PATIENCE, f"sampling across an update, KV {kind}"
            )
            served.reverse()
        return kinds


async def _failed(error: BaseException) -> dict[str, list[Sample]]:
    raise error
