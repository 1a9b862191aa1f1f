"""Rules about places: the last token of a sequence, and the rows that sequences are packed into."""

from __future__ import annotations

import numpy as np
from scipy import stats

from rollproof.gap.column_checks import BoolArray, FloatArray, counted
from rollproof.gap.diagnosis.causes import ROUNDING, Cause, CauseName, Scene
from rollproof.gap.diagnosis.usual_diff import diff_and_usual
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["end_without_logprob", "packing"]

# |logprob| of the other side, in nats, from which an exact 0 is no rounding of it
_DOUBTFUL = 0.01
_MIN_ENDS = 8
# Times as frequent as at similar tokens elsewhere
_MORE = 10.0
_END_CHANCE = 1e-6
_CONFIDENCE = 0.95
_BINS = 4
_MIN_SEQUENCES = 5
_CHANCE = 1e-3
_RATIO = 1.3
_DECAY = 1.5
# Loss-masked tokens of a sequence from which its first and last third are compared
_THIRDS = 12


def end_without_logprob(scene: Scene) -> Cause | None:
    """Find last tokens with a logprob of exactly 0 that the other side is not certain of."""
    pairs = scene.pairs
    if not scene.signs.tokens:
        return None
    for side, own, other in (
        ("rollout", pairs.rollout, pairs.trainer),
        ("trainer", pairs.trainer, pairs.rollout),
    ):
        cause = _zero_ends(pairs, side, own, other)
        if cause is not None:
            return cause
    return None


def _zero_ends(pairs: TokenPairs, side: str, own: FloatArray, other: FloatArray) -> Cause | None:
    with np.errstate(invalid="ignore"):
        doubtful = np.isfinite(own) & (other < -_DOUBTFUL) & np.isfinite(other)
    zero = doubtful & (own == 0.0)
    last = pairs.starts + pairs.lengths - 1
    # a longer run of zeros is padding, or a logprob mode, and has a note of its own
    before = (pairs.lengths > 1) & zero[np.maximum(last - 1, 0)]
    ends = last[doubtful[last] & ~before]
    found = ends[zero[ends]]
    if len(found) < _MIN_ENDS or len(found) < before.sum():
        return None
    elsewhere = doubtful.copy()
    elsewhere[last] = False
    # a coarse dtype rounds a logprob near 0 to it: how often that happens at other such tokens
    edges = np.unique(np.quantile(other[ends], np.linspace(0, 1, _BINS + 1)))
    bins = np.searchsorted(edges[1:-1], other[elsewhere])
    counts = np.bincount(bins, minlength=len(edges))
    zeros = np.bincount(bins[zero[elsewhere]], minlength=len(edges))
    rate = (zeros + 0.5) / (counts + 1)
    usual = float(rate[np.searchsorted(edges[1:-1], other[ends])].mean())
    share = len(found) / len(ends)
    chance = float(stats.binom.sf(len(found) - 1, len(ends), min(usual, 1.0)))
    if share < _MORE * usual or chance > _END_CHANCE:
        return None
    sides = {"rollout": "trainer", "trainer": "rollout"}
    advice = {
        "rollout": (
            "The end token was forced or added by the stack, or the engine did not return its"
            " logprob: take the engine's logprob of it, or give it mask 0."
        ),
        "trainer": (
            "The trainer's logprobs end one token early and are filled up with 0: score the last"
            " token too, or give it mask 0."
        ),
    }
    return Cause(
        name=CauseName.NO_END_LOGPROB,
        confidence=_CONFIDENCE,
        because=(
            f"of {counted(len(ends), 'last token')} that the {sides[side]} is not certain of"
            f" (logprob {float(other[ends].mean()):.2g} on the mean, {pairs.n_sequences:,}"
            f" sequences), {len(found):,} have a {side} logprob of exactly 0; of other such tokens"
            f" {zeros.sum() / max(int(counts.sum()), 1):.2%} have"
        ),
        advice=advice[side],
    )


def packing(scene: Scene) -> Cause | None:
    """Find sequences that agree if they are the first of their packed row, and otherwise differ at
    their starts.
    """
    pairs = scene.pairs
    index = pairs.columns.get("pack_index")
    if index is None or not scene.signs.tokens:
        return None
    first = index[pairs.starts] == 0
    if min(first.sum(), (~first).sum()) < _MIN_SEQUENCES:
        return None
    diff, usual = diff_and_usual(pairs, np.repeat(first, pairs.lengths))
    if float(diff.sum()) < ROUNDING * len(diff):
        return None
    # sides that are equal in the first sequences would make any difference infinite
    usual = np.maximum(usual, ROUNDING)
    everywhere = _times(pairs, diff, usual, np.ones(pairs.n_tokens, bool))
    ratio, chance = _larger(everywhere[~first], everywhere[first])
    long = pairs.lengths >= _THIRDS
    third = 3 * pairs.index_in_sequence // np.maximum(np.repeat(pairs.lengths, pairs.lengths), 1)
    early, late = (_times(pairs, diff, usual, third == place) for place in (0, 2))
    fading = np.log(np.maximum(early, 1e-12) / np.maximum(late, 1e-12))
    if min((first & long).sum(), (~first & long).sum()) < _MIN_SEQUENCES:
        return None
    # harder starts fade in the first sequences too
    faded, fading_chance = _larger(np.exp(fading[~first & long]), np.exp(fading[first & long]))
    if max(chance, fading_chance) > _CHANCE or ratio < _RATIO or faded < _DECAY:
        return None
    at_start = float(np.median(early[~first & long]) / max(np.median(early[first & long]), 1e-12))
    return Cause(
        name=CauseName.PACKING,
        confidence=1 - max(0.01, chance, fading_chance),
        because=(
            f"{counted(int(first.sum()), 'sequence')} that come first in their packed row agree;"
            f" the {int((~first).sum()):,} after them differ {at_start:.2g} times as much in their"
            f" first third, and less towards their end (rank tests, p ="
            f" {max(chance, fading_chance):.1g})"
        ),
        advice=(
            "A packed sequence sees the one before it: pass cu_seqlens or a block-diagonal mask,"
            " restart the position ids, and reset the state of linear attention and of convolutions"
            " at each start."
        ),
    )


def _times(pairs: TokenPairs, diff: FloatArray, usual: FloatArray, tokens: BoolArray) -> FloatArray:
    """``(sequences,)``: |d| of some tokens over the usual one."""
    own, expected = (
        np.add.reduceat(np.where(tokens, column, 0.0), pairs.starts) for column in (diff, usual)
    )
    return np.asarray(own / np.maximum(expected, 1e-300))


def _larger(values: FloatArray, others: FloatArray) -> tuple[float, float]:
    """Return the ratio of the medians, and the probability of the ranks by chance."""
    ratio = float(np.median(values) / max(float(np.median(others)), 1e-12))
    return ratio, float(stats.mannwhitneyu(values, others, alternative="greater").pvalue)
