"""Rules of the diagnosis that need an optional column: versions, resumes, ages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from rollproof.gap.buckets import NEAR, bucket_codes, resume_parts, staleness
from rollproof.gap.column_checks import BoolArray, FloatArray, is_present, some_of
from rollproof.gap.diagnosis.causes import (
    ROUNDING,
    Cause,
    CauseName,
    Scene,
    confidence_beyond,
    times_text,
)
from rollproof.gap.diagnosis.outliers import find_mistagged
from rollproof.gap.diagnosis.usual_diff import diff_and_usual
from rollproof.gap.intervals import Interval, Resampler
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["boundary", "lag", "versions"]

_NEAR = ("0", "1", "2-7")
# Correlation of age and size from which the size rises with age: one age of five or more that
# differs from the others gives 0.71 at most.
_RISING = 0.75
_MAX_LISTED = 4
_MAX_CHANCE = 1e-3
_BETTER_VERSION = 1.15
_TAG_ADVICE = (
    "The tag is published before or after the weights: read it from the weights that sampled, and"
    " score under that version."
)
_STUCK_ADVICE = (
    "The engine keeps answering from old weights: the update did not reach it, or is smaller than"
    " its precision resolves."
)


def _better_version(pairs: TokenPairs, tokens: BoolArray, tag: Any) -> Any:
    """Return the version that surely fits the ``tokens`` of a tag better, or ``None``."""
    with np.errstate(invalid="ignore"):
        distance = {
            version: np.abs(scores[tokens] - pairs.rollout[tokens])
            for version, scores in pairs.by_version.items()
        }
    distance = {version: size for version, size in distance.items() if np.isfinite(size).any()}
    if tag not in distance:
        return None
    mean = {version: float(size[np.isfinite(size)].mean()) for version, size in distance.items()}
    best = min(mean, key=lambda version: mean[version])
    both = np.isfinite(distance[best]) & np.isfinite(distance[tag])
    if best == tag or not both.any():
        return None
    if distance[tag][both].mean() <= _BETTER_VERSION * distance[best][both].mean():
        return None
    # most of the sequences must agree: a heavy token of one of them must not decide
    gain = np.bincount(pairs.owner[tokens][both], weights=(distance[tag] - distance[best])[both])
    # sequences that both versions score equally say nothing
    gain = gain[gain != 0]
    if not len(gain):
        return None
    chance = float(stats.wilcoxon(gain, alternative="greater").pvalue)
    return best if chance < _MAX_CHANCE else None


def _better_versions(pairs: TokenPairs, tags: npt.NDArray[Any], part: BoolArray) -> dict[Any, Any]:
    """Return the tags in ``part`` that another version fits better, with that version."""
    better = {}
    for tag in np.unique(tags[is_present(tags) & part]):
        best = _better_version(pairs, part & (tags == tag), tag)
        if best is not None:
            better[tag.item() if isinstance(tag, np.generic) else tag] = best
    return better


def _parts_around_a_resume(pairs: TokenPairs) -> Iterator[tuple[str, BoolArray]]:
    """Yield all tokens, then those before and those after a resume.

    A sample with one tag, or with that of its last call, is wrong in one of them.
    """
    yield "", np.ones(pairs.n_tokens, bool)
    since = pairs.columns.get("since_resume")
    if since is not None:
        yield "; before a resume alone", since < 0
        yield "; after a resume alone", since >= 0


def versions(scene: Scene) -> Cause | None:
    """Find tags that another version fits better; this needs scores under several versions."""
    pairs = scene.pairs
    tags = pairs.columns.get("version")
    if tags is None or len(pairs.by_version) < 2:
        return None
    for place, part in _parts_around_a_resume(pairs):
        better = _better_versions(pairs, tags, part)
        if better:
            return _mistagged(better, place)
    return _mistagged_sequences(pairs)


def _mistagged(better: dict[Any, Any], place: str) -> Cause:
    fits = list(better.items())[:_MAX_LISTED]
    listed = ", ".join(f"tag {tag}: version {version}" for tag, version in fits)
    # one version that fits all tags means that the engine stopped updating
    stuck = len(better) > 1 and len(set(better.values())) == 1
    return Cause(
        name=CauseName.STUCK if stuck else CauseName.WRONG_VERSION,
        confidence=0.9,
        because=(
            "the rollout's logprobs fit another version than the one that they are tagged with"
            f" ({listed}{place})"
        ),
        advice=_STUCK_ADVICE if stuck else _TAG_ADVICE,
    )


def _mistagged_sequences(pairs: TokenPairs) -> Cause | None:
    """Find sequences that another version fits when most are tagged correctly."""
    outliers = find_mistagged(pairs, diff_and_usual(pairs)[1])
    if not outliers:
        return None
    fits = list(dict.fromkeys((outlier.tag, outlier.version) for outlier in outliers))
    listed = ", ".join(f"tag {tag}: version {version}" for tag, version in fits[:_MAX_LISTED])
    sequences = some_of([outlier.sequence for outlier in outliers], pairs.sequences)
    return Cause(
        name=CauseName.WRONG_VERSION,
        confidence=0.9,
        because=(
            f"in {sequences} the rollout's logprobs fit another version than the one that they are"
            f" tagged with ({listed})"
        ),
        advice=_TAG_ADVICE,
    )


def boundary(scene: Scene) -> Cause | None:
    """Find tokens right after a resume that differ more than similar tokens away from one."""
    pairs = scene.pairs
    since = pairs.columns.get("since_resume")
    buckets = {bucket.label: bucket for bucket in scene.buckets.get("since_resume", ())}
    if since is None or not scene.signs.tokens:
        return None
    away = (since < 0) | (since >= NEAR)
    diff, usual = diff_and_usual(pairs, away)
    # sides that are equal away from resumes would make any difference infinite
    usual = np.maximum(usual, ROUNDING)
    elsewhere = _times_usual(pairs, away, diff, usual)
    typical = 0.0 if elsewhere.value == 0 else elsewhere.high
    near = {
        label: _times_usual(pairs, part, diff, usual)
        for label, part in resume_parts(since).items()
        if label in _NEAR
    }
    worst = max(near, key=lambda label: np.nan_to_num(near[label].value, nan=-1.0))
    times = near[worst]
    if worst not in buckets or buckets[worst].abs_diff.value < ROUNDING:
        return None
    if not (times.value > 2 * elsewhere.value and times.low > typical):
        return None
    place = {"0": "at the first token", "1": "at the second token"}.get(worst, f"at {worst} tokens")
    ratio = times.value / elsewhere.value if elsewhere.value > 0 else math.inf
    return Cause(
        name=CauseName.BOUNDARY,
        confidence=confidence_beyond(ratio, 2),
        because=(
            f"mean |d| is {buckets[worst].abs_diff.value:.2g} {place} after a resume,"
            f" {times_text(times.value)} times the average for tokens of similar logprob elsewhere"
        ),
        advice=(
            "The resumed call saw another context or other weights than the trainer scores: check"
            " the resume prompt, the retained KV cache and the segment's version."
        ),
    )


def _times_usual(
    pairs: TokenPairs, tokens: BoolArray, diff: FloatArray, usual: FloatArray
) -> Interval:
    """Return the |d| of ``tokens`` over the usual one, with an interval over sequences."""
    owner, count = pairs.owner[tokens], pairs.n_sequences
    sums = [
        np.bincount(owner, weights=column[tokens], minlength=count).astype(np.float64)
        for column in (diff, usual)
    ]
    present = np.bincount(owner, minlength=count) > 0
    return Resampler(np.stack(sums, axis=1)[present], resamples=200).ratio(0, 1)


def lag(scene: Scene) -> Cause | None:
    """Find a |d| that rises with the age of the weights, relative to tokens of similar logprob."""
    buckets = scene.buckets.get("staleness", ())
    age = staleness(scene.pairs)
    if len(buckets) < 2 or age is None:
        return None
    codes, labels = bucket_codes(age)
    diff, usual = diff_and_usual(scene.pairs)
    if float(diff.sum()) < ROUNDING * len(diff):
        return None
    times = [_times_usual(scene.pairs, codes == code, diff, usual) for code in range(len(labels))]
    fresh, oldest = times[0], times[-1]
    means = [interval.value for interval in times]
    rising = np.corrcoef(np.arange(len(means)), means)[0, 1] if np.ptp(means) > 0 else 0.0
    if not (oldest.low > fresh.high and rising > _RISING):
        return None
    scored_then = "current_logprob" in scene.pairs.columns or len(scene.pairs.by_version) > 1
    return Cause(
        name=CauseName.STALENESS,
        confidence=confidence_beyond(oldest.value / max(fresh.value, 1e-12), 1),
        because=(
            f"mean |d| rises from {buckets[0].abs_diff.value:.2g} at {labels[0]} versions of age to"
            f" {buckets[-1].abs_diff.value:.2g} at {labels[-1]}: from {times_text(fresh.value)}"
            f" to {times_text(oldest.value)} times the average for tokens of similar logprob"
        ),
        advice=(
            "The scores are of the weights that sampled, so this is no change of the policy: look"
            " at what was different when the old tokens were sampled (retained KV cache,"
            " precision), and check their version tags."
            if scored_then
            else (
                "Score each token under the weights that sampled it to see the engine mismatch"
                " alone; what rises with age is the policy's own change."
            )
        ),
    )
