"""Trainers: what scores the rollouts of a trace anew, each token under the weights that sampled it.

A trainer is any object with the method of ``GapTrainer``; ``hf:PATH`` is the one that is built in
(``rollproof.gap.hf_trainer``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollproof.core.contract import Provenance
from rollproof.core.error_text import told_with_place
from rollproof.core.records import IntArray, Rollout, Version
from rollproof.errors import GapError, RollproofError, SubjectError, UsageError
from rollproof.gap.gap_report import GapReport
from rollproof.gap.joining import Sample, current_columns, rollout_columns, samples_of
from rollproof.gap.limits import Limits, limits_of
from rollproof.gap.measure import measure_pairs, require_sampling
from rollproof.gap.token_pairs import FloatArray, TokenPairs
from rollproof.store import open_trace

__all__ = ["GapTrainer", "Scored", "measure_rollouts", "score_rollouts"]

_PROVENANCE_NAMES = tuple(str(one) for one in Provenance)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored:
    """What a trainer says of one rollout: ``logprobs`` ``(response,)``, natural, of the law that
    the sampling temperature gives; and ``routes`` ``(response, layers, top_k)``, the experts of the
    forward that gave each, on the rollout's own layer axis, where known.
    """

    logprobs: Any
    routes: Any = None


@runtime_checkable
class GapTrainer(Protocol):
    """Scores rollouts. A factory of one is what ``--trainer module:factory`` names."""

    def score(
        self, rollouts: Sequence[Rollout], *, version: Version, replay: bool
    ) -> Sequence[Scored]:
        """One ``Scored`` for each of ``rollouts``, in order, under the weights ``version``
        (``None``: the rollouts do not tell theirs).

        Called once for each version that sampled a token. With ``replay`` the experts are those of
        ``rollout.routes``. All response tokens are to be scored, masked ones and those of other
        versions too: what is not of ``version`` is not used.

        A trainer that also has ``sampled_at(temperatures)`` is told before, once, at which
        temperatures the trace's calls were sampled.
        """
        ...


def score_rollouts(
    rollouts: Iterable[Rollout] | Path | str,
    trainer: GapTrainer,
    *,
    replay: bool = False,
    every_version: bool = False,
    provenance: str | None = None,
) -> TokenPairs:
    """Pairs of the rollouts' own logprobs and the trainer's: each segment under the weights of its
    own version.

    ``rollouts`` are records, or the path of a recorded trace. ``every_version`` scores every
    rollout under every version at hand, which tells whether a tag names the weights that sampled.
    ``provenance`` says of which weights a resumed rollout's routes are, as a contract declares it
    (default: the trace's, else ``as-sampled``). Raises ``GapError`` where either side lacks what
    the other has.
    """
    if not callable(getattr(trainer, "score", None)):
        raise UsageError(
            f"A trainer has a method score(rollouts, *, version, replay); {type(trainer).__name__}"
            " has none."
        )
    if provenance not in (None, *_PROVENANCE_NAMES):
        raise UsageError(
            f"provenance={provenance!r} is not one of: {', '.join(_PROVENANCE_NAMES)}."
        )
    samples = _samples(rollouts)
    provenance = provenance or (
        _provenance(Path(rollouts)) if isinstance(rollouts, Path | str) else "as-sampled"
    )
    if replay:
        _require_routes(samples)
    if callable(told := getattr(trainer, "sampled_at", None)):
        told(frozenset().union(*(sample.temperatures for sample in samples.values())))
    wanted = {name: _versions(sample) for name, sample in samples.items()}
    everyone = sorted(
        {version for found in wanted.values() for version in found},
        key=lambda version: (str(type(version)), version),
    )
    scores: dict[str, dict[Version, Scored]] = {name: {} for name in samples}
    for version in everyone:
        names = [name for name in samples if every_version or version in wanted[name]]
        own = [samples[name].rollout for name in names]
        found = _found(trainer, own, version, replay)
        if not isinstance(found, Sequence | np.ndarray):
            raise GapError(
                f"The trainer's score returned a {type(found).__name__}: it returns one Scored for"
                " each rollout, in a list."
            )
        if len(found) != len(own):
            raise GapError(
                f"The trainer returned {len(found)} scores for {len(own)} rollouts under version"
                f" {version}."
            )
        for name, rollout, scored in zip(names, own, found, strict=True):
            scores[name][version] = _checked(name, rollout, scored, version)
    columns = rollout_columns(samples)
    columns["trainer_logprob"] = np.concatenate(
        [_own(samples[name], wanted[name], scores[name]) for name in samples]
    )
    columns |= _route_columns(samples, scores, latest=provenance == "latest-prefill")
    if every_version and len(everyone) > 1:
        columns["by_version"] = {
            version: np.concatenate([scores[name][version].logprobs for name in samples])
            for version in everyone
        }
        columns |= current_columns(columns["by_version"])
    return TokenPairs.of(**columns)


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
    """The gap of rollouts that ``trainer`` scores anew: ``score_rollouts``, then ``measure``.
    Raises as either does.
    """
    chosen = limits_of(limits, override=limits_file)
    require_sampling(resamples, seed)
    pairs = score_rollouts(rollouts, trainer, replay=replay, every_version=every_version)
    report = measure_pairs(pairs, limits=chosen, subject=subject, resamples=resamples, seed=seed)
    return noted(report, trainer)


def noted(report: GapReport, trainer: GapTrainer) -> GapReport:
    """The report with what its trainer has to say of its scores (``notes``, where it has that)."""
    return replace(report, notes=(*report.notes, *getattr(trainer, "notes", ())))


def _samples(rollouts: Iterable[Rollout] | Path | str) -> Mapping[str, Sample]:
    if isinstance(rollouts, Path | str):
        samples: Mapping[str, Sample] = samples_of(Path(rollouts), None)
    elif not isinstance(rollouts, Iterable):
        raise UsageError(
            "rollouts must be records (rollproof.Rollout) or the path of a trace, not a"
            f" {type(rollouts).__name__}."
        )
    else:
        samples = {}
        for rollout in rollouts:
            if not isinstance(rollout, Rollout):
                raise GapError(
                    f"A rollout must be a rollproof.Rollout, not {type(rollout).__name__}."
                )
            if rollout.request_id in samples:
                raise GapError(
                    f"Two rollouts are called {rollout.request_id!r}: give each a request_id of its"
                    " own."
                )
            samples = {**samples, rollout.request_id: Sample(rollout=rollout)}
    if not any(sample.tokens for sample in samples.values()):
        raise GapError("There is no rollout with a response token: there is nothing to compare.")
    mute = [name for name, sample in samples.items() if sample.rollout.logprobs is None]
    if mute:
        raise GapError(
            f"{len(mute):,} of {len(samples):,} rollouts have no logprobs (the first: {mute[0]}):"
            " record them with logprobs."
        )
    return {name: sample for name, sample in samples.items() if sample.tokens}


def _require_routes(samples: Mapping[str, Sample]) -> None:
    bare = [name for name, sample in samples.items() if sample.rollout.routes is None]
    if bare:
        raise GapError(
            f"{len(bare):,} of {len(samples):,} rollouts have no routes to replay (the first:"
            f" {bare[0]}): record them with routes."
        )


def _versions(sample: Sample) -> list[Version]:
    """The versions of a rollout's tokens, each once; ``[None]`` where they are not told."""
    found = sample.versions
    return [None] if found is None else list(dict.fromkeys(found))


def _found(trainer: Any, rollouts: Sequence[Rollout], version: Version, replay: bool) -> Any:
    try:
        return trainer.score(rollouts, version=version, replay=replay)
    except RollproofError:
        raise
    except Exception as error:  # whatever a user's trainer raises, told in our words
        raise SubjectError(f"The trainer's score raised {told_with_place(error)}.") from error


def _checked(name: str, rollout: Rollout, scored: Any, version: Version) -> Scored:
    given = scored if isinstance(scored, Scored) else Scored(logprobs=scored)
    try:
        logprobs = np.asarray(given.logprobs, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GapError(
            f"The trainer's logprobs of rollout {name} are no numbers: {error}."
        ) from error
    if logprobs.shape != (len(rollout.response_ids),):
        raise GapError(
            f"The trainer's logprobs of rollout {name} under version {version} have shape"
            f" {logprobs.shape}, not ({len(rollout.response_ids)},): one for each response token,"
            " masked ones included."
        )
    return Scored(
        logprobs=logprobs, routes=None if given.routes is None else np.asarray(given.routes)
    )


def _own(
    sample: Sample, versions: Sequence[Version], scores: Mapping[Version, Scored]
) -> FloatArray:
    """Each token's logprob under the version that sampled it."""
    if len(versions) == 1:
        return np.asarray(scores[versions[0]].logprobs)
    return np.array(
        [scores[version].logprobs[i] for i, version in enumerate(sample.versions or ())]
    )


def _provenance(trace: Path) -> str:
    return open_trace(trace).header.contract.provenance or "as-sampled"


def _route_columns(
    samples: Mapping[str, Sample], scores: Mapping[str, Mapping[Version, Scored]], *, latest: bool
) -> dict[str, IntArray]:
    """Routes of both sides at the forward that gave each token's logprob, where every rollout has
    them.

    Where an engine's ``latest`` prefill overwrites the rows of earlier segments, all are of the
    last weights.
    """
    left, right = [], []
    for name, sample in samples.items():
        versions = _versions(sample)
        theirs = [scores[name][version].routes for version in versions]
        mine = _rows(sample.rollout)
        if mine is None or any(routes is None or routes.shape != mine.shape for routes in theirs):
            return {}
        left.append(mine)
        tags = sample.versions or [None] * len(mine)
        tags = [tags[-1]] * len(tags) if latest else tags
        right.append(np.stack([theirs[versions.index(tag)][i] for i, tag in enumerate(tags)]))
    return {"rollout_routes": np.concatenate(left), "trainer_routes": np.concatenate(right)}


def _rows(rollout: Rollout) -> IntArray | None:
    """``(response, layers, top_k)``: the row of the token before each response token; ``None``
    where rows are lacking.
    """
    if rollout.routes is None or not rollout.prompt_ids:
        return None
    first = len(rollout.prompt_ids) - 1 - rollout.routes_start
    rows = rollout.routes[max(first, 0) : first + len(rollout.response_ids)]
    return rows if first >= 0 and len(rows) == len(rollout.response_ids) else None
