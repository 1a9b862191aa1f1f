"""What the batch subjects of several stacks have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    LayerAxis,
    Logprobs,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.records import Rollout

__all__ = [
    "LAYERS",
    "TOP_K",
    "array_of",
    "batch_contract",
    "logprobs_or_zero",
    "mask_of",
    "prefixed",
]

LAYERS, TOP_K = 4, 3


def batch_contract(*, rows: Rows, resume: ResumeBy, versions: Versions, **differs: Any) -> Contract:
    """Return the contract of the samples that a conversion is given.

    There are more experts than a byte can count, and a dense layer before the MoE layers: both are
    where conversions lose routes. ``differs`` are the fields of ``Contract`` that are not as here.
    """
    fields: dict[str, Any] = {
        "logprobs": Logprobs.RAW,
        "abort_surfaces": False,
        "kv_policy": KvPolicy.RECOMPUTE,
    }
    if rows is not Rows.NONE:
        fields |= {
            "layer_axis": LayerAxis.ALL,
            "num_layers": LAYERS,
            "moe_layers": (1, 2, 3),
            # beyond a byte
            "num_experts": 300,
            "top_k": TOP_K,
            "filler": Filler.ZEROS,
            "dtype": "uint16|int16|int32|int64",
            "provenance": Provenance.AS_SAMPLED,
        }
    return Contract(rows=rows, resume=resume, versions=versions, **{**fields, **differs})


def mask_of(sample: Rollout) -> list[int]:
    """The sample's loss mask; ones if it has none."""
    if sample.loss_mask is None:
        return [1] * len(sample.response_ids)
    return [int(flag) for flag in sample.loss_mask]


def logprobs_or_zero(sample: Rollout) -> list[float] | None:
    """The sample's logprobs, with 0.0 for tokens that have none, as stacks write it."""
    if sample.logprobs is None:
        return None
    return [0.0 if np.isnan(value) else float(value) for value in sample.logprobs]


def array_of(tensor: Any) -> Any:
    """A numpy copy of a CPU tensor."""
    return tensor.detach().cpu().numpy().copy()


def prefixed(count: int, values: Any, filler: float) -> Any:
    """``values`` after ``count`` places that hold ``filler``."""
    return np.concatenate([np.full(count, filler, dtype=values.dtype), values])
