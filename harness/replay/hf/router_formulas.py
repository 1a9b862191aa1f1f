"""What a router of each family computes for given experts, written out without a top-k.

It is the reference for gradients under replay: it shares no code with the interception, or with the
families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional

from rollproof.replay.hf.routers import Routers

__all__ = ["FORMULAS", "fixed_selection"]

Weigh = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From a router, hidden states ``(rows, hidden)`` and ids ``(rows, top_k)``: logits ``(rows,
experts)``, weights ``(rows, top_k)``.
"""


def _softmax(
    router: Any,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    *,
    normalise: bool | None = None,
    cast: bool = True,
) -> Any:
    """Softmax over all experts, then the probabilities of the given ones, normalised if the router
    does so, or as ``normalise`` says.
    """
    logits = functional.linear(hidden, router.weight)
    weights = logits.float().softmax(-1).gather(-1, ids)
    if router.norm_topk_prob if normalise is None else normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype) if cast else weights


def _sigmoid(router: Any, hidden: torch.Tensor, ids: torch.Tensor) -> Any:
    """Sigmoid of each logit; bias and groups only affect the selection (DeepSeek-V3,
    arXiv:2412.19437, equations 12 to 16).
    """
    logits = functional.linear(hidden.float(), router.weight.float())
    weights = logits.sigmoid().gather(-1, ids)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * router.routed_scaling_factor


def _softmax_of_chosen(router: Any, hidden: torch.Tensor, ids: torch.Tensor) -> Any:
    """Softmax over the logits of the given experts alone (GPT-OSS)."""
    logits = functional.linear(hidden, router.weight, router.bias)
    return logits, logits.gather(-1, ids).softmax(-1)


FORMULAS: Mapping[str, Weigh] = MappingProxyType(
    {
        "qwen3_moe": _softmax,
        "qwen2_moe": _softmax,
        "olmoe": _softmax,
        "qwen3_next": _softmax,
        # always normalises, and has no norm_topk_prob
        "qwen3_5_moe_text": partial(_softmax, normalise=True),
        # always normalises, and keeps float32
        "mixtral": partial(_softmax, normalise=True, cast=False),
        "deepseek_v3": _sigmoid,
        "glm4_moe": _sigmoid,
        "gpt_oss": _softmax_of_chosen,
    }
)
"""The formula of each family, by ``model_type``."""


@contextmanager
def fixed_selection(routers: Routers, family: str, routes: torch.Tensor) -> Iterator[None]:
    """Let every router compute its family's formula for ``routes``.

    They are ``(rows, layers with a router, top_k)``, without any -1.
    """
    weigh = FORMULAS[family]

    def forward(
        module: Any, ids: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (*weigh(module, hidden.reshape(-1, hidden.shape[-1]), ids), ids)

    for number, router in enumerate(routers.all):
        router.module.forward = partial(forward, router.module, routes[:, number])
    try:
        yield
    finally:
        for router in routers.all:
            del router.module.forward
