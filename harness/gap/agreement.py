"""Router agreement: how far the trainer used the experts that the rollout used, token by token.

Rows are compared as sets: the order of the experts within a row is not part of a selection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.errors import GapError
from rollproof.gap.column_checks import BoolArray, FloatArray, IntArray
from rollproof.gap.intervals import Interval, share_interval
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["Agreement", "Selections", "agreement", "overlap", "selections"]

_CHUNK = 1 << 16
# 64-bit words of a set of experts; with more experts than fit, sets are compared by sorting
_MAX_WORDS = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Agreement:
    """Router agreement of rollout and trainer.

    Attributes:
        metrics: ``slot_mismatch`` (mean share of a row's experts that the other side did not
            choose), ``layer_mismatch`` (share of (token, layer) with different sets),
            ``any_layer_mismatch`` (share of tokens that differ in a layer), ``jaccard``.
        per_layer: ``(layers, 2)``: slot and layer mismatch of each layer of the axis.
        tokens: tokens with a selection in some layer.
        free: rows without a selection (a negative id, or one expert several times) on either side;
            they are left out.
    """

    metrics: Mapping[str, Interval]
    per_layer: FloatArray
    tokens: int
    free: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selections:
    """The rows of one side as sets, built once and compared many times.

    Attributes:
        sets: ``(n, layers, words)`` with each row's experts as bits, or ``(n, layers, top_k)`` with
            its sorted ids if there are more experts than bits.
        complete: ``(n, layers)``: whether a row holds ``top_k`` distinct, real experts.
        top_k: experts of a row.
    """

    sets: IntArray
    complete: BoolArray
    top_k: int

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def layers(self) -> int:
        """Layers of the axis."""
        return int(self.sets.shape[1])

    def at(self, rows: Any, layers: Any = slice(None)) -> Selections:
        """Return those of some rows, and of a slice of the layers."""
        return Selections(
            sets=self.sets[rows][:, layers],
            complete=self.complete[rows][:, layers],
            top_k=self.top_k,
        )

    def overlap(self, other: Selections) -> tuple[IntArray, BoolArray]:
        """``(n, layers)`` number of common experts, and whether both rows are complete.

        A side with one layer is compared with every layer of the other.
        """
        complete = self.complete & other.complete
        if self.sets.dtype == np.uint64:
            return _count_bits(self.sets & other.sets), complete
        shape = np.broadcast_shapes(self.sets.shape, other.sets.shape)
        sides = [np.broadcast_to(side.sets, shape) for side in (self, other)]
        # ids are distinct within a side, so equal neighbours are common experts
        merged = np.sort(np.concatenate(sides, axis=2), axis=2)
        return (np.diff(merged, axis=2) == 0).sum(axis=2), complete

    def missed(self, other: Selections) -> tuple[FloatArray, BoolArray]:
        """``(n, layers)`` share of slots that differ, and whether both rows are complete.

        The share of incomplete rows is 0.
        """
        common, complete = self.overlap(other)
        return np.where(complete, (self.top_k - common) / self.top_k, 0.0), complete


def selections(left: IntArray, right: IntArray) -> tuple[Selections, Selections]:
    """Return two sides' ``(n, layers, top_k)`` ids, ready to be compared."""
    words = int(max(left.max(initial=0), right.max(initial=0))) // 64 + 1
    if words > _MAX_WORDS:
        return _sorted_sets(left), _sorted_sets(right)
    return _bit_sets(left, words), _bit_sets(right, words)


def overlap(left: IntArray, right: IntArray) -> tuple[IntArray, BoolArray]:
    """Compare two ``(n, layers, top_k)`` arrays.

    Returns ``(n, layers)`` number of common experts, and whether both rows hold distinct, real
    experts.
    """
    ours, theirs = selections(left, right)
    return ours.overlap(theirs)


def _bit_sets(ids: IntArray, words: int) -> Selections:
    """Experts as bits; negative ids set none."""
    bits = np.zeros((64 * words + 1, words), dtype=np.uint64)  # the last row is that of id -1
    numbers = np.arange(64 * words)
    bits[numbers, numbers // 64] = np.left_shift(np.uint64(1), (numbers % 64).astype(np.uint64))
    if ids.min(initial=0) < -1:
        ids = np.maximum(ids, -1)
    # up to 64 experts fit into one word, and without an axis for it this takes half the time
    single = words == 1
    sets: IntArray = np.bitwise_or.reduce((bits[:, 0] if single else bits)[ids], axis=2)
    sets = sets[:, :, None] if single else sets
    return Selections(sets=sets, complete=_count_bits(sets) == ids.shape[2], top_k=ids.shape[2])


def _sorted_sets(ids: IntArray) -> Selections:
    sets = np.sort(ids, axis=2).astype(np.int64)
    complete = (sets[:, :, 0] >= 0) & (np.diff(sets, axis=2) > 0).all(axis=2)
    return Selections(sets=sets, complete=complete, top_k=ids.shape[2])


def _count_bits(sets: IntArray) -> IntArray:
    """``(n, layers)``: the number of bits that are set."""
    counts = getattr(np, "bitwise_count", None)  # since numpy 2.0
    bits = counts(sets) if counts is not None else np.unpackbits(sets.view(np.uint8), axis=2)
    if bits.shape[2] == 1:
        return np.asarray(bits[:, :, 0], dtype=np.int64)
    out: IntArray = bits.sum(axis=2, dtype=np.int64)
    return out


def agreement(pairs: TokenPairs) -> Agreement | None:
    """Return the router agreement of the pairs; ``None`` if a side has no routes.

    Raises ``GapError`` if the axes differ.
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
    # in chunks, because the sets of all tokens of a deep model need gigabytes
    for begin in range(0, tokens, _CHUNK):
        common, complete = overlap(left[begin : begin + _CHUNK], right[begin : begin + _CHUNK])
        missed = np.where(complete, (top_k - common) / top_k, 0.0)
        differs = complete & (common < top_k)
        # two sets of top_k with `common` in both have 2 * top_k - common in all
        jaccard = np.where(complete, common / (2 * top_k - common), 0.0)
        free += int((~complete).sum())
        layer_columns = [missed.sum(axis=0), differs.sum(axis=0), complete.sum(axis=0)]
        by_layer += np.stack(layer_columns, axis=1)
        columns = (
            missed.sum(axis=1),
            differs.sum(axis=1),
            jaccard.sum(axis=1),
            complete.sum(axis=1),
            differs.any(axis=1),
            complete.any(axis=1),
        )
        sequence = owner[begin : begin + _CHUNK]
        for i, column in enumerate(columns):
            sums[:, i] += np.bincount(sequence, weights=column, minlength=len(sums))
    rows = by_layer[:, 2:]
    return Agreement(
        metrics={
            "slot_mismatch": share_interval(sums[:, 0], sums[:, 3]),
            "layer_mismatch": share_interval(sums[:, 1], sums[:, 3]),
            "any_layer_mismatch": share_interval(sums[:, 4], sums[:, 5]),
            "jaccard": share_interval(sums[:, 2], sums[:, 3]),
        },
        per_layer=np.divide(
            by_layer[:, :2], rows, out=np.full((layers, 2), np.nan), where=rows > 0
        ),
        tokens=int(sums[:, 5].sum()),
        free=free,
    )
