"""Load a Qwen3-MoE checkpoint of transformers into a megatron-core GPT.

So both can be compared with one engine. Shapes become fields of ``TransformerConfig``; each
parameter of the undivided GPT is made from the checkpoint's tensors, and divided over ranks as all
weights are (``model_weights.fill``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollproof.core.model_config import model_of
from rollproof.errors import UsageError
from rollproof.replay.megatron.megatron_setups import Dispatcher, MegatronSetup

__all__ = ["checkpoint_config", "checkpoint_setup", "rotary_base", "undivided_weights"]

_TYPE = "qwen3_moe"


def checkpoint_setup(
    checkpoints: tuple[Path, ...], *, dtype: str = "bfloat16", **sizes: Any
) -> MegatronSetup:
    """Return a setup with the weights of ``checkpoints``, all of one shape, by their index.

    ``sizes`` are its parallel sizes. Raises ``UsageError`` for a checkpoint that is not of
    Qwen3-MoE with a router in every layer, or that the sizes do not divide.
    """
    config, model = _read(checkpoints[0]), model_of(checkpoints[0])
    if (
        config.get("model_type") != _TYPE
        or model is None
        or len(model.moe_layers) < model.num_layers
    ):
        raise UsageError(
            f"{checkpoints[0]} is not a checkpoint of {_TYPE} with a router in every layer: its"
            " weights cannot be loaded into megatron-core."
        )
    setup = MegatronSetup(
        **{
            "name": "checkpoint",
            "num_layers": model.num_layers,
            "moe_layers": model.moe_layers,
            "num_experts": model.num_experts,
            "top_k": model.top_k,
            "vocab": config["vocab_size"],
            "dispatcher": Dispatcher.ALLTOALL,
            "own_widths": True,
            **sizes,
        }
    )
    groups = config["num_key_value_heads"]
    wrong = [
        f"{name} {number} is not divisible by {parts}"
        for name, number, parts in (
            ("num_key_value_heads", groups, setup.tp),
            ("num_experts", setup.num_experts, setup.ep),
            ("layers", setup.num_layers, setup.pp * setup.vpp),
        )
        if number % parts
    ]
    if wrong:
        raise UsageError(
            f"The checkpoint {checkpoints[0]} does not fit {setup.words}: {'; '.join(wrong)}."
        )
    return replace(
        setup, name=f"{_TYPE}, {setup.words}", checkpoints=tuple(map(str, checkpoints)), dtype=dtype
    )


def checkpoint_config(folder: str, dtype: str) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that a checkpoint adds to a setup's."""
    import torch

    config = _read(Path(folder))
    kind = getattr(torch, dtype)
    return {
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "layernorm_epsilon": config["rms_norm_eps"],
        "moe_router_dtype": "fp32",  # as in transformers
        "params_dtype": kind,
        "pipeline_dtype": kind,
        "bf16": kind is torch.bfloat16,
        "fp16": kind is torch.float16,
    }


def rotary_base(folder: str) -> int:
    """Return the base of the rotary positions."""
    config = _read(Path(folder))
    base = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta", 10000))
    return int(base)


@lru_cache(maxsize=2)
def undivided_weights(folder: str) -> Mapping[str, Any]:
    """Return the parameters of the undivided GPT by name, in the checkpoint's own precision."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        source = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True
        ).state_dict()
        config = _read(Path(folder))
        out = {
            "embedding.word_embeddings.weight": source["model.embed_tokens.weight"],
            "decoder.final_layernorm.weight": source["model.norm.weight"],
            "output_layer.weight": source["lm_head.weight"],
        }
        for layer in range(config["num_hidden_layers"]):
            out |= _layer(source, config, layer)
    return out


def _layer(source: Mapping[str, Any], config: Mapping[str, Any], layer: int) -> dict[str, Any]:
    import torch

    here, there = f"model.layers.{layer}.", f"layers.{layer}."
    groups, size, hidden = config["num_key_value_heads"], config["head_dim"], config["hidden_size"]
    query, key, value = (
        source[f"{here}self_attn.{name}_proj.weight"].view(groups, -1, size, hidden)
        for name in "qkv"
    )
    out = {
        # the queries of a group, then its key and its value: tensor ranks divide groups
        f"{there}self_attention.linear_qkv.weight": (
            torch.cat([query, key, value], 1).reshape(-1, hidden)
        ),
        f"{there}self_attention.linear_proj.weight": source[f"{here}self_attn.o_proj.weight"],
        f"{there}self_attention.q_layernorm.weight": source[f"{here}self_attn.q_norm.weight"],
        f"{there}self_attention.k_layernorm.weight": source[f"{here}self_attn.k_norm.weight"],
        f"{there}input_layernorm.weight": source[f"{here}input_layernorm.weight"],
        f"{there}pre_mlp_layernorm.weight": source[f"{here}post_attention_layernorm.weight"],
        f"{there}mlp.router.weight": source[f"{here}mlp.gate.weight"],
    }
    for expert in range(len(source[f"{here}mlp.gate.weight"])):
        out[f"{there}mlp.experts.{expert}.linear_fc1.weight"] = source[
            f"{here}mlp.experts.gate_up_proj"
        ][expert]
        out[f"{there}mlp.experts.{expert}.linear_fc2.weight"] = source[
            f"{here}mlp.experts.down_proj"
        ][expert]
    return out


def _read(folder: Path) -> Mapping[str, Any]:
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} is not the folder of a checkpoint: config.json cannot be read ({error})."
        ) from error
    return config
