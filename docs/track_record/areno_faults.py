"""Faults of AReno: `python docs/track_record/areno_faults.py [NAME ...]`."""

from importlib.metadata import version
from typing import Any

import torch
from areno.engine.runtime.rollout import _build_rollout_from_rows, _merge_rollouts
from common import run

VERSION = f"areno {version('areno')}:"


def merged(logprobs: list[float], rows: int) -> Any:
    """A merged rollout of 2 + 5 tokens."""
    chunk = _build_rollout_from_rows(
        [[1, 2]],
        [[3, 4, 5, 6, 7]],
        ["length"],
        [torch.tensor(logprobs)],
        metrics=None,
        routed_experts=[torch.ones(rows, 1, 1)],
    )
    return _merge_rollouts([chunk])


def short_fields() -> None:
    """Missing logprobs become zeros, and any number of rows is taken: the merging checks neither
    length.
    """
    few, many = merged([-0.5, -0.25], 6), merged([-0.5] * 5, 9)
    print(VERSION, f"2 logprobs for 5 tokens: {few.logprobs[0].tolist()}")
    print(VERSION, f"{len(many.routed_experts[0])} rows for 2 + 5 tokens are taken")


if __name__ == "__main__":
    run(short_fields)
