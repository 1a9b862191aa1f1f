"""Faults of slime, from a checkout on PYTHONPATH: `python docs/track_record/slime_faults.py`.

Stubbed are the engine's packages, which slime's manager imports at its head.
"""

from types import SimpleNamespace
from typing import Any

import slime
import torch
from common import commit_of, run, stub_packages

stub_packages("sglang", "sglang_router", "wandb")

from slime.ray.rollout import RolloutManager
from slime.utils.types import Sample

VERSION = f"slime {commit_of(slime)[:9]}:"


def train_data(*samples: Sample) -> Any:
    """``_convert_samples_to_train_data`` of these samples."""
    manager = object.__new__(RolloutManager.__ray_metadata__.modified_class)
    manager.custom_convert_samples_to_train_data_func = None
    manager.custom_reward_post_process_func = None
    manager.args = SimpleNamespace(
        advantage_estimator="none", rewards_normalization=False, reward_key=None
    )
    return manager._convert_samples_to_train_data(list(samples))


def sample(**fields: Any) -> Sample:
    return Sample(tokens=[1, 2, 3, 4], response_length=2, reward=0.0, **fields)


def mixed_batch() -> None:
    """Whether a batch has routes and logprobs is decided by its first sample; only the length of
    the loss mask is checked.
    """
    routed = sample(rollout_routed_experts=torch.ones(3, 1, 1), rollout_log_probs=[-0.1, -0.2])
    data = train_data(sample(), routed)
    fields = sorted(set(data) & {"rollout_routed_experts", "rollout_log_probs"})
    print(VERSION, f"the first of two samples has neither: {fields}")
    data = train_data(sample(rollout_routed_experts=torch.ones(9, 1, 1), rollout_log_probs=[-0.1]))
    rows = len(data["rollout_routed_experts"][0])
    print(VERSION, f"1 logprob and {rows} rows for 2 + 2 tokens are taken")


if __name__ == "__main__":
    run(mixed_batch)
