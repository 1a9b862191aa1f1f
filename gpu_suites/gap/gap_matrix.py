"""The gap between an engine and a trainer, for each source of the trainer's routes.

The sources are native routing, R2 and R3, and three negative controls: the engine's routes shifted
by a token, by a layer, and permuted over the sequence. A control leaves every id legal and
distinct, so that only its place is wrong; it must come out worse than no replay at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from rollproof.core.records import IntArray
from rollproof.gap.gap_report import GapReport
from rollproof.gap.limits import GapVerdict
from rollproof.gap.measure import measure
from rollproof.gap.trainer_comparison import Comparison, compare
from rollproof.gpu_suites.gap.engine_rollouts import Sample, Unit, units_of
from rollproof.gpu_suites.gap.scorers import Routes, Scored, Scorer

__all__ = ["CONTROLS", "Cell", "Routed", "measure_cell", "routed"]


class Routed(StrEnum):
    """The source of the routes that the trainer executes."""

    NATIVE = "native"
    R2 = "R2"
    """Recorded in one pass of the trainer, replayed in another one over other microbatches."""
    R3 = "R3"
    """Recorded in the rollout engine."""
    SHIFTED_TOKEN = "R3 shifted by a token"
    SHIFTED_LAYER = "R3 shifted by a layer"
    PERMUTED = "R3 permuted"


CONTROLS: tuple[Routed, ...] = (Routed.SHIFTED_TOKEN, Routed.SHIFTED_LAYER, Routed.PERMUTED)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cell:
    """One engine and one trainer on the same samples.

    Attributes:
        engine: name of the engine.
        trainer: name of the trainer.
        dtype: the dtype of both.
        reports: the gap for each source of routes.
        effect: R3 and the controls compared with native routing, token by token.
        self_replay: largest difference of a logprob between a recording pass and its replay over
            the same rows (``Scorer.repeated``). Inexact replay and nondeterminism show in it.
            ``None`` if the trainer records nothing that could be replayed.
        about: what is special about the cell.
        seconds: seconds that it took.
        ours: the part of them that was not the trainer's.
    """

    engine: str
    trainer: str
    dtype: str
    reports: Mapping[Routed, GapReport]
    effect: Comparison
    self_replay: float | None
    about: str = ""
    seconds: float = 0.0
    ours: float = 0.0

    @property
    def helps(self) -> bool:
        """Whether replay lowers every compared metric, with an interval that excludes 1."""
        return all(effect.verdict is GapVerdict.PASS for effect in self.effect.effects)

    @property
    def controls_harm(self) -> bool:
        """Whether every control is worse than no replay, with an interval that excludes 1."""
        return all(
            effect.verdict is GapVerdict.PASS
            for row in self.effect.controls.values()
            for effect in row
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "engine": self.engine,
            "trainer": self.trainer,
            "dtype": self.dtype,
            "about": self.about,
            "n_tokens": self.effect.tokens,
            "n_sequences": self.effect.sequences,
            "self_replay_max_abs": self.self_replay,
            "seconds": round(self.seconds, 1),
            "seconds_ours": round(self.ours, 1),
            "effect": self.effect.to_dict(),
            "reports": {str(mode): _shortened(report) for mode, report in self.reports.items()},
        }


def routed(units: Sequence[Unit], mode: Routed, seed: int = 0) -> list[IntArray]:
    """Return the engine's routes of each unit, ``(tokens - 1, layers, top_k)``, as ``mode`` moves
    them.
    """
    draw = np.random.default_rng(seed)
    moves: Mapping[Routed, Callable[[IntArray], IntArray]] = {
        Routed.R3: lambda rows: rows,
        Routed.SHIFTED_TOKEN: lambda rows: np.roll(rows, 1, axis=0),
        Routed.SHIFTED_LAYER: lambda rows: np.roll(rows, 1, axis=1),
        Routed.PERMUTED: lambda rows: rows[draw.permutation(len(rows))],
    }
    return [moves[mode](unit.routes).astype(np.int64) for unit in units]


def measure_cell(
    engine: str,
    samples: Sequence[Sample],
    scorer: Scorer,
    *,
    limits: Mapping[Routed, str] | None = None,
    modes: Sequence[Routed] = tuple(Routed),
    about: str = "",
    seed: int = 0,
) -> Cell:
    """Score ``samples`` in every mode and compare. Native and R3 are always among them.

    ``limits`` name a profile of limits for a mode. Raises what the scorer raises, and ``GapError``
    if nothing can be compared.
    """
    began, spent = time.perf_counter(), 0.0
    units = list(units_of(samples))

    def score(routes: Routes, *, other: bool = False) -> Scored:
        nonlocal spent
        start = time.perf_counter()
        try:
            return scorer.score(units, routes, other=other)
        finally:
            spent += time.perf_counter() - start

    # first, because R2 replays what this pass recorded
    native = score(None)
    start = time.perf_counter()
    repeated = scorer.repeated(units, native) if scorer.records else None
    spent += time.perf_counter() - start
    scored: dict[Routed, Scored] = {Routed.NATIVE: native}
    if Routed.R2 in modes and scorer.records:
        scored[Routed.R2] = score(native.routes, other=True)
    for mode in (Routed.R3, *(control for control in CONTROLS if control in modes)):
        scored[mode] = score(routed(units, mode, seed))
    profiles = limits or {}
    reports = {
        mode: _measure_mode(
            samples, units, scores, profiles.get(mode), f"{engine} to {scorer.name}, {mode}"
        )
        for mode, scores in scored.items()
    }
    effect = compare(
        reports[Routed.R3].pairs,
        reports[Routed.NATIVE].pairs,
        controls={str(mode): reports[mode].pairs for mode in CONTROLS if mode in reports},
        name="native",
    )
    self_replay = None
    if repeated is not None:
        logprobs = zip(native.logprobs, repeated.logprobs, strict=True)
        self_replay = max(float(np.abs(first - second).max()) for first, second in logprobs)
    seconds = time.perf_counter() - began
    return Cell(
        engine=engine,
        trainer=scorer.name,
        dtype=scorer.dtype,
        reports=reports,
        effect=effect,
        self_replay=self_replay,
        about=about,
        seconds=seconds,
        ours=seconds - spent,
    )


def _measure_mode(
    samples: Sequence[Sample],
    units: Sequence[Unit],
    scored: Scored,
    limits: str | None,
    subject: str,
) -> GapReport:
    """Return the report of one mode, with the agreement of executed and engine's routes."""
    by_number = {sample.number: sample for sample in samples}
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "rollout",
            "trainer",
            "sequence",
            "token",
            "position",
            "version",
            "since",
            "executed",
            "engine",
        )
    }
    for unit, logprobs, chosen in zip(units, scored.logprobs, scored.routes, strict=True):
        sample = by_number[unit.sample]
        sent = len(sample.prompt_ids)
        place = slice(unit.start - sent, unit.end - sent)
        predicting = slice(unit.start - 1, unit.end - 1)  # row i predicts token i + 1
        columns["rollout"].append(sample.logprobs[place])
        columns["trainer"].append(logprobs)
        columns["sequence"].append(np.full(len(logprobs), unit.sample))
        columns["token"].append(np.array(unit.ids[unit.start : unit.end]))
        columns["position"].append(np.arange(unit.start, unit.end))
        # versions are single letters here; their codes are numbers with an order
        columns["version"].append(np.full(len(logprobs), ord(unit.version[0])))
        columns["since"].append(sample.since_resume[place])
        columns["executed"].append(chosen[predicting])
        columns["engine"].append(unit.routes[predicting].astype(np.int64))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    # -1: the trainer does not return the routes of every token
    complete = bool((joined["executed"] >= 0).all())
    resumed = bool((joined["since"] >= 0).any())
    # without a resumed sample the column would hold nothing but -1
    extra: dict[str, Any] = (
        {"version": joined["version"], "since_resume": joined["since"]} if resumed else {}
    )
    return measure(
        joined["rollout"],
        joined["trainer"],
        sequence_id=joined["sequence"],
        mask=np.ones(len(joined["rollout"])),
        token_id=joined["token"],
        position=joined["position"],
        rollout_routes=joined["engine"] if complete else None,
        trainer_routes=joined["executed"] if complete else None,
        limits=limits,
        subject=subject,
        **extra,
    )


# Metrics of a short report; those with a limit are in it too
_SHORT = (
    "kl_mu_pi_k3",
    "k3_winsorised",
    "abs_diff_mean",
    "abs_diff_p99",
    "abs_diff_max",
    "rho_mean_minus_1",
    "F2",
    "F5",
    "slot_mismatch",
    "layer_mismatch",
)


def _shortened(report: GapReport) -> dict[str, Any]:
    """Return the part of a report that is stored with a run."""
    full = report.to_dict()
    metrics = {
        name: value
        for name, value in full["metrics"].items()
        if name in _SHORT or value["threshold"] is not None
    }
    short = {
        name: {
            key: _rounded(value[key])
            for key in ("value", "low", "high", "threshold", "verdict")
            if value[key] is not None
        }
        for name, value in metrics.items()
    }
    fields = {
        name: full[name]
        for name in ("verdict", "limits", "n_tokens", "n_sequences", "diagnosis", "notes")
    }
    buckets = {
        name: rows for name, rows in full["buckets"].items() if name in ("since_resume", "version")
    }
    return {
        **fields,
        "metrics": short,
        "buckets": buckets,
        "per_layer": [_rounded(value) for value in full["per_layer"]],
    }


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
