"""Measuring: pairs in, report out; what every door of the gap calls."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rollproof.errors import UsageError
from rollproof.gap.buckets import bucketed, staleness
from rollproof.gap.decomposition import decompose
from rollproof.gap.diagnosis import diagnose
from rollproof.gap.intervals import Interval
from rollproof.gap.limits import GapVerdict, Limit, Limits, limits_named
from rollproof.gap.pairs import TokenPairs
from rollproof.gap.panel import Panel, measure_panel
from rollproof.gap.report import FEW_SEQUENCES, GapReport

__all__ = ["measure", "measure_pairs"]

_LEAST = 50


def measure(
    rollout_logprob: Any,
    trainer_logprob: Any,
    *,
    sequence_id: Any,
    mask: Any,
    limits: str | Limits | None = None,
    limits_file: Path | None = None,
    subject: str = "gap",
    resamples: int = 1000,
    seed: int = 0,
    **columns: Any,
) -> GapReport:
    """The gap between two columns of logprobs of the same tokens, each ``(n,)``, in nats.

    ``sequence_id`` and ``mask`` are ``(n,)``; further columns (``version``, ``position``, ``rollout_routes`` ...) as in
    ``rollproof.gap.pairs.COLUMNS``. ``limits`` names a profile (``moe-bf16``) or is one; ``limits_file`` holds profiles of one's
    own. Raises ``GapError`` where the columns cannot be compared, ``UsageError`` for an unknown profile. Sources of the metrics and
    limits are in their entries.
    """
    chosen = limits if isinstance(limits, Limits) else limits_named(limits, override=limits_file)
    pairs = TokenPairs.of(rollout_logprob=rollout_logprob, trainer_logprob=trainer_logprob, sequence_id=sequence_id, mask=mask, **columns)
    return measure_pairs(pairs, limits=chosen, subject=subject, resamples=resamples, seed=seed)


def measure_pairs(pairs: TokenPairs, *, limits: Limits, subject: str = "gap", resamples: int = 1000, seed: int = 0) -> GapReport:
    """As ``measure``, of pairs that are already laid out. Raises ``UsageError`` for fewer resamples than an interval can be told from."""
    if isinstance(resamples, bool) or not isinstance(resamples, int) or resamples < _LEAST:
        raise UsageError(f"resamples={resamples!r} must be a whole number of at least {_LEAST}; 1000 is usual.")
    panel = measure_panel(pairs, resamples=resamples, seed=seed)
    verdicts = {name: _judged(limit, panel.metrics[name], panel) for name, limit in limits.limits.items() if name in panel.metrics}
    buckets = bucketed(pairs, seed=seed)
    failing = panel.n_nonfinite > 0 or GapVerdict.FAIL in verdicts.values()
    return GapReport(
        subject=subject,
        panel=panel,
        limits=limits,
        verdicts=verdicts,
        causes=diagnose(pairs, buckets, failing=failing),
        buckets=buckets,
        notes=tuple(_notes(pairs, panel, limits)),
        pairs=pairs,
        decomposition=decompose(pairs, resamples=resamples, seed=seed),
    )


def _judged(limit: Limit, interval: Interval, panel: Panel) -> GapVerdict:
    """The limit's verdict; of few sequences nothing passes, since their interval cannot be trusted."""
    verdict = limit.judge(interval)
    return GapVerdict.INCONCLUSIVE if verdict is GapVerdict.PASS and panel.n_sequences < FEW_SEQUENCES else verdict


def _notes(pairs: TokenPairs, panel: Panel, limits: Limits) -> list[str]:
    notes = []
    if not pairs.n_tokens:
        notes.append(f"No token is left: the mask excludes all {pairs.masked:,}.")
    elif pairs.n_sequences < FEW_SEQUENCES:
        notes.append(
            f"{pairs.n_sequences} sequences are too few for intervals over sequences: measure at least {FEW_SEQUENCES}, better 64."
        )
    greedy = int((pairs.sides["temperature"] == 0).sum()) if "temperature" in pairs.sides else 0
    if greedy:
        notes.append(
            f"{greedy:,} tokens were chosen greedily (temperature 0): those are no draws from the rollout's law, so that k1, k3 and E[rho]"
            " estimate nothing of it; |d| compares them all the same."
        )
    lag = staleness(pairs)
    ahead = 0 if lag is None else int((lag < 0).sum())
    if ahead:
        notes.append(
            f"{ahead:,} tokens were sampled by a version that is newer than their current_version: one of the two columns is wrong."
        )
    plain, cut = panel.metrics["kl_mu_pi_k3"].value, panel.metrics["k3_winsorised"].value
    if plain > 2 * cut > 0:
        notes.append(
            f"A few tokens carry k3: {plain:.3g}, and {cut:.3g} with |d| cut at 2. Look at the worst tokens before trusting the mean."
        )
    flat = [name for name in limits.limits if name in panel.metrics and math.isnan(panel.metrics[name].value)]
    if flat and panel.n_tokens > panel.n_nonfinite:
        notes.append(f"{' and '.join(flat)} cannot be known: every token has the same probability, so that there is nothing to compare.")
    unmeasured = [name for name in limits.limits if name in ("slot_mismatch", "layer_mismatch") and len(pairs.routes) < 2]
    if unmeasured:
        notes.append(f"{' and '.join(unmeasured)} not measured: that needs rollout_routes and trainer_routes.")
    return notes
