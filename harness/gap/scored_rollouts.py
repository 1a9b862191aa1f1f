"""Joining: the rollouts of a recorded trace, and a trainer's logprobs of them, as pairs.

The trainer's side is a Parquet file with ``sequence_id`` (the request's id) and
``trainer_logprob``, one row a response token in order (or one row a request, with lists), or the
``Score`` events that the trace itself holds. Of scores under several weight versions each token
takes that of the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Provenance
from rollproof.core.error_text import told_with_place
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Reply, Result
from rollproof.core.events.training import Score
from rollproof.core.records import IntArray, Rollout, Version, spread
from rollproof.errors import GapError, RollproofError, SubjectError, UsageError
from rollproof.gap.pair_files import read_columns
from rollproof.gap.token_pairs import FloatArray, TokenPairs
from rollproof.store import open_trace

__all__ = [
    "GapTrainer",
    "Sample",
    "Scored",
    "current_columns",
    "join_trace",
    "rollout_columns",
    "samples_of",
    "score_rollouts",
]

_SCORES = "score:"


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """A rollout with what the trace says of it: the tokens of each delivered reply, scores by
    version, the temperatures of its calls.
    """

    rollout: Rollout
    pieces: list[tuple[int, ...]] = field(default_factory=list)
    scores: dict[Version, FloatArray] = field(default_factory=dict)
    temperatures: frozenset[float] = frozenset()

    @property
    def tokens(self) -> int:
        return len(self.rollout.response_ids)

    @property
    def versions(self) -> list[Version] | None:
        """Of each response token; ``None`` where the rollout does not tell all of them."""
        own = self.rollout
        if own.token_versions is not None:
            found = list(own.token_versions)
        else:
            found = spread(own.spans, self.tokens) if own.spans else [own.version] * self.tokens
        return (
            None
            if len(found) != self.tokens or any(version is None for version in found)
            else found
        )

    @property
    def since_resume(self) -> npt.NDArray[np.int64] | None:
        """Tokens since the last call began, -1 in the first; ``None`` where the replies end to end
        are not the response.
        """
        if tuple(token for piece in self.pieces for token in piece) != self.rollout.response_ids:
            return None
        parts = [np.arange(len(piece)) for piece in self.pieces if piece]
        return np.concatenate(
            [np.full(len(part), -1) if i == 0 else part for i, part in enumerate(parts)]
            or [np.arange(0)]
        )


def join_trace(
    trace: Path, trainer: str, *, renamed: Mapping[str, str] | None = None
) -> TokenPairs:
    """Pairs of the rollouts in ``trace`` and the logprobs of ``trainer``: ``score:SCORER``, or the
    path of a Parquet file.

    In a trace of several episodes the requests are called ``EPISODE:ID``, counted from 0. Raises
    ``GapError`` where a side lacks what the other has, ``TraceError`` where the trace cannot be
    read.
    """
    scorer = trainer.removeprefix(_SCORES) if trainer.startswith(_SCORES) else None
    samples = samples_of(trace, scorer)
    if not samples:
        raise GapError(f"{trace} holds no finished rollout: there is nothing to compare.")
    mute = [name for name, sample in samples.items() if sample.rollout.logprobs is None]
    if mute:
        raise GapError(
            f"{len(mute):,} of {len(samples):,} rollouts in {trace} have no logprobs (the first:"
            f" {mute[0]}): record them with logprobs."
        )
    columns = rollout_columns(samples)
    side = (
        _scored(samples, trainer)
        if scorer is not None
        else _read(samples, Path(trainer), dict(renamed or {}))
    )
    return TokenPairs.of(**columns, **side)


def samples_of(trace: Path, scorer: str | None) -> dict[str, Sample]:
    """The finished rollouts of a trace by their names (``EPISODE:ID`` where it holds several), with
    the scores of ``scorer``.
    """
    episodes = [_episode(events, scorer) for _, events in open_trace(trace).episodes()]
    if len(episodes) == 1:
        return episodes[0]
    return {
        f"{number}:{name}": sample
        for number, episode in enumerate(episodes)
        for name, sample in episode.items()
    }


def _episode(events: Iterable[Event], scorer: str | None) -> dict[str, Sample]:
    owner: dict[int, str] = {}
    pieces: dict[str, list[tuple[int, ...]]] = {}
    scores: dict[str, dict[Version, FloatArray]] = {}
    temperatures: dict[str, set[float]] = {}
    rollouts: dict[str, Rollout] = {}
    for event in events:
        if isinstance(event, Call):
            owner[event.call_id] = event.request_id
            declared = event.sampling.get("temperature")
            if isinstance(declared, int | float):
                temperatures.setdefault(event.request_id, set()).add(float(declared))
        elif isinstance(event, Reply) and event.delivered and not event.duplicate:
            pieces.setdefault(owner.get(event.call_id, ""), []).append(
                tuple(event.output.token_ids)
            )
        elif isinstance(event, Result) and event.rollout is not None:
            rollouts[event.request_id] = event.rollout
        elif isinstance(event, Score) and event.scorer == scorer:
            scores.setdefault(event.request_id, {})[event.version] = np.asarray(
                event.logprobs, dtype=np.float64
            )
    return {
        name: Sample(
            rollout=rollout,
            pieces=pieces.get(name, []),
            scores=scores.get(name, {}),
            temperatures=frozenset(temperatures.get(name, ())),
        )
        for name, rollout in rollouts.items()
    }


def rollout_columns(samples: Mapping[str, Sample]) -> dict[str, Any]:
    """The columns of ``TokenPairs`` that the rollouts tell themselves. Raises ``GapError`` where
    logprobs and tokens differ in number.
    """
    own = [sample.rollout for sample in samples.values()]
    _lengths(
        {
            name: (
                len(sample.rollout.logprobs if sample.rollout.logprobs is not None else ()),
                sample.tokens,
            )
            for name, sample in samples.items()
        },
        "the rollout's logprobs",
    )
    out: dict[str, Any] = {
        "sequence_id": np.repeat(
            np.array(list(samples)), [sample.tokens for sample in samples.values()]
        ),
        "rollout_logprob": np.concatenate(
            [np.asarray(rollout.logprobs, dtype=np.float64) for rollout in own]
        ),
        "mask": np.concatenate(
            [
                np.ones(len(r.response_ids)) if r.loss_mask is None else np.asarray(r.loss_mask)
                for r in own
            ]
        ),
        "token_id": np.concatenate(
            [np.asarray(rollout.response_ids, dtype=np.int64) for rollout in own]
        ),
        "position": np.concatenate(
            [len(rollout.prompt_ids) + np.arange(len(rollout.response_ids)) for rollout in own]
        ),
    }
    versions = [sample.versions for sample in samples.values()]
    if all(found is not None for found in versions):
        out["version"] = _column([version for found in versions for version in found or ()])
    if all(len(sample.temperatures) == 1 for sample in samples.values()):
        out["temperature"] = np.repeat(
            [next(iter(sample.temperatures)) for sample in samples.values()],
            [sample.tokens for sample in samples.values()],
        )
    since = [sample.since_resume for sample in samples.values()]
    if all(found is not None for found in since):
        out["since_resume"] = np.concatenate([found for found in since if found is not None])
    return out


def _scored(samples: Mapping[str, Sample], trainer: str) -> dict[str, Any]:
    """The trainer's columns out of ``Score`` events."""
    bare = [name for name, sample in samples.items() if not sample.scores]
    if bare:
        raise GapError(
            f"{len(bare):,} of {len(samples):,} rollouts have no score by"
            f" {trainer.removeprefix(_SCORES)!r} in the trace (the first: {bare[0]}). Name a scorer"
            " that is there, or give a Parquet file with the trainer's logprobs."
        )
    for version in {version for sample in samples.values() for version in sample.scores}:
        _lengths(
            {
                name: (len(s.scores[version]), s.tokens)
                for name, s in samples.items()
                if version in s.scores
            },
            f"the scores under {version}",
        )
    common = [
        version
        for version in next(iter(samples.values())).scores
        if all(version in sample.scores for sample in samples.values())
    ]
    out: dict[str, Any] = {
        "trainer_logprob": np.concatenate(
            [_own_score(name, sample) for name, sample in samples.items()]
        )
    }
    if len(common) > 1:
        out["by_version"] = {
            version: np.concatenate([sample.scores[version] for sample in samples.values()])
            for version in common
        }
        out |= current_columns(out["by_version"])
    elif len(common) == 1 and isinstance(common[0], int):
        out["current_version"] = np.full(len(out["trainer_logprob"]), common[0])
    return out


def current_columns(by_version: Mapping[Version, FloatArray]) -> dict[str, Any]:
    """The scores under the newest of several versions as those of the current weights, where
    versions are numbers.
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


def _own_score(name: str, sample: Sample) -> FloatArray:
    """Each token's score under its own version; the only score that there is, whatever its version."""
    if len(sample.scores) == 1:
        return next(iter(sample.scores.values()))
    versions = sample.versions
    lacking = sorted(
        {str(version) for version in versions or ()} - {str(version) for version in sample.scores}
    )
    if versions is None or lacking:
        told = (
            f"no score under version {', '.join(lacking)}"
            if lacking
            else "no version for each of its tokens"
        )
        raise GapError(
            f"Rollout {name} has several scores and {told}: score every segment under the version"
            " that sampled it."
        )
    return np.array(
        [sample.scores[version][i] for i, version in enumerate(versions)], dtype=np.float64
    )


def _read(samples: Mapping[str, Sample], path: Path, renamed: dict[str, str]) -> dict[str, Any]:
    """The trainer's columns out of a Parquet file, in the order of the samples."""
    values, _ = read_columns(path, required=("sequence_id", "trainer_logprob"), renamed=renamed)
    ids = np.asarray(values["sequence_id"]).astype(str)
    position = values.get("position")
    order = np.lexsort((position, ids)) if position is not None else np.argsort(ids, kind="stable")
    names, first, counts = np.unique(ids[order], return_index=True, return_counts=True)
    there = {
        str(name): order[begin : begin + count]
        for name, begin, count in zip(names, first, counts, strict=True)
    }
    bare = [name for name in samples if name not in there and samples[name].tokens]
    if bare:
        raise GapError(
            f"{path} has no rows for {len(bare):,} of {len(samples):,} rollouts (the first:"
            f" {bare[0]}); its sequence_id must be the request's id."
        )
    _lengths(
        {name: (len(there.get(name, ())), sample.tokens) for name, sample in samples.items()},
        f"{path}",
    )
    rows = np.concatenate([there.get(name, order[:0]) for name in samples])
    out = {"trainer_logprob": values["trainer_logprob"][rows]}
    if "token_id" in values:
        out["trainer_token_id"] = values["token_id"][rows]
    return out


def _lengths(found: Mapping[str, tuple[int, int]], what: str) -> None:
    wrong = [(name, here, there) for name, (here, there) in found.items() if here != there]
    if wrong:
        name, here, there = wrong[0]
        raise GapError(
            f"{what}: {len(wrong):,} rollouts have another number of logprobs than response tokens"
            f" (the first: {name}, {here:,} for {there:,}). One logprob is needed for each response"
            " token, masked ones included."
        )


def _column(values: list[Version]) -> npt.NDArray[Any]:
    """Integers as such, so that ages can be told; anything else as text."""
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    return (
        np.array(values, dtype=np.int64)
        if whole
        else np.array([str(value) for value in values], dtype=object)
    )


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
