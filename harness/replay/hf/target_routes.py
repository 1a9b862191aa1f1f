"""The routes that a pass replays, checked before the first router runs.

Routes are ``(rows, layers, top_k)`` or ``(batch, width, layers, top_k)``: one row per row that the
routers see, batch-major, as a model of HF transformers flattens ``(batch, width)``. They must be
padded and packed as the token ids are. A row that is masked out, or all -1, is *free*: the router
chooses by itself there.
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
    """Checked routes.

    ``ids`` is ``(rows, layers with a router, top_k)`` int64, ``free`` ``(rows, layers with a
    router)``. Ids are valid in rows that are not free.
    """

    ids: torch.Tensor
    free: torch.Tensor
    any_free: bool

    @property
    def rows(self) -> int:
        """The number of rows that each router must see."""
        return int(self.ids.shape[0])


def checked_targets(routes: Any, mask: Any, routers: Routers) -> Targets:
    """Check ``routes`` (an array or a tensor) for ``routers``.

    ``mask`` is true for rows that are replayed (``None``: all rows). The layer axis has all layers
    or those with a router; its length decides. Raises ``RoutesError`` for routes that no router can
    execute.
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
            f"Routes have {ids.shape[-1]} columns, but the model runs top_k={routers.top_k} experts"
            " per token: these routes are of another model, or cut. A narrower target would run"
            " fewer experts than the model was trained with."
        )
    if not len(ids):
        raise RoutesError(
            "Routes have no rows: skip an empty microbatch, or pass the rows that the model will"
            " see."
        )
    replayed = _replayed(mask, places, ids.device)
    sentinel = (ids == -1).all(-1)
    free = sentinel if replayed is None else sentinel | ~replayed[:, None]
    _refuse_invalid(ids, free, routers)
    return Targets(ids=ids, free=free, any_free=bool(free.any()))


def _integers(routes: Any) -> torch.Tensor:
    if isinstance(routes, np.ma.MaskedArray):
        raise RoutesError(
            "Routes are a masked array, and its masked values would be replayed: pass its data and"
            " the mask separately."
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
        raise RoutesError(f"Routes are of {ids.dtype}, but expert ids are integers.")
    if ids.is_meta or ids.is_nested or ids.layout is not torch.strided:
        kind = "meta" if ids.is_meta else "nested" if ids.is_nested else ids.layout
        raise RoutesError(f"Routes are a {kind} tensor, but must be a plain one.")
    # copied: a caller may reuse its buffer for the next microbatch before this one's recompute
    return ids.to(torch.int64, copy=True)


def _own_layers(ids: torch.Tensor, routers: Routers) -> torch.Tensor:
    """Return only the layers with a router."""
    layers = ids.shape[-2]
    if layers == len(routers.layers):
        return ids
    if layers == routers.num_layers:
        return ids[:, list(routers.layers)]
    raise RoutesError(
        f"Routes have {layers} layers; the model has {routers.num_layers}, {len(routers.layers)} of"
        f" them with a router, {list(routers.layers)}. The layer axis must have all layers or those"
        " with a router; MTP layers are not part of it."
    )


def _replayed(mask: Any, places: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    if mask is None:
        return None
    try:
        flags = torch.as_tensor(mask, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RoutesError(
            "The mask must be an array or a tensor, one value for each row, not"
            f" {type(mask).__name__}: {error}."
        ) from error
    turned = flags.dim() == len(places) > 1 and tuple(flags.shape) != places
    if turned or flags.numel() != torch.Size(places).numel():
        raise RoutesError(
            f"The shape of the mask is {tuple(flags.shape)}, that of the routes {places}: pad and"
            " pack both by one function."
        )
    if flags.is_floating_point():
        raise RoutesError(
            f"The mask is of {flags.dtype}; it must be true (or 1) for rows that are replayed, like"
            " an attention mask."
        )
    return flags.reshape(-1) != 0


def _refuse_invalid(ids: torch.Tensor, free: torch.Tensor, routers: Routers) -> None:
    """Raise ``RoutesError`` for replayed rows that do not name top_k distinct existing experts."""
    if bool(free.all()):
        raise RoutesError(
            "Every row is free (masked out, or all -1): the pass would silently route natively."
        )
    if bool((empty := free.all(0)).any()):
        layers = [routers.layers[int(number)] for number in empty.nonzero()]
        raise RoutesError(
            f"All rows of layers {layers} are -1, but other layers have routes: these layers would"
            " silently route natively."
        )
    wrong = (ids < 0) | (ids >= routers.num_experts)
    ordered = ids.sort(-1).values
    double = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    faults = (
        (
            double & (ids == 0).all(-1),
            "are all zero (expert 0, top_k times)",
            "They are padding: mask them out, or fill them with -1.",
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
    for condition, text, hint in faults:
        bad = condition & ~free
        if bool(bad.any()):
            rows, layers = bad.nonzero(as_tuple=True)
            shown = ", ".join(
                f"row {int(r)} of layer {routers.layers[int(n)]}: {ids[r, n].tolist()}"
                for r, n in zip(rows[:_SHOWN], layers[:_SHOWN], strict=True)
            )
            raise RoutesError(f"{int(bad.sum())} of {bad.numel()} rows {text} ({shown}). {hint}")
