"""Strays: single sequences that stand apart from all others, where a few in a hundred move no mean.

Each sequence is tested by itself, on bounded terms: what counts is which way a token differs, and
never how much, so that neither heavy tails nor noise that is a sequence's own can accuse one. A
sequence is told where its mean is so far above what numerics may bring about (``_Test``) that
chance gives that to no sequence of a million measurements (Hoeffding 1963). Tokens are taken for
independent given their context: a repetition loop whose tokens are uncertain would count as often
as it repeats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.gap.column_checks import BoolArray, FloatArray, known
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["Stray", "other_versions", "tilted", "torn"]

_CHANCE = 1e-6
_LIKELY, _UNLIKELY = (-0.6, -0.02), -1.5
"""Rollout logprobs of tokens that another temperature makes more likely, and below which it makes
them less likely (or the reverse).
"""
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Test:
    """The mean of terms within an interval of length ``width``: ``healthy`` where numerics make
    them lean, told from ``least`` on.
    """

    width: float
    healthy: float
    least: float

    def surely(self, mean: FloatArray, counts: FloatArray, tests: int) -> BoolArray:
        """Where the mean of ``counts`` terms is what chance gives to none of ``tests`` sequences,
        but once in a million times.
        """
        reach = self.width * np.sqrt(
            math.log(max(tests, 1) / _CHANCE) / (2 * np.maximum(counts, 1))
        )
        return np.asarray((mean >= self.least) & (mean - self.healthy >= reach))


_WAYS = _Test(width=2.0, healthy=0.2, least=0.5)
"""Signs: three quarters of the tokens go one way. Those of healthy sequences lean by 0.08 in 4,000
tokens, and by 0.3 in 500.
"""
_STRANGE = _Test(width=2.0, healthy=-0.6, least=-0.4)
"""Less the agreement about which tokens are likely: -0.8 or less of a healthy sequence, and about 0
of two that are not of one text.
"""
_NEARER = _Test(width=2.0, healthy=0.1, least=0.3)
"""How much nearer another version is, between -1 and 1: -0.3 to -0.7 of a healthy sequence, and
near 0 of one whose noise is large.
"""
_PARTED = 0.5
"""Times the usual |d| that two versions must part by, for a token to tell them apart."""
_RARE = 0.25
"""Share of the sequences above which none stands apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stray:
    """The index in ``pairs.sequences`` of one that stands apart, and the mean of its terms; ``tag``
    and ``version`` where those tell.
    """

    sequence: int
    lean: float
    tag: Any = None
    version: Any = None


def tilted(pairs: TokenPairs) -> tuple[Stray, ...]:
    """Sequences whose likely tokens differ one way and whose unlikely ones the other, as under
    another temperature.

    ``lean`` is above 0 where the trainer's law is the sharper one. What all sequences share is no
    stray's: the median of d is taken off.
    """
    rollout, trainer = _thinned(pairs)
    d = trainer - rollout
    usual = [
        float(np.median(d[part])) if part.any() else 0.0 for part in _parts(rollout, np.isfinite(d))
    ]
    sums, counts = np.zeros(pairs.n_sequences), np.zeros(pairs.n_sequences)
    for begin, end, rows in _chunks(pairs):
        rollout = pairs.rollout[begin:end]
        with np.errstate(invalid="ignore"):
            d = pairs.trainer[begin:end] - rollout
        likely, unlikely = _parts(rollout, np.isfinite(d))
        terms = np.where(likely, np.sign(d - usual[0]), 0.0) - np.where(
            unlikely, np.sign(d - usual[1]), 0.0
        )
        starts = pairs.starts[rows] - begin
        sums[rows] = np.add.reduceat(terms, starts)
        counts[rows] = np.add.reduceat(likely | unlikely, starts, dtype=np.float64)
    lean = sums / np.maximum(counts, 1)
    return _few(lean, _WAYS.surely(np.abs(lean), counts, 2 * pairs.n_sequences))


def _parts(rollout: FloatArray, finite: BoolArray) -> tuple[BoolArray, BoolArray]:
    return finite & (rollout > _LIKELY[0]) & (rollout < _LIKELY[1]), finite & (rollout < _UNLIKELY)


def torn(pairs: TokenPairs) -> tuple[Stray, ...]:
    """Sequences whose two sides do not agree which tokens are likely, as those of swapped samples
    or of lost weights.

    ``lean`` is the share of tokens that are likely on both sides or on neither, less the share of
    the others.
    """
    rollout, _ = _thinned(pairs)
    bound = min(float(np.median(rollout)), _LIKELY[1]) if len(rollout) else 0.0
    sums, counts = np.zeros(pairs.n_sequences), np.zeros(pairs.n_sequences)
    for begin, end, rows in _chunks(pairs):
        rollout, trainer = pairs.rollout[begin:end], pairs.trainer[begin:end]
        finite = np.isfinite(rollout) & np.isfinite(trainer)
        starts = pairs.starts[rows] - begin
        sums[rows] = np.add.reduceat(
            np.where((rollout > bound) == (trainer > bound), 1.0, -1.0) * finite, starts
        )
        counts[rows] = np.add.reduceat(finite, starts, dtype=np.float64)
    if -sums.sum() > _STRANGE.healthy * counts.sum():
        return ()  # of all sequences together: none of them is what is usual
    lean = sums / np.maximum(counts, 1)
    return _few(lean, _STRANGE.surely(-lean, counts, pairs.n_sequences))


def _thinned(pairs: TokenPairs) -> tuple[FloatArray, FloatArray]:
    """Rollout and trainer logprobs of finite tokens, every so many of them."""
    every = max(1, pairs.n_tokens // _CHUNK)
    rollout, trainer = pairs.rollout[::every], pairs.trainer[::every]
    finite = np.isfinite(rollout) & np.isfinite(trainer)
    return rollout[finite], trainer[finite]


def _few(lean: FloatArray, found: BoolArray) -> tuple[Stray, ...]:
    """Those that are found, unless they are so many that it is not clear which stand apart."""
    few = found.sum() <= _RARE * len(found)
    return (
        tuple(Stray(sequence=int(at), lean=float(lean[at])) for at in np.flatnonzero(found))
        if few
        else ()
    )


def _chunks(pairs: TokenPairs) -> Iterator[tuple[int, int, slice]]:
    """First and last token of whole sequences of about ``_CHUNK`` tokens, and which sequences those
    are.
    """
    bounds = np.append(pairs.starts, pairs.n_tokens)
    first = 0
    while first < pairs.n_sequences:
        last = max(
            first + 1, int(np.searchsorted(bounds, bounds[first] + _CHUNK, side="right")) - 1
        )
        yield int(bounds[first]), int(bounds[last]), slice(first, last)
        first = last


def other_versions(pairs: TokenPairs, usual: FloatArray) -> tuple[Stray, ...]:
    """Sequences that another version than the tagged one fits, over tokens where the two part by as
    much as half of ``usual`` ``(n,)``.

    A term is how much nearer the other version is, in parts of what the two versions differ by. Of
    a rollout that the tagged weights sampled its expectation is below 0 for every noise that leans
    no way, since the distance is convex.
    """
    tags = pairs.sides.get("version")
    if tags is None or len(pairs.by_version) < 2:
        return ()
    found: dict[tuple[int, Any], Stray] = {}
    owner, told = pairs.owner, known(tags)
    names = [tag for tag in np.unique(tags[told]).tolist() if tag in pairs.by_version]
    tests = pairs.n_sequences * len(names) * (len(pairs.by_version) - 1)
    for tag in names:
        rows = np.flatnonzero(told & (tags == tag))
        for version, scores in pairs.by_version.items():
            with np.errstate(invalid="ignore", divide="ignore"):
                own = np.abs(pairs.by_version[tag][rows] - pairs.rollout[rows])
                parted = np.abs(scores[rows] - pairs.by_version[tag][rows])
                term = (own - np.abs(scores[rows] - pairs.rollout[rows])) / parted
            seen = np.isfinite(term) & (parted > _PARTED * usual[rows])
            counts = np.bincount(owner[rows][seen], minlength=pairs.n_sequences).astype(np.float64)
            lean = np.bincount(
                owner[rows][seen], weights=term[seen], minlength=pairs.n_sequences
            ) / np.maximum(counts, 1)
            for at in np.flatnonzero(_NEARER.surely(lean, counts, tests)).tolist():
                if (at, tag) not in found or lean[at] > found[at, tag].lean:
                    found[at, tag] = Stray(
                        sequence=at, lean=float(lean[at]), tag=tag, version=version
                    )
    return tuple(sorted(found.values(), key=lambda stray: stray.sequence))
