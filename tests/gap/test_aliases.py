"""Names that other projects log, against their own functions where those are installed, and against their formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollproof.fakes.gap_faults import GapWorld, gap_columns
from rollproof.gap import GapReport, measure
from rollproof.gap.metrics import METRICS
from rollproof.gap.pairs import FloatArray

SHAPE = (16, 40)
FROZEN_GENERATION = [[-0.5, -1.25, -0.01, -3.0, -0.2], [-2.0, -0.75, -1.5, -0.1, -0.3], [-0.9, -0.05, -4.5, -0.6, -1.1]]
FROZEN_TRAINER = [[-0.4, -1.5, -0.02, -2.25, -0.2], [-2.5, -0.7, -1.4, -0.15, -9.0], [-0.95, -0.04, -3.0, -0.61, -1.0]]
FROZEN_MASK = [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 1, 1, 1, 0]]
NEMO_RL = {
    "token_mult_prob_error": 1.4895391907999218,
    "gen_kl_error": 0.20808439327203923,
    "max_seq_mult_prob_error": 2.167263134835467,
    "mean_seq_mult_prob_error": 1.5615403446364897,
    "min_seq_mult_prob_error": 1.2141085953819561,
    "sampling_importance_ratio": 1.348917725654678,
}
"""What NeMo-RL's code (7ea279abf: algorithms/loss/loss_functions.py from line 406, grpo.py from line 2552, utils.py) says of these arrays,
in float64: ``PYTHONPATH=. python benchmarks/gap_nemo_rl.py CHECKOUT``. Its policy_kl_error (0.0950) and js_divergence_error (0.0307)
estimate nothing that goes by their names, since the tokens are the engine's: they have no metric here."""


def _measured() -> tuple[GapReport, FloatArray, FloatArray, FloatArray]:
    """A report, and rollout, trainer and mask ``SHAPE`` that it is of; masked tokens hold nonsense."""
    columns = gap_columns("raw logprobs, T=0.8", seed=5, world=GapWorld(sequences=SHAPE[0], length=SHAPE[1]))
    rng = np.random.default_rng(0)
    mask = np.arange(SHAPE[1])[None] < rng.integers(5, SHAPE[1], (SHAPE[0], 1))
    rollout, trainer = (columns[name].reshape(SHAPE) for name in ("rollout_logprob", "trainer_logprob"))
    rollout = np.where(mask, rollout, -3.0)
    columns |= {"mask": mask.ravel(), "rollout_logprob": rollout.ravel()}
    return measure(**columns, resamples=100), rollout, trainer, mask.astype(float)


def test_every_alias_is_there_once() -> None:
    """Each name that a metric lists is in the report and in its JSON, and no two metrics claim one name."""
    report = _measured()[0]
    names = [alias for metric in METRICS.values() for alias in metric.aliases]
    assert len(set(names)) == len(names)
    assert set(names) <= set(report.aliased())
    assert report.aliased() == report.to_dict()["aliases"]


def test_formulas_of_other_projects() -> None:
    """NeMo-RL, slime, TRL, SkyRL, prime-rl, AReaL and TorchTitan: their formulas, written out, give the value under their name."""
    report, rollout, trainer, mask = _measured()
    keep = mask.astype(bool)
    d = (trainer - rollout)[keep]
    k3 = np.exp(trainer - rollout) - 1 - (trainer - rollout)
    expected = {
        "gen_kl_error": k3[keep].mean(),  # NeMo-RL: mean over the tokens of the batch
        "token_mult_prob_error": np.exp(np.abs(d)).mean(),
        "mismatch_kl": k3[keep].mean(),  # prime-rl
        "train_rollout_kl": ((k3 * mask).sum(1) / mask.sum(1)).mean(),  # slime, miles: mean of the samples' means
        "train_rollout_logprob_abs_diff": ((np.abs(trainer - rollout) * mask).sum(1) / mask.sum(1)).mean(),
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


def test_verl_offpolicy_metrics() -> None:
    """Verl's compute_offpolicy_metrics gives the same numbers to 1e-6 under every name of its that is listed."""
    torch: Any = pytest.importorskip("torch", reason="parity with verl needs torch")
    helper: Any = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason="parity with verl needs verl")
    report, *arrays = _measured()
    rollout, trainer, mask = (torch.tensor(array, dtype=torch.float64) for array in arrays)
    theirs = helper.compute_offpolicy_metrics(trainer, rollout, mask)
    ours = {name.removeprefix("rollout_corr/"): value for name, value in report.aliased().items() if name.startswith("rollout_corr/")}
    listed = "kl k3_kl log_ppl_diff log_ppl_abs_diff log_ppl_diff_max log_ppl_diff_min ppl_ratio chi2_token chi2_seq"
    assert set(listed.split()) == set(ours)
    assert {name: theirs[name] for name in ours} == pytest.approx(ours, rel=1e-6, abs=1e-9)


def test_verl_debug_metrics() -> None:
    """Verl's calculate_debug_metrics gives the same numbers to 1e-6 (it compares probabilities, whatever its docstring says)."""
    torch: Any = pytest.importorskip("torch", reason="parity with verl needs torch")
    debug: Any = pytest.importorskip("verl.utils.debug.metrics", reason="parity with verl needs verl")
    report, *arrays = _measured()
    rollout, trainer, mask = (torch.tensor(array, dtype=torch.float64) for array in arrays)

    columns = {"rollout_log_probs": rollout, "old_log_probs": trainer, "response_mask": mask, "responses": rollout}
    theirs = {
        name: value for name, value in debug.calculate_debug_metrics(SimpleNamespace(batch=columns)).items() if not name.endswith("_valid")
    }
    ours = report.aliased()
    assert theirs == pytest.approx({name: ours[name] for name in theirs}, rel=1e-6)


def test_nemo_rl_metrics() -> None:
    """NeMo-RL's own code gave these numbers of these arrays: ours are the same to the 1e-8 that it adds to its token count."""
    generation, trainer, mask = (np.array(array) for array in (FROZEN_GENERATION, FROZEN_TRAINER, FROZEN_MASK))
    sequence = np.repeat(np.arange(len(mask)), mask.shape[1])
    report = measure(generation.ravel(), trainer.ravel(), sequence_id=sequence, mask=mask.ravel(), resamples=100)
    found = report.aliased()
    assert pytest.approx({name: found[name] for name in NEMO_RL}, rel=1e-8) == NEMO_RL


def test_nothing_measured_has_no_number() -> None:
    """Of an all-masked batch every name is there, with NaN: a zero would read as perfect."""
    report = measure(np.zeros(3) - 1, np.zeros(3) - 1, sequence_id=np.arange(3), mask=np.zeros(3))
    assert all(math.isnan(value) for value in report.aliased().values())
