"""Agreement: how far the experts that the trainer used are those that the rollout used, on the same
tokens.

Rows are compared as sets: the order of the experts within a row is not part of a selection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.core.records import IntArray
from rollproof.errors import GapError
from rollproof.gap.intervals import Interval, share_interval
from rollproof.gap.token_pairs import BoolArray, FloatArray, TokenPairs

__all__ = ["Agreement", "Selections", "agreement", "overlap", "selections"]

_CHUNK = 1 << 16
_WORDS = 16
"""64-bit words of a set of experts, at most: with more experts than they hold, sets are compared by
sorting.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Agreement:
    """Router agreement of two sides.

    ``metrics``: ``slot_mismatch`` (mean share of a row's experts that the other side did not
    choose), ``layer_mismatch`` (share of (token, layer) whose sets differ), ``any_layer_mismatch``
    (share of tokens that differ in a layer), ``jaccard``. ``per_layer`` is ``(layers, 2)`` with the
    slot and the layer mismatch of each layer of the axis. ``free`` counts the rows that hold no
    capture (a negative id, or one expert several times) on either side: they are left out, and so
    many are counted here.
    """

    metrics: Mapping[str, Interval]
    per_layer: FloatArray
    tokens: int
    free: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selections:
    """The rows of a side as sets, made once however often they are compared.

    ``sets`` is ``(n, layers, words)`` with each row's experts as bits, or ``(n, layers, top_k)``
    with its sorted ids where there are more experts than bits; ``whole`` ``(n, layers)`` whether a
    row holds ``top_k`` distinct, real experts.
    """

    sets: IntArray
    whole: BoolArray
    top_k: int

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def layers(self) -> int:
        """Layers of the axis."""
        return int(self.sets.shape[1])

    def at(self, rows: Any, layers: Any = slice(None)) -> Selections:
        """Those of some rows, and of a slice of the layers."""
        return Selections(
            sets=self.sets[rows][:, layers], whole=self.whole[rows][:, layers], top_k=self.top_k
        )

    def overlap(self, other: Selections) -> tuple[IntArray, BoolArray]:
        """``(n, layers)`` number of common experts, and whether both rows are whole. One layer is
        compared with every other's.
        """
        whole = self.whole & other.whole
        if self.sets.dtype == np.uint64:
            return _count(self.sets & other.sets), whole
        shape = np.broadcast_shapes(self.sets.shape, other.sets.shape)
        both = np.sort(
            np.concatenate([np.broadcast_to(one.sets, shape) for one in (self, other)], axis=2),
            axis=2,
        )
        return (np.diff(both, axis=2) == 0).sum(axis=2), whole


def selections(left: IntArray, right: IntArray) -> tuple[Selections, Selections]:
    """Two sides' ``(n, layers, top_k)`` ids, ready to be compared."""
    words = int(max(left.max(initial=0), right.max(initial=0))) // 64 + 1
    one, other = ((_bits if words <= _WORDS else _sorted)(ids, words) for ids in (left, right))
    return one, other


def overlap(left: IntArray, right: IntArray) -> tuple[IntArray, BoolArray]:
    """For ``(n, layers, top_k)`` arrays: ``(n, layers)`` number of common experts, and whether both
    rows hold distinct, real experts.
    """
    one, other = selections(left, right)
    return one.overlap(other)


def _bits(ids: IntArray, words: int) -> Selections:
    """Experts as bits; negative ids are none."""
    bits = np.zeros((64 * words + 1, words), dtype=np.uint64)  # the last row is that of id -1
    numbers = np.arange(64 * words)
    bits[numbers, numbers // 64] = np.left_shift(np.uint64(1), (numbers % 64).astype(np.uint64))
    if ids.min(initial=0) < -1:
        ids = np.maximum(ids, -1)
    alone = words == 1  # without an axis of one word it takes half the time
    sets: IntArray = np.bitwise_or.reduce((bits[:, 0] if alone else bits)[ids], axis=2)
    sets = sets[:, :, None] if alone else sets
    return Selections(sets=sets, whole=_count(sets) == ids.shape[2], top_k=ids.shape[2])


def _sorted(ids: IntArray, _: int) -> Selections:
    sets = np.sort(ids, axis=2).astype(np.int64)
    whole = (sets[:, :, 0] >= 0) & (np.diff(sets, axis=2) > 0).all(axis=2)
    return Selections(sets=sets, whole=whole, top_k=ids.shape[2])


def _count(sets: IntArray) -> IntArray:
    """``(n, layers)``: the bits that are set."""
    counts = getattr(np, "bitwise_count", None)  # since numpy 2.0
    bits = counts(sets) if counts is not None else np.unpackbits(sets.view(np.uint8), axis=2)
    if bits.shape[2] == 1:
        return np.asarray(bits[:, :, 0], dtype=np.int64)
    out: IntArray = bits.sum(axis=2, dtype=np.int64)
    return out


def agreement(pairs: TokenPairs) -> Agreement | None:
    """Router agreement of the pairs; ``None`` where a side has no routes. Raises ``GapError`` where
    their axes differ.
    """
    left, right = pairs.routes.get("rollout_routes"), pairs.routes.get("trainer_routes")
    if left is None or right is None:
        return None
    if left.shape != right.shape:
        raise GapError(
            f"rollout_routes {left.shape} and trainer_routes {right.shape} differ in shape (tokens,"
            " layers, top_k): drop the dense layers on the side that counts them, or say which"
            " layers the other side's are."
        )
    tokens, layers, top_k = left.shape
    owner = pairs.owner
    sums = np.zeros((pairs.n_sequences, 6))
    by_layer = np.zeros((layers, 3))
    free = 0
    for begin in range(0, tokens, _CHUNK):
        common, whole = overlap(left[begin : begin + _CHUNK], right[begin : begin + _CHUNK])
        missed = np.where(whole, (top_k - common) / top_k, 0.0)
        differs = whole & (common < top_k)
        jaccard = np.where(whole, common / (2 * top_k - common), 0.0)
        captured = whole.any(axis=1)
        free += int((~whole).sum())
        by_layer += np.stack([missed.sum(axis=0), differs.sum(axis=0), whole.sum(axis=0)], axis=1)
        columns = (
            missed.sum(axis=1),
            differs.sum(axis=1),
            jaccard.sum(axis=1),
            whole.sum(axis=1),
            differs.any(axis=1),
            captured,
        )
        place = owner[begin : begin + _CHUNK]
        for i, column in enumerate(columns):
            sums[:, i] += np.bincount(place, weights=column, minlength=len(sums))
    counted = by_layer[:, 2:]
    return Agreement(
        metrics={
            "slot_mismatch": share_interval(sums[:, 0], sums[:, 3]),
            "layer_mismatch": share_interval(sums[:, 1], sums[:, 3]),
            "any_layer_mismatch": share_interval(sums[:, 4], sums[:, 5]),
            "jaccard": share_interval(sums[:, 2], sums[:, 3]),
        },
        per_layer=np.divide(
            by_layer[:, :2], counted, out=np.full((layers, 2), np.nan), where=counted > 0
        ),
        tokens=int(sums[:, 5].sum()),
        free=free,
    )
