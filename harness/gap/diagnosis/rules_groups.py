"""Rules that compare groups: replicas, and labels of the user's own.

Every value of a label may be the odd one by chance, and every label: the tests of all of them share
one chance. Sequences are ranked, not averaged: one heavy token must not accuse a group. Only what
exceeds the usual |d| of tokens of similar logprob counts: harder prompts differ more without fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rollproof.gap.column_checks import BoolArray, FloatArray, is_present
from rollproof.gap.diagnosis.causes import ROUNDING, Cause, CauseName, Scene, times_text
from rollproof.gap.diagnosis.evidence import gather_evidence
from rollproof.gap.diagnosis.rules import DISTRIBUTION_RULES, PART_ADVICE
from rollproof.gap.diagnosis.usual_diff import diff_and_usual
from rollproof.gap.groups import Grouping
from rollproof.gap.token_pairs import TokenPairs

__all__ = [
    "MIN_SEQUENCES",
    "compare_groups",
    "groupings",
    "label_parts",
    "replica",
    "scene_of",
    "undersampled",
]

MIN_SEQUENCES = 5
"""Sequences of a group below which it is not judged."""
_MAX_CHANCE = 1e-3
_RATIO = 1.3
_MAX_LISTED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Apart:
    """A group that differs from the others.

    Attributes:
        label: its index in the labels.
        typical: the median over its sequences of |d| over the usual one.
        ratio: that over the same of the others.
        chance: the probability of the test, times the number of tests.
    """

    label: int
    typical: float
    ratio: float
    chance: float


def grouping_of(pairs: TokenPairs, name: str) -> Grouping | None:
    """Return a column of labels as a grouping; ``None`` if there is none."""
    column = pairs.columns.get(name)
    if column is None:
        return None
    present = is_present(column)
    names, inverse = np.unique(column[present], return_inverse=True)
    codes = np.full(pairs.n_tokens, -1)
    codes[present] = inverse
    number = names.dtype.kind in "iuf"
    texts = [f"{label:g}" if number else str(label) for label in names]
    return Grouping(codes=codes, labels=texts)


def replica(scene: Scene) -> Cause | None:
    """Find one replica with sequences that differ more than similar ones of the others."""
    grouping = grouping_of(scene.pairs, "replica")
    if grouping is None or not scene.signs.tokens:
        return None
    diff, usual = diff_and_usual(scene.pairs)
    apart = next(_apart(scene.pairs, grouping, diff, usual, tests=len(grouping.labels)), None)
    if apart is None:
        return None
    name = grouping.labels[apart.label]
    specific = _distribution_cause(scene.pairs.select(grouping.members(apart.label)))
    if specific is not None:
        because = f"at replica {name} alone: {specific.because}"
        return dataclasses.replace(specific, because=because)
    return Cause(
        name=CauseName.REPLICA,
        confidence=1 - max(0.01, apart.chance),
        because=f"sequences of replica {name} have {_size(apart)}",
        advice=(
            "That replica missed a weight update, or runs another configuration: compare its"
            " weights' checksum with the others'."
        ),
    )


def _size(apart: _Apart) -> str:
    return (
        f"{times_text(apart.typical)} times the usual |d| of tokens of similar logprob, on the"
        f" median, {times_text(apart.ratio)} times what the others have (rank test,"
        f" p = {apart.chance:.1g})"
    )


def compare_groups(scene: Scene) -> tuple[Cause, ...]:
    """Find the groups of every label that differ more than the others of it.

    A cause that the group's own tokens show, and the others do not, is named; otherwise that the
    group differs.
    """
    if not scene.signs.tokens or not scene.pairs.groups:
        return ()
    diff, usual = diff_and_usual(scene.pairs)
    causes: dict[CauseName, Cause] = {}
    for name, group, apart in _all_apart(scene.pairs, diff, usual):
        own = group.members(apart.label)
        place = f"{name} {group.labels[apart.label]}"
        specific = _distribution_cause(scene.pairs.select(own))
        rest = None if specific is None else _distribution_cause(scene.pairs.select(~own))
        if specific is not None and (rest is None or rest.name is not specific.name):
            cause = dataclasses.replace(
                specific,
                because=f"in {place} alone: {specific.because}",
                # other groups of the same engines agree, so the weights are there
                name=(
                    CauseName.PART_UNRELATED
                    if specific.name is CauseName.UNRELATED
                    else specific.name
                ),
                advice=PART_ADVICE if specific.name is CauseName.UNRELATED else specific.advice,
            )
        else:
            cause = Cause(
                name=CauseName.GROUP,
                confidence=1 - max(0.01, apart.chance),
                because=f"{place} has {_size(apart)}",
                advice=(
                    "Look for what is different there: preprocessing and position ids of images,"
                    " another prompt template, configuration or hardware."
                ),
            )
        earlier = causes.get(cause.name)
        if earlier is not None:
            cause = dataclasses.replace(earlier, because=f"{earlier.because}; {cause.because}")
        causes[cause.name] = cause
    return tuple(causes.values())


def _all_apart(
    pairs: TokenPairs, diff: FloatArray, usual: FloatArray
) -> Iterator[tuple[str, Grouping, _Apart]]:
    groups: Mapping[str, Grouping] = pairs.groups
    tests = sum(len(grouping.labels) for grouping in groups.values())
    for name, grouping in groups.items():
        for apart in list(_apart(pairs, grouping, diff, usual, tests=tests))[:_MAX_LISTED]:
            yield name, grouping, apart


def _apart(
    pairs: TokenPairs, grouping: Grouping, diff: FloatArray, usual: FloatArray, *, tests: int
) -> Iterator[_Apart]:
    """Yield the groups that differ, the worst first, until one does not."""
    count = len(grouping.labels)
    present = grouping.codes >= 0
    if count < 2 or float(diff.sum()) < ROUNDING * len(diff):
        return
    # a sequence that several groups share counts for each of them with its own tokens
    parts = pairs.owner[present] * count + grouping.codes[present]
    filled = np.flatnonzero(np.bincount(parts))
    part_diff = np.bincount(parts, weights=diff[present])[filled]
    part_usual = np.bincount(parts, weights=usual[present])[filled]
    times, owner = part_diff / np.maximum(part_usual, 1e-300), filled % count
    typical = {
        label: float(np.median(times[owner == label]))
        for label in range(count)
        if (owner == label).sum() >= MIN_SEQUENCES
    }
    # one group is left to compare with; a group that differs is not compared with the next
    named: list[int] = []
    for worst in sorted(typical, key=lambda label: -typical[label]):
        others = times[~np.isin(owner, [*named, worst])]
        if len(others) < MIN_SEQUENCES:
            return
        own = times[owner == worst]
        ranks = stats.mannwhitneyu(own, others, alternative="greater")
        # each of them could have been the worst by chance
        chance = float(ranks.pvalue) * tests
        ratio = typical[worst] / max(float(np.median(others)), 1e-300)
        if chance > _MAX_CHANCE or ratio < _RATIO:
            return
        yield _Apart(label=worst, typical=typical[worst], ratio=ratio, chance=chance)
        named.append(worst)


def undersampled(pairs: TokenPairs, grouping: Grouping) -> list[str]:
    """Return the values with too few sequences to judge, if there are several values."""
    if len(grouping.labels) < 2:
        return []
    present = grouping.codes >= 0
    each = np.unique(grouping.codes[present] * pairs.n_sequences + pairs.owner[present])
    count = np.bincount(each // pairs.n_sequences, minlength=len(grouping.labels))
    return [label for label, own in zip(grouping.labels, count, strict=True) if own < MIN_SEQUENCES]


def groupings(pairs: TokenPairs) -> dict[str, Grouping]:
    """Return the labels that sequences are compared by: the replica, and those of the user."""
    own = grouping_of(pairs, "replica")
    return {**({} if own is None else {"replica": own}), **pairs.groups}


def label_parts(pairs: TokenPairs) -> Iterator[tuple[str, BoolArray]]:
    """Yield the tokens of each value of labels that have several, with the label and the value."""
    for name, grouping in groupings(pairs).items():
        if len(grouping.labels) > 1:
            for code, label in enumerate(grouping.labels):
                yield f"{name} {label}", grouping.members(code)


def scene_of(pairs: TokenPairs) -> Scene:
    """Return the scene of some tokens, without buckets."""
    return Scene(pairs=pairs, signs=gather_evidence(pairs), buckets={})


def _distribution_cause(pairs: TokenPairs) -> Cause | None:
    """Return the first cause that the distribution of some tokens has."""
    scene = scene_of(pairs)
    causes = (rule(scene) for rule in DISTRIBUTION_RULES)
    return next((cause for cause in causes if cause is not None), None)
