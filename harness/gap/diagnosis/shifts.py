"""Shifts: logprobs or routes at another token or layer than they belong to, everywhere or in part.

A shift of a share of the tokens is lost in a correlation over all of them. So the tokens are cut
into blocks (each sequence, or each third of a long one), and the routes into layers: a block is
shifted if another place fits it at least three times as well as its own. Numerics never do that,
whatever their size: a neighbour's logprobs and experts are another token's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.gap.agreement import Selections
from rollproof.gap.column_checks import BoolArray, FloatArray, IntArray, counted, listed
from rollproof.gap.token_pairs import TokenPairs

__all__ = [
    "BETTER",
    "ENOUGH",
    "MISMATCH",
    "STEPS",
    "Shift",
    "logprob_shift",
    "lost_shift",
    "moved_layers",
    "moved_tokens",
    "route_shift",
]

ENOUGH = 100
"""Tokens below which no shift is reported."""
MISMATCH = 0.3
"""Share of expert slots that differ from which a shift is looked for: in healthy runs 1 to 5 %
differ.
"""
BETTER = 3.0
"""How many times better another place must fit."""
STEPS = (-2, -1, 1, 2)
# Tokens from which a sequence is cut into thirds
_LONG = 90
# Tokens below which a block is not judged
_MIN_TOKENS = 20
# Mean |d|, in nats, below which logprobs are where they belong, or so confident that places cannot
# be distinguished.
_MIN_DIFF = 0.05
_MAX_DIFF = 3.0
# Tokens on which every layer is compared with every other
_SAMPLED_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """Tokens or layers that another place fits better.

    Attributes:
        axis: ``token`` or ``layer``.
        step: how many places further on along the axis fits.
        here: mean |d| of those tokens as they stand (of routes: share of slots that differ).
        left: the same after the move.
        sequences: sequences with such tokens.
        total: sequences that were judged.
        third: the third (0, 1, 2) of the sequences that they are in, if it is one.
        layers: the layers concerned, if not all are.
        layer_of: layers with the experts of another layer, and that layer.
        tokens: how many, if they are scattered.
        empty: leading layers that hold no selection at most of them.
    """

    axis: str
    step: int
    here: float
    left: float
    sequences: int = 0
    total: int = 0
    third: int | None = None
    layers: tuple[int, ...] | None = None
    layer_of: tuple[tuple[int, int], ...] = ()
    tokens: int = 0
    empty: int = 0

    @property
    def partial(self) -> bool:
        """Whether a part of the tokens or layers is where it belongs."""
        return (
            self.tokens > 0
            or self.sequences < self.total
            or self.third is not None
            or self.layers is not None
        )

    @property
    def where(self) -> str:
        """The place in words: ``in layer 3 alone, in the last third of 6 of 60 sequences``."""
        places = []
        if self.layers is not None:
            names = listed(self.layers)
            single = len(self.layers) == 1
            places.append(f"in layer {names} alone" if single else f"in layers {names}")
        of_total = f"{self.sequences:,} of {counted(self.total, 'sequence')}"
        if self.tokens:
            sequences = counted(self.sequences, "sequence")
            places.append(f"at {counted(self.tokens, 'token')} of {sequences}")
        elif self.third is not None:
            third = ("first", "middle", "last")[self.third]
            places.append(f"in the {third} third of {of_total}")
        elif self.sequences < self.total:
            places.append(f"in {of_total}")
        return ", ".join(places)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blocks:
    """Tokens by block: three a sequence; a short sequence has the first alone.

    Attributes:
        of: ``(n,)``: the block of each token.
        count: the number of blocks.
    """

    of: IntArray
    count: int

    @classmethod
    def of_tokens(cls, pairs: TokenPairs) -> _Blocks:
        lengths = np.repeat(pairs.lengths, pairs.lengths)
        third = 3 * pairs.index_in_sequence // np.maximum(lengths, 1)
        # a third of a short sequence would have too few tokens to judge
        third = np.where(lengths >= _LONG, third, 0)
        return cls(of=3 * pairs.owner + third, count=3 * pairs.n_sequences)

    def sums(self, tokens: IntArray, values: FloatArray | None = None) -> FloatArray:
        """Sum ``values`` of ``tokens`` by block; without values, count the tokens."""
        return np.bincount(self.of[tokens], weights=values, minlength=self.count).astype(np.float64)

    def place(self, shifted: BoolArray, judged: BoolArray) -> dict[str, Any]:
        """Return ``sequences``, ``total`` and ``third`` of a ``Shift`` of some blocks."""
        hits, known = shifted.reshape(-1, 3), judged.reshape(-1, 3)
        thirds = np.flatnonzero(hits.any(axis=0))
        in_long = known[:, 1].any() and bool(hits[known[:, 1]].any())
        return {
            "sequences": int(hits.any(axis=1).sum()),
            "total": int(known.any(axis=1).sum()),
            "third": int(thirds[0]) if len(thirds) == 1 and in_long else None,
        }


def logprob_shift(pairs: TokenPairs) -> Shift | None:
    """Return the blocks with trainer logprobs of the next or the previous token, if there are."""
    blocks, owner, finite = _Blocks.of_tokens(pairs), pairs.owner, pairs.finite
    best: Shift | None = None
    most = ENOUGH - 1.0
    # an off-by-one of the logits is by one token; routes may be off by two (STEPS)
    for step in (-1, 1):
        ours = _tokens_with_neighbour(owner, step)
        ours = ours[finite[ours] & finite[ours + step]]
        count = blocks.sums(ours)
        rollout = pairs.rollout[ours]
        # cut, because a few heavy tokens would hide that all others fit
        here = blocks.sums(ours, np.minimum(np.abs(rollout - pairs.trainer[ours]), _MAX_DIFF))
        moved = np.abs(rollout - pairs.trainer[ours + step])
        left = blocks.sums(ours, np.minimum(moved, _MAX_DIFF))
        judged = count >= _MIN_TOKENS
        shifted = judged & (here > _MIN_DIFF * count) & (BETTER * left < here)
        if count[shifted].sum() > most:
            most = float(count[shifted].sum())
            best = Shift(
                axis="token",
                step=step,
                here=float(here[shifted].sum() / most),
                left=float(left[shifted].sum() / most),
                **blocks.place(shifted, judged),
            )
    return best


def route_shift(left: Selections, right: Selections, pairs: TokenPairs) -> Shift | None:
    """Return the blocks and layers with trainer routes of another token or layer, if there are.

    ``left`` and ``right`` are of the first rows of ``pairs``.
    """
    blocks, owner = _Blocks.of_tokens(pairs), pairs.owner[: len(left)]
    everyone = np.arange(len(left))
    base = _cells(blocks, everyone, left, right)
    shifts = [_of_other_layers(left, right, base)]
    for axis, step in _moves(left.layers):
        if axis == "token":
            ours = _tokens_with_neighbour(owner, step)
            moved = _cells(blocks, ours, left.at(ours), right.at(ours + step))
        else:
            at = slice(max(0, -step), left.layers - max(0, step))
            moved = np.zeros_like(base)
            moved[:, :, at] = _cells(blocks, everyone, *moved_layers(left, right, step))
        shifts.append(_shift_of_cells(axis, step, blocks, base, moved))
    candidates = [(weight, shift) for weight, shift in shifts if shift is not None]
    return max(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


def _moves(layers: int) -> Iterator[tuple[str, int]]:
    for step in STEPS:
        yield "token", step
    for step in STEPS:
        if abs(step) < layers:
            yield "layer", step


def _shift_of_cells(
    axis: str, step: int, blocks: _Blocks, base: FloatArray, moved: FloatArray
) -> tuple[float, Shift | None]:
    """Return the shift of the cells that the move mends, and how many rows those have."""
    here, after = (
        np.divide(missed, rows, out=np.zeros_like(missed), where=rows > 0)
        for missed, rows in (base, moved)
    )
    rows = base[1]
    judged = (rows >= _MIN_TOKENS) & (moved[1] >= _MIN_TOKENS)
    mended = judged & (here >= MISMATCH) & (BETTER * after <= here)
    if (rows * mended).sum(axis=0).max(initial=0) < ENOUGH:
        return 0.0, None
    weight = float(rows[mended].sum())
    layers = np.flatnonzero(mended.any(axis=0))
    all_layers = len(layers) == judged.any(axis=0).sum()
    own = rows[mended.any(axis=1)].sum(axis=0)
    return weight, Shift(
        axis=axis,
        step=step,
        empty=_empty_layers(own / own.max()),
        here=float((here * rows)[mended].sum() / weight),
        left=float((after * rows)[mended].sum() / weight),
        layers=None if all_layers else tuple(layers.tolist()),
        **blocks.place(mended.any(axis=1), judged.any(axis=1)),
    )


def lost_shift(
    left: Selections, right: Selections, lost: BoolArray, pairs: TokenPairs
) -> Shift | None:
    """Return what mends scattered tokens: most of those ``lost`` are another token's or layer's.

    No layer of a lost token agrees. Rows of a draft model or of another request fit nowhere.
    """
    owner = pairs.owner[: len(left)]
    # at either end of a stretch of lost rows a neighbour is outside, so a third is enough
    most = max(_MIN_TOKENS - 1, int(lost.sum()) / 3)
    best: Shift | None = None
    for axis, step in _moves(left.layers):
        if axis == "token":
            ours = _tokens_with_neighbour(owner, step)
            ours = ours[lost[ours]]
            moved = left.at(ours), right.at(ours + step)
        else:
            ours = np.flatnonzero(lost)
            moved = moved_layers(left.at(ours), right.at(ours), step)
        after, here = _row_mismatch(*moved), _row_mismatch(left.at(ours), right.at(ours))
        mended = BETTER * after <= here
        if mended.sum() > most:
            most = float(mended.sum())
            own = ours[mended]
            captured = left.at(own).overlap(right.at(own))[1].mean(axis=0)
            best = Shift(
                axis=axis,
                step=step,
                here=float(here[mended].mean()),
                left=float(after[mended].mean()),
                sequences=len(np.unique(owner[own])),
                total=pairs.n_sequences,
                tokens=len(own),
                empty=_empty_layers(captured),
            )
    return best


def _row_mismatch(left: Selections, right: Selections) -> FloatArray:
    """``(rows,)``: share of the slots that differ, over layers with a selection on both sides.

    NaN if there is no such layer.
    """
    missed, complete = left.missed(right)
    layers = complete.sum(axis=1)
    out = np.full(len(left), np.nan)
    return np.asarray(np.divide(missed.sum(axis=1), layers, out=out, where=layers > 0))


def _empty_layers(captured: FloatArray) -> int:
    """Count the leading layers with a selection in less than half of the rows; 0 if all are."""
    filled = np.asarray(captured) >= 0.5
    return int(np.argmax(filled)) if filled.any() else 0


def _of_other_layers(
    left: Selections, right: Selections, base: FloatArray
) -> tuple[float, Shift | None]:
    """Return the layers with another layer's experts, however far away, in all sequences."""
    missed, rows = base.sum(axis=1)
    here = np.divide(missed, rows, out=np.zeros_like(missed), where=rows >= ENOUGH)
    count = min(len(left), _SAMPLED_ROWS)
    sample = np.linspace(0, len(left) - 1, count).astype(np.int64)
    layer_of, after = {}, {}
    for layer in np.flatnonzero(here >= MISMATCH).tolist():
        common, complete = left.at(sample, slice(layer, layer + 1)).overlap(right.at(sample))
        slots = complete.sum(axis=0) * left.top_k
        share = np.divide(
            (common * complete).sum(axis=0),
            slots,
            out=np.zeros(len(slots)),
            where=complete.sum(axis=0) >= _MIN_TOKENS,
        )
        best = int(np.argmax(share))
        if best != layer and BETTER * (1 - share[best]) <= here[layer]:
            layer_of[layer], after[layer] = best, 1 - share[best]
    if not layer_of:
        return 0.0, None
    layers = list(layer_of)
    return float(rows[layers].sum()), Shift(
        axis="layer",
        step=layer_of[layers[0]] - layers[0],
        here=float(here[layers].mean()),
        left=float(np.mean(list(after.values()))),
        layers=tuple(layers) if len(layers) < left.layers else None,
        layer_of=tuple(layer_of.items()),
    )


def _cells(blocks: _Blocks, tokens: IntArray, left: Selections, right: Selections) -> FloatArray:
    """``(2, blocks, layers)``: slots that differ, in rows, and rows with two selections."""
    missed, complete = left.missed(right)
    return np.stack(
        [
            np.stack([blocks.sums(tokens, part[:, i]) for i in range(part.shape[1])], axis=1)
            for part in (missed, complete.astype(np.float64))
        ]
    )


def _tokens_with_neighbour(owner: IntArray, step: int) -> IntArray:
    """Return the tokens with another token of their sequence ``step`` places further on."""
    ours = np.arange(max(0, -step), max(0, len(owner) - max(0, step)))
    return np.asarray(ours[owner[ours] == owner[ours + step]])


def moved_layers(left: Selections, right: Selections, step: int) -> tuple[Selections, Selections]:
    """Return the layers of ``left`` and those ``step`` layers further on of ``right``."""
    begin, end = max(0, -step), left.layers - max(0, step)
    moved = slice(begin + step, end + step)
    return left.at(slice(None), slice(begin, end)), right.at(slice(None), moved)


def moved_tokens(
    left: Selections, right: Selections, owner: IntArray, step: int
) -> tuple[Selections, Selections]:
    """Return the rows of ``left`` and those ``step`` tokens further on of ``right``."""
    ours = _tokens_with_neighbour(owner, step)
    return left.at(ours), right.at(ours + step)
