from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.engine_contract import PauseMode
from rollproof.core.engine_protocol import EngineSettings, Query, Watch
from rollproof.core.records import EngineOutput
from rollproof.errors import EngineError
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.gpu_suites.gap.engine_rollouts import (
    Sample,
    prompts_of,
    sample,
    sample_across,
    units_of,
)
from rollproof.gpu_suites.gap.gap_matrix import CONTROLS, Routed, measure_cell, routed
from rollproof.gpu_suites.gap.scorers import Routes, Scored
from rollproof.simulation import virtual_loop


def sampled(
    mode: PauseMode | None = None, *, count: int = 24, tokens: int = 20, flavour: str = "vllm-0.26"
) -> list[Sample]:
    """Samples of a fake engine, whole or across an update."""
    from pathlib import Path

    async def main() -> list[Sample]:
        engine = FakeEngineSubject(EngineSettings(model=Path(), max_batch=count), flavour, 0)
        await engine.start()
        prompts = prompts_of(count, vocab=60, longest=20)
        try:
            if mode is None:
                return await sample(engine, prompts, tokens=tokens)
            return await sample_across(engine, prompts, tokens=tokens, update=Path(), mode=mode)
        finally:
            await engine.stop()

    return virtual_loop.run(main)


@dataclass
class Trainer:
    """A trainer whose logprobs stray where its routes are not the engine's: by ``size`` for each
    row that differs.

    Natively it routes a row in ``every`` otherwise. ``unsteady`` gives other values each time.
    """

    units_of_engine: Any
    every: int = 5
    size: float = 0.4
    unsteady: bool = False
    name: str = "pretended"
    dtype: str = "float64"
    records: bool = True
    calls: int = 0

    def score(self, units: Sequence[Any], routes: Routes, *, other: bool = False) -> Scored:
        self.calls += 1
        own = [self._native(unit) for unit in units]
        used = own if routes is None else routes
        logprobs = []
        for unit, theirs in zip(units, used, strict=True):
            wrong = (np.sort(theirs) != np.sort(unit.routes)).any(axis=(1, 2))[
                unit.start - 1 : unit.end - 1
            ]
            base = self.units_of_engine[unit.sample, unit.start]
            noise = (
                0.01 * np.cos(np.arange(len(base)))
                - 0.011
                - (0.1 * self.calls if self.unsteady else 0)
            )
            logprobs.append(base + noise - self.size * wrong)
        return Scored(logprobs=tuple(logprobs), routes=tuple(used))

    def repeated(self, units: Sequence[Any], native: Scored) -> Scored:
        return self.score(units, native.routes)

    def _native(self, unit: Any) -> Any:
        made = np.array(unit.routes, dtype=np.int64)
        made[:: self.every] = (made[:: self.every] + 1) % 8
        return made

    def close(self) -> None: ...


def trainer(samples: Sequence[Sample], **options: Any) -> Trainer:
    scores_by_ids = {}
    for rollout in samples:
        sent = len(rollout.prompt_ids)
        for unit in units_of([rollout]):
            scores_by_ids[unit.sample, unit.start] = rollout.logprobs[
                unit.start - sent : unit.end - sent
            ]
    return Trainer(scores_by_ids, **options)


def test_replay_lowers_the_gap_and_controls_raise_it() -> None:
    """A trainer that routes a fifth of its rows otherwise: R3 takes that away, R2 changes nothing,
    wrong routes do harm.
    """
    samples = sampled()
    cell = measure_cell("fake", samples, trainer(samples))

    k3 = {mode: report.panel.metrics["kl_mu_pi_k3"].value for mode, report in cell.reports.items()}
    assert set(Routed) == set(k3)
    assert k3[Routed.NATIVE] == k3[Routed.R2]
    assert k3[Routed.R3] < 0.1 * k3[Routed.NATIVE]
    assert all(k3[mode] > 2 * k3[Routed.NATIVE] for mode in CONTROLS)
    assert (True, True, 0.0) == (cell.helps, cell.controls_harm, cell.self_replay)
    data = cell.to_dict()
    assert (24 * 20, 24) == (data["n_tokens"], data["n_sequences"])
    assert 0 == data["reports"]["R3"]["metrics"]["slot_mismatch"]["value"]
    assert data["seconds"] >= data["seconds_ours"]


def test_replay_that_does_nothing_does_not_help() -> None:
    """Where native routing is the engine's, there is nothing to lower: no effect is claimed."""
    samples = sampled()
    cell = measure_cell("fake", samples, trainer(samples, every=10_000, size=0.0))
    assert not cell.controls_harm
    assert not cell.helps


def test_a_trainer_that_does_not_repeat_itself_is_seen() -> None:
    """Self-replay is compared value by value."""
    samples = sampled()
    assert (
        pytest.approx(0.1)
        == measure_cell("fake", samples, trainer(samples, unsteady=True)).self_replay
    )


@pytest.mark.parametrize(
    ("mode", "flavour"),
    [
        (PauseMode.ABORT, "vllm-0.26"),
        (PauseMode.KEEP, "vllm-0.26"),
        (PauseMode.IN_PLACE, "sglang-0.5.17"),
    ],
)
def test_samples_across_an_update(mode: PauseMode, flavour: str) -> None:
    """Each token is scored under its own version, with the rows of the call that sampled it."""
    samples = sampled(mode, flavour=flavour)
    assert [20] * 24 == [len(rollout.response_ids) for rollout in samples]
    assert sum(len(rollout.segments) == 2 for rollout in samples) > 12
    for rollout in samples:
        assert list("AB"[: len(rollout.segments)]) == [
            segment.version for segment in rollout.segments
        ] or ["B"] == [s.version for s in rollout.segments]
        assert rollout.versions == sorted(rollout.versions)
        since = rollout.since_resume
        assert (since[-1] == rollout.segments[-1].end - rollout.segments[-1].start - 1) == (
            len(rollout.segments) == 2
        )
        for unit in units_of([rollout]):
            assert len(unit.routes) == len(unit.ids) - 1
    cell = measure_cell("fake", samples, trainer(samples), modes=(Routed.NATIVE, Routed.R3))
    assert "since_resume" in cell.reports[Routed.R3].buckets
    assert {"0", "1", "2-7", "8+", "before any"} >= {
        bucket.label for bucket in cell.reports[Routed.R3].buckets["since_resume"]
    }


def test_controls_keep_ids_legal_and_move_them() -> None:
    """A control is a legal routing at the wrong place."""
    unit, *_ = units_of(sampled())
    for mode in (Routed.R3, *CONTROLS):
        (made,) = routed([unit], mode)
        assert np.array_equal(made, unit.routes) == (mode is Routed.R3)
        assert np.array_equal(np.sort(made.ravel()), np.sort(unit.routes.ravel()))


def test_an_engine_that_returns_no_routes_is_told() -> None:
    """There is nothing to compare then."""

    class Silent(FakeEngineSubject):
        async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
            return [
                replace(rollout, routes=None) for rollout in await super().generate(query, watch)
            ]

    async def main() -> None:
        from pathlib import Path

        engine = Silent(EngineSettings(model=Path(), max_batch=4), "vllm-0.26", 0)
        await engine.start()
        await sample(engine, prompts_of(2, vocab=60), tokens=3)

    with pytest.raises(
        EngineError, match="no routes, or not a logprob for each token, for sequence 0"
    ):
        virtual_loop.run(main)
