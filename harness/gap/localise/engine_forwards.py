"""Forwards of megatron-core and of vLLM, for localisation: their rows, their routers, and how their
modules are reached. Needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rollproof.errors import GapError
from rollproof.gap.localise.forwards import Forward

__all__ = ["megatron_forward", "vllm_forward"]

_IN_PROCESS = (
    "the model must live in this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is"
    " imported, and make LLM(..., enforce_eager=True, enable_prefix_caching=False)"
)


def megatron_forward(
    model: Any, input_ids: Any, attention_mask: Any = None, *, name: str = "Megatron"
) -> Forward:
    """A forward of a ``GPTModel`` of megatron-core on one rank over ``input_ids`` ``(batch,
    width)``, padded on the right.

    Activations are sequence-first: token s of sample b is row s x batch + b. Where the
    configuration has ``moe_enable_routing_replay``, the routers can be replayed. Raises
    ``GapError`` for padding on the left, which a causal mask alone does not hide.
    """
    ids, mask = _padded(input_ids, attention_mask)
    batch, width = ids.shape
    sample, place = np.nonzero(mask)
    where = next(model.parameters()).device
    tokens = torch.from_numpy(ids).to(where)
    positions = torch.arange(width, device=where)[None].expand(batch, width)
    return Forward(
        model=model,
        run=lambda own: own(tokens, positions, None),
        size=batch * width,
        rows=place * batch + sample,
        name=name,
        replay=_megatron_replay if _replaying_routers(model) else None,
    )


def _replaying_routers(model: Any) -> list[Any]:
    found = [
        module for module in model.modules() if getattr(module, "router_replay", None) is not None
    ]
    return sorted(found, key=lambda router: int(router.layer_number))


@contextmanager
def _megatron_replay(model: Any, routes: Any) -> Iterator[None]:
    """megatron-core's own ``RouterReplay`` with ``routes`` ``(size, MoE layers, top_k)``; a free
    row (-1) gets any distinct experts.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    routers = _replaying_routers(model)
    if len(routers) != routes.shape[1]:
        raise GapError(
            f"The routes have {routes.shape[1]} layers, and the model {len(routers)} routers that"
            " can be replayed."
        )
    filler = torch.arange(routes.shape[2])
    try:
        for router, target in zip(routers, routes.unbind(1), strict=True):
            target = torch.where(target < 0, filler, target).to(router.weight.device)
            router.router_replay.set_target_indices(target)
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
    finally:
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()


def vllm_forward(
    llm: Any, input_ids: Any, attention_mask: Any = None, *, name: str = "vLLM"
) -> Forward:
    """A prefill of a ``vllm.LLM`` over ``input_ids`` ``(batch, width)``: its filled tokens lie
    flat, one prompt behind the other.

    Raises ``GapError`` where the model cannot be reached, or where the prefill would take several
    steps.
    """
    ids, mask = _padded(input_ids, attention_mask)
    prompts = [line[: int(own.sum())].tolist() for line, own in zip(ids, mask, strict=True)]
    tokens = sum(map(len, prompts))
    config = llm.llm_engine.vllm_config
    if not config.model_config.enforce_eager or config.cache_config.enable_prefix_caching:
        raise GapError(
            "Modules of this vLLM cannot be heard: compiled graphs call no hooks, and a cached"
            f" prefix is not run; {_IN_PROCESS}."
        )
    room = (config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs)
    if tokens > room[0] or len(prompts) > room[1]:
        raise GapError(
            f"{tokens:,} tokens of {len(prompts)} prompts do not fit into one step of vLLM"
            f" ({room[0]:,} tokens of {room[1]} prompts): give fewer, or raise"
            " max_num_batched_tokens and max_num_seqs."
        )
    try:
        model = llm.apply_model(_itself)[0]
    except Exception as error:
        raise GapError(
            f"The model of this vLLM cannot be reached ({type(error).__name__}); {_IN_PROCESS}."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise GapError(f"The model of this vLLM cannot be reached; {_IN_PROCESS}.")

    def run(_: Any) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return Forward(model=model, run=run, size=tokens, rows=np.arange(tokens), name=name)


def _itself(model: Any) -> Any:
    return model


def _padded(input_ids: Any, attention_mask: Any) -> tuple[Any, Any]:
    """Ids and mask ``(batch, width)`` as arrays, with padding on the right only."""
    ids = np.asarray(input_ids, dtype=np.int64)
    if ids.ndim != 2:
        raise GapError(f"input_ids must be (batch, width), not {ids.shape}.")
    mask = (
        np.ones(ids.shape, bool)
        if attention_mask is None
        else np.asarray(attention_mask).astype(bool)
    )
    if mask.shape != ids.shape:
        raise GapError(
            f"attention_mask {mask.shape} and input_ids {ids.shape} must have one shape."
        )
    if (np.diff(mask.astype(np.int8), axis=1) > 0).any():
        raise GapError(
            "Padding must stand on the right: behind padding on the left, tokens would see it."
        )
    return ids, mask
