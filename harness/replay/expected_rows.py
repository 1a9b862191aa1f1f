"""Targets: which experts each row of a step ought to execute, derived from the samples' payload and
from nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract
from rollproof.core.events.replay import Routing, Step
from rollproof.core.records import IntArray, Rollout
from rollproof.replay.replay_samples import captured_rows

__all__ = ["Targets", "chosen_by"]


class Targets:
    """The targets of the rows of a step, in one array over all tokens of all samples.

    ``experts`` is ``(tokens, MoE layers, top_k)``; ``known`` ``(tokens, MoE layers)`` says where
    there is a target: a captured row of top_k distinct expert ids in range. The other rows are
    free.
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
        """The place of the final token of every sample that has tokens."""
        return (self.starts[1:] - 1)[np.diff(self.starts) > 0]

    def places(self, call: Routing) -> npt.NDArray[np.int64]:
        """``(rows,)``: the index of each row among all tokens; -1 for padding and for what is no
        place of the step.
        """
        samples, positions = call.samples.astype(np.int64), call.positions.astype(np.int64)
        inside = (samples >= 0) & (samples < len(self.lengths))
        lengths = np.array([*self.lengths, 0])[np.where(inside, samples, -1)]
        inside &= (positions >= 0) & (positions < lengths)
        return np.where(inside, self.starts[np.where(inside, samples, 0)] + positions, -1)

    def column(self, layer: int) -> int | None:
        """Which of the MoE layers a global layer index is; ``None`` for none."""
        return self.layers.index(layer) if layer in self.layers else None


def chosen_by(
    contract: Contract, step: Step, calls: Sequence[Routing], *, dropped: bool = False
) -> IntArray | None:
    """What routers chose in ``calls`` of the forward pass of ``step``: ``(tokens, MoE layers,
    top_k)``; ``None`` where a row is missing.

    The final token of a sample predicts nothing, and a trainer need not forward it: its row may be
    -1. With ``dropped``, other rows may hold -1, too, where a router gave a token to fewer than
    top_k experts (a capacity factor).
    """
    frame = Targets(contract, step.samples)
    chosen: IntArray = np.full(frame.experts.shape, -1, dtype=np.int32)
    seen = np.zeros(chosen.shape[:2], dtype=bool)
    for call in calls:
        column = frame.column(call.layer)
        if column is None or call.experts.shape[1] != (contract.top_k or 1):
            continue
        places = frame.places(call)
        chosen[places[places >= 0], column] = call.experts[places >= 0]
        seen[places[places >= 0], column] = True
    missing = np.asarray(~seen.all(axis=1) if dropped else (chosen < 0).any(axis=(1, 2)))
    missing[frame.finals] = False
    return None if missing.any() else chosen
