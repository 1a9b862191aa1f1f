"""Logprobs that are too few become zeros, and rows of any number are taken: the merging looks at neither length."""

from importlib.metadata import version

import torch
from areno.engine.runtime.rollout import _build_rollout_from_rows, _merge_rollouts

VERSION = version("areno")


def merged(logprobs, rows):
    chunk = _build_rollout_from_rows(
        [[1, 2]],
        [[3, 4, 5, 6, 7]],
        ["length"],
        [torch.tensor(logprobs)],
        metrics=None,
        routed_experts=[torch.ones(rows, 1, 1)],
    )
    return _merge_rollouts([chunk])


few, many = merged([-0.5, -0.25], 6), merged([-0.5] * 5, 9)
print(f"areno {VERSION}: 2 logprobs for 5 tokens: {few.logprobs[0].tolist()}")
print(f"areno {VERSION}: {len(many.routed_experts[0])} rows for 2 + 5 tokens are taken")
