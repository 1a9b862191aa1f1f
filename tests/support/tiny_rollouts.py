"""Rollouts that tiny models of HF transformers really sampled, one version of the weights after
another. Needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollproof.core.records import FinishReason, Rollout, Span
from rollproof.fakes.tiny_models import make_checkpoint

__all__ = ["SIZES", "checkpoint", "load", "sample", "trace_of"]

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
}
"""Fields of the tiny models' configuration in place of the families' own."""


def checkpoint(folder: Path, family: str = "qwen3_moe", *, seed: int = 0) -> Path:
    """A checkpoint small enough to be made and run in a second."""
    heads = {"num_key_value_heads": 1} if family != "deepseek_v3" else {"num_hidden_layers": 3}
    moe = {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    return make_checkpoint(folder, family, seed=seed, **SIZES | heads | moe)


def load(path: Path, dtype: str = "float32") -> Any:
    """The model of a checkpoint, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), local_files_only=True
    ).eval()


def sample(
    paths: Sequence[Path],
    *,
    count: int = 6,
    prompt: int = 5,
    each: int = 8,
    dtype: str = "float32",
    seed: int = 0,
) -> list[Rollout]:
    """``count`` rollouts of ``each`` tokens from each checkpoint in turn: versions 0, 1 ...

    A row of routes is of the forward that sampled the next token.
    """
    import torch

    from rollproof.errors import RouterError
    from rollproof.replay.hf import hf_record

    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (count, prompt), generator=random)
    logprobs: list[Any] = []
    routes = None
    for path in paths:
        model = load(path, dtype)
        with torch.no_grad():
            for _ in range(each):
                law = torch.log_softmax(model(ids, use_cache=False).logits[:, -1].double(), -1)
                picked = torch.multinomial(law.exp(), 1, generator=random)
                logprobs.append(law.gather(1, picked)[:, 0].numpy())
                ids = torch.cat([ids, picked], 1)
            try:
                with hf_record(model) as recorded:
                    model(ids[:, :-1], use_cache=False)
            except RouterError:
                continue
            rows = recorded.routes.reshape(
                count, ids.shape[1] - 1, len(recorded.layers), -1
            ).numpy()
            routes = (
                rows
                if routes is None
                else np.concatenate([routes, rows[:, routes.shape[1] :]], axis=1)
            )
    spans = tuple(Span(start=each * i, end=each * (i + 1), version=i) for i in range(len(paths)))
    return [
        Rollout(
            request_id=f"r{row}",
            prompt_ids=tuple(ids[row, :prompt].tolist()),
            response_ids=tuple(ids[row, prompt:].tolist()),
            finish_reason=FinishReason.LENGTH,
            logprobs=np.stack(logprobs, axis=1)[row],
            routes=None if routes is None else routes[row],
            spans=spans,
        )
        for row in range(count)
    ]


def trace_of(rollouts: Sequence[Rollout]) -> Any:
    """A trace that holds the rollouts as results, and nothing else."""
    from rollproof.core.events.rollout import Result
    from tests.support.trace_builder import TraceBuilder, contract

    return (
        TraceBuilder(contract(rows="none"))
        .add(*(Result(request_id=rollout.request_id, rollout=rollout) for rollout in rollouts))
        .trace()
    )
