"""Column causes: the rules of a diagnosis that need a column to tell: versions, resumes, replicas,
the age of the weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from rollproof.gap.buckets import NEAR, bucket_codes, resume_parts, staleness
from rollproof.gap.column_checks import BoolArray, FloatArray, known, some_of
from rollproof.gap.diagnosis.causes import ROUNDING, Cause, CauseName, Scene, beyond
from rollproof.gap.diagnosis.evidence import gather
from rollproof.gap.diagnosis.outliers import other_versions
from rollproof.gap.diagnosis.rules import DISTRIBUTION_RULES
from rollproof.gap.intervals import Interval, Resampler
from rollproof.gap.panel import abs_diff
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["FEW", "beside_usual", "boundary", "few_sequences", "lag", "replica", "versions"]

FEW = 5
"""Sequences of a replica below which it is not judged."""
_PER_PART = 25
_NEAR = ("0", "1", "2-7")
_RISING = 0.75
"""Correlation of age and size from which the size rises with age: one age of five or more that is
apart gives 0.71 at most.
"""


def _better_version(pairs: TokenPairs, own: BoolArray, tag: Any) -> Any:
    """The version that fits the tokens of a tag better than the tag's own, sequence by sequence;
    ``None`` where none surely does.
    """
    with np.errstate(invalid="ignore"):
        apart = {
            version: np.abs(scores[own] - pairs.rollout[own])
            for version, scores in pairs.by_version.items()
        }
    apart = {version: size for version, size in apart.items() if np.isfinite(size).any()}
    if tag not in apart:
        return None
    mean = {version: float(size[np.isfinite(size)].mean()) for version, size in apart.items()}
    best = min(mean, key=lambda version: mean[version])
    both = np.isfinite(apart[best]) & np.isfinite(apart[tag])
    if best == tag or not both.any() or apart[tag][both].mean() <= 1.15 * apart[best][both].mean():
        return None
    # most of the sequences must say so: a heavy token of one of them must not
    gain = np.bincount(pairs.owner[own][both], weights=(apart[tag] - apart[best])[both])
    gain = gain[gain != 0]
    return (
        best
        if len(gain) and float(stats.wilcoxon(gain, alternative="greater").pvalue) < 1e-3
        else None
    )


def _fits(pairs: TokenPairs, tags: npt.NDArray[Any], part: BoolArray) -> dict[Any, Any]:
    """The tags of the tokens ``part`` that another version fits, and that version."""
    fits = {}
    for tag in np.unique(tags[known(tags) & part]):
        if (best := _better_version(pairs, part & (tags == tag), tag)) is not None:
            fits[tag.item() if isinstance(tag, np.generic) else tag] = best
    return fits


def _sides_of_a_resume(pairs: TokenPairs) -> Iterator[tuple[str, BoolArray]]:
    """All tokens, then those before and behind a resume: a sample with one tag, or with that of its
    last call, is wrong on one side.
    """
    yield "", np.ones(pairs.n_tokens, bool)
    since = pairs.sides.get("since_resume")
    if since is not None:
        yield "; before a resume alone", since < 0
        yield "; behind a resume alone", since >= 0


def versions(scene: Scene) -> Cause | None:
    """Tags that another version fits better: scores under several versions tell."""
    pairs = scene.pairs
    tags = pairs.sides.get("version")
    if tags is None or len(pairs.by_version) < 2:
        return None
    where, fits = next(
        (
            (where, fits)
            for where, part in _sides_of_a_resume(pairs)
            if (fits := _fits(pairs, tags, part))
        ),
        ("", {}),
    )
    if not fits:
        return _some_sequences(pairs)
    told = ", ".join(f"tag {tag}: version {best}" for tag, best in list(fits.items())[:4]) + where
    stuck = len(fits) > 1 and len(set(fits.values())) == 1
    return Cause(
        name=CauseName.STUCK if stuck else CauseName.WRONG_VERSION,
        confidence=0.9,
        because=(
            "the rollout's logprobs fit another version than the one that they are tagged with"
            f" ({told})"
        ),
        advice=(
            "The engine keeps answering from old weights: the update did not reach it, or is"
            " smaller than its precision resolves."
            if stuck
            else _TAG
        ),
    )


_TAG = (
    "The tag is published before or after the weights: read it from the weights that sampled, and"
    " score under that version."
)


def _some_sequences(pairs: TokenPairs) -> Cause | None:
    """Sequences that another version fits, where most are tagged rightly."""
    found = other_versions(pairs, beside_usual(pairs)[1])
    if not found:
        return None
    fits = {(stray.tag, stray.version): None for stray in found}
    told = ", ".join(f"tag {tag}: version {version}" for tag, version in list(fits)[:4])
    return Cause(
        name=CauseName.WRONG_VERSION,
        confidence=0.9,
        because=(
            f"in {some_of([stray.sequence for stray in found], pairs.sequences)} the rollout's"
            f" logprobs fit another version than the one that they are tagged with ({told})"
        ),
        advice=_TAG,
    )


def boundary(scene: Scene) -> Cause | None:
    """Tokens just behind a resume that differ more than those away from one, beside what tokens of
    their logprobs do there.
    """
    pairs = scene.pairs
    since = pairs.sides.get("since_resume")
    row = {bucket.label: bucket for bucket in scene.buckets.get("since_resume", ())}
    if since is None or not scene.signs.tokens:
        return None
    away = (since < 0) | (since >= NEAR)
    size, usual = beside_usual(pairs, away)
    usual = np.maximum(usual, ROUNDING)
    inside = _times_usual(pairs, away, size, usual)
    typical = 0.0 if inside.value == 0 else inside.high
    found = {
        label: _times_usual(pairs, codes, size, usual)
        for label, codes in resume_parts(since).items()
        if label in _NEAR
    }
    worst = max(found, key=lambda label: np.nan_to_num(found[label].value, nan=-1.0))
    times = found[worst]
    if (
        worst not in row
        or row[worst].abs_diff.value < ROUNDING
        or not (times.value > 2 * inside.value and times.low > typical)
    ):
        return None
    where = (
        "at the first token"
        if worst == "0"
        else f"at {worst} tokens"
        if worst != "1"
        else "at the second token"
    )
    return Cause(
        name=CauseName.BOUNDARY,
        confidence=beyond(times.value / inside.value if inside.value > 0 else math.inf, 2),
        because=(
            f"mean |d| is {row[worst].abs_diff.value:.2g} {where} after a resume, {times.value:.2g}"
            " times what tokens of such logprobs have away from one"
        ),
        advice=(
            "The resumed call saw another context or other weights than the trainer scores: check"
            " the resume prompt, the kept KV cache and the segment's version."
        ),
    )


def _times_usual(
    pairs: TokenPairs, own: BoolArray, size: FloatArray, usual: FloatArray
) -> Interval:
    """Over the tokens ``own``: their |d| over the usual one, with an interval over sequences."""
    owner, count = pairs.owner[own], pairs.n_sequences
    sums = [
        np.bincount(owner, weights=column[own], minlength=count).astype(np.float64)
        for column in (size, usual)
    ]
    return Resampler(
        np.stack(sums, axis=1)[np.bincount(owner, minlength=count) > 0], resamples=200
    ).ratio(0, 1)


def beside_usual(
    pairs: TokenPairs, among: BoolArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """``(n,)`` |d| of each token (0 where not finite), and the mean of tokens (of all, or those
    ``among``) of about its rollout logprob.

    Some prompts are harder than others, and their tokens less certain: only what is beside that is
    of a replica, or of a version.
    """
    size = abs_diff(pairs)
    finite = np.isfinite(size)
    learnt = finite if among is None else finite & among
    size = np.nan_to_num(size)
    # the few least certain tokens have a difference of their own
    orders = np.sort(np.concatenate([np.linspace(0, 1, 21), [0.002, 0.005, 0.01, 0.02]]))
    known = int(learnt.sum())
    orders = orders[(orders * known >= _PER_PART) | (orders == 0)]
    edges = np.unique(np.quantile(pairs.rollout[learnt], orders)) if known else np.zeros(1)
    place = np.clip(
        np.searchsorted(edges, pairs.rollout, side="right") - 1, 0, max(len(edges) - 2, 0)
    )
    count = np.bincount(place[learnt], minlength=len(edges))
    mean = np.bincount(place[learnt], weights=size[learnt], minlength=len(edges)) / np.maximum(
        count, 1
    )
    return size, np.where(finite, mean[place], 0.0)


def few_sequences(pairs: TokenPairs) -> list[Any]:
    """Replicas with so few sequences that nothing can be told of them, where there are several."""
    side = pairs.sides.get("replica")
    if side is None or not known(side).any():
        return []
    told = known(side)
    names, codes = np.unique(side[told], return_inverse=True)
    count = np.bincount(
        np.unique(codes * pairs.n_sequences + pairs.owner[told]) // pairs.n_sequences,
        minlength=len(names),
    )
    return (
        [name.item() if isinstance(name, np.generic) else name for name in names[count < FEW]]
        if len(names) > 1
        else []
    )


def replica(scene: Scene) -> Cause | None:
    """One replica whose sequences differ more than the others', beside what tokens of their
    logprobs do.
    """
    pairs = scene.pairs
    if "replica" not in pairs.sides or not scene.signs.tokens:
        return None
    size, usual = beside_usual(pairs)
    side = pairs.sides["replica"]
    told = known(side)
    names, codes = np.unique(side[told], return_inverse=True)
    if len(names) < 2:
        return None
    # a sequence that several replicas sampled counts for each of them with its own tokens
    parts = pairs.owner[told] * len(names) + codes
    count, own_size, own_usual = (
        np.bincount(parts, weights=one) for one in (None, size[told], usual[told])
    )
    held = np.flatnonzero(count)
    means, owner = own_size[held] / np.maximum(own_usual[held], 1e-300), names[held % len(names)]
    typical = {
        name: float(np.median(means[owner == name]))
        for name in names
        if (owner == name).sum() >= FEW
    }
    if not typical:
        return None
    worst = max(typical, key=lambda name: typical[name])
    own, others = means[owner == worst], means[owner != worst]
    if len(others) < FEW or float(size.sum()) < ROUNDING * len(size):
        return None
    # ranks, not means: one heavy token must not accuse a replica
    chance = float(stats.mannwhitneyu(own, others, alternative="greater").pvalue) * len(names)
    ratio = typical[worst] / max(float(np.median(others)), 1e-300)
    if chance > 1e-3 or ratio < 1.3:
        return None
    alone = pairs.chosen(told & (side == worst))
    here = Scene(pairs=alone, signs=gather(alone), buckets={})
    if (
        law := next(
            (cause for rule in DISTRIBUTION_RULES if (cause := rule(here)) is not None), None
        )
    ) is not None:
        return dataclasses.replace(law, because=f"at replica {worst} alone: {law.because}")
    return Cause(
        name=CauseName.REPLICA,
        confidence=1 - max(0.01, chance),
        because=(
            f"sequences of replica {worst} have {typical[worst]:.2g} times the usual |d| of tokens"
            f" of their logprobs, on the median, {ratio:.1f} times what the others have (rank test,"
            f" p = {chance:.1g})"
        ),
        advice=(
            "That replica missed a weight update, or runs another configuration: compare its"
            " weights' checksum with the others'."
        ),
    )


def lag(scene: Scene) -> Cause | None:
    """A |d| that rises with the age of the weights, beside what tokens of such logprobs have."""
    row = scene.buckets.get("staleness", ())
    age = staleness(scene.pairs)
    if len(row) < 2 or age is None:
        return None
    codes, labels = bucket_codes(age)
    size, usual = beside_usual(scene.pairs)
    found = [_times_usual(scene.pairs, codes == code, size, usual) for code in range(len(labels))]
    fresh, oldest = found[0], found[-1]
    if float(size.sum()) < ROUNDING * len(size):
        return None
    means = [interval.value for interval in found]
    rising = np.corrcoef(np.arange(len(means)), means)[0, 1] if np.ptp(means) > 0 else 0.0
    if not (oldest.low > fresh.high and rising > _RISING):
        return None
    return Cause(
        name=CauseName.STALENESS,
        confidence=beyond(oldest.value / max(fresh.value, 1e-12), 1),
        because=(
            f"mean |d| rises from {row[0].abs_diff.value:.2g} at {labels[0]} versions of age to"
            f" {row[-1].abs_diff.value:.2g} at {labels[-1]}: from {fresh.value:.2g} to"
            f" {oldest.value:.2g} times what tokens of such logprobs have"
        ),
        advice=(
            "The scores are of the weights that sampled, so that this is no change of the policy:"
            " look at what was different when the old tokens were sampled (kept KV cache,"
            " precision), and whether their versions are tagged rightly."
            if "current_logprob" in scene.pairs.sides or len(scene.pairs.by_version) > 1
            else (
                "Score each token under the weights that sampled it to see the engine mismatch"
                " alone; what rises with age is the policy's own change."
            )
        ),
    )
