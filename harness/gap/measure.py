"""Entry points ``measure``, ``measure_rollouts`` and ``measure_pairs``: logprobs in, report out.

All of them lay out token pairs and then call ``measure_pairs``, which collects the panel, the
verdicts, the buckets, the diagnosis and the notes into a ``GapReport``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollproof.core.records import Rollout
from rollproof.errors import UsageError
from rollproof.gap.buckets import bucket_pairs, decompose, staleness
from rollproof.gap.column_checks import BoolArray, IntArray, counted, is_present, listed, some_of
from rollproof.gap.diagnosis.arrival import measure_arrivals
from rollproof.gap.diagnosis.diagnose import diagnose
from rollproof.gap.diagnosis.evidence import sample_sequences
from rollproof.gap.diagnosis.outliers import find_mismatched, find_tilted
from rollproof.gap.diagnosis.rules_groups import MIN_SEQUENCES, groupings, label_parts, undersampled
from rollproof.gap.gap_report import FEW_SEQUENCES, GapReport
from rollproof.gap.intervals import FEW_TOKENS
from rollproof.gap.limits import GapVerdict, Limits, resolve_limits
from rollproof.gap.panel import Panel, measure_panel
from rollproof.gap.scored_rollouts import GapTrainer, score_rollouts
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["measure", "measure_pairs", "measure_rollouts"]

_MIN_RESAMPLES, _MAX_RESAMPLES = 50, 1_000_000
# Length from which a run of exact zeros at a sequence's end looks like padding: a sharp model ends
# a sequence with shorter runs by itself.
_MIN_PADDING = 16
# |d|, in nats, from which one side alone counts as padded
_PADDED_DIFF = 0.01
_LISTED_VERSIONS = 4


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
    groups: Mapping[str, Any] | None = None,
    **columns: Any,
) -> GapReport:
    """Measure the gap between two columns of logprobs of the same tokens.

    Sources of the metrics and limits are in their entries.

    Args:
        rollout_logprob: ``(n,)``, in nats, as the engine reported them.
        trainer_logprob: ``(n,)``, in nats, of the same tokens.
        sequence_id: ``(n,)``: the sequence of each token.
        mask: ``(n,)``: whether the loss counts the token.
        limits: the name of a profile (``moe-bf16``), or a profile.
        limits_file: a TOML file with further profiles.
        subject: the title of the report.
        resamples: bootstrap resamples of sequences.
        seed: seed of the resampling.
        groups: labels of your own to compare, by name, each ``(n,)``, such as ``{"modality":
            ["image", "text", ...]}``.
        columns: further columns (``version``, ``position``, ``rollout_routes`` ...) as in
            ``rollproof.gap.token_pairs.COLUMNS``.

    Raises:
        GapError: the columns cannot be compared.
        UsageError: an unknown profile, or an argument of the wrong kind.
    """
    profile = resolve_limits(limits, override=limits_file)
    pairs = TokenPairs.of(
        rollout_logprob=rollout_logprob,
        trainer_logprob=trainer_logprob,
        sequence_id=sequence_id,
        mask=mask,
        groups=groups,
        **columns,
    )
    return measure_pairs(pairs, limits=profile, subject=subject, resamples=resamples, seed=seed)


def measure_rollouts(
    rollouts: Iterable[Rollout] | Path | str,
    trainer: GapTrainer,
    *,
    replay: bool = False,
    every_version: bool = False,
    limits: str | Limits | None = None,
    limits_file: str | os.PathLike[str] | None = None,
    subject: str = "gap",
    resamples: int = 1000,
    seed: int = 0,
) -> GapReport:
    """Score rollouts with ``trainer`` (``score_rollouts``) and measure their gap (``measure``).

    Raises as either does.
    """
    profile = resolve_limits(limits, override=limits_file)
    # scoring takes minutes: bad arguments are refused before it
    _check_sampling(resamples, seed)
    pairs = score_rollouts(rollouts, trainer, replay=replay, every_version=every_version)
    return measure_pairs(
        pairs,
        limits=profile,
        subject=subject,
        resamples=resamples,
        seed=seed,
        notes=getattr(trainer, "notes", ()),
    )


def measure_pairs(
    pairs: TokenPairs,
    *,
    limits: Limits,
    subject: str = "gap",
    resamples: int = 1000,
    seed: int = 0,
    notes: Sequence[str] = (),
) -> GapReport:
    """Measure the gap of pairs that are laid out already.

    Args:
        pairs: the tokens with both logprobs.
        limits: the profile to judge by.
        subject: the title of the report.
        resamples: bootstrap resamples of sequences.
        seed: seed of the resampling.
        notes: further notes for the reader, such as those of the trainer.

    Raises:
        UsageError: an argument of the wrong kind.
    """
    _check_sampling(resamples, seed)
    if not isinstance(subject, str):
        raise UsageError(f"subject={subject!r} must be text: it is the title of the report.")
    panel = measure_panel(pairs, resamples=resamples, seed=seed)
    temperatures = _temperatures(pairs)
    verdicts = _worst_first(
        {
            name: _verdict(name, limits, panel, temperatures)
            for name in limits.limits
            if name in panel.metrics
        }
    )
    buckets = bucket_pairs(pairs, seed=seed)
    sampled = sample_sequences(pairs)
    arrivals = measure_arrivals(sampled, label_parts(sampled))
    failing = panel.n_nonfinite > 0 or GapVerdict.FAIL in verdicts.values()
    return GapReport(
        subject=subject,
        panel=panel,
        limits=limits,
        verdicts=verdicts,
        causes=diagnose(pairs, buckets, arrivals, failing=failing),
        buckets=buckets,
        notes=(*_token_notes(pairs), *_panel_notes(pairs, panel, limits, temperatures), *notes),
        pairs=pairs,
        decomposition=decompose(pairs, resamples=resamples, seed=seed),
        arrivals=arrivals,
    )


def _worst_first(verdicts: Mapping[str, GapVerdict]) -> dict[str, GapVerdict]:
    """Return verdicts in the order of a report: what failed, then what is undecided."""
    order = (GapVerdict.FAIL, GapVerdict.INCONCLUSIVE, GapVerdict.PASS)
    return dict(sorted(verdicts.items(), key=lambda item: order.index(item[1])))


def _check_sampling(resamples: Any, seed: Any) -> None:
    if (
        isinstance(resamples, bool)
        or not isinstance(resamples, int | np.integer)
        or not _MIN_RESAMPLES <= resamples <= _MAX_RESAMPLES
    ):
        raise UsageError(
            f"resamples={resamples!r} must be a whole number of at least {_MIN_RESAMPLES} and at"
            f" most {_MAX_RESAMPLES:,}; 1000 is usual."
        )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise UsageError(f"seed={seed!r} must be a whole number of at least 0.")


def _verdict(
    name: str, limits: Limits, panel: Panel, temperatures: Collection[float]
) -> GapVerdict:
    verdict = limits.judge(name, panel.metrics[name], temperatures)
    # intervals over a few sequences cannot be trusted, so nothing passes by them
    if verdict is GapVerdict.PASS and panel.n_sequences < FEW_SEQUENCES:
        return GapVerdict.INCONCLUSIVE
    return verdict


def _temperatures(pairs: TokenPairs) -> tuple[float, ...]:
    """The declared sampling temperatures, each once."""
    column = pairs.columns.get("temperature")
    return () if column is None else tuple(np.unique(column).astype(float).tolist())


def _token_notes(pairs: TokenPairs) -> Iterator[str]:
    """Notes about the tokens and their columns."""
    if not pairs.n_tokens:
        yield f"No token is left: the mask excludes all {pairs.masked:,}."
    elif pairs.n_sequences < FEW_SEQUENCES:
        few = counted(pairs.n_sequences, "sequence", "are")
        yield (
            f"{few} too few for intervals over sequences: measure at least {FEW_SEQUENCES},"
            " better 64."
        )
    yield from _outlier_notes(pairs)
    yield from _padding_notes(pairs)
    if pairs.scattered:
        yield (
            f"The rows of {counted(pairs.scattered, 'sequence')} are in several places, and no"
            " position gives their order: they are taken in the order of the rows. If they are"
            " samples of one prompt, give each sample its own sequence_id."
        )
    yield from _unused_version_notes(pairs)
    greedy = int((pairs.columns["temperature"] == 0).sum()) if "temperature" in pairs.columns else 0
    if greedy:
        yield (
            f"{counted(greedy, 'token', 'were')} chosen greedily (temperature 0). That is no draw"
            " from the rollout's distribution, so k1, k3 and E[rho] do not estimate a divergence;"
            " |d| is still a comparison."
        )
    lag = staleness(pairs)
    ahead = 0 if lag is None else int((lag < 0).sum())
    if ahead:
        yield (
            f"{counted(ahead, 'token', 'were')} sampled by a version that is newer than the"
            " current_version: one of the two columns is wrong."
        )
    for name, grouping in groupings(pairs).items():
        lacking = undersampled(pairs, grouping)
        if lacking and name == "replica" and name not in pairs.groups:
            yield (
                f"{counted(len(lacking), 'replica')} sampled fewer than {MIN_SEQUENCES} sequences"
                f" ({listed(lacking)}): too few to detect a stale replica."
            )
        elif lacking:
            values = counted(len(lacking), "value", "are")
            yield (
                f"{values} in fewer than {MIN_SEQUENCES} sequences, of the group {name}"
                f" ({listed(lacking)}): too few to be compared."
            )


def _outlier_notes(pairs: TokenPairs) -> Iterator[str]:
    """Notes about sequences unlike all others, when they are too few to be a cause of the gap."""
    mismatched = {outlier.sequence: outlier.lean for outlier in find_mismatched(pairs)}
    if mismatched:
        agreement = (1 + max(mismatched.values())) / 2
        yield (
            f"In {some_of(list(mismatched), pairs.sequences)} rollout and trainer have little in"
            f" common: they agree which tokens are likely at {agreement:.0%} of them at most. Look"
            " for samples that were swapped, or scored after another text."
        )
    tilted = [outlier for outlier in find_tilted(pairs) if outlier.sequence not in mismatched]
    for sharper in (True, False):
        sequences = [outlier.sequence for outlier in tilted if (outlier.lean > 0) is sharper]
        if sequences:
            more, less = ("more", "less") if sharper else ("less", "more")
            yield (
                f"{some_of(sequences, pairs.sequences)}"
                f" stand{'s' if len(sequences) == 1 else ''} apart: likely tokens are {more} likely"
                f" to the trainer there than to the rollout, and unlikely ones {less}, as at"
                " another temperature, in another logprob mode, or under weights of another age."
                " Inspect those sequences separately."
            )


def _unused_version_notes(pairs: TokenPairs) -> Iterator[str]:
    """Notes about scores under versions that no token is tagged with."""
    if not pairs.by_version or not pairs.n_tokens:
        return
    column = pairs.columns.get("version")
    tags = [] if column is None else np.unique(column[is_present(column)]).tolist()
    if not set(tags) & set(pairs.by_version):
        scored = ", ".join(map(str, list(pairs.by_version)[:_LISTED_VERSIONS]))
        tagged = (
            "no token has one of them as its version"
            f" ({', '.join(map(str, tags[:_LISTED_VERSIONS]))})"
            if tags
            else "no token has a version"
        )
        yield (
            f"trainer_logprob@VERSION is there for {scored}, and {tagged}: whether another version"
            " sampled was not checked."
        )


def _padding_notes(pairs: TokenPairs) -> Iterator[str]:
    """Notes about long ends of sequences with logprobs of exactly 0.

    Such a token could not have been another one, or it is no token.
    """
    if not pairs.n_tokens:
        return
    rollout, trainer = pairs.rollout, pairs.trainer
    zeros = {
        "on both sides": (rollout == 0) & (trainer == 0),
        "at the rollout alone": (rollout == 0) & (trainer < -_PADDED_DIFF),
        "at the trainer alone": (trainer == 0) & (rollout < -_PADDED_DIFF),
    }
    for place, zero in zeros.items():
        lengths = _end_runs(pairs, zero)
        padded = lengths >= _MIN_PADDING
        if padded.any():
            tokens, sequences = int(lengths[padded].sum()), int(padded.sum())
            yield (
                f"{tokens:,} tokens at the ends of {counted(sequences, 'sequence')} have a logprob"
                f" of exactly 0 {place}, as padding has. If it is padding, exclude it with the"
                " mask: every mean here includes it."
            )


def _end_runs(pairs: TokenPairs, matching: BoolArray) -> IntArray:
    """``(sequences,)``: length of the longer run of ``matching`` tokens, at either end of each."""
    index = np.arange(pairs.n_tokens)
    last_other = np.maximum.reduceat(np.where(matching, -1, index), pairs.starts)
    first_other = np.minimum.reduceat(np.where(matching, pairs.n_tokens, index), pairs.starts)
    ends = pairs.starts + pairs.lengths
    trailing = ends - 1 - np.maximum(last_other, pairs.starts - 1)
    leading = np.minimum(first_other, ends) - pairs.starts
    return np.asarray(np.maximum(trailing, leading))


def _panel_notes(
    pairs: TokenPairs, panel: Panel, limits: Limits, temperatures: Collection[float]
) -> Iterator[str]:
    """Notes about the panel's numbers and the limits."""
    if limits.too_cold(temperatures):
        coldest = min(temperature for temperature in temperatures if temperature > 0)
        yield (
            f"Tokens were sampled at temperature {coldest:g}, and the limits {limits.profile} are"
            f" for {limits.temperature:g}: numerics weigh {(limits.temperature or 1) / coldest:.2g}"
            " times as much there, so a broken limit decides nothing. Write limits for your"
            " temperature (--limits-file)."
        )
    k3 = panel.metrics["kl_mu_pi_k3"]
    if panel.n_tokens < FEW_TOKENS and k3.low < k3.high:
        yield (
            f"k3 of {counted(panel.n_tokens, 'token')} may be larger than its interval says: that"
            " interval contains the true value in 90 % of data sets of 640 tokens, and in 95 % from"
            " 1,920 on. mean |d| is more certain."
        )
    winsorised = panel.metrics["k3_winsorised"].value
    if k3.value > 2 * winsorised > 0:
        yield (
            f"A few tokens carry k3: {k3.value:.3g}, and {winsorised:.3g} with |d| cut at 2. Look"
            " at the worst tokens before you trust the mean."
        )
    undefined = [
        name
        for name in limits.limits
        if name in panel.metrics and math.isnan(panel.metrics[name].value)
    ]
    if undefined and panel.n_tokens > panel.n_nonfinite:
        yield (
            f"{' and '.join(undefined)} cannot be computed: every token has the same probability."
        )
    unmeasured = [
        name
        for name in limits.limits
        if name in ("slot_mismatch", "layer_mismatch") and len(pairs.routes) < 2
    ]
    if unmeasured:
        yield (
            f"{' and '.join(unmeasured)} not measured: that needs rollout_routes and"
            " trainer_routes."
        )
