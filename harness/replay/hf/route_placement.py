"""Place the routes of finished samples at the rows of a padded or packed microbatch.

The rows follow the token ids: a sample of n tokens has n rows, or n - 1 as engines return (the last
sampled token was never forwarded). All other rows are -1: the router chooses there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.errors import RoutesError
from rollproof.layouts.padding import packed
from rollproof.layouts.sources import Source

__all__ = ["batch_routes", "packed_routes"]

Rows = npt.NDArray[np.int64]


def batch_routes(routes: Sequence[Any], attention_mask: Any, *, prefix: bool = False) -> Rows:
    """Place the routes of samples in a padded batch.

    Args:
        routes: one ``(rows, layers, top_k)`` per sample.
        attention_mask: ``(batch, width)``, 0 in padding, which may be on any side.
        prefix: an engine may have captured fewer rows than it forwarded tokens. They are the first
            ones; the router chooses in all others.

    Returns ``(batch, width, layers, top_k)``. Raises ``RoutesError``.
    """
    mask, routes = _array(attention_mask), _listed(routes)
    if mask.ndim != 2 or len(mask) != len(routes):
        raise RoutesError(
            f"The attention mask is {mask.shape}, not (batch, width) with one line for each of"
            f" {len(routes)} samples."
        )
    tokens = mask != 0
    if mask.dtype.kind not in "biu" and not np.isin(mask, (0, 1)).all():
        raise RoutesError(
            f"The attention mask is {mask.dtype} and has other values than 0 and 1: pass the mask"
            " of tokens, not an additive one."
        )
    sample = np.where(tokens, np.arange(len(mask))[:, None], -1)
    position = np.where(tokens, np.cumsum(tokens, axis=1) - 1, -1)
    return _placed(
        routes, tokens.sum(axis=1).tolist(), Source(sample=sample, position=position), prefix
    )


def packed_routes(
    routes: Sequence[Any],
    cu_seqlens: Any,
    lengths: Sequence[int] | None = None,
    *,
    prefix: bool = False,
) -> Rows:
    """Place the routes of packed samples.

    Args:
        routes: one ``(rows, layers, top_k)`` per sample.
        cu_seqlens: cumulative lengths ``(samples + 1,)``.
        lengths: the samples' own lengths, if they were padded before they were packed.
        prefix: as for ``batch_routes``.

    Returns ``(packed rows, layers, top_k)``. Raises ``RoutesError``, and ``LayoutError`` for
    lengths that do not fit.
    """
    cumulative, routes = _array(cu_seqlens), _listed(routes)
    if cumulative.shape != (len(routes) + 1,):
        raise RoutesError(
            f"Cumulative lengths are {cumulative.shape}, not ({len(routes) + 1},) for {len(routes)}"
            " samples."
        )
    widths = np.diff(cumulative.astype(np.int64)).tolist()
    if cumulative.dtype.kind not in "iu" or cumulative[0] != 0 or min(widths, default=0) < 0:
        raise RoutesError(
            "Cumulative lengths are integers that begin with 0 and never fall, not"
            f" {cumulative.tolist()}."
        )
    own = widths if lengths is None else [int(length) for length in lengths]
    if min(own, default=0) < 0:
        raise RoutesError(f"Samples have lengths {own}: none can be negative.")
    return _placed(routes, own, packed(own, cumulative.astype(np.int64)), prefix)


def _listed(routes: Any) -> Sequence[Any]:
    if (
        not hasattr(routes, "__len__")
        or not hasattr(routes, "__getitem__")
        or isinstance(routes, Mapping | str)
    ):
        raise RoutesError(
            "Routes are a sequence with one array (rows, layers, top_k) for each sample, not"
            f" {type(routes).__name__}."
        )
    return list(routes)


def _placed(routes: Sequence[Any], lengths: Sequence[int], source: Source, prefix: bool) -> Rows:
    payloads = [
        _payload(array, number, length, prefix)
        for number, (array, length) in enumerate(zip(routes, lengths, strict=True))
    ]
    shapes = [payload.shape[1:] for payload in payloads]
    if len(set(shapes)) != 1:
        raise RoutesError(
            f"Samples have routes of (layers, top_k) {shapes}: those of one microbatch must be of"
            " one model, and there must be at least one sample."
        )
    # -1 is left to the router; zeros would be expert 0, top_k times (slime#822, miles#1002)
    return source.take(payloads, fill=-1).astype(np.int64)


def _payload(routes: Any, number: int, length: int, prefix: bool) -> Rows:
    array = _array(routes)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise RoutesError(
            f"The routes of sample {number} are {array.dtype} {array.shape}, not integers (rows,"
            " layers, top_k)."
        )
    # a prefix is requested explicitly, or rows that were lost would pass as one
    allowed = range(length + 1) if prefix else (length, max(0, length - 1))
    if len(array) not in allowed:
        raise RoutesError(
            f"Sample {number} has {length} tokens and {len(array)} rows of routes; it must have"
            f" {max(0, length - 1)}, as engines return, or {length}"
            + (
                ", or fewer."
                if prefix
                else ": the sample and its routes were cut or joined separately. Rows of a captured"
                " prefix need prefix=True."
            )
        )
    return array.astype(np.int64)


def _array(value: Any) -> npt.NDArray[Any]:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
