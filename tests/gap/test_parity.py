"""Numbers under other projects' names, against their own code: of the released package where it is
installed, else against what it gave.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollproof.gap import measure
from rollproof.gap.token_pairs import FloatArray
from tests.support.measured_gap import FROZEN_GENERATION, FROZEN_MASK, FROZEN_TRAINER, measured
from tests.support.upstream_source import installed, run_block, run_function, run_statements

NEMO_RL = {
    "token_mult_prob_error": 1.4895391907999218,
    "gen_kl_error": 0.20808439327203923,
    "max_seq_mult_prob_error": 2.167263134835467,
    "mean_seq_mult_prob_error": 1.5615403446364897,
    "min_seq_mult_prob_error": 1.2141085953819561,
    "sampling_importance_ratio": 1.348917725654678,
}
"""What NeMo-RL's code (7ea279abf) says of the frozen case, in float64. Its policy_kl_error (0.0950)
and js_divergence_error (0.0307) estimate nothing that goes by their names, since the tokens are the
engine's: they have no metric here."""
PRIME_RL = {
    "mismatch_kl/all/mean": 0.20808439344544294,
    "mismatch_kl/all/max": 1.9816890703380645,
    "mismatch_kl": 0.20808439344544294,
}
"""prime-rl 559b44772."""
SLIME = {"train_rollout_logprob_abs_diff": 0.3012222222222222}
"""slime 624b824a8."""


def test_verl_offpolicy_metrics() -> None:
    """Verl's compute_offpolicy_metrics gives the same numbers to 1e-6 under every name of its that
    is listed.
    """
    torch: Any = pytest.importorskip("torch", reason="parity with verl needs torch")
    helper: Any = pytest.importorskip(
        "verl.trainer.ppo.rollout_corr_helper", reason="parity with verl needs verl"
    )
    report, *arrays = measured()
    rollout, trainer, mask = (torch.tensor(array, dtype=torch.float64) for array in arrays)
    theirs = helper.compute_offpolicy_metrics(trainer, rollout, mask)
    ours = {
        name.removeprefix("rollout_corr/"): value
        for name, value in report.aliased().items()
        if name.startswith("rollout_corr/")
    }
    listed = (
        "kl k3_kl log_ppl_diff log_ppl_abs_diff log_ppl_diff_max log_ppl_diff_min ppl_ratio"
        " chi2_token chi2_seq"
    )
    assert set(listed.split()) == set(ours)
    assert {name: theirs[name] for name in ours} == pytest.approx(ours, rel=1e-6, abs=1e-9)


def test_verl_debug_metrics() -> None:
    """Verl's calculate_debug_metrics gives the same numbers to 1e-6 (it compares probabilities,
    whatever its docstring says).
    """
    torch: Any = pytest.importorskip("torch", reason="parity with verl needs torch")
    debug: Any = pytest.importorskip(
        "verl.utils.debug.metrics", reason="parity with verl needs verl"
    )
    report, *arrays = measured()
    rollout, trainer, mask = (torch.tensor(array, dtype=torch.float64) for array in arrays)

    columns = {
        "rollout_log_probs": rollout,
        "old_log_probs": trainer,
        "response_mask": mask,
        "responses": rollout,
    }
    theirs = {
        name: value
        for name, value in debug.calculate_debug_metrics(SimpleNamespace(batch=columns)).items()
        if not name.endswith("_valid")
    }
    ours = report.aliased()
    assert theirs == pytest.approx({name: ours[name] for name in theirs}, rel=1e-6)


@pytest.mark.parametrize("theirs", [NEMO_RL, PRIME_RL, SLIME], ids=["nemo-rl", "prime-rl", "slime"])
def test_frozen_case(theirs: dict[str, float]) -> None:
    """What no package index has gave these numbers of these arrays: ours are the same, to the 1e-8
    that NeMo-RL adds to its token count.
    """
    found = _case("frozen")[1]
    assert pytest.approx({name: found[name] for name in theirs}, rel=1e-8) == theirs


@pytest.mark.parametrize("case", ["measured", "frozen"])
def test_nemo_rl_own_code(case: str) -> None:
    """The statements of NeMo-RL's loss and GRPO that make its metrics, run as they stand, give the
    same numbers.
    """
    torch: Any = pytest.importorskip("torch", reason="parity with NeMo-RL needs torch")
    path = installed("nemo_rl", "algorithms/loss/loss_functions.py")
    if path is None:
        pytest.skip("parity with NeMo-RL needs a checkout of it on the path")
    arrays, expected = _case(case)
    generation, trainer, mask = (torch.tensor(array, dtype=torch.float64) for array in arrays)
    folder = path.parents[1]
    space: dict[str, Any] = {
        "torch": torch,
        "mask": mask,
        "global_valid_toks": mask.sum(),
        "Optional": Any,
    }
    for name in ("masked_mean", "calculate_kl"):
        run_function(folder / "utils.py", name, space)
    own = SimpleNamespace(reference_policy_kl_type="k3", sequence_level_importance_ratios=False)
    ratio = torch.exp(trainer - generation)
    space |= {
        "self": own,
        "generation_logprobs": generation,
        "prev_logprobs": trainer,
        "actor_importance_weights": ratio,
    }
    run_statements(
        path,
        "lp_error = torch.abs(generation_logprobs - prev_logprobs)",
        "gen_kl_error = masked_mean(",
        space,
    )
    run_block(
        path,
        lambda text: text.startswith(
            "if self.sequence_level_importance_ratios:\n            sample_importance_ratio"
        ),
        space,
    )
    run_statements(
        folder / "grpo.py", "denom = mask.sum(dim=-1)", "if valid_seq_mask.any():", space
    )
    logged = {
        "token_mult_prob_error": "mult_prob_error",
        "sampling_importance_ratio": "sample_importance_ratio",
    }
    theirs = {name: float(space[logged.get(name, name)]) for name in NEMO_RL}
    assert theirs == pytest.approx({name: expected[name] for name in theirs}, rel=1e-8)


@pytest.mark.parametrize("case", ["measured", "frozen"])
def test_prime_rl_own_code(case: str) -> None:
    """The statement of prime-rl's training loop that gathers its mismatch KL, run as it stands,
    gives the numbers that it logs.
    """
    torch: Any = pytest.importorskip("torch", reason="parity with prime-rl needs torch")
    path = installed("prime_rl", "trainer/rl/train.py")
    if path is None:
        pytest.skip("parity with prime-rl needs the src folder of a checkout of it on the path")
    arrays, expected = _case(case)
    rollout, trainer, mask = (
        torch.tensor(array, dtype=torch.float64).flatten() for array in arrays
    )
    space = {
        "torch": torch,
        "Tensor": torch.Tensor,
        "has_mismatch_tokens": True,
        "mismatch_mask": mask.bool(),
    }
    run_function(path.with_name("loss.py"), "compute_importance_ratio_and_mismatch_kl", space)
    space |= {
        "out": {"logprobs": trainer},
        "inference_logprobs": rollout,
        "env_names": ["one"] * len(mask),
        "tensors": defaultdict(list),
    }
    run_block(
        path,
        lambda text: (
            text.startswith("if has_mismatch_tokens:") and "compute_importance_ratio" in text
        ),
        space,
    )
    values = torch.cat(space["tensors"]["mismatch_kl/all"])
    theirs = {
        "mismatch_kl/all/mean": float(values.mean()),
        "mismatch_kl/all/max": float(values.max()),
    }
    assert theirs == pytest.approx({name: expected[name] for name in theirs}, rel=1e-9)


def test_trl_metrics() -> None:
    """The lines of TRL's GRPOTrainer that log the sampling difference, run as they stand, give the
    same numbers.
    """
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
        "self": own,
        "torch": torch,
        "mode": "train",
        "device": "cpu",
        "tool_mask": None,
        "completion_mask": mask,
        "old_per_token_logps": trainer,
        "sampling_per_token_logps": rollout,
        "sequence_level_is": False,
        "vllm_importance_sampling_ratio": torch.exp(trainer - rollout),
        "nanmin": torch.min,
        "nanmax": torch.max,
    }
    run_block(
        path, lambda text: '_metrics[mode]["sampling/sampling_logp_difference/mean"]' in text, space
    )
    theirs = {name: values[0] for name, values in own._metrics["train"].items()}
    ours = report.aliased()
    names = ["sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"]
    assert {name: theirs[name] for name in names} == pytest.approx(
        {name: ours[name] for name in names}, rel=1e-9
    )
    assert theirs["sampling/importance_sampling_ratio/mean"] == pytest.approx(
        ours["sampling_importance_ratio"], rel=1e-9
    )


def test_skyrl_metrics() -> None:
    """The lines of SkyRL's trainer that log the difference, and its workers' function, give the
    same numbers.
    """
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
        lambda text: (
            text.startswith('if training_input.get("rollout_logprobs"')
            and "rollout_train_logprobs_abs_diff_max" in text
        ),
        {"self": own, "training_input": batch, "action_log_probs": trainer},
    )
    ours = report.aliased()
    names = {name for name in ours if name.startswith("policy/rollout_train_logprobs_abs_diff_")}
    assert 3 == len(names)
    assert {name: own.all_metrics[name] for name in names} == pytest.approx(
        {name: ours[name] for name in names}, rel=1e-9
    )


@pytest.mark.parametrize("case", ["measured", "frozen"])
@pytest.mark.parametrize("project", ["slime", "miles"])
def test_slime_and_miles_own_code(project: str, case: str) -> None:
    """The statement of slime's and miles' loss that compares the two sides, over the number of
    samples, gives the same numbers.
    """
    torch: Any = pytest.importorskip("torch", reason=f"parity with {project} needs torch")
    folder = {"slime": "backends/megatron_utils", "miles": "backends/training_utils"}[project]
    path = installed(project, f"{folder}/loss.py")
    if path is None:
        pytest.skip(f"parity with {project} needs it, or a checkout of it on the path")
    arrays, expected = _case(case)
    rollout, trainer, mask = (torch.tensor(array, dtype=torch.float64) for array in arrays)
    one_rank = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    space = {
        "torch": torch,
        "mpu": one_rank,
        "get_parallel_state": lambda: SimpleNamespace(cp=SimpleNamespace(size=1)),
    }
    make = run_function(path.with_name("cp_utils.py"), "get_sum_of_sample_mean", space)
    if project == "miles":
        run_function(path.parents[2] / "utils/ppo_utils.py", "compute_approx_kl", space)
    lengths = [rollout.shape[1]] * len(rollout)
    space |= {
        "args": SimpleNamespace(use_rollout_logprobs=False),
        "batch": {"rollout_log_probs": list(rollout)},
        "old_log_probs": trainer.flatten(),
        "train_scored_log_probs": trainer.flatten(),
        "active_tokens": mask.flatten().bool(),
        "sum_of_sample_mean": make(lengths, lengths, list(mask)),
    }
    run_block(
        path,
        lambda text: (
            text.startswith('if "rollout_log_probs" in batch')
            and "train_rollout_logprob_abs_diff =" in text
        ),
        space,
    )
    names = [
        "train_rollout_logprob_abs_diff",
        *(["train_rollout_kl"] if project == "miles" else []),
    ]
    theirs = {name: float(space[name]) / len(rollout) for name in names}
    # miles computes its KL in float32
    assert theirs == pytest.approx({name: expected[name] for name in names}, rel=1e-6)


def _case(name: str) -> tuple[tuple[FloatArray, FloatArray, FloatArray], dict[str, float]]:
    """Rollout, trainer and mask ``(samples, tokens)`` of a case, and what is measured of it, by
    alias.
    """
    if name == "measured":
        report, *arrays = measured()
        return (arrays[0], arrays[1], arrays[2]), report.aliased()
    generation, trainer, mask = (
        np.array(array, dtype=float) for array in (FROZEN_GENERATION, FROZEN_TRAINER, FROZEN_MASK)
    )
    sequence = np.repeat(np.arange(len(mask)), mask.shape[1])
    report = measure(
        generation.ravel(), trainer.ravel(), sequence_id=sequence, mask=mask.ravel(), resamples=100
    )
    return (generation, trainer, mask), report.aliased()
