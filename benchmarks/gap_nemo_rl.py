"""Prints what NeMo-RL's own code says of the frozen case of test_parity.py; for whoever freezes its numbers anew.

PYTHONPATH=. python benchmarks/gap_nemo_rl.py CHECKOUT   (a checkout of NVIDIA-NeMo/RL; needs torch, and nothing else of theirs)

Their functions and the lines of their loss that make the metrics are taken out of the checkout and run as they are.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

from tests.support.gap_measured import FROZEN_GENERATION, FROZEN_MASK, FROZEN_TRAINER


def functions(path: Path, *names: str) -> dict[str, Any]:
    space: dict[str, Any] = {"torch": torch, "Optional": Any, "Any": Any}
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            node.returns = None
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                argument.annotation = None
            exec(compile(ast.Module([node], []), str(path), "exec"), space)  # noqa: S102 - their code, as it stands
    return space


def main() -> None:
    root = Path(sys.argv[1]) / "nemo_rl" / "algorithms"
    space = functions(root / "utils.py", "masked_mean", "calculate_kl")
    lines = (root / "loss" / "loss_functions.py").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if "lp_error = torch.abs(generation_logprobs - prev_logprobs)" in line)
    end = next(i for i, line in enumerate(lines) if i > begin and "Calculate KL regularization" in line)
    mask = torch.tensor(FROZEN_MASK, dtype=torch.float64)
    own = type("Own", (), {"reference_policy_kl_type": "k3"})()
    space |= {
        "self": own,
        "mask": mask,
        "global_valid_toks": mask.sum(),
        "generation_logprobs": torch.tensor(FROZEN_GENERATION, dtype=torch.float64),
        "prev_logprobs": torch.tensor(FROZEN_TRAINER, dtype=torch.float64),
    }
    exec(compile(textwrap.dedent("\n".join(lines[begin:end])), "loss_functions.py", "exec"), space)  # noqa: S102 - their code, as it stands
    for name in ("mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error"):
        print(f"{name} {space[name]!r}")
    lines = (root / "grpo.py").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip() == "denom = mask.sum(dim=-1)")
    end = next(i for i, line in enumerate(lines) if i > begin and "min_seq_mult_prob_error = valid_errors" in line)
    block = textwrap.dedent("\n".join(lines[begin : end + 1]))
    exec(compile(block, "grpo.py", "exec"), space)  # noqa: S102 - their code, as it stands
    for name in ("max_seq_mult_prob_error", "mean_seq_mult_prob_error", "min_seq_mult_prob_error"):
        print(f"{name} {space[name]!r}")
    ratio = torch.exp(space["prev_logprobs"] - space["generation_logprobs"])
    print(f"sampling_importance_ratio {space['masked_mean'](ratio, mask, global_normalization_factor=mask.sum()).item()!r}")


if __name__ == "__main__":
    main()
