"""The experts that each row of a training step must execute under routing replay.

They are derived from the routes of the step's samples, never from what a trainer says that it
installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract, Rows
from rollproof.core.events.replay import Routing, Step
from rollproof.core.records import IntArray, Rollout
from rollproof.core.replay_contract import ReplayMode
from rollproof.core.trainer_contract import terms_of

__all__ = ["ExpectedRows", "captured_rows", "chosen_routes"]


class ExpectedRows:
    """The expected experts of all rows of a step, in one array over all tokens of all samples.

    ``experts`` is ``(tokens, MoE layers, top_k)``. ``known`` is ``(tokens, MoE layers)``: true if
    the row was captured and names top_k distinct expert ids in range. In the other rows a router
    is free to choose.
    """

    def __init__(self, contract: Contract, samples: Sequence[Rollout]) -> None:
        self.layers: tuple[int, ...] = contract.moe_layers or ()
        lengths = [sample.total for sample in samples]
        self.starts: IntArray = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        total, top_k = int(self.starts[-1]), contract.top_k or 1
        self.lengths: tuple[int, ...] = tuple(lengths)
        self.experts: IntArray = np.full((total, len(self.layers), top_k), -1, dtype=np.int32)
        for start, sample in zip(self.starts.tolist(), samples, strict=False):
            rows = captured_rows(contract, sample)
            routes = sample.routes
            if (
                routes is None
                or routes.shape[1:] != (contract.route_layers, top_k)
                or routes.dtype.kind not in "iu"
            ):
                continue
            self.experts[start : start + rows] = routes[:rows, list(contract.moe_columns)]
        inside = (self.experts >= 0) & (self.experts < (contract.num_experts or 1))
        ordered = np.sort(self.experts, axis=2)
        self.known: npt.NDArray[np.bool_] = inside.all(axis=2) & (
            ordered[:, :, 1:] != ordered[:, :, :-1]
        ).all(axis=2)

    @property
    def finals(self) -> IntArray:
        """The index of the final token of every sample that has tokens."""
        return (self.starts[1:] - 1)[np.diff(self.starts) > 0]

    def places(self, call: Routing) -> npt.NDArray[np.int64]:
        """Return the index of each row among all tokens, ``(rows,)``: -1 for padding and for
        rows of no sample of the step.
        """
        samples, positions = call.samples.astype(np.int64), call.positions.astype(np.int64)
        inside = (samples >= 0) & (samples < len(self.lengths))
        lengths = np.array([*self.lengths, 0])[np.where(inside, samples, -1)]
        inside &= (positions >= 0) & (positions < lengths)
        return np.where(inside, self.starts[np.where(inside, samples, 0)] + positions, -1)

    def column(self, layer: int) -> int | None:
        """Return the index of ``layer`` among the MoE layers; ``None`` if it is none of them."""
        return self.layers.index(layer) if layer in self.layers else None


def chosen_routes(
    contract: Contract, step: Step, calls: Sequence[Routing], *, dropped: bool = False
) -> IntArray | None:
    """Return what routers chose in ``calls`` of the forward pass of ``step``: ``(tokens, MoE
    layers, top_k)``; ``None`` if a row is missing.

    The final token of a sample predicts nothing, so a trainer need not forward it, and its row may
    be -1. With ``dropped``, other rows may contain -1, too: a router with a capacity factor gives
    a token to fewer than top_k experts.
    """
    expected = ExpectedRows(contract, step.samples)
    chosen: IntArray = np.full(expected.experts.shape, -1, dtype=np.int32)
    seen = np.zeros(chosen.shape[:2], dtype=bool)
    for call in calls:
        column = expected.column(call.layer)
        if column is None or call.experts.shape[1] != (contract.top_k or 1):
            continue
        places = expected.places(call)
        chosen[places[places >= 0], column] = call.experts[places >= 0]
        seen[places[places >= 0], column] = True
    missing = np.asarray(~seen.all(axis=1) if dropped else (chosen < 0).any(axis=(1, 2)))
    missing[expected.finals] = False
    return None if missing.any() else chosen


def captured_rows(contract: Contract, sample: Rollout) -> int:
    """Return how many of the sample's first tokens have a captured row; the filler row of the
    final token does not count.
    """
    if sample.routes is None:
        return 0
    own = len(sample.routes)
    last = (
        sample.total
        if contract.rows is Rows.CAPTURED_PREFIX or terms_of(contract).mode is ReplayMode.R2
        else sample.total - 1
    )
    return max(0, min(own, last))
