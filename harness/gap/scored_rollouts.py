"""Rollouts and a trainer's logprobs of them, as token pairs.

The rollouts are records or those of a recorded trace. The trainer's logprobs come from an object
with the method of ``GapTrainer``, which scores each token under the weights that sampled it
(``hf:PATH`` is built in: ``rollproof.gap.hf_trainer``); from a Parquet file with ``sequence_id``
(the request's id) and ``trainer_logprob``, one row a response token in order (or one row a request,
with lists); or from the ``Score`` events of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Provenance
from rollproof.core.error_text import describe_error_with_place
from rollproof.core.records import Rollout, Version
from rollproof.errors import GapError, RollproofError, SubjectError, UsageError
from rollproof.gap.column_checks import FloatArray, IntArray
from rollproof.gap.pair_files import read_columns
from rollproof.gap.rollout_samples import (
    Sample,
    read_samples,
    require_logprobs,
    require_routes,
    samples_with_tokens,
)
from rollproof.gap.token_pairs import TokenPairs
from rollproof.store import open_trace

__all__ = ["GapTrainer", "Scored", "join_scores", "join_trace", "score_rollouts"]

_SCORES = "score:"
_PROVENANCES = tuple(str(provenance) for provenance in Provenance)
# Logprobs `(response,)` by the rollout's name and the version that scored them
_Logprobs: TypeAlias = "Mapping[str, Mapping[Version, FloatArray]]"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored:
    """A trainer's scores of one rollout.

    Attributes:
        logprobs: ``(response,)``, natural, of the distribution at the sampling temperature.
        routes: ``(response, layers, top_k)``: the experts of the forward that gave each logprob, on
            the rollout's own layer axis; ``None`` if unknown.
    """

    logprobs: Any
    routes: Any = None


@runtime_checkable
class GapTrainer(Protocol):
    """Scores rollouts. ``--trainer module:factory`` names a factory of one.

    A trainer may also have ``sampled_at(temperatures)``, which is called once before any scoring
    with the temperatures that the trace's calls were sampled at, and ``notes``, lines for the
    report.
    """

    def score(
        self, rollouts: Sequence[Rollout], *, version: Version, replay: bool
    ) -> Sequence[Scored]:
        """Return one ``Scored`` for each of ``rollouts``, in order.

        Called once for each version that sampled a token. All response tokens are scored, masked
        ones and those of other versions too: logprobs of other versions' tokens are not used.

        Args:
            rollouts: the rollouts with a token of ``version``.
            version: the weights to score under; ``None`` if the rollouts have no version.
            replay: use the experts of ``rollout.routes``.
        """
        ...


def join_trace(
    trace: Path, trainer: str, *, renamed: Mapping[str, str] | None = None
) -> TokenPairs:
    """Return pairs of the rollouts in ``trace`` and logprobs that exist already.

    In a trace of several episodes the requests are called ``EPISODE:ID``, counted from 0.

    Args:
        trace: the trace file.
        trainer: ``score:SCORER``, or the path of a Parquet file.
        renamed: names of ``COLUMNS`` to the file's own names for them.

    Raises:
        GapError: rollouts and scores do not match.
        TraceError: the trace cannot be read.
    """
    scorer = trainer.removeprefix(_SCORES) if trainer.startswith(_SCORES) else None
    samples = read_samples(trace, scorer)
    if not samples:
        raise GapError(f"{trace} holds no finished rollout: there is nothing to compare.")
    require_logprobs(samples, f" in {trace}")
    columns = _rollout_columns(samples)
    if scorer is None:
        scores = _file_columns(samples, Path(trainer), dict(renamed or {}))
    else:
        scores = _event_columns(samples, scorer)
    return TokenPairs.of(**columns, **scores)


def join_scores(rollouts: Iterable[Rollout], logprobs: Mapping[str, FloatArray]) -> TokenPairs:
    """Return pairs of rollouts and the trainer's logprobs ``(response,)`` of each, by request id.

    Raises ``GapError`` if rollouts and scores do not match.
    """
    samples = samples_with_tokens(rollouts)
    _require_lengths(
        {name: (len(logprobs[name]), sample.n_tokens) for name, sample in samples.items()},
        "the trainer's logprobs",
    )
    columns = _rollout_columns(samples)
    columns["trainer_logprob"] = np.concatenate([logprobs[name] for name in samples])
    return TokenPairs.of(**columns)


def score_rollouts(
    rollouts: Iterable[Rollout] | Path | str,
    trainer: GapTrainer,
    *,
    replay: bool = False,
    every_version: bool = False,
    provenance: str | None = None,
) -> TokenPairs:
    """Score rollouts, each segment under the weights of its own version, and return the pairs.

    Args:
        rollouts: records, or the path of a recorded trace.
        trainer: what scores them.
        replay: let the trainer use the rollouts' routes.
        every_version: score every rollout under every available version, which shows whether a tag
            names the weights that sampled.
        provenance: which weights a resumed rollout's routes are of, as a contract declares it
            (default: the trace's, else ``as-sampled``).

    Raises:
        GapError: rollouts and scores do not match.
        SubjectError: the trainer raised.
        UsageError: an argument of the wrong kind.
    """
    if not callable(getattr(trainer, "score", None)):
        raise UsageError(
            f"A trainer has a method score(rollouts, *, version, replay); {type(trainer).__name__}"
            " has none."
        )
    if provenance not in (None, *_PROVENANCES):
        raise UsageError(f"provenance={provenance!r} is not one of: {', '.join(_PROVENANCES)}.")
    samples = samples_with_tokens(rollouts)
    if provenance is None:
        provenance = "as-sampled"
        if isinstance(rollouts, Path | str):
            provenance = _trace_provenance(Path(rollouts))
    if replay:
        require_routes(samples)
    sampled_at = getattr(trainer, "sampled_at", None)
    if callable(sampled_at):
        sampled_at(frozenset().union(*(sample.temperatures for sample in samples.values())))
    scores = _run_trainer(trainer, samples, replay=replay, every_version=every_version)
    logprobs = {
        name: {version: scored.logprobs for version, scored in by_version.items()}
        for name, by_version in scores.items()
    }
    columns = _rollout_columns(samples)
    columns["trainer_logprob"] = _own_column(samples, logprobs)
    if every_version:
        columns |= _version_columns(logprobs)
    columns |= _route_columns(samples, scores, latest=provenance == "latest-prefill")
    return TokenPairs.of(**columns)


def _require_lengths(lengths: Mapping[str, tuple[int, int]], source: str) -> None:
    """Raise ``GapError`` unless each rollout's two lengths, logprobs and tokens, are equal."""
    wrong = [(name, *pair) for name, pair in lengths.items() if pair[0] != pair[1]]
    if wrong:
        name, logprobs, tokens = wrong[0]
        raise GapError(
            f"{source}: {len(wrong):,} rollouts have another number of logprobs than response"
            f" tokens (the first: {name}, {logprobs:,} for {tokens:,}). One logprob is needed for"
            " each response token, masked ones included."
        )


def _rollout_columns(samples: Mapping[str, Sample]) -> dict[str, Any]:
    """Return the columns of ``TokenPairs`` that the rollouts themselves have."""
    rollouts = [sample.rollout for sample in samples.values()]
    lengths = {
        name: (0 if rollout.logprobs is None else len(rollout.logprobs), len(rollout.response_ids))
        for name, rollout in zip(samples, rollouts, strict=True)
    }
    _require_lengths(lengths, "the rollout's logprobs")
    n_tokens = [sample.n_tokens for sample in samples.values()]
    masks = [
        np.ones(len(rollout.response_ids))
        if rollout.loss_mask is None
        else np.asarray(rollout.loss_mask)
        for rollout in rollouts
    ]
    columns: dict[str, Any] = {
        "sequence_id": np.repeat(np.array(list(samples)), n_tokens),
        "rollout_logprob": np.concatenate(
            [np.asarray(rollout.logprobs, dtype=np.float64) for rollout in rollouts]
        ),
        "mask": np.concatenate(masks),
        "token_id": np.concatenate(
            [np.asarray(rollout.response_ids, dtype=np.int64) for rollout in rollouts]
        ),
        "position": np.concatenate(
            [len(rollout.prompt_ids) + np.arange(len(rollout.response_ids)) for rollout in rollouts]
        ),
    }
    versions = [sample.versions for sample in samples.values()]
    if all(labels is not None for labels in versions):
        columns["version"] = _version_column(
            [version for labels in versions for version in labels or ()]
        )
    # a rollout with calls at several temperatures has no temperature of each token
    if all(len(sample.temperatures) == 1 for sample in samples.values()):
        temperatures = [next(iter(sample.temperatures)) for sample in samples.values()]
        columns["temperature"] = np.repeat(temperatures, n_tokens)
    since_resume = [sample.since_resume for sample in samples.values()]
    if all(column is not None for column in since_resume):
        columns["since_resume"] = np.concatenate(
            [column for column in since_resume if column is not None]
        )
    return columns


def _version_column(versions: list[Version]) -> npt.NDArray[Any]:
    """Return integers as such, so that ages can be computed; anything else as text."""
    if all(isinstance(version, int) and not isinstance(version, bool) for version in versions):
        return np.array(versions, dtype=np.int64)
    return np.array([str(version) for version in versions], dtype=object)


def _own_column(samples: Mapping[str, Sample], logprobs: _Logprobs) -> FloatArray:
    """Return each token's logprob under the version that sampled it."""
    return np.concatenate(
        [_under_own_version(sample, logprobs[name]) for name, sample in samples.items()]
    )


def _version_columns(logprobs: _Logprobs) -> dict[str, Any]:
    """Return the columns of several versions, if every rollout was scored under them."""
    common = _common_versions(logprobs)
    if len(common) < 2:
        return {}
    by_version = {
        version: np.concatenate([scores[version] for scores in logprobs.values()])
        for version in common
    }
    return {"by_version": by_version, **_current_columns(by_version)}


def _common_versions(logprobs: _Logprobs) -> list[Version]:
    return [
        version
        for version in next(iter(logprobs.values()))
        if all(version in scores for scores in logprobs.values())
    ]


def _under_own_version(sample: Sample, logprobs: Mapping[Version, FloatArray]) -> FloatArray:
    """``(response,)``: each token's logprob under the version that sampled it."""
    if len(logprobs) == 1:
        # the only score there is, whatever its version
        return next(iter(logprobs.values()))
    distinct = sample.distinct_versions
    if len(distinct) == 1:
        return logprobs[distinct[0]]
    return np.array([logprobs[version][i] for i, version in enumerate(sample.versions or ())])


def _current_columns(by_version: Mapping[Version, FloatArray]) -> dict[str, Any]:
    """Return the scores under the newest version as those of the current weights.

    Only numbers have an order, so text versions give no columns.
    """
    if not all(
        isinstance(version, int) and not isinstance(version, bool) for version in by_version
    ):
        return {}
    newest = max(by_version, key=lambda version: int(str(version)))
    return {
        "current_logprob": by_version[newest],
        "current_version": np.full(len(by_version[newest]), newest),
    }


def _event_columns(samples: Mapping[str, Sample], scorer: str) -> dict[str, Any]:
    """Return the trainer's columns out of ``Score`` events."""
    lacking = [name for name, sample in samples.items() if not sample.scores]
    if lacking:
        raise GapError(
            f"{len(lacking):,} of {len(samples):,} rollouts have no score by {scorer!r} in the"
            f" trace (the first: {lacking[0]}). Name a scorer of the trace, or give a Parquet file"
            " with the trainer's logprobs."
        )
    for version in {version for sample in samples.values() for version in sample.scores}:
        lengths = {
            name: (len(sample.scores[version]), sample.n_tokens)
            for name, sample in samples.items()
            if version in sample.scores
        }
        _require_lengths(lengths, f"the scores under {version}")
    for name, sample in samples.items():
        _require_own_versions(name, sample)
    logprobs = {name: sample.scores for name, sample in samples.items()}
    columns: dict[str, Any] = {"trainer_logprob": _own_column(samples, logprobs)}
    columns |= _version_columns(logprobs)
    common = _common_versions(logprobs)
    if len(common) == 1 and isinstance(common[0], int):
        columns["current_version"] = np.full(len(columns["trainer_logprob"]), common[0])
    return columns


def _require_own_versions(name: str, sample: Sample) -> None:
    """Raise ``GapError`` if a rollout has several scores, and a token none under its version."""
    if len(sample.scores) == 1:
        return
    versions = sample.versions
    scored = {str(version) for version in sample.scores}
    lacking = sorted({str(version) for version in versions or ()} - scored)
    if versions is None or lacking:
        problem = (
            f"no score under version {', '.join(lacking)}"
            if lacking
            else "no version for each of its tokens"
        )
        raise GapError(
            f"Rollout {name} has several scores and {problem}: score every segment under the"
            " version that sampled it."
        )


def _file_columns(
    samples: Mapping[str, Sample], path: Path, renamed: dict[str, str]
) -> dict[str, Any]:
    """Return the trainer's columns out of a Parquet file, in the order of the samples."""
    values, _ = read_columns(path, required=("sequence_id", "trainer_logprob"), renamed=renamed)
    ids = np.asarray(values["sequence_id"]).astype(str)
    position = values.get("position")
    order = np.lexsort((position, ids)) if position is not None else np.argsort(ids, kind="stable")
    names, first, counts = np.unique(ids[order], return_index=True, return_counts=True)
    rows_of = {
        str(name): order[begin : begin + count]
        for name, begin, count in zip(names, first, counts, strict=True)
    }
    lacking = [name for name in samples if name not in rows_of and samples[name].n_tokens]
    if lacking:
        raise GapError(
            f"{path} has no rows for {len(lacking):,} of {len(samples):,} rollouts (the first:"
            f" {lacking[0]}); its sequence_id must be the request's id."
        )
    lengths = {
        name: (len(rows_of.get(name, ())), sample.n_tokens) for name, sample in samples.items()
    }
    _require_lengths(lengths, f"{path}")
    # rollouts without a response have no rows
    rows = np.concatenate([rows_of.get(name, order[:0]) for name in samples])
    columns = {"trainer_logprob": values["trainer_logprob"][rows]}
    if "token_id" in values:
        columns["trainer_token_id"] = values["token_id"][rows]
    return columns


def _run_trainer(
    trainer: GapTrainer, samples: Mapping[str, Sample], *, replay: bool, every_version: bool
) -> dict[str, dict[Version, Scored]]:
    """Return the scores of each rollout, by version."""
    own = {name: sample.distinct_versions for name, sample in samples.items()}
    versions = sorted(
        {version for labels in own.values() for version in labels},
        # versions may be numbers, text and None, which have no common order
        key=lambda version: (str(type(version)), version),
    )
    scores: dict[str, dict[Version, Scored]] = {name: {} for name in samples}
    # version by version, since a trainer may hold the weights of one version at a time
    for version in versions:
        names = [name for name in samples if every_version or version in own[name]]
        rollouts = [samples[name].rollout for name in names]
        batch = _call_trainer(trainer, rollouts, version, replay)
        for name, rollout, scored in zip(names, rollouts, batch, strict=True):
            scores[name][version] = _check_scored(name, rollout, scored, version)
    return scores


def _call_trainer(
    trainer: Any, rollouts: Sequence[Rollout], version: Version, replay: bool
) -> Sequence[Any] | npt.NDArray[Any]:
    try:
        batch = trainer.score(rollouts, version=version, replay=replay)
    except RollproofError:
        raise
    except Exception as error:  # a user's trainer may raise anything
        raise SubjectError(
            f"The trainer's score raised {describe_error_with_place(error)}."
        ) from error
    if not isinstance(batch, Sequence | np.ndarray):
        raise GapError(
            f"The trainer's score returned a {type(batch).__name__}: it returns one Scored for"
            " each rollout, in a list."
        )
    if len(batch) != len(rollouts):
        raise GapError(
            f"The trainer returned {len(batch)} scores for {len(rollouts)} rollouts under version"
            f" {version}."
        )
    return batch


def _check_scored(name: str, rollout: Rollout, scored: Any, version: Version) -> Scored:
    """Return the scores as arrays; logprobs alone are accepted too."""
    result = scored if isinstance(scored, Scored) else Scored(logprobs=scored)
    try:
        logprobs = np.asarray(result.logprobs, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GapError(
            f"The trainer's logprobs of rollout {name} are not numbers: {error}."
        ) from error
    if logprobs.shape != (len(rollout.response_ids),):
        raise GapError(
            f"The trainer's logprobs of rollout {name} under version {version} have shape"
            f" {logprobs.shape}, not ({len(rollout.response_ids)},): one for each response token,"
            " masked ones included."
        )
    routes = None if result.routes is None else np.asarray(result.routes)
    return Scored(logprobs=logprobs, routes=routes)


def _trace_provenance(trace: Path) -> str:
    return open_trace(trace).header.contract.provenance or "as-sampled"


def _route_columns(
    samples: Mapping[str, Sample], scores: Mapping[str, Mapping[Version, Scored]], *, latest: bool
) -> dict[str, IntArray]:
    """Return the routes of rollout and trainer at the forward that gave each token's logprob.

    Without routes of every rollout there are no columns.
    """
    rollout_routes, trainer_routes = [], []
    for name, sample in samples.items():
        versions = sample.distinct_versions
        routes = [scores[name][version].routes for version in versions]
        rows = _predicting_rows(sample.rollout)
        if rows is None or any(own is None or own.shape != rows.shape for own in routes):
            return {}
        rollout_routes.append(rows)
        tags = sample.versions or [None] * len(rows)
        if latest:
            # the engine's last prefill overwrote the rows of earlier segments
            tags = [tags[-1]] * len(tags)
        picked = [routes[versions.index(tag)][i] for i, tag in enumerate(tags)]
        trainer_routes.append(np.stack(picked))
    return {
        "rollout_routes": np.concatenate(rollout_routes),
        "trainer_routes": np.concatenate(trainer_routes),
    }


def _predicting_rows(rollout: Rollout) -> IntArray | None:
    """``(response, layers, top_k)``: the routes of the token before each response token.

    ``None`` if rows are lacking.
    """
    if rollout.routes is None or not rollout.prompt_ids:
        return None
    # row i is of the forward of token i, which predicts token i + 1; engines may omit the rows
    # before routes_start
    first = len(rollout.prompt_ids) - 1 - rollout.routes_start
    rows = rollout.routes[max(first, 0) : first + len(rollout.response_ids)]
    return rows if first >= 0 and len(rows) == len(rollout.response_ids) else None
