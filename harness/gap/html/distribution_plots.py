"""Pictures: the numbers behind each plot of a gap, small whatever the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.gap.agreement import overlap
from rollproof.gap.quantiles import abs_diff
from rollproof.gap.token_pairs import FloatArray, TokenPairs

__all__ = [
    "Density",
    "LayerMap",
    "Run",
    "Tail",
    "Timeline",
    "density",
    "layer_map",
    "tail",
    "timelines",
]

_CELLS = 48
_LOWEST = -16.0
"""Logprobs below this share the lowest cells: one token at -60 must not squeeze all others into a
corner.
"""
_POINTS = 240
_COLUMNS = 10
_TIMELINES = 8
_MARKS = 40
"""Worst tokens that a timeline marks; more would be a smear."""
LARGE = 0.5
"""|d| from which a timeline marks a token: rho beyond 1.6."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Density:
    """``counts`` ``(cells, cells)`` of tokens: rows the trainer's logprob, columns the rollout's,
    both by ``edges`` ``(cells + 1,)``.

    ``cut`` tokens lie below the lowest edge on either axis and are counted in its cells.
    """

    edges: FloatArray
    counts: npt.NDArray[np.int64]
    cut: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tail:
    """``share`` ``(points,)`` of the tokens have a |d| above ``size`` ``(points,)``, ascending;
    ``zero`` is the share with |d| = 0.
    """

    size: FloatArray
    share: FloatArray
    zero: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerMap:
    """Slot mismatch ``(layers, columns)`` by layer of the routes' axis and by tenth of the
    sequence; NaN where nothing was captured.
    """

    mismatch: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Positions ``first`` up to ``last`` (excluded) that one ``version`` sampled, ``None`` where
    versions are not told.
    """

    first: int
    last: int
    version: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Tokens of one sequence: what sampled them, where it was resumed, and where the two sides part
    most.
    """

    sequence: str
    runs: tuple[Run, ...]
    resumes: tuple[int, ...]
    worst: tuple[tuple[int, float], ...]


def density(pairs: TokenPairs) -> Density | None:
    """How many tokens have which pair of logprobs; ``None`` without a finite pair."""
    known = np.isfinite(pairs.rollout) & np.isfinite(pairs.trainer)
    if not known.any():
        return None
    left, right = pairs.rollout[known], pairs.trainer[known]
    lowest = max(_LOWEST, float(min(left.min(), right.min(), -1e-3)))
    edges = np.linspace(lowest, 0.0, _CELLS + 1)
    column, row = (
        np.clip(np.searchsorted(edges, values, side="right") - 1, 0, _CELLS - 1)
        for values in (left, right)
    )
    counts = np.bincount(row * _CELLS + column, minlength=_CELLS * _CELLS).reshape(_CELLS, _CELLS)
    return Density(edges=edges, counts=counts, cut=int(((left < lowest) | (right < lowest)).sum()))


def tail(pairs: TokenPairs) -> Tail | None:
    """The share of tokens beyond each size of |d|, down to the largest; ``None`` where no |d| is
    above 0.
    """
    size = abs_diff(pairs)
    size = size[np.isfinite(size)]
    above = np.sort(size[size > 0])
    if not len(above):
        return None
    # steps even on the log scale of the share, so that the last tokens have points of their own
    rank = np.unique(np.round(len(above) - np.geomspace(1, len(above), _POINTS)).astype(np.int64))
    return Tail(
        size=above[rank], share=(len(above) - rank) / len(size), zero=1 - len(above) / len(size)
    )


def layer_map(pairs: TokenPairs) -> LayerMap | None:
    """Where in depth and sequence the experts differ; ``None`` where a side has no routes."""
    left, right = pairs.routes.get("rollout_routes"), pairs.routes.get("trainer_routes")
    if left is None or right is None or not len(left):
        return None
    tokens, layers, top_k = left.shape
    within = np.arange(tokens) - np.repeat(pairs.starts, pairs.lengths)
    column = np.minimum(within * _COLUMNS // np.repeat(pairs.lengths, pairs.lengths), _COLUMNS - 1)
    missed, seen = np.zeros((_COLUMNS, layers)), np.zeros((_COLUMNS, layers))
    step = 1 << 16
    for begin in range(0, tokens, step):
        common, whole = overlap(left[begin : begin + step], right[begin : begin + step])
        place = column[begin : begin + step]
        np.add.at(missed, place, np.where(whole, (top_k - common) / top_k, 0.0))
        np.add.at(seen, place, whole)
    return LayerMap(
        mismatch=np.divide(missed, seen, out=np.full_like(missed, np.nan), where=seen > 0).T
    )


def timelines(pairs: TokenPairs, *, most: int = _TIMELINES) -> tuple[Timeline, ...]:
    """The ``most`` sequences with the most versions and resumes, then the largest mean |d|; none
    where neither column is there.
    """
    version, since = pairs.sides.get("version"), pairs.sides.get("since_resume")
    if (version is None and since is None) or not pairs.n_tokens:
        return ()
    size = np.nan_to_num(abs_diff(pairs))
    inside = np.ones(pairs.n_tokens, bool)
    inside[pairs.starts] = False
    turns = np.zeros(pairs.n_tokens)
    if version is not None:
        turns[1:] += (version[1:] != version[:-1]) & inside[1:]
    if since is not None:
        turns += since == 0
    rank = np.lexsort(
        (
            -np.add.reduceat(size, pairs.starts) / pairs.lengths,
            -np.add.reduceat(turns, pairs.starts),
        )
    )
    return tuple(_timeline(pairs, int(sequence), size) for sequence in rank[:most])


def _timeline(pairs: TokenPairs, sequence: int, size: FloatArray) -> Timeline:
    begin = int(pairs.starts[sequence])
    own = slice(begin, begin + int(pairs.lengths[sequence]))
    count = own.stop - own.start
    place = (
        np.asarray(pairs.sides["position"][own], dtype=np.int64)
        if "position" in pairs.sides
        else np.arange(count)
    )
    version = (
        pairs.sides["version"][own]
        if "version" in pairs.sides
        else np.full(count, None, dtype=object)
    )
    # a gap in the positions (tokens that the loss leaves out) ends a run too
    turns = np.flatnonzero((version[1:] != version[:-1]) | (np.diff(place) != 1)) + 1
    runs = [
        Run(first=int(place[first]), last=int(place[last - 1]) + 1, version=_plain(version[first]))
        for first, last in zip([0, *turns], [*turns, count], strict=True)
    ]
    since = (
        pairs.sides["since_resume"][own] if "since_resume" in pairs.sides else np.full(count, -1)
    )
    large = np.flatnonzero(size[own] > LARGE)
    large = np.sort(large[np.argsort(-size[own][large], kind="stable")[:_MARKS]])
    return Timeline(
        sequence=str(_plain(pairs.sequences[sequence])),
        runs=tuple(_joined(runs)),
        resumes=tuple(int(place[i]) for i in np.flatnonzero(since == 0)),
        worst=tuple((int(place[i]), float(size[own][i])) for i in large),
    )


def _joined(runs: Sequence[Run], most: int = 200) -> Sequence[Run]:
    """Neighbours of one version as one run where there are too many to be told apart."""
    if len(runs) <= most:
        return runs
    out = [runs[0]]
    for run in runs[1:]:
        if run.version == out[-1].version:
            out[-1] = Run(first=out[-1].first, last=run.last, version=run.version)
        else:
            out.append(run)
    return out[:most]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
