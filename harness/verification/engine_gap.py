"""Engine gap: an engine's logprobs and routes against those of a Hugging Face model.

The model routes natively and with the engine's routes replayed. Both sides see the same sequences
in the same dtype; ``rollproof.gap`` measures the difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.engine_protocol import EngineSettings, Query
from rollproof.core.records import EngineOutput, IntArray
from rollproof.core.subjects import EngineSubject
from rollproof.engines.engine_targets import EngineTarget
from rollproof.engines.experiments import Setting
from rollproof.engines.reference_model import ReferenceModel
from rollproof.gap.gap_report import GapReport
from rollproof.gap.measure import measure
from rollproof.invariants.engine.independent_forward import moe_rows

__all__ = ["RolloutGap", "Sampled", "measure_rollout_gap", "sample_rollouts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A sequence that an engine sampled: its prompt, and the engine's output."""

    prompt_ids: tuple[int, ...]
    output: EngineOutput

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt_ids + self.output.token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGap:
    """The gap of one engine in one dtype: with the model's own routing, and with the engine's
    routes replayed (R3).
    """

    engine: str
    dtype: str
    native: GapReport
    replayed: GapReport


def measure_rollout_gap(
    target: EngineTarget,
    dtype: str = "float32",
    *,
    sequences: int = 16,
    tokens: int = 32,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> RolloutGap:
    """Sample ``sequences`` of ``tokens`` each on a real engine, and measure the gap to a Hugging
    Face model in ``dtype``.

    Raises ``EngineStartError`` where the engine does not start, ``EngineError`` where there is no
    model to compare with.
    """
    settings = replace(target.settings[Setting.MAIN], dtype=dtype)
    contract, sampled = asyncio.run(
        sample_rollouts(target.make, settings, sequences=sequences, tokens=tokens, seed=seed)
    )
    model = ReferenceModel(target.checkpoints[Setting.MAIN], contract, dtype)
    native: list[tuple[np.ndarray, IntArray]] = []
    replayed: list[tuple[np.ndarray, IntArray]] = []
    for number, sample in enumerate(sampled):
        if progress is not None:
            progress(f"forward {number + 1} of {len(sampled)}, {dtype}")
        raw, _, routes, _, _ = model.forward(settings.version, sample.ids, 1.0)
        native.append((raw, routes))
        replayed.append(
            (model.replayed(settings.version, sample.ids, _complete_rows(contract, sample)), routes)
        )
    return RolloutGap(
        engine=target.name,
        dtype=dtype,
        native=_measured(contract, sampled, native),
        replayed=_measured(contract, sampled, replayed),
    )


async def sample_rollouts(
    make: Callable[[EngineSettings], EngineSubject],
    settings: EngineSettings,
    *,
    sequences: int,
    tokens: int,
    seed: int = 0,
) -> tuple[Contract, Sequence[Sampled]]:
    """Start an engine, let it sample at temperature 1, and stop it; returns its contract and what
    it sampled.
    """
    draw = np.random.default_rng(seed)
    engine = make(settings)
    prompts = [
        tuple(int(token) for token in draw.integers(3, 512, int(draw.integers(8, 40))))
        for _ in range(sequences)
    ]
    try:
        await engine.start()
        queries = [
            Query(handle=f"gap-{i}-", prompt_ids=prompt, max_tokens=tokens, seed=seed + i)
            for i, prompt in enumerate(prompts)
        ]
        outputs = await asyncio.gather(
            *(engine.generate(query, lambda _: None) for query in queries)
        )
    finally:
        await engine.stop()
    return engine.contract, [
        Sampled(prompt_ids=prompt, output=output)
        for prompt, (output,) in zip(prompts, outputs, strict=True)
    ]


def _complete_rows(contract: Contract, sample: Sampled) -> IntArray:
    """``(T, moe layers, top_k)``: the engine's rows, and -1 where it returned none, so that the
    model routes by itself there.
    """
    assert sample.output.routes is not None
    rows = moe_rows(contract, sample.output.routes).astype(np.int64)
    missing = len(sample.ids) - len(rows)
    return np.concatenate([rows, np.full((missing, *rows.shape[1:]), -1)])


def _measured(
    contract: Contract, sampled: Sequence[Sampled], forwards: Sequence[tuple[np.ndarray, IntArray]]
) -> GapReport:
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("rollout", "trainer", "sequence", "token", "engine", "model")
    }
    moe = list(contract.moe_layers or ())
    for number, (sample, (logprobs, routes)) in enumerate(zip(sampled, forwards, strict=True)):
        assert sample.output.logprobs is not None and sample.output.routes is not None
        sent, count = len(sample.prompt_ids), len(sample.output.token_ids)
        predicting = slice(sent - 1, sent - 1 + count)  # row i predicts token i + 1
        columns["rollout"].append(sample.output.logprobs)
        columns["trainer"].append(logprobs[sent:])
        columns["sequence"].append(np.full(count, number))
        columns["token"].append(np.array(sample.output.token_ids))
        columns["engine"].append(
            moe_rows(contract, sample.output.routes)[predicting].astype(np.int64)
        )
        columns["model"].append(routes[predicting][:, moe])
    joined: Mapping[str, np.ndarray] = {
        name: np.concatenate(parts) for name, parts in columns.items()
    }
    return measure(
        joined["rollout"],
        joined["trainer"],
        sequence_id=joined["sequence"],
        mask=np.ones(len(joined["rollout"])),
        token_id=joined["token"],
        rollout_routes=joined["engine"],
        trainer_routes=joined["model"],
    )
