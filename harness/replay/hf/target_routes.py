"""Targets: the routes that a pass replays, checked before the first router runs.

Routes come as ``(rows, layers, top_k)`` or ``(batch, width, layers, top_k)``: one row per row that
the routers see, batch-major, which is how a model of HF transformers flattens ``(batch, width)``;
padding and packing are done by the functions that do it to the token ids (``rollproof.layouts``). A
row that is masked out, or all -1, is *free*: the router chooses by itself there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollproof.errors import RoutesError
from rollproof.replay.hf.routers import Routers

__all__ = ["Targets", "checked_targets"]

_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Targets:
    """``ids`` ``(rows, layers with a router, top_k)`` int64, valid wherever ``free`` ``(rows,
    layers with a router)`` is false.
    """

    ids: torch.Tensor
    free: torch.Tensor
    any_free: bool

    @property
    def rows(self) -> int:
        """How many rows each router is to see."""
        return int(self.ids.shape[0])


def checked_targets(routes: Any, mask: Any, routers: Routers) -> Targets:
    """Check ``routes`` (an array or a tensor) and ``mask`` (true where a row is replayed; ``None``:
    everywhere) for ``routers``.

    The layer axis holds all layers or those with a router; its length says which. Raises
    ``RoutesError`` for what no router can execute.
    """
    ids = _integers(routes)
    if ids.dim() not in (3, 4):
        raise RoutesError(
            "Routes are (rows, layers, top_k) or (batch, width, layers, top_k), not"
            f" {tuple(ids.shape)}."
        )
    places = tuple(ids.shape[:-2])
    ids = ids.reshape(-1, *ids.shape[-2:])
    ids = _own_layers(ids, routers)
    if ids.shape[-1] != routers.top_k:
        raise RoutesError(
            f"Routes have {ids.shape[-1]} columns, and the model runs top_k={routers.top_k} experts"
            " per token: these are routes of another model, or cut. A narrower target would run"
            " fewer experts than the model has been trained with."
        )
    if not len(ids):
        raise RoutesError(
            "Routes have no rows: leave an empty microbatch out, or replay the rows that the model"
            " will see."
        )
    replayed = _replayed(mask, places, ids.device)
    sentinel = (ids == -1).all(-1)
    free = sentinel if replayed is None else sentinel | ~replayed[:, None]
    _refuse_invalid(ids, free, routers)
    return Targets(ids=ids, free=free, any_free=bool(free.any()))


def _integers(routes: Any) -> torch.Tensor:
    if isinstance(routes, np.ma.MaskedArray):
        raise RoutesError(
            "Routes are a masked array, and what is masked would be replayed: give its data, and"
            " the mask on its own."
        )
    if isinstance(routes, np.ndarray) and routes.dtype.kind in "iu":
        routes = routes.astype(np.int64)  # of any byte order, and of any strides
    try:
        ids = torch.as_tensor(routes)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RoutesError(
            f"Routes must be an array or a tensor of integers, not {type(routes).__name__}:"
            f" {error}."
        ) from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise RoutesError(
            f"Routes are of {ids.dtype}, and expert ids are integers: a float cannot say which"
            " experts ran."
        )
    if ids.is_meta or ids.is_nested or ids.layout is not torch.strided:
        kind = "meta" if ids.is_meta else "nested" if ids.is_nested else ids.layout
        raise RoutesError(f"Routes are a {kind} tensor, and must be a plain one.")
    return ids.to(
        torch.int64, copy=True
    )  # a caller's buffer may hold the next microbatch before this one's recompute


def _own_layers(ids: torch.Tensor, routers: Routers) -> torch.Tensor:
    """Only the layers with a router."""
    held = ids.shape[-2]
    if held == len(routers.layers):
        return ids
    if held == routers.num_layers:
        return ids[:, list(routers.layers)]
    raise RoutesError(
        f"Routes hold {held} layers; the model has {routers.num_layers}, {len(routers.layers)} of"
        f" them with a router, {list(routers.layers)}. The layer axis must hold all layers or those"
        " with a router; MTP layers are not part of it."
    )


def _replayed(mask: Any, places: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    if mask is None:
        return None
    try:
        given = torch.as_tensor(mask, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RoutesError(
            "The mask must be an array or a tensor, one value for each row, not"
            f" {type(mask).__name__}: {error}."
        ) from error
    turned = given.dim() == len(places) > 1 and tuple(given.shape) != places
    if turned or given.numel() != torch.Size(places).numel():
        raise RoutesError(
            f"The mask is {tuple(given.shape)}, the routes have the places {places}: pad and pack"
            " both by one function."
        )
    if given.is_floating_point():
        raise RoutesError(
            f"The mask is of {given.dtype}; it must be true (or 1) where a row is replayed, as an"
            " attention mask is."
        )
    return given.reshape(-1) != 0


def _refuse_invalid(ids: torch.Tensor, free: torch.Tensor, routers: Routers) -> None:
    """Each row that is replayed must name top_k distinct experts that exist."""
    if bool(free.all()):
        raise RoutesError(
            "Every row is free (masked out, or all -1): the pass would route natively and nobody"
            " would notice."
        )
    if bool((empty := free.all(0)).any()):
        layers = [routers.layers[int(number)] for number in empty.nonzero()]
        raise RoutesError(
            f"All rows of layers {layers} are -1, and other layers have routes: these layers would"
            " route natively."
        )
    wrong = (ids < 0) | (ids >= routers.num_experts)
    ordered = ids.sort(-1).values
    double = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    faults = (
        (
            double & (ids == 0).all(-1),
            "are all zero (expert 0, top_k times)",
            "They are padding: leave them out of the mask, or fill them by -1.",
        ),
        (
            wrong.any(-1),
            f"name experts outside of 0 to {routers.num_experts - 1}",
            "A dtype of 8 bits wraps ids above 255 (or 127).",
        ),
        (
            double,
            "name one expert twice",
            "A router never does; columns were mixed up, or the ids wrapped in a narrow dtype.",
        ),
    )
    for where, what, hint in faults:
        bad = where & ~free
        if bool(bad.any()):
            rows, layers = bad.nonzero(as_tuple=True)
            shown = ", ".join(
                f"row {int(r)} of layer {routers.layers[int(n)]}: {ids[r, n].tolist()}"
                for r, n in zip(rows[:_SHOWN], layers[:_SHOWN], strict=True)
            )
            raise RoutesError(f"{int(bad.sum())} of {bad.numel()} rows {what} ({shown}). {hint}")
