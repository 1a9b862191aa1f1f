"""Numbers under other projects' names, against their own code: of the released package where it is installed, else against what it gave."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollproof.gap import measure
from tests.support.gap_measured import FROZEN_GENERATION, FROZEN_MASK, FROZEN_TRAINER, measured
from tests.support.upstream import installed, run_block, run_function

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
PRIME_RL = {"mismatch_kl": 0.20808439344544294}
"""prime-rl 559b44772, trainer/rl/loss.py: ``compute_importance_ratio_and_mismatch_kl``, then ``_safe_mean`` under the loss mask."""
SLIME = {"train_rollout_logprob_abs_diff": 0.3012222222222222}
"""slime 624b824a8, backends/megatron_utils/cp_utils.py: ``get_sum_of_sample_mean`` of |d|, over the number of samples."""


def test_verl_offpolicy_metrics() -> None:
    """Verl's compute_offpolicy_metrics gives the same numbers to 1e-6 under every name of its that is listed."""
    torch: Any = pytest.importorskip("torch", reason="parity with verl needs torch")
    helper: Any = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason="parity with verl needs verl")
    report, *arrays = measured()
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
    report, *arrays = measured()
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


def test_prime_rl_and_slime_metrics() -> None:
    """prime-rl's and slime's own functions gave these numbers of the same arrays."""
    generation, trainer, mask = (np.array(array) for array in (FROZEN_GENERATION, FROZEN_TRAINER, FROZEN_MASK))
    sequence = np.repeat(np.arange(len(mask)), mask.shape[1])
    found = measure(generation.ravel(), trainer.ravel(), sequence_id=sequence, mask=mask.ravel(), resamples=100).aliased()
    assert pytest.approx({name: found[name] for name in PRIME_RL | SLIME}, rel=1e-12) == PRIME_RL | SLIME


def test_trl_metrics() -> None:
    """The lines of TRL's GRPOTrainer that log the sampling difference, run as they stand, give the same numbers."""
    torch: Any = pytest.importorskip("torch", reason="parity with TRL needs torch")
    path = installed("trl", "trainer/grpo_trainer.py")
    if path is None:
        pytest.skip("parity with TRL needs trl")
    report, *arrays = measured()
    rollout, trainer, mask = (torch.tensor(array, dtype=torch.float64) for array in arrays)
    own = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        accelerator=SimpleNamespace(gather=lambda value: value),
        _metrics={"train": defaultdict(list)},
    )
    space = {
        "self": own, "torch": torch, "mode": "train", "device": "cpu", "tool_mask": None, "completion_mask": mask,
        "old_per_token_logps": trainer, "sampling_per_token_logps": rollout, "sequence_level_is": False,
        "vllm_importance_sampling_ratio": torch.exp(trainer - rollout), "nanmin": torch.min, "nanmax": torch.max,
    }  # fmt: skip
    run_block(path, lambda text: '_metrics[mode]["sampling/sampling_logp_difference/mean"]' in text, space)
    theirs = {name: values[0] for name, values in own._metrics["train"].items()}
    ours = report.aliased()
    names = ["sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"]
    assert {name: theirs[name] for name in names} == pytest.approx({name: ours[name] for name in names}, rel=1e-9)
    assert theirs["sampling/importance_sampling_ratio/mean"] == pytest.approx(ours["sampling_importance_ratio"], rel=1e-9)


def test_skyrl_metrics() -> None:
    """The lines of SkyRL's trainer that log the difference, and its workers' function, give the same numbers."""
    torch: Any = pytest.importorskip("torch", reason="parity with SkyRL needs torch")
    path = installed("skyrl", "train/trainer.py")
    if path is None:
        pytest.skip("parity with SkyRL needs skyrl 0.4")
    report, *arrays = measured()
    rollout, trainer, mask = (torch.tensor(array, dtype=torch.float64) for array in arrays)
    own = SimpleNamespace(all_metrics={})
    batch = {"rollout_logprobs": rollout, "loss_mask": mask}
    run_block(
        path,
        lambda text: text.startswith('if training_input.get("rollout_logprobs"') and "rollout_train_logprobs_abs_diff_max" in text,
        {"self": own, "training_input": batch, "action_log_probs": trainer},
    )
    ours = report.aliased()
    names = {name for name in ours if name.startswith("policy/rollout_train_logprobs_abs_diff_")}
    assert 3 == len(names)
    assert {name: own.all_metrics[name] for name in names} == pytest.approx({name: ours[name] for name in names}, rel=1e-9)


def test_slime_abs_diff() -> None:
    """Slime's sum_of_sample_mean over its number of samples is the mean over sequences, where slime is installed."""
    torch: Any = pytest.importorskip("torch", reason="parity with slime needs torch")
    path = installed("slime", "backends/megatron_utils/cp_utils.py")
    if path is None:
        pytest.skip("parity with slime needs a checkout of slime on the path")
    report, *arrays = measured()
    rollout, trainer, mask = (torch.tensor(array, dtype=torch.float64) for array in arrays)
    one_rank = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    make = run_function(path, "get_sum_of_sample_mean", {"torch": torch, "mpu": one_rank})
    lengths = [rollout.shape[1]] * len(rollout)
    theirs = make(lengths, lengths, list(mask))((trainer - rollout).abs().flatten()) / len(rollout)
    assert report.aliased()["train_rollout_logprob_abs_diff"] == pytest.approx(float(theirs), rel=1e-9)
