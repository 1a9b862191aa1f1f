"""Find the routers of a model of HF transformers by structure, not by the names of a family.

An MoE block is a module with a child that has the experts (parameters ``(num_experts, ...)`` of
three dimensions, or a list of ``num_experts`` modules). Its router is the other child with a weight
``(num_experts, hidden)``, of its own or deeper: ``mlp.gate`` in most families, ``mlp.router`` in
GPT-OSS, ``block_sparse_moe.gate`` in older ones. ``num_experts`` and ``top_k`` come from the
model's configuration. If PEFT wraps the experts or a router, the wrapped module is examined.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rollproof.errors import RouterError

__all__ = ["Router", "Routers", "find_routers"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Router:
    """A router: its module, its path in the model, and the index of its layer among all layers."""

    module: nn.Module
    path: str
    layer: int

    def __str__(self) -> str:
        return f"The router {self.path} ({type(self.module).__name__})"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routers:
    """The routers of one model, in the order of their layers.

    ``owner`` is the module that contains and runs the layers. ``proven`` are the layers with a
    router that passed ``topk.probe``.
    """

    all: tuple[Router, ...]
    owner: nn.Module
    num_layers: int
    num_experts: int
    top_k: int
    proven: set[int] = field(default_factory=set)

    @property
    def layers(self) -> tuple[int, ...]:
        """The global indexes of the layers with a router, ascending."""
        return tuple(router.layer for router in self.all)


def find_routers(model: Any) -> Routers:
    """Find the routers of a model of HF transformers, or of a wrapper around one.

    Wrappers are DDP, PEFT and FSDP2. Reuse the result in a loop: it saves the walk over all
    modules. Raises ``RouterError`` for a compiled model, a model without MoE layers, and for
    routers that cannot be identified for certain.
    """
    if not isinstance(model, nn.Module):
        raise RouterError(
            f"Pass a model (a torch.nn.Module) to replay, not a {type(model).__name__}."
        )
    config = next(
        (found for module in model.modules() if (found := _text_config(module)) is not None), None
    )
    if config is None:
        raise RouterError(
            f"{type(model).__name__} has no configuration of HF transformers (a `config`), so its"
            " top-k is unknown."
        )
    num_experts, top_k = _size(config, _EXPERTS), _size(config, _TOP_K)
    if num_experts < 2:
        raise RouterError(
            f"{type(model).__name__} has no MoE layers (its configuration {type(config).__name__}"
            " names no number of experts): there is nothing to replay. Do not use hf_replay for"
            " dense models."
        )
    if not 1 <= top_k <= num_experts:
        raise RouterError(
            f"{type(config).__name__} has {num_experts} experts and no usable number of experts per"
            f" token ({list(_TOP_K)})."
        )
    found = sorted(_routers(model, num_experts), key=lambda router: router.layer)
    if not found:
        raise RouterError(
            f"No module of {type(model).__name__} looks like an MoE block with {num_experts}"
            f" experts and a router weight ({num_experts}, hidden), although its configuration has"
            " experts: every layer is dense, or this family is built in another way."
        )
    _refuse_compiled(model, found)
    owners = {_split(router.path)[0] for router in found}
    twice = next(
        (pair for pair in itertools.pairwise(found) if pair[0].layer == pair[1].layer), None
    )
    if len(owners) == 1 and twice is not None:
        raise RouterError(
            f"Layer {twice[0].layer} of {type(model).__name__} has two routers, {twice[0].path} and"
            f" {twice[1].path}: it is uncertain which one runs. A mixture of attention"
            " heads, and a copy of a whole MoE block (PEFT's modules_to_save), are not supported."
        )
    # targets would go to the copy that never runs (verl#7340: 80 routers for 40 layers)
    if len(owners) > 1:
        raise RouterError(
            f"{type(model).__name__} has several stacks of layers with routers ({sorted(owners)}):"
            " pass to hf_replay the one that replays, such as `model.thinker`. Two copies of one"
            " decoder are a defect (verl#7340)."
        )
    owner = model.get_submodule(stack.rpartition(".")[0]) if (stack := owners.pop()) else model
    num_layers = len(model.get_submodule(stack)) if stack else found[-1].layer + 1
    return Routers(
        all=tuple(found), owner=owner, num_layers=num_layers, num_experts=num_experts, top_k=top_k
    )


def _routers(model: nn.Module, num_experts: int) -> Iterator[Router]:
    for path, block in model.named_modules():
        if _adapted(block) is not None:
            continue
        children = {name: _bare(child) for name, child in block.named_children()}
        experts = [
            name for name, child in children.items() if _holds_experts(name, child[0], num_experts)
        ]
        if not experts:
            continue
        others = {name: child[0] for name, child in children.items() if name not in experts}
        gates = [name for name, child in others.items() if _is_gate(child, num_experts)]
        # Or around it: AFMoE's linear layer, a trained copy (PEFT's modules_to_save).
        gates = gates or [
            name
            for name, child in others.items()
            if any(_is_gate(one, num_experts) for one in child.modules())
        ]
        if len(gates) != 1:
            raise RouterError(
                f"The MoE block {path} ({type(block).__name__}) has {len(gates)} children with a"
                f" weight ({num_experts}, hidden), not one (children: {sorted(children)}): its"
                " router is not found beyond doubt. A router whose weight is held in another shape"
                " (quantised, flattened by FSDP1) is not supported: leave it out of that."
            )
        gate, inner = children[gates[0]]
        full = ".".join(part for part in (path, gates[0], inner) if part)
        yield Router(module=gate, path=full, layer=_split(full)[1])


def _adapted(module: nn.Module) -> nn.Module | None:
    """What a module of PEFT adapts; ``None`` for any other module. It calls it, with its parameters
    changed meanwhile.
    """
    inner = getattr(module, "base_layer", None)
    return inner if isinstance(inner, nn.Module) else None


def _bare(module: nn.Module) -> tuple[nn.Module, str]:
    """What PEFT has put its modules around, and the path from the outermost of them."""
    path = []
    while (inner := _adapted(module)) is not None:
        path.append("base_layer")
        module = inner
    return module, ".".join(path)


def _holds_experts(name: str, child: nn.Module, num_experts: int) -> bool:
    if isinstance(child, nn.ModuleList):
        return "expert" in name and len(child) == num_experts
    return any(
        p.dim() == 3 and p.shape[0] == num_experts and min(p.shape[1:]) > 1
        for p in child.parameters(recurse=False)
    )


def _is_gate(child: nn.Module, num_experts: int) -> bool:
    return any(p.dim() == 2 and p.shape[0] == num_experts for p in child.parameters(recurse=False))


def _split(path: str) -> tuple[str, int]:
    """The path of the list of layers, and the index of the layer: the last number in the path of a
    router.
    """
    parts = path.split(".")
    at = next((i for i in reversed(range(len(parts))) if parts[i].isdigit()), None)
    return ("", 0) if at is None else (".".join(parts[:at]), int(parts[at]))


def _size(config: Any, names: tuple[str, ...]) -> int:
    """The first of the fields that the configuration has; 0 for none."""
    try:
        return next(
            (value for name in names if isinstance(value := getattr(config, name, None), int)), 0
        )
    except RuntimeError as error:  # transformers' heterogeneous models
        raise RouterError(
            f"{type(config).__name__} has no one value of {list(names)} for all layers: {error}"
        ) from error


def _text_config(module: nn.Module) -> Any | None:
    # multimodal models hold the sizes of their language model in a section of its own
    config: Any = getattr(module, "config", None)
    try:
        return config.get_text_config() if hasattr(config, "get_text_config") else None
    except ValueError:  # an encoder and a decoder: the model below says which
        return None


def _refuse_compiled(model: nn.Module, routers: list[Router]) -> None:
    """Raise ``RouterError`` for a model that is compiled with its routers."""
    # code that was traced before may not call a router that is exchanged later: that depends on its
    # guards
    around = {
        path
        for router in routers
        for path in itertools.accumulate(router.path.split("."), "{}.{}".format)
    } | {""}
    compiled = [
        path or type(model).__name__
        for path, module in model.named_modules()
        if path in around
        and (
            hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        )
    ]
    if compiled:
        raise RouterError(
            f"{compiled[0]} is compiled (torch.compile) with the routers in it, and rollproof"
            " cannot prove that such code sees the routes. Replay the model as it was before"
            " torch.compile, or compile parts without routers (such as the attention modules)."
        )
