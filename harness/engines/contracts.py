"""Declarations: the contract of a real engine, from the flavour whose conventions it has and the
config of its model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollproof.core.case import Model
from rollproof.core.contract import Contract, KvPolicy, ResumeBy, Rows
from rollproof.core.engine_protocol import EngineSettings
from rollproof.errors import EngineStartError
from rollproof.fakes.engine.flavours import Flavour, engine_contract, engine_terms, flavour_named

__all__ = ["declared", "kv_groups_of", "model_of"]

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk")


def declared(flavour: str | Flavour, settings: EngineSettings) -> Contract:
    """What an engine of that flavour promises for the checkpoint ``settings.model``: without routes
    where those are off.

    Raises ``EngineStartError`` for a folder that holds no config, or a config that lacks what a
    contract needs.
    """
    named = flavour_named(flavour) if isinstance(flavour, str) else flavour
    terms = engine_terms(named, settings.max_length)
    model = model_of(settings.model)
    if not settings.routes:
        declared = engine_contract(named, Model(), KvPolicy.RECOMPUTE)
        return Contract(
            rows=Rows.NONE,
            resume=ResumeBy.ENGINE,
            versions=declared.versions,
            tag_read=declared.tag_read,
            logprobs=declared.logprobs,
            abort_surfaces=True,
            kv_policy=KvPolicy.RECOMPUTE,
            engine=terms,
        )
    if model is None:
        raise EngineStartError(
            f"The model in {settings.model} has no experts, and routes are asked of it: an engine"
            " would refuse, or return what nobody chose. Name a MoE checkpoint, or start the"
            " engine with routes=False."
        )
    return replace(engine_contract(named, model, KvPolicy.RECOMPUTE), engine=terms)


def model_of(folder: Path) -> Model | None:
    """Layers, experts and top-k of a checkpoint, from its ``config.json``; ``None`` for a dense
    model.

    A layer is dense where ``mlp_only_layers`` lists it, where it is among the first
    ``first_k_dense_replace`` or ``num_dense_layers``, or where ``decoder_sparse_step`` passes over
    it, as the families of transformers read these fields; or where ``mlp_layer_types`` says so of
    each layer. Raises ``EngineStartError``.
    """
    config = _config(folder)
    layers = _first(config, _LAYERS)
    if layers is None:
        raise EngineStartError(
            f"The config in {folder} lacks the number of layers (one of {list(_LAYERS)}): without"
            " it nobody can say how many layers routes must have. Add it to config.json; it is"
            " never guessed from the weights."
        )
    experts, top_k = _first(config, _EXPERTS), _first(config, _TOP_K)
    if not experts:
        return None
    if top_k is None:
        raise EngineStartError(
            f"The config in {folder} has {experts} experts and lacks their number per token (one of"
            f" {list(_TOP_K)})."
        )
    return Model(
        num_layers=layers,
        moe_layers=_moe_layers(config, layers),
        num_experts=experts,
        top_k=top_k,
        vocab=config.get("vocab_size") or Model().vocab,
    )


def kv_groups_of(folder: Path) -> int:
    """How many kinds of attention the layers of a checkpoint have, each with a KV cache of its own;
    1 where its config names none.
    """
    kinds = _config(folder).get("layer_types")
    return len(set(kinds)) if isinstance(kinds, list) and kinds else 1


def _config(folder: Path) -> Mapping[str, Any]:
    path = Path(folder) / "config.json"
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineStartError(
            f"{folder} is no folder of a checkpoint: {path.name} cannot be read ({error})."
            " `rollproof verify --engine` makes a tiny model by itself where --model is left out."
        ) from error
    if not isinstance(read, dict):
        raise EngineStartError(f"{path} must hold a JSON object, not {type(read).__name__}.")
    nested = read.get("text_config")
    return nested if isinstance(nested, dict) else read


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
    dense: set[int] = set(config.get("mlp_only_layers") or ())
    dense.update(range(config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0))
    step = config.get("decoder_sparse_step") or 1
    return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
