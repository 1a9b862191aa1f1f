"""Aliases: the names under which verl, NeMo-RL, slime, miles, prime-rl, TRL, SkyRL, AReaL and
TorchTitan log the same numbers.

A name is here only where its formula is ours, or one of the sums' that is computed here. What
parts: each of these projects averages over the batch of one step (and some over its micro-batches
or ranks), and this over all the tokens that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rollproof.gap.metrics import METRICS
from rollproof.gap.sums import PLACE

if TYPE_CHECKING:
    from rollproof.gap.gap_report import GapReport
    from rollproof.gap.token_pairs import FloatArray

__all__ = ["aliased"]

_BOUND = 20.0
"""verl clips a logarithm here before its exponential."""


def aliased(report: GapReport) -> dict[str, float]:
    """Value by foreign name; NaN where nothing was measured."""
    values = {
        alias: report.panel.metrics[name].value
        for name, metric in METRICS.items()
        for alias in metric.aliases
    }
    largest = report.panel.metrics["abs_diff_max"].value
    values |= dict.fromkeys(_LARGEST, largest)
    sums = report.panel.resampler.sums
    values |= {
        name: function(sums[sums[:, PLACE["finite"]] > 0])
        for name, function in _OF_SEQUENCES.items()
    }
    values["sampling_importance_ratio"] = report.panel.metrics["rho_mean_minus_1"].value + 1
    values["training/rollout_probs_diff_max"] = _largest_probability_difference(report)
    return dict(sorted(values.items()))


_LARGEST = (
    "sampling/sampling_logp_difference/max",
    "bit_wise/logprob_diff/max",
    "policy/rollout_train_logprobs_abs_diff_max",
)
"""TRL, TorchTitan and SkyRL: the largest |d|."""


def _gaps(sums: FloatArray) -> FloatArray:
    """``(sequences,)``: the rollout's mean logprob less the trainer's."""
    return np.asarray(-sums[:, PLACE["d"]] / sums[:, PLACE["finite"]])


def _products(sums: FloatArray) -> FloatArray:
    """``(sequences,)``: the mean of exp(|d|)."""
    return np.asarray(sums[:, PLACE["mult"]] / sums[:, PLACE["finite"]])


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else math.nan


_OF_SEQUENCES: Mapping[str, Callable[[FloatArray], float]] = {
    "mismatch_kl/all/max": lambda sums: (
        float(sums[:, PLACE["top_k3"]].max()) if len(sums) else math.nan
    ),
    "rollout_corr/log_ppl_diff_max": lambda sums: (
        float(_gaps(sums).max(initial=-math.inf)) if len(sums) else math.nan
    ),
    "rollout_corr/log_ppl_diff_min": lambda sums: (
        float(_gaps(sums).min(initial=math.inf)) if len(sums) else math.nan
    ),
    "rollout_corr/ppl_ratio": lambda sums: _mean(np.exp(np.clip(_gaps(sums), -80, 80))),
    "rollout_corr/chi2_seq": lambda sums: (
        _mean(np.exp(2 * np.clip(sums[:, PLACE["d"]], -_BOUND, _BOUND))) - 1
    ),
    "max_seq_mult_prob_error": lambda sums: float(_products(sums).max()) if len(sums) else math.nan,
    "mean_seq_mult_prob_error": lambda sums: _mean(_products(sums)),
    "min_seq_mult_prob_error": lambda sums: float(_products(sums).min()) if len(sums) else math.nan,
}
"""prime-rl's largest k3 of a token, and metrics of whole sequences: verl's (its
rollout_corr_helper) and NeMo-RL's (its GRPO).
"""


def _largest_probability_difference(report: GapReport) -> float:
    rollout, trainer = report.pairs.rollout, report.pairs.trainer
    known = np.isfinite(rollout) & np.isfinite(trainer)
    return (
        float(np.abs(np.exp(trainer[known]) - np.exp(rollout[known])).max())
        if known.any()
        else math.nan
    )
