"""Faulty replays for models of HF transformers, as they were published, each as what a trainer
would put in the place of ``hf_replay``.

They are made of one plain replay (``Plain``), which is right for Qwen3-MoE and checks nothing: a
rebound forward of each gate that computes the family's formula for the ids that it is given, and
asks the gate where it is given none.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch

from rollproof.replay.hf import find_routers
from rollproof.replay.hf.router_formulas import FORMULAS


class Plain:
    """Replays ``routes`` of all layers on a Qwen3-MoE; the right one, without any check of what it
    is given.
    """

    def __init__(self, model: Any, routes: Any) -> None:
        self.model = model
        self.routes = self.placed(torch.as_tensor(routes).reshape(-1, *routes.shape[-2:]))
        self.routers = self.models(model)

    def __enter__(self) -> Self:
        for module, layer in self.routers:
            module.forward = lambda hidden, module=module, layer=layer: self.route(
                module, hidden, self.target(layer)
            )
        return self

    def __exit__(self, *error: object) -> None:
        for module, _ in self.routers:
            vars(module).pop("forward", None)

    def models(self, model: Any) -> list[tuple[Any, int]]:
        return [(router.module, router.layer) for router in find_routers(model).all]

    def placed(self, routes: Any) -> Any:
        return routes

    def target(self, layer: int) -> Any:
        return self.routes[:, layer]

    def route(self, module: Any, hidden: Any, ids: Any) -> Any:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        native = type(module).forward(module, hidden)[2]
        ids = torch.where((ids < 0).any(-1, keepdim=True), native, ids)
        return (*self.weights(module, hidden, ids), ids)

    def weights(self, module: Any, hidden: Any, ids: Any) -> Any:
        return FORMULAS["qwen3_moe"](module, hidden, ids)


class Shifted(Plain):
    """Routes one row late: those of token p at the row of token p + 1 (slime#1045)."""

    def placed(self, routes: Any) -> Any:
        return routes.roll(1, 0)


class SwappedLayers(Plain):
    """Layers in the opposite order."""

    def target(self, layer: int) -> Any:
        return self.routes[:, -1 - layer]


class SequenceMajor(Plain):
    """Rows in sequence-major order (Megatron's), on a model that is batch-major."""

    def placed(self, routes: Any) -> Any:
        return routes.reshape(2, -1, *routes.shape[1:]).transpose(0, 1).reshape(routes.shape)


class Native(Plain):
    """Replay that does nothing: hooks on a decoder that does not run (verl#7340)."""

    def models(self, model: Any) -> list[tuple[Any, int]]:
        return []


class ZerosExecuted(Plain):
    """Rows without a target execute zeros: expert 0, top_k times (verl#4986, SkyRL#1908)."""

    def placed(self, routes: Any) -> Any:
        return routes.clamp(min=0)


class Narrow(Plain):
    """Routes that were cut to one column (Megatron's gather takes them in silence)."""

    def placed(self, routes: Any) -> Any:
        return routes[..., :1]


class DeadGate(Plain):
    """Weights from scores that are zero except for the live choice (ISEEKYAN/Megatron-LM#79)."""

    def weights(self, module: Any, hidden: Any, ids: Any) -> Any:
        logits = torch.nn.functional.linear(hidden, module.weight)
        scores = logits.softmax(-1)
        live = torch.zeros_like(scores).scatter_(-1, scores.topk(2).indices, 1.0)
        weights = (scores * live).gather(-1, ids)
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-9)


class DetachedGate(Plain):
    """Weights that were computed outside of the graph: the gate never learns."""

    def weights(self, module: Any, hidden: Any, ids: Any) -> Any:
        with torch.no_grad():
            return super().weights(module, hidden, ids)


class DoubleSoftmax(Plain):
    """Softmax over what is already probabilities (transformers#45120)."""

    def weights(self, module: Any, hidden: Any, ids: Any) -> Any:
        logits, _ = super().weights(module, hidden, ids)
        weights = logits.softmax(-1).softmax(-1).gather(-1, ids)
        return logits, weights / weights.sum(-1, keepdim=True)


class LeftAfterFailure(Plain):
    """Replaced forwards that stay in place when the step raises."""

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            super().__exit__(*error)


class EveryModel(Plain):
    """Replay on the class of the gates: a reference model in the same process is replayed, too
    (slime#1187, NeMo-RL#4083).
    """

    def __enter__(self) -> Self:
        kind = type(self.routers[0][0])
        self.kind, self.plain, self.turn = kind, kind.forward, 0

        def forward(module: Any, hidden: Any) -> Any:
            layer, self.turn = self.turn % 3, self.turn + 1
            rows = hidden.reshape(-1, hidden.shape[-1])
            native = self.plain(module, rows)[2]
            ids = self.routes[:, layer]
            ids = torch.where((ids < 0).any(-1, keepdim=True), native, ids)
            return (*self.weights(module, rows, ids), ids)

        kind.forward = forward
        return self

    def __exit__(self, *error: object) -> None:
        self.kind.forward = self.plain


class CachedTarget(Plain):
    """The target is kept from the first microbatch on, in a cache by layer that a recompute reads
    (SkyRL#1908).
    """

    cache: ClassVar[dict[int, Any]] = {}

    def route(self, module: Any, hidden: Any, ids: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            cached = self.cache.setdefault(id(module), ids)
            ids = cached if len(cached) == len(ids) else ids.flip(0)
        return super().route(module, hidden, ids)
