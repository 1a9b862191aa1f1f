"""Decoding: from a coded value back to the request, position, layer and version that produced it.

A ``Decoder`` holds a universe: the ids of some requests, and some versions. It computes what each
of them would give and reports every one that fits: several where the value is ambiguous, none where
nothing in the universe explains it. With N positions times versions in the universe, a value that
comes from elsewhere is explained by chance N times as often as two values coincide
(``rollproof.fakes.coded.policy`` has the table).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2, perm
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray, Version
from rollproof.errors import UsageError

if TYPE_CHECKING:
    from rollproof.fakes.coded.policy import CodedPolicy

__all__ = ["Decoder", "Source"]

_SHIFTS = (1, -1, 2, -2)
"""Layer shifts that ``explain_row`` tries where no row fits as it stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a value comes from. ``what`` is ``row``, ``cell`` or ``logprob``; its text is for
    findings.

    ``position`` is absolute, over prompt and response. ``layer`` is set for cells; ``shift`` counts
    the layers by which an observed row is displaced: its column l holds the choice of layer l +
    shift.
    """

    what: str
    request: str
    position: int
    version: Version
    layer: int | None = None
    shift: int = 0

    def __str__(self) -> str:
        what = "logprob of token" if self.what == "logprob" else "row"
        text = f"{what} {self.position} of request {self.request} under version {self.version}"
        if self.layer is not None:
            text = f"layer {self.layer} of {text}"
        return f"{text}, displaced by {self.shift:+d} layers" if self.shift else text


class Decoder:
    """Explains values by a universe of requests (``{request id: prompt and response ids}``) and
    versions.

    Versions are those of the weights, not their labels; ``mixed_key`` makes one for mixed KV.
    Memory is one 64-bit number per position and version; a search costs about a nanosecond for
    each.
    """

    def __init__(
        self,
        policy: CodedPolicy,
        requests: Mapping[str, Sequence[int]],
        versions: Iterable[Version],
    ) -> None:
        self._policy = policy
        self._requests = dict(requests)
        self._versions = tuple(dict.fromkeys(versions))
        self._rows: dict[tuple[str, Version], npt.NDArray[np.uint64]] = {}

    def explain_row(self, row: IntArray) -> tuple[Source, ...]:
        """Every source whose MoE layers all agree with ``row``, ``(layers, top_k)`` over all layers
        or over MoE layers only.

        Where none does, sources of a row displaced by one or two layers, if the layers that are
        left over tell enough. Raises ``UsageError`` for another shape.
        """
        cells = self._moe_cells(row)
        found = tuple(self._search(cells, 0))
        for shift in _SHIFTS:
            if found:
                break
            kept = {layer + shift: cell for layer, cell in cells.items() if layer + shift in cells}
            found = tuple(self._search(kept, shift)) if self._telling(len(kept)) else ()
        return found

    def explain_cell(
        self, layer: int, experts: Sequence[int] | IntArray, *, other_layers: bool = True
    ) -> tuple[Source, ...]:
        """Every source whose choice in ``layer`` is ``experts``, in this order.

        Where none is and ``other_layers`` is set, every source whose choice in some other MoE layer
        is.
        """
        cell = np.asarray(experts, dtype=np.int64)
        found = tuple(self._cells(layer, cell)) if layer in self._policy.moe_layers else ()
        if found or not other_layers:
            return found
        return tuple(
            source
            for other in self._policy.moe_layers
            if other != layer
            for source in self._cells(other, cell)
        )

    def explain_logprob(self, value: float, tolerance: float = 0.0) -> tuple[Source, ...]:
        """Every source whose logprob (T = 1) is within ``tolerance`` of ``value``; values are
        2**-20 apart at least.
        """
        return tuple(
            Source(what="logprob", request=request, position=int(position), version=version)
            for request, ids in self._requests.items()
            for version in self._versions
            for position in np.flatnonzero(
                np.abs(self._policy.logprobs(version, ids, 0) - value) <= tolerance
            )
        )

    def _telling(self, cells: int) -> bool:
        """Whether agreement of that many cells is by chance in less than one search of a thousand."""
        policy = self._policy
        bits = min(14.0, log2(perm(policy.num_experts, policy.top_k)))
        positions = sum(len(ids) for ids in self._requests.values()) * len(self._versions)
        return cells * bits >= log2(positions + 1) + 10

    def _search(self, cells: Mapping[int, npt.NDArray[np.int64]], shift: int) -> Iterator[Source]:
        """Sources that agree in all ``cells``: candidates are narrowed layer by layer, so that most
        cost one comparison.
        """
        for request, version, drawn in self._drawn():
            at = np.arange(len(drawn))
            for layer, cell in cells.items():
                at = at[self._agree(drawn[at], layer, cell)]
                if not len(at):
                    break
            for position in at:
                yield Source(
                    what="row",
                    request=request,
                    position=int(position),
                    version=version,
                    shift=shift,
                )

    def _cells(self, layer: int, cell: npt.NDArray[np.int64]) -> Iterator[Source]:
        for request, version, drawn in self._drawn():
            for position in np.flatnonzero(self._agree(drawn, layer, cell)):
                yield Source(
                    what="cell",
                    request=request,
                    position=int(position),
                    version=version,
                    layer=layer,
                )

    def _agree(
        self, drawn: npt.NDArray[np.uint64], layer: int, cell: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        routes = self._policy.routes_of_hashes(drawn, (layer,))[:, 0]
        return (
            (routes == cell).all(axis=1)
            if routes.shape[1:] == cell.shape
            else np.zeros(len(drawn), dtype=np.bool_)
        )

    def _drawn(self) -> Iterator[tuple[str, Version, npt.NDArray[np.uint64]]]:
        for request, ids in self._requests.items():
            for version in self._versions:
                key = (request, version)
                if key not in self._rows:
                    self._rows[key] = self._policy.route_hashes(version, ids)
                yield request, version, self._rows[key]

    def _moe_cells(self, row: IntArray) -> dict[int, npt.NDArray[np.int64]]:
        """The cells of a row by global layer, in ascending order."""
        policy = self._policy
        array: npt.NDArray[Any] = np.asarray(row)
        columns = {
            policy.num_layers: policy.moe_layers,
            len(policy.moe_layers): tuple(range(len(policy.moe_layers))),
        }
        if array.ndim != 2 or array.shape[1] != policy.top_k or array.shape[0] not in columns:
            raise UsageError(
                f"A row to explain must be (layers, top_k) with {sorted(columns)} layers and"
                f" top_k={policy.top_k}, not {array.shape}."
            )
        cells = array.astype(np.int64)
        return {
            layer: cells[column]
            for layer, column in zip(policy.moe_layers, columns[array.shape[0]], strict=True)
        }
