"""Read the shape of a model from the ``config.json`` of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollproof.core.case import Model
from rollproof.core.error_text import show
from rollproof.errors import EngineStartError

__all__ = ["end_tokens_of", "kv_groups_of", "model_of"]

# Each family of models names these fields in its own way: Mixtral and gpt-oss have
# num_local_experts, DeepSeek n_routed_experts, Qwen num_experts.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk")
_MOST_LAYERS = 10_000
"""More than any model has, and few enough to list."""


def model_of(folder: Path) -> Model | None:
    """Return layers, experts and top-k of the checkpoint in ``folder``; ``None`` for a dense model.

    A layer is dense if ``mlp_only_layers`` lists it, if it is among the first
    ``first_k_dense_replace`` or ``num_dense_layers``, or if ``decoder_sparse_step`` passes over it
    (as the model families of transformers read these fields). ``mlp_layer_types``, if present,
    decides for every layer instead. Raises ``EngineStartError`` for a config that cannot be read,
    or that lacks the number of layers or of experts per token.
    """
    config = _config(folder)
    layers = _first(config, _LAYERS)
    if layers is None:
        raise EngineStartError(
            f"The config in {folder} lacks the number of layers (one of {list(_LAYERS)}), which"
            " says how many layers routes must have. Add it to config.json; it is never guessed"
            " from the weights."
        )
    experts, top_k = _first(config, _EXPERTS), _first(config, _TOP_K)
    if not experts:
        return None
    if top_k is None:
        raise EngineStartError(
            f"The config in {folder} has {experts} experts and lacks their number per token (one of"
            f" {list(_TOP_K)})."
        )
    if layers > _MOST_LAYERS:
        raise EngineStartError(
            f"The config in {folder} has {layers:,} layers; rollproof takes up to"
            f" {_MOST_LAYERS:,}. It is damaged, or no config of a model."
        )
    return Model(
        num_layers=layers,
        moe_layers=_moe_layers(config, layers),
        num_experts=experts,
        top_k=top_k,
        vocab=_count(config, "vocab_size") or Model().vocab,
    )


def end_tokens_of(folder: Path) -> tuple[int, ...]:
    """Return the end tokens of a checkpoint, ascending: ``eos_token_id`` of its generation config,
    or of its config.
    """
    try:
        text = (Path(folder) / "generation_config.json").read_text(encoding="utf-8")
        found = json.loads(text).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        found = None
    if found is None:
        found = _config(folder).get("eos_token_id")
    tokens: list[Any] = found if isinstance(found, list) else [found]
    return tuple(sorted({token for token in tokens if _is_count(token)}))


def kv_groups_of(folder: Path) -> int:
    """Return the number of kinds of attention in a checkpoint: each has a KV cache of its own.

    It is 1 if the config names no kinds.
    """
    kinds = _config(folder).get("layer_types")
    return len(set(map(str, kinds))) if isinstance(kinds, list) and kinds else 1


def _config(folder: Path) -> Mapping[str, Any]:
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineStartError(
            f"{folder} is not the folder of a checkpoint: {path.name} cannot be read ({error})."
            " Without --model, `rollproof verify --engine` makes a tiny model by itself."
        ) from error
    if not isinstance(config, dict):
        raise EngineStartError(f"{path} must hold a JSON object, not {type(config).__name__}.")
    # multimodal models hold the sizes of their language model in a section of its own
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _moe_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return tuple(layer for layer, kind in enumerate(kinds[:layers]) if kind == "sparse")
    listed = config.get("mlp_only_layers") or []
    for layer in listed if isinstance(listed, list) else [listed]:
        if not isinstance(listed, list) or not _is_count(layer):
            raise EngineStartError(
                f"mlp_only_layers in the config must be a list of layers; {show(layer)} is none."
            )
    first = _count(config, "first_k_dense_replace") or _count(config, "num_dense_layers")
    step = _count(config, "decoder_sparse_step") or 1
    dense = {*listed, *range(min(first, layers))}
    # transformers counts from 1 here: with a step of 2 the layers 1, 3, 5 have experts
    return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def _count(config: Mapping[str, Any], name: str) -> int:
    """Return a field that counts layers or tokens, 0 if it is absent or null."""
    value = config.get(name)
    if value is None:
        return 0
    if not _is_count(value):
        raise EngineStartError(
            f"{name} in the config must be a whole number from 0 on, not {show(value)}."
        )
    return int(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
