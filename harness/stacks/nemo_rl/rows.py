"""Training rows of NeMo-RL: from messages to columns, and from a row to a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollproof.core.records import FinishReason, Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.stacks._support.tokenizer import PAD_ID
from rollproof.stacks.nemo_rl.upstream import NemoRl

__all__ = ["message_rows", "rollout_of"]


def message_rows(nemo: NemoRl, batch: Any, *, routes: bool) -> tuple[Any, Any]:
    """The training batch of ``async_grpo_train`` and the lengths of its rows, by the functions that
    it calls.
    """
    nemo.rollouts.backfill_missing_routed_experts(batch["message_log"])
    nemo.grpo.add_grpo_token_loss_masks_and_generation_logprobs(batch["message_log"])
    flat, lengths = nemo.messages.batched_message_log_to_flat_message(
        batch["message_log"],
        pad_value_dict={"token_ids": PAD_ID},
        make_sequence_length_divisible_by=8,
    )
    policy = {"precision": "float32", "router_replay": {"enabled": routes}}
    return nemo.grpo._build_async_grpo_train_data(flat, lengths, batch, policy), lengths


def rollout_of(
    request: Request,
    columns: Mapping[str, Any],
    length: int,
    *,
    truncated: bool,
    **versions: Any,
) -> Rollout:
    """The first row of ``columns``, without padding, as the rollout of ``request``."""
    prompt = len(request.prompt_ids)
    tokens = as_tokens(columns["input_ids"][0, :length].tolist(), what="input_ids")
    logprobs = columns["generation_logprobs"][0, prompt:length].numpy().astype(np.float64)
    routes = columns["routed_experts"][0, :length].numpy() if "routed_experts" in columns else None
    return Rollout(
        request_id=request.request_id,
        prompt_ids=tokens[:prompt],
        response_ids=tokens[prompt:],
        finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
        logprobs=as_logprobs(logprobs),
        loss_mask=columns["token_mask"][0, prompt:length].numpy().astype(np.int64),
        routes=as_routes(routes),
        **versions,
    )
