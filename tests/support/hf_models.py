"""Tiny models of transformers for tests of ``rollproof.replay.hf``, and what their tests ask of
them. Needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollproof.replay.hf import find_routers, hf_record, hf_replay

__all__ = [
    "GOOD",
    "IDS",
    "ROWS",
    "assert_untouched",
    "checkpointing",
    "drift",
    "gradients",
    "loss",
    "of_family",
    "recorded",
    "same",
    "spied",
    "trained",
]

IDS = torch.arange(3, 25).reshape(2, 11)
ROWS = IDS.numel()
GOOD = np.tile(np.array([[0, 1]]), (ROWS, 3, 1))


def of_family(model_type: str, **config: Any) -> Any:
    """A small model of any family of transformers, to be trained."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    made = AutoConfig.for_model(
        model_type,
        **sizes,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        **config,
    )
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model.train()


def loss(model: Any, ids: Any = IDS) -> Any:
    return model(ids, labels=ids, use_cache=False).loss


def drift(model: Any, seed: int = 9) -> None:
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.08 * torch.randn(parameter.shape, generator=noise))


def recorded(model: Any, ids: Any = IDS) -> Any:
    with hf_record(model) as taken, torch.no_grad():
        model(ids, use_cache=False)
    return taken.routes


def gradients(model: Any) -> dict[str, Any]:
    found = {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
    model.zero_grad()
    return found


def trained(
    model: Any, routes: Any, ids: Any = IDS, mask: Any = None
) -> tuple[float, dict[str, Any]]:
    with hf_replay(model, routes, mask):
        value = loss(model, ids)
        value.backward()
    return float(value.detach()), gradients(model)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


@contextmanager
def spied(model: Any) -> Iterator[list[tuple[int, Any]]]:
    """Layer and executed ids of every call of a router, from its output."""
    calls: list[tuple[int, Any]] = []
    hooks = [
        router.module.register_forward_hook(
            lambda _m, _i, out, layer=router.layer: calls.append((layer, out[2].clone()))
        )
        for router in find_routers(model).all
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def assert_untouched(model: Any) -> None:
    assert [] == [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert 0 == len(find_routers(model).owner._forward_hooks)
    assert [] == torch.overrides._get_current_function_mode_stack()


def checkpointing(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
