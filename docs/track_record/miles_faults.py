"""Faults of miles: `python docs/track_record/miles_faults.py [NAME ...]`.

Stubbed are the packages of engine and trainer that miles' manager imports at its head.
"""

import logging
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import run, stub_packages

logging.disable(logging.WARNING)
# the wheel brings copies of SGLang and Megatron, which need a GPU's packages
stub_packages(
    "sglang", "sglang_router", "megatron", "wandb", version="0.3.2", even_if_installed=True
)

import miles.rollout.sglang_rollout as rollout
from miles.ray.rollout import RolloutManager
from miles.utils.types import Sample

VERSION = f"miles {version('miles-rl')}:"


def train_data(*samples: Sample) -> Any:
    """``_convert_samples_to_train_data`` of these samples."""
    manager = object.__new__(RolloutManager.__ray_metadata__.modified_class)
    manager.custom_convert_samples_to_train_data_func = None
    manager.custom_reward_post_process_func = None
    manager.args = SimpleNamespace(
        advantage_estimator="none",
        rewards_normalization=False,
        reward_key=None,
        use_dynamic_global_batch_size=False,
    )
    return manager._convert_samples_to_train_data(list(samples))


def sample(**fields: Any) -> Sample:
    return Sample(tokens=[1, 2, 3, 4], response_length=2, reward=0.0, **fields)


async def empty_text() -> None:
    """Whether a sample is continued is read from its text: after a part whose tokens have none
    (special tokens, bytes of a character) the prompt alone is sent, and its tokens stay.
    """
    sent, replies = [], [([7], "abort"), ([8, 9], "stop")]

    async def post(_url: str, payload: Any, **_: Any) -> Any:
        sent.append(payload["input_ids"])
        tokens, reason = replies.pop(0)
        logprobs = [(-0.1, token, None) for token in tokens]
        meta = {"output_token_logprobs": logprobs, "finish_reason": {"type": reason}}
        return {"text": "" if reason == "abort" else "b", "meta_info": meta}

    words = SimpleNamespace(encode=lambda *_, **__: [1, 2])
    rollout.GenerateState = lambda args: SimpleNamespace(tokenizer=words, processor=None)
    rollout.post = post
    names = (
        "ci_test",
        "use_rollout_routing_replay",
        "use_miles_router",
        "lora_rank",
        "lora_adapter_path",
    )
    args = SimpleNamespace(
        **dict.fromkeys(names, False),
        sglang_router_ip="",
        sglang_router_port=0,
        sglang_router_policy="",
        sglang_speculative_algorithm=None,
    )
    part = Sample(prompt="a")
    for _ in range(2):
        part = await rollout.generate(args, part, {"max_new_tokens": 8})
    print(VERSION, f"sent {sent[1]} after {[1, 2, 7]}; the sample has {part.tokens}")


def mixed_batch() -> None:
    """Whether a batch has routes and logprobs is decided by its first sample; only the length of
    the loss mask is checked.
    """
    routes = np.ones((3, 1, 1), dtype=np.int32)
    data = train_data(
        sample(), sample(rollout_routed_experts=routes, rollout_log_probs=[-0.1, -0.2])
    )
    fields = sorted(set(data) & {"rollout_routed_experts", "rollout_log_probs"})
    print(VERSION, f"the first of two samples has neither: {fields}")
    routes = np.ones((9, 1, 1), dtype=np.int32)
    data = train_data(sample(rollout_routed_experts=routes, rollout_log_probs=[-0.1]))
    rows = len(data["rollout_routed_experts"][0])
    print(VERSION, f"1 logprob and {rows} rows for 2 + 2 tokens are taken")


if __name__ == "__main__":
    run(empty_text, mixed_batch)
