"""The usual |d|: that of tokens of similar logprob, against which a part of the tokens is held."""

from __future__ import annotations

import numpy as np

from rollproof.gap.column_checks import BoolArray, FloatArray
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["diff_and_usual"]

# Tokens of a bin below which its mean is chance
_PER_PART = 25


def diff_and_usual(
    pairs: TokenPairs, reference: BoolArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Return the |d| of each token, and the mean |d| of tokens of about its rollout logprob.

    Some prompts are harder than others, and their tokens less certain: only what exceeds that is
    due to a replica, or to a version.

    Args:
        pairs: the tokens; a |d| that is not finite is 0.
        reference: the tokens that the mean is of (default: all).
    """
    diff = pairs.abs_diff
    finite = np.isfinite(diff)
    learnt = finite if reference is None else finite & reference
    diff = np.nan_to_num(diff)
    # the few least certain tokens have a difference of their own, so the bins are finer there
    orders = np.sort(np.concatenate([np.linspace(0, 1, 21), [0.002, 0.005, 0.01, 0.02]]))
    count = int(learnt.sum())
    orders = orders[(orders * count >= _PER_PART) | (orders == 0)]
    edges = np.unique(np.quantile(pairs.rollout[learnt], orders)) if count else np.zeros(1)
    bins = np.searchsorted(edges, pairs.rollout, side="right") - 1
    bins = np.clip(bins, 0, max(len(edges) - 2, 0))
    counts = np.bincount(bins[learnt], minlength=len(edges))
    sums = np.bincount(bins[learnt], weights=diff[learnt], minlength=len(edges))
    mean = sums / np.maximum(counts, 1)
    return diff, np.where(finite, mean[bins], 0.0)
