"""Fake gap: tokens with logprobs of a rollout engine and a trainer that differ by a known law.

A token bank stands for the distributions that a trained model has: 64 candidates with logits (-ln
rank + 0.35 N) x LogNormal(2.2, 0.8) (mean negative log-likelihood about 0.3; half of the tokens
above 0.99). The difference is either *mechanistic* (noise on every logit, so that full
distributions exist) or *closed form*: with v = min(s^2, 4) (1-p)^2 1.15, d = -v/2 + sqrt(v) N(0,1),
whose mean of exp(d) is 1 exactly. Profiles were fitted to published figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PROFILES", "GapProfile", "bank", "closed_form", "noise_scale"]

CANDIDATES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GapProfile:
    """Noise of a pair of engines: logit noise ``sigma`` with log-spread ``spread``; ``flips`` of
    the tokens get more, of ``flip_sigma``.
    """

    sigma: float
    spread: float
    flips: float
    flip_sigma: float


PROFILES: Mapping[str, GapProfile] = {
    "dense-bf16": GapProfile(sigma=0.069, spread=0.70, flips=0.04, flip_sigma=0.115),
    "moe-bf16": GapProfile(sigma=0.069, spread=0.72, flips=0.08, flip_sigma=0.27),
    "moe-bf16-r3": GapProfile(sigma=0.048, spread=0.81, flips=0.074, flip_sigma=0.146),
    "moe-fp8": GapProfile(sigma=0.074, spread=0.69, flips=0.11, flip_sigma=0.32),
    "first-integration": GapProfile(sigma=0.206, spread=0.72, flips=0.093, flip_sigma=0.095),
    "agentic-stale": GapProfile(sigma=0.248, spread=0.59, flips=0.051, flip_sigma=0.70),
}


def bank(size: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """``(size, 64)`` logits."""
    rank = -np.log(np.arange(1, CANDIDATES + 1))
    sharp = rng.lognormal(2.2, 0.8, (size, 1))
    return (rank + 0.35 * rng.standard_normal((size, CANDIDATES))) * sharp


def noise_scale(
    profile: GapProfile,
    sequences: int,
    length: int,
    rng: np.random.Generator,
    *,
    cluster: float = 0.5,
) -> npt.NDArray[np.float64]:
    """``(sequences, length)``: logit-noise deviation of each token; ``cluster`` is the log-spread
    between sequences.
    """
    scale = profile.sigma * rng.lognormal(
        -(profile.spread**2) / 2, profile.spread, (sequences, length)
    )
    hit = rng.random((sequences, length)) < profile.flips
    scale = scale + hit * np.abs(rng.standard_t(4, (sequences, length))) * profile.flip_sigma
    return scale * rng.lognormal(0.0, cluster, (sequences, 1)) if cluster else scale


def closed_form(
    rollout: npt.NDArray[np.float64], scale: npt.NDArray[np.float64], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Trainer logprobs, of the shape of ``rollout``: E[exp(trainer - rollout)] = 1 whatever
    ``scale``.

    The closed form gives a k3 about 30 % below that of the mechanism, hence the factor 1.17 on the
    scale. A deviation of at most a quarter of -log p keeps the result a probability (but for one
    token in 30,000 of those, which is cut).
    """
    deviation = np.minimum(1.17 * scale, 2.0) * (1 - np.exp(rollout)) * np.sqrt(1.15)
    deviation = np.minimum(deviation, -rollout / 4)
    return np.asarray(
        np.minimum(rollout - deviation**2 / 2 + deviation * rng.standard_normal(rollout.shape), 0.0)
    )
