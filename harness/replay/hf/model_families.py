"""Tiny MoE models of HF transformers, in memory.

With the initial weights of a library every token goes to almost the same experts. Here all matrices
are drawn so wide that routing depends on the token, and that a small change of the weights changes
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from rollproof.errors import UsageError

__all__ = ["DENSE", "FAMILIES", "REFUSED", "VOCAB", "Family", "tiny_model"]

VOCAB = 128
DENSE = "qwen3"
_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
_SPREAD = 0.25
"""Standard deviation of all matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """An architecture, and the fields of its configuration in addition to the common sizes."""

    name: str
    config: Mapping[str, Any]
    moe_layers: tuple[int, ...] = (0, 1, 2)
    num_experts: int = 8
    top_k: int = 2


_QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_DEEPSEEK = {
    **_GLM,
    "head_dim": 4,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "routed_scaling_factor": 2.5,
}
_GPT_OSS = {
    **_LOCAL,
    "head_dim": 8,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    # not the family's default, which scales positions to a context that a tiny model does not have
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def _table(*families: Family) -> Mapping[str, Family]:
    return MappingProxyType({family.name: family for family in families})


FAMILIES: Mapping[str, Family] = _table(
    Family(name="qwen3_moe", config={**_QWEN, "norm_topk_prob": True, "decoder_sparse_step": 1}),
    Family(
        name="qwen2_moe",
        config={**_QWEN, "shared_expert_intermediate_size": 24, "norm_topk_prob": False},
    ),
    Family(name="olmoe", config={"num_experts": 8, "num_experts_per_tok": 2}),
    Family(name="mixtral", config=_LOCAL),
    Family(name="deepseek_v3", config=_DEEPSEEK, moe_layers=(1, 2)),
    Family(name="glm4_moe", config=_GLM, moe_layers=(1, 2)),
    Family(name="gpt_oss", config=_GPT_OSS),
    Family(name="qwen3_5_moe_text", config={**_QWEN, "shared_expert_intermediate_size": 24}),
    Family(name="qwen3_next", config={**_QWEN, "shared_expert_intermediate_size": 24}),
)
"""Families with routers that select by one top-k, by ``model_type``. The last two have linear
attention, which is slow on a CPU.
"""

REFUSED: Mapping[str, Family] = _table(
    # samples by argmax
    Family(name="phimoe", config=_LOCAL),
    Family(
        # uses weights of masked scores
        name="deepseek_v2",
        config={**_DEEPSEEK, "topk_method": "group_limited_greedy"},
        moe_layers=(1, 2),
    ),
    Family(
        # scatters its weights
        name="llama4_text",
        config={
            **_LOCAL,
            "intermediate_size_mlp": 48,
            "head_dim": 8,
            "interleave_moe_layer_step": 1,
        },
    ),
)
"""Families with routers that cannot be replayed."""

_OTHERS = _table(Family(name=DENSE, config={"head_dim": 8}, moe_layers=()))


def tiny_model(
    name: str, *, seed: int = 5, dtype: torch.dtype = torch.float32, **config: Any
) -> Any:
    """Return a random model of the family ``name``; ``config`` overrides its configuration.

    One seed gives one model. Needs transformers. Raises ``UsageError`` for an unknown family.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    families = {**FAMILIES, **REFUSED, **_OTHERS}
    if name not in families:
        raise UsageError(f"No family is named {name!r}; choose among {list(families)}.")
    complete = AutoConfig.for_model(name, **{**_SIZES, **families[name].config, **config})
    # there are no grouped products of float64, but one product per expert
    experts = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
    model = AutoModelForCausalLM.from_config(complete, attn_implementation="eager", **experts)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(_SPREAD * torch.randn(parameter.shape, generator=noise))
        for path, buffer in sorted(model.named_buffers()):
            # a new model has zeros there, with which biased and unbiased scores are equal
            if path.endswith("e_score_correction_bias"):
                buffer.copy_(_SPREAD * torch.randn(buffer.shape, generator=noise))
    return model.to(dtype)
