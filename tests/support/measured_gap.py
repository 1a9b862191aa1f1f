"""A measured gap with its arrays, for tests that hold its numbers against other people's code."""

from __future__ import annotations

import numpy as np

from rollproof.gap import GapReport, measure
from rollproof.gap.token_pairs import FloatArray
from tests.support.gap_faults import GapWorld, gap_columns
from tests.support.gap_profiles import bank

__all__ = ["FROZEN_GENERATION", "FROZEN_MASK", "FROZEN_TRAINER", "measured", "sampled"]

SHAPE = (16, 40)
FROZEN_GENERATION = [
    [-0.5, -1.25, -0.01, -3.0, -0.2],
    [-2.0, -0.75, -1.5, -0.1, -0.3],
    [-0.9, -0.05, -4.5, -0.6, -1.1],
]
FROZEN_TRAINER = [
    [-0.4, -1.5, -0.02, -2.25, -0.2],
    [-2.5, -0.7, -1.4, -0.15, -9.0],
    [-0.95, -0.04, -3.0, -0.61, -1.0],
]
FROZEN_MASK = [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 1, 1, 1, 0]]
"""Three samples of five tokens, small enough to be typed into another project's interpreter."""


def measured() -> tuple[GapReport, FloatArray, FloatArray, FloatArray]:
    """Return a report, and its rollout, trainer and mask; masked tokens hold nonsense."""
    columns = gap_columns(
        "raw logprobs, T=0.8", seed=5, world=GapWorld(sequences=SHAPE[0], length=SHAPE[1])
    )
    rng = np.random.default_rng(0)
    mask = np.arange(SHAPE[1])[None] < rng.integers(5, SHAPE[1], (SHAPE[0], 1))
    rollout, trainer = (
        columns[name].reshape(SHAPE) for name in ("rollout_logprob", "trainer_logprob")
    )
    rollout = np.where(mask, rollout, -3.0)
    columns |= {"mask": mask.ravel(), "rollout_logprob": rollout.ravel()}
    return measure(**columns, resamples=100), rollout, trainer, mask.astype(float)


def sampled(rng: np.random.Generator, tokens: int) -> FloatArray:
    """Logprobs of tokens that the fake's laws sampled."""
    logits = bank(tokens, rng)
    picked = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    top = logits.max(axis=1)
    return np.asarray(
        logits[np.arange(tokens), picked] - top - np.log(np.exp(logits - top[:, None]).sum(axis=1))
    )
