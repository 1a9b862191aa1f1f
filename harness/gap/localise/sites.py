"""The sites of a model at which two forwards are compared, and the names of their modules.

One table of roles matches the module names of HF transformers, Megatron-core and vLLM (SGLang's are
those of vLLM). A module with another name is a site of that name, so that two models of one
framework are compared throughout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from rollproof.core.records import IntArray

__all__ = ["GLUE", "ROLES", "Site", "Tap", "find_taps"]

ROLES: Mapping[str, str] = MappingProxyType(
    {
        "embed": r"(?:embed_tokens|embedding|wte)",
        "attn_norm": r"(?:input_layernorm|ln_1)",
        "q": r"(?:self_attn|attention)\.q_proj",
        "k": r"(?:self_attn|attention)\.k_proj",
        "v": r"(?:self_attn|attention)\.v_proj",
        "qkv": r"(?:self_attn\.qkv_proj|self_attention\.linear_qkv)",
        "q_norm": r"(?:self_attn\.q_norm|self_attention\.q_layernorm)",
        "k_norm": r"(?:self_attn\.k_norm|self_attention\.k_layernorm)",
        "o": r"(?:self_attn\.o_proj|self_attention\.linear_proj)",
        "mlp_norm": r"(?:post_attention_layernorm|pre_mlp_layernorm|ln_2)",
        "router": r"(?:mlp|block_sparse_moe|feed_forward)\.(?:gate|router)",
        "experts": r"(?:mlp|block_sparse_moe|feed_forward)\.experts",
        "shared": r"mlp\.(?:shared_experts?)",
        "gate": r"mlp\.gate_proj",
        "up": r"mlp\.up_proj",
        "gate_up": r"mlp\.(?:gate_up_proj|linear_fc1)",
        "down": r"mlp\.(?:down_proj|linear_fc2)",
        "mlp": r"(?:mlp|block_sparse_moe|feed_forward)",
        "final_norm": r"(?:norm|final_layernorm|ln_f)",
        "head": r"(?:lm_head|output_layer)",
    }
)
"""Roles, in the order in which a forward reaches them, and the names (within the layer, or within
the model) of their modules.

``qkv`` and ``gate_up`` are fused modules with the columns of ``q``, ``k``, ``v`` and of ``gate``,
``up``.
"""

GLUE: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "residual",
        "o": "attention",
        "mlp_norm": "residual after attention",
        "down": "activation",
        "final_norm": "residual",
    }
)
"""Sites without a module of their own: they are read at the input of the module after them."""

_LAYER = re.compile(r"^(?:.*\.)?layers?\.(\d+)\.(.+)$")
_OUTSIDE = ("embed", "final_norm", "head")
_LAST = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Site:
    """A place in a model.

    Attributes:
        layer: its layer: -1 before the first one, 2^30 after the last.
        role: what is computed there.
    """

    layer: int
    role: str

    def __str__(self) -> str:
        return self.role if self.layer in (-1, _LAST) else f"layer {self.layer} {self.role}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tap:
    """A module with hooks.

    Attributes:
        name: its name.
        module: the module.
        columns: its sites, with the columns of its output that are theirs (``None``: all).
        before: the site of its input, if that is one.
        router: whether it is a router, with outputs that are distinguished by their kinds.
    """

    name: str
    module: Any
    columns: Mapping[Site, IntArray | None] = field(default_factory=dict)
    before: Site | None = None
    router: bool = False

    @property
    def site(self) -> Site:
        """The first of its sites."""
        return next(iter(self.columns))


def find_taps(model: Any) -> dict[str, Tap]:
    """Return the modules of ``model`` (torch) that are sites, by name."""
    taps = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        if (
            not name
            or "Identity" in type(module).__name__
            or any(name.startswith(f"{outer}.") for outer in inside)
        ):
            continue
        tap = _tap(model, name, module)
        if tap is not None:
            taps[name] = tap
            if tap.site.role in ("experts", "router"):
                inside.append(name)  # what is within has rows of its own
    return taps


def _tap(model: Any, name: str, module: Any) -> Tap | None:
    match = _LAYER.match(name)
    if match is None:
        last = name.rsplit(".", 1)[-1]
        role = next((role for role in _OUTSIDE if re.fullmatch(ROLES[role], last)), None)
        if role is None:
            return None
        site = Site(layer=-1 if role == "embed" else _LAST, role=role)
        return Tap(name=name, module=module, columns={site: None}, before=_before(site))
    layer, inner = int(match[1]), match[2]
    role = next(
        (
            role
            for role, pattern in ROLES.items()
            if role not in _OUTSIDE and re.fullmatch(pattern, inner)
        ),
        None,
    )
    if role is None:
        if (
            next(module.children(), None) is not None
            or next(module.parameters(recurse=False), None) is None
        ):
            # a block, with sites for leaves, or a module without weights, which shows at the next
            # module's input
            return None
        role = inner
    site = Site(layer=layer, role=role)
    fused = {"qkv": _qkv, "gate_up": _halves}.get(role)
    columns = (
        {site: None}
        if fused is None
        else {Site(layer=layer, role=part): index for part, index in fused(model, module, name)}
    )
    if not columns:
        return None
    return Tap(
        name=name, module=module, columns=columns, before=_before(site), router=role == "router"
    )


def _before(site: Site) -> Site | None:
    return Site(layer=site.layer, role=GLUE[site.role]) if site.role in GLUE else None


def _config(model: Any, *names: str) -> int | None:
    for holder in (model, *(module for module in model.modules())):
        config = getattr(holder, "config", None)
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, int):
                return value
    return None


def _width(module: Any) -> int | None:
    """Return the number of columns of a projection's output."""
    weight = getattr(module, "weight", None)
    if weight is not None and weight.ndim == 2:
        return int(weight.shape[0])
    # vLLM packs some weights, and has the number as an attribute
    size = getattr(module, "output_size_per_partition", None)
    return size if isinstance(size, int) else None


def _qkv(model: Any, module: Any, name: str) -> Iterator[tuple[str, IntArray]]:
    """Yield the columns of q, k and v in a fused projection.

    vLLM has them one after the other, Megatron group by group (the group's queries, its key, its
    value).
    """
    heads = _config(model, "num_attention_heads")
    groups = _config(model, "num_query_groups", "num_key_value_heads") or heads
    width = _width(module)
    if heads is None or groups is None or width is None:
        return
    size = width // (heads + 2 * groups)
    each = heads // groups
    if name.endswith("linear_qkv"):
        columns = np.arange((heads + 2 * groups) * size).reshape(groups, each + 2, size)
        parts = {"q": columns[:, :each], "k": columns[:, each], "v": columns[:, each + 1]}
    else:
        queries, keys = heads * size, groups * size
        ends = np.cumsum([0, queries, keys, keys])
        parts = {part: np.arange(ends[i], ends[i + 1]) for i, part in enumerate("qkv")}
    for part, index in parts.items():
        yield part, index.reshape(-1)


def _halves(model: Any, module: Any, name: str) -> Iterator[tuple[str, IntArray]]:
    del model, name
    width = _width(module)
    if width is None:
        return
    half = width // 2
    yield "gate", np.arange(half)
    yield "up", np.arange(half, 2 * half)
