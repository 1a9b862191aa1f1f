"""Measuring: pairs in, report out; what every door of the gap calls."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import numpy as np

from rollproof.errors import UsageError
from rollproof.gap.buckets import bucketed
from rollproof.gap.decomposition import decompose
from rollproof.gap.diagnosis.diagnose import diagnose
from rollproof.gap.gap_report import FEW_SEQUENCES, GapReport
from rollproof.gap.limits import GapVerdict, Limits, limits_of
from rollproof.gap.panel import Panel, measure_panel
from rollproof.gap.reader_notes import declared, notes_of
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["measure", "measure_pairs", "require_sampling"]

_LEAST, _MOST = 50, 1_000_000


def measure(
    rollout_logprob: Any,
    trainer_logprob: Any,
    *,
    sequence_id: Any,
    mask: Any,
    limits: str | Limits | None = None,
    limits_file: str | os.PathLike[str] | None = None,
    subject: str = "gap",
    resamples: int = 1000,
    seed: int = 0,
    **columns: Any,
) -> GapReport:
    """The gap between two columns of logprobs of the same tokens, each ``(n,)``, in nats.

    ``sequence_id`` and ``mask`` are ``(n,)``; further columns (``version``, ``position``,
    ``rollout_routes`` ...) as in ``rollproof.gap.token_pairs.COLUMNS``. ``limits`` names a profile
    (``moe-bf16``) or is one; ``limits_file`` holds profiles of one's own. Raises ``GapError`` where
    the columns cannot be compared, ``UsageError`` for an unknown profile or an argument of the
    wrong kind. Sources of the metrics and limits are in their entries.
    """
    chosen = limits_of(limits, override=limits_file)
    pairs = TokenPairs.of(
        rollout_logprob=rollout_logprob,
        trainer_logprob=trainer_logprob,
        sequence_id=sequence_id,
        mask=mask,
        **columns,
    )
    return measure_pairs(pairs, limits=chosen, subject=subject, resamples=resamples, seed=seed)


def measure_pairs(
    pairs: TokenPairs, *, limits: Limits, subject: str = "gap", resamples: int = 1000, seed: int = 0
) -> GapReport:
    """As ``measure``, of pairs that are already laid out. Raises ``UsageError`` for an argument of
    the wrong kind.
    """
    require_sampling(resamples, seed)
    if not isinstance(subject, str):
        raise UsageError(f"subject={subject!r} must be text: it stands at the head of the report.")
    panel = measure_panel(pairs, resamples=resamples, seed=seed)
    verdicts = {
        name: _judged(name, limits, panel, declared(pairs))
        for name in limits.limits
        if name in panel.metrics
    }
    buckets = bucketed(pairs, seed=seed)
    failing = panel.n_nonfinite > 0 or GapVerdict.FAIL in verdicts.values()
    return GapReport(
        subject=subject,
        panel=panel,
        limits=limits,
        verdicts=verdicts,
        causes=diagnose(pairs, buckets, failing=failing),
        buckets=buckets,
        notes=notes_of(pairs, panel, limits),
        pairs=pairs,
        decomposition=decompose(pairs, resamples=resamples, seed=seed),
    )


def require_sampling(resamples: Any, seed: Any) -> None:
    """Raise ``UsageError`` unless intervals can be told from so many resamples, drawn with such a
    seed.
    """
    if (
        isinstance(resamples, bool)
        or not isinstance(resamples, int | np.integer)
        or not _LEAST <= resamples <= _MOST
    ):
        raise UsageError(
            f"resamples={resamples!r} must be a whole number of at least {_LEAST} and at most"
            f" {_MOST:,}; 1000 is usual."
        )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise UsageError(f"seed={seed!r} must be a whole number of at least 0.")


def _judged(name: str, limits: Limits, panel: Panel, temperatures: Collection[float]) -> GapVerdict:
    """The limit's verdict; of few sequences nothing passes, since their interval cannot be trusted."""
    verdict = limits.judge(name, panel.metrics[name], temperatures)
    return (
        GapVerdict.INCONCLUSIVE
        if verdict is GapVerdict.PASS and panel.n_sequences < FEW_SEQUENCES
        else verdict
    )
