"""Outliers: single sequences unlike all others, when they are too few to move a mean.

Each sequence is tested by itself, on bounded terms: the terms count which way a token differs, and
never how much, so that neither heavy tails nor noise of one sequence can accuse it. A sequence is
reported if its mean is so far above what numerics may cause (``_Test``) that chance gives that to
no sequence in a million measurements (Hoeffding 1963). Tokens are taken for independent given their
context: a repetition loop with uncertain tokens would count as often as it repeats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.gap.column_checks import BoolArray, FloatArray, is_present
from rollproof.gap.metrics import sequence_chunks
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["Outlier", "find_mismatched", "find_mistagged", "find_tilted"]

_CHANCE = 1e-6
# Rollout logprobs of tokens that another temperature makes more likely, and the logprob below which
# it makes them less likely (or the reverse).
_LIKELY, _UNLIKELY = (-0.6, -0.02), -1.5
_CHUNK = 1 << 20
# Times the usual |d| that two versions must differ by, for a token to distinguish them
_MIN_PARTED = 0.5
# With more than this share of the sequences found, it is unclear which are the outliers
_MAX_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class _Test:
    """A test of the mean of bounded terms.

    Attributes:
        width: length of the interval that the terms are in.
        healthy: the largest mean that numerics cause.
        threshold: the mean from which a sequence is reported.
    """

    width: float
    healthy: float
    threshold: float

    def rejects(self, mean: FloatArray, counts: FloatArray, tests: int) -> BoolArray:
        """Whether chance gives the mean of ``counts`` terms to none of ``tests`` sequences.

        The exception is once in a million times.
        """
        log_tests = math.log(max(tests, 1) / _CHANCE)
        reach = self.width * np.sqrt(log_tests / (2 * np.maximum(counts, 1)))
        return np.asarray((mean >= self.threshold) & (mean - self.healthy >= reach))


# Three quarters of the tokens differ one way. The mean of healthy sequences is 0.08 with 4,000
# tokens, and 0.3 with 500.
_TILTED = _Test(width=2.0, healthy=0.2, threshold=0.5)
# Minus the agreement about which tokens are likely: -0.8 or less in a healthy sequence, and about 0
# if the two logprobs are not of one text.
_MISMATCHED = _Test(width=2.0, healthy=-0.6, threshold=-0.4)
# How much nearer another version is, between -1 and 1: -0.3 to -0.7 in a healthy sequence, and near
# 0 in a noisy one.
_MISTAGGED = _Test(width=2.0, healthy=0.1, threshold=0.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlier:
    """A sequence unlike all others.

    Attributes:
        sequence: its index in ``pairs.sequences``.
        lean: the mean of its terms.
        tag: its version tag, if another version fits better.
        version: the version that fits.
    """

    sequence: int
    lean: float
    tag: Any = None
    version: Any = None


def find_tilted(pairs: TokenPairs) -> tuple[Outlier, ...]:
    """Return sequences with likely tokens that differ one way and unlikely ones the other way.

    Another temperature does that. ``lean`` is above 0 if the trainer's distribution is the sharper
    one.
    """
    rollout, trainer = _thinned(pairs)
    d = trainer - rollout
    # what all sequences share is no outlier's: the median of d is subtracted
    medians = [
        float(np.median(d[part])) if part.any() else 0.0
        for part in _likely_and_unlikely(rollout, np.isfinite(d))
    ]
    sums, counts = np.zeros(pairs.n_sequences), np.zeros(pairs.n_sequences)
    for begin, end, rows in sequence_chunks(pairs, _CHUNK):
        rollout = pairs.rollout[begin:end]
        with np.errstate(invalid="ignore"):
            d = pairs.trainer[begin:end] - rollout
        likely, unlikely = _likely_and_unlikely(rollout, np.isfinite(d))
        rising = np.where(likely, np.sign(d - medians[0]), 0.0)
        terms = rising - np.where(unlikely, np.sign(d - medians[1]), 0.0)
        starts = pairs.starts[rows] - begin
        sums[rows] = np.add.reduceat(terms, starts)
        counts[rows] = np.add.reduceat(likely | unlikely, starts, dtype=np.float64)
    lean = sums / np.maximum(counts, 1)
    return _outliers(lean, _TILTED.rejects(np.abs(lean), counts, 2 * pairs.n_sequences))


def _likely_and_unlikely(rollout: FloatArray, finite: BoolArray) -> tuple[BoolArray, BoolArray]:
    likely = (rollout > _LIKELY[0]) & (rollout < _LIKELY[1])
    return finite & likely, finite & (rollout < _UNLIKELY)


def find_mismatched(pairs: TokenPairs) -> tuple[Outlier, ...]:
    """Return sequences in which rollout and trainer disagree about which tokens are likely.

    Swapped samples or lost weights do that. ``lean`` is the share of tokens that are likely on both
    sides or on neither, minus the share of the others.
    """
    rollout, _ = _thinned(pairs)
    bound = min(float(np.median(rollout)), _LIKELY[1]) if len(rollout) else 0.0
    sums, counts = np.zeros(pairs.n_sequences), np.zeros(pairs.n_sequences)
    for begin, end, rows in sequence_chunks(pairs, _CHUNK):
        rollout, trainer = pairs.rollout[begin:end], pairs.trainer[begin:end]
        finite = np.isfinite(rollout) & np.isfinite(trainer)
        agree = (rollout > bound) == (trainer > bound)
        starts = pairs.starts[rows] - begin
        sums[rows] = np.add.reduceat(np.where(agree, 1.0, -1.0) * finite, starts)
        counts[rows] = np.add.reduceat(finite, starts, dtype=np.float64)
    if -sums.sum() > _MISMATCHED.healthy * counts.sum():
        return ()  # all sequences together disagree, so none is an outlier
    lean = sums / np.maximum(counts, 1)
    return _outliers(lean, _MISMATCHED.rejects(-lean, counts, pairs.n_sequences))


def _thinned(pairs: TokenPairs) -> tuple[FloatArray, FloatArray]:
    """Return both logprobs of a regular sample of the finite tokens."""
    step = max(1, pairs.n_tokens // _CHUNK)
    rollout, trainer = pairs.rollout[::step], pairs.trainer[::step]
    finite = np.isfinite(rollout) & np.isfinite(trainer)
    return rollout[finite], trainer[finite]


def _outliers(lean: FloatArray, rejected: BoolArray) -> tuple[Outlier, ...]:
    if rejected.sum() > _MAX_SHARE * len(rejected):
        return ()
    return tuple(Outlier(sequence=int(at), lean=float(lean[at])) for at in np.flatnonzero(rejected))


def find_mistagged(pairs: TokenPairs, usual: FloatArray) -> tuple[Outlier, ...]:
    """Return sequences that another version fits better than the tagged one.

    Only tokens count at which the two versions differ by half of ``usual`` ``(n,)`` or more.
    """
    tags = pairs.columns.get("version")
    if tags is None or len(pairs.by_version) < 2:
        return ()
    outliers: dict[tuple[int, Any], Outlier] = {}
    owner, tagged = pairs.owner, is_present(tags)
    names = [tag for tag in np.unique(tags[tagged]).tolist() if tag in pairs.by_version]
    tests = pairs.n_sequences * len(names) * (len(pairs.by_version) - 1)
    for tag in names:
        rows = np.flatnonzero(tagged & (tags == tag))
        for version, scores in pairs.by_version.items():
            # How much nearer the other version is, relative to the difference of the two versions.
            # If the tagged weights sampled, its expectation is below 0 for every symmetric noise,
            # since the distance is convex.
            with np.errstate(invalid="ignore", divide="ignore"):
                own = np.abs(pairs.by_version[tag][rows] - pairs.rollout[rows])
                parted = np.abs(scores[rows] - pairs.by_version[tag][rows])
                term = (own - np.abs(scores[rows] - pairs.rollout[rows])) / parted
            counting = np.isfinite(term) & (parted > _MIN_PARTED * usual[rows])
            sequence = owner[rows][counting]
            counts = np.bincount(sequence, minlength=pairs.n_sequences).astype(np.float64)
            sums = np.bincount(sequence, weights=term[counting], minlength=pairs.n_sequences)
            lean = sums / np.maximum(counts, 1)
            for at in np.flatnonzero(_MISTAGGED.rejects(lean, counts, tests)).tolist():
                if (at, tag) not in outliers or lean[at] > outliers[at, tag].lean:
                    outliers[at, tag] = Outlier(
                        sequence=at, lean=float(lean[at]), tag=tag, version=version
                    )
    return tuple(sorted(outliers.values(), key=lambda outlier: outlier.sequence))
