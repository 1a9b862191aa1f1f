"""Names that other projects log, against their formulas; test_parity.py holds them against their
own code.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollproof.gap import measure
from rollproof.gap.metrics import METRICS
from tests.support.measured_gap import measured


def test_every_alias_is_there_once() -> None:
    """Each name that a metric lists is in the report and in its JSON, and no two metrics claim one
    name.
    """
    report = measured()[0]
    names = [alias for metric in METRICS.values() for alias in metric.aliases]
    assert len(set(names)) == len(names)
    assert set(names) <= set(report.aliased())
    assert report.aliased() == report.to_dict()["aliases"]


def test_formulas_of_other_projects() -> None:
    """NeMo-RL, slime, TRL, SkyRL, prime-rl, AReaL and TorchTitan: their formulas, written out, give
    the value under their name.
    """
    report, rollout, trainer, mask = measured()
    keep = mask.astype(bool)
    d = (trainer - rollout)[keep]
    k3 = np.exp(trainer - rollout) - 1 - (trainer - rollout)
    expected = {
        "gen_kl_error": k3[keep].mean(),  # NeMo-RL: mean over the tokens of the batch
        "token_mult_prob_error": np.exp(np.abs(d)).mean(),
        "mismatch_kl": k3[keep].mean(),  # prime-rl
        "train_rollout_kl": (
            ((k3 * mask).sum(1) / mask.sum(1)).mean()
        ),  # miles: mean of the samples' means
        "train_rollout_logprob_abs_diff": (
            ((np.abs(trainer - rollout) * mask).sum(1) / mask.sum(1)).mean()
        ),
        "sampling/sampling_logp_difference/mean": np.abs(d).mean(),  # TRL
        "sampling/sampling_logp_difference/max": np.abs(d).max(),
        "policy/rollout_train_logprobs_abs_diff_mean": np.abs(d).mean(),  # SkyRL
        "policy/rollout_train_logprobs_abs_diff_std": np.abs(d).std(ddof=1),
        "extreme_frac_tau2": (np.abs(d) > math.log(2)).mean(),  # AReaL
        "ratio_tokens_different": (np.abs(d) > 1e-6).mean(),  # TorchTitan
        "kl_v2": (d * d / 2).mean(),  # SGLang
    }
    found = report.aliased()
    assert expected == pytest.approx({name: found[name] for name in expected}, rel=1e-9)


def test_nothing_measured_has_no_number() -> None:
    """Of an all-masked batch every name is there, with NaN: a zero would read as perfect."""
    report = measure(np.zeros(3) - 1, np.zeros(3) - 1, sequence_id=np.arange(3), mask=np.zeros(3))
    assert all(math.isnan(value) for value in report.aliased().values())
