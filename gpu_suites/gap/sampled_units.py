"""The samples of each engine for the gap's suite, sampled on first use."""

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
"""Tokens of each: 36,864 in all, for a relative interval of a few percent (docs/gap.md)."""
PATIENCE: float = 240.0
"""Seconds that an engine may take: one that hangs ends its suite, and the next one runs."""
ACROSS: Mapping[str, Mapping[str, PauseMode]] = {
    "vllm": {"recompute": PauseMode.ABORT, "keep": PauseMode.KEEP},
    "sglang": {"recompute": PauseMode.ABORT, "keep": PauseMode.IN_PLACE},
}
"""The pause under which the weights change, by what happens to the KV."""


@dataclass
class Rollouts:
    """The samples of engines, each of which is started once per dtype.

    The failure of an engine is raised once; later tests that need it are skipped.

    Attributes:
        checkpoints: folders by version.
        spending: where time is recorded.
        planned: engines and dtypes of this session. Those in one dtype sample at the same time,
            since the models are so small that a GPU holds both.
        across: whether to sample across weight updates too.
        extra: further options of the engines.
        results: the samples or the failure, by engine and dtype.
        raised: the failures that were raised.
    """

    checkpoints: dict[str, Path]
    spending: Spending
    planned: frozenset[tuple[str, str]] = frozenset()
    across: bool = True
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    results: dict[tuple[str, str], dict[str, list[Sample]] | Exception] = field(
        default_factory=dict
    )
    raised: set[tuple[str, str]] = field(default_factory=set)

    def of(self, engine: str, dtype: str) -> dict[str, list[Sample]]:
        """Return samples by kind.

        ``uninterrupted``, and across an update with KV ``recompute`` (computed again) or ``keep``.
        """
        key = (engine, dtype)
        if key not in self.results:
            names = [
                engine,
                *(name for name, kind in sorted(self.planned) if kind == dtype and name != engine),
            ]
            with contextlib.ExitStack() as stack:
                for name in names:
                    stack.enter_context(on_gpu(name, dtype))
                for name, samples in zip(
                    names, asyncio.run(self._together(names, dtype)), strict=True
                ):
                    self.results[name, dtype] = samples
        result = self.results[key]
        if isinstance(result, Exception):
            if key in self.raised:
                pytest.skip(f"{engine} in {dtype} sampled nothing: {str(result).splitlines()[0]}")
            self.raised.add(key)
            raise result
        return result

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
                results = await asyncio.gather(*work, return_exceptions=True)
        finally:
            with self.spending.on(Part.STARTING):
                await asyncio.gather(*(engine.stop() for engine in engines.values()))
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
        return results  # type: ignore[return-value]  # any other BaseException has just been raised

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
            "uninterrupted": await bounded(
                sample(engine, prompts, tokens=TOKENS), engine, PATIENCE, "sampling"
            )
        }
        # one engine serves all kinds: each begins with the weights that the last one ended with
        served = ["A", "B"]
        for kind, mode in ACROSS[name].items() if self.across else ():
            # a cached prefix would be of the weights before the last update
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
