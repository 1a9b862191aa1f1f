"""Public records: what a subject is asked for, what it returns, and what engines return."""

from __future__ import annotations

from rollproof.core.records import (
    BatchRow,
    ColumnArray,
    EngineOutput,
    FinishReason,
    FloatArray,
    IntArray,
    LogprobArray,
    Request,
    Rollout,
    Scalar,
    Span,
    Version,
    as_logprobs,
    as_mask,
    as_routes,
    as_tokens,
    spread,
)
from rollproof.core.sampling_masks import SamplingMask

__all__ = [
    "BatchRow",
    "ColumnArray",
    "EngineOutput",
    "FinishReason",
    "FloatArray",
    "IntArray",
    "LogprobArray",
    "Request",
    "Rollout",
    "SamplingMask",
    "Scalar",
    "Span",
    "Version",
    "as_logprobs",
    "as_mask",
    "as_routes",
    "as_tokens",
    "spread",
]
