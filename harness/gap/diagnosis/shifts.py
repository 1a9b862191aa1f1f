"""Shifts: logprobs or routes that stand at another token or layer than they belong to, in every
sequence or in a part of them.

A shift of a share of the tokens is lost in a correlation over all of them. So the tokens are cut
into blocks (each sequence, or each third of a long one), and the routes into layers: a block is
shifted where another place fits it at least three times as well as its own. Numerics never do that,
whatever their size: a neighbour's logprobs and experts are another token's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.core.records import IntArray
from rollproof.gap.agreement import Selections
from rollproof.gap.column_checks import BoolArray, FloatArray, counted, listed
from rollproof.gap.token_pairs import TokenPairs

__all__ = [
    "BETTER",
    "ENOUGH",
    "MISMATCH",
    "STEPS",
    "Shift",
    "dull_layers",
    "logprob_shift",
    "lost_shift",
    "moved_layers",
    "moved_tokens",
    "route_shift",
]

ENOUGH = 100
"""Tokens below which no shift is told."""
_LONG = 90
"""Tokens from which a sequence is looked at in thirds."""
_LEAST = 20
"""Tokens below which a block says nothing."""
_APART = 0.05
"""Mean |d|, in nats, below which logprobs are where they belong, or so confident that no place can
be told from another.
"""
MISMATCH = 0.3
"""Share of expert slots that differ from which a shift is looked for: healthy sides differ in 1 to
5 %.
"""
BETTER = 3.0
"""Times that another place must fit better than the own one."""
_CUT = 3.0
STEPS = (-2, -1, 1, 2)
_ROWS = 4096
"""Tokens on which every layer is compared with every other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """What fits ``step`` places further on along ``axis`` (``token`` or ``layer``): in
    ``sequences`` of ``total`` sequences, in ``third`` (0, 1, 2) of them where it is one, in
    ``layers`` where it is not all. ``here`` and ``left`` are the mean |d| (of routes: the share of
    slots that differ) of those tokens as they stand and after the move. ``layer_of`` maps layers
    that stand for another to that one. ``tokens`` counts them where they stand here and there, and
    ``dull`` the leading layers that hold no selection at most of them.
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
    dull: int = 0

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
        """In words: ``in layer 3 alone, in the last third of 6 of 60 sequences``."""
        told = []
        if self.layers is not None:
            some = listed(self.layers)
            told.append(f"in layer {some} alone" if len(self.layers) == 1 else f"in layers {some}")
        if self.tokens:
            told.append(
                f"at {counted(self.tokens, 'token')} of {counted(self.sequences, 'sequence')}"
            )
        elif self.third is not None:
            told.append(
                f"in the {('first', 'middle', 'last')[self.third]} third of {self.sequences:,} of"
                f" {counted(self.total, 'sequence')}"
            )
        elif self.sequences < self.total:
            told.append(f"in {self.sequences:,} of {counted(self.total, 'sequence')}")
        return ", ".join(told)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blocks:
    """``of`` ``(n,)``: the block of each token; three a sequence, of which a short one has the
    first alone.
    """

    of: IntArray
    count: int

    @classmethod
    def of_tokens(cls, pairs: TokenPairs) -> _Blocks:
        lengths = np.repeat(pairs.lengths, pairs.lengths)
        within = np.arange(pairs.n_tokens) - np.repeat(pairs.starts, pairs.lengths)
        third = np.where(lengths >= _LONG, 3 * within // np.maximum(lengths, 1), 0)
        return cls(of=3 * pairs.owner + third, count=3 * pairs.n_sequences)

    def sums(self, tokens: IntArray, values: FloatArray | None = None) -> FloatArray:
        """Of the blocks of ``tokens``: the sum of ``values``, or how many there are."""
        return np.bincount(self.of[tokens], weights=values, minlength=self.count).astype(np.float64)

    def place(self, hit: BoolArray, there: BoolArray) -> dict[str, Any]:
        """Where blocks that are hit lie, of those that are there: ``sequences``, ``total`` and
        ``third`` of a ``Shift``.
        """
        hits, known = hit.reshape(-1, 3), there.reshape(-1, 3)
        thirds = np.flatnonzero(hits.any(axis=0))
        long = known[:, 1].any() and bool(hits[known[:, 1]].any())
        alone = len(thirds) == 1 and long
        return {
            "sequences": int(hits.any(axis=1).sum()),
            "total": int(known.any(axis=1).sum()),
            "third": int(thirds[0]) if alone else None,
        }


def logprob_shift(pairs: TokenPairs) -> Shift | None:
    """Blocks whose trainer logprobs are those of the next or the last token; ``None`` where there
    are no such.
    """
    blocks, owner = _Blocks.of_tokens(pairs), pairs.owner
    finite = np.isfinite(pairs.rollout) & np.isfinite(pairs.trainer)
    best: Shift | None = None
    most = ENOUGH - 1.0
    for step in (-1, 1):
        ours = _neighboured(owner, step)
        ours = ours[finite[ours] & finite[ours + step]]
        count = blocks.sums(ours)
        here = blocks.sums(
            ours, np.minimum(np.abs(pairs.rollout[ours] - pairs.trainer[ours]), _CUT)
        )
        left = blocks.sums(
            ours, np.minimum(np.abs(pairs.rollout[ours] - pairs.trainer[ours + step]), _CUT)
        )
        there = count >= _LEAST
        hit = there & (here > _APART * count) & (BETTER * left < here)
        if count[hit].sum() > most:
            most = float(count[hit].sum())
            mean = float(here[hit].sum() / most)
            best = Shift(
                axis="token",
                step=step,
                here=mean,
                left=float(left[hit].sum() / most),
                **blocks.place(hit, there),
            )
    return best


def route_shift(left: Selections, right: Selections, pairs: TokenPairs) -> Shift | None:
    """Blocks and layers whose trainer routes are those of another token or layer; ``None`` where
    there are no such.

    ``left`` and ``right`` are of the first rows of ``pairs``.
    """
    blocks, owner = _Blocks.of_tokens(pairs), pairs.owner[: len(left)]
    everyone = np.arange(len(left))
    base = _cells(blocks, everyone, left, right)
    found = [
        (weight, shift)
        for weight, shift in [_of_other_layers(left, right, base)]
        if shift is not None
    ]
    for axis, step in [("token", step) for step in STEPS] + [
        ("layer", step) for step in STEPS if abs(step) < left.layers
    ]:
        if axis == "token":
            ours = _neighboured(owner, step)
            moved = _cells(blocks, ours, left.at(ours), right.at(ours + step))
        else:
            at = slice(max(0, -step), left.layers - max(0, step))
            moved = np.zeros_like(base)
            moved[:, :, at] = _cells(blocks, everyone, *moved_layers(left, right, step))
        weight, shift = _hit(axis, step, blocks, base, moved)
        if shift is not None:
            found.append((weight, shift))
    return max(found, key=lambda one: one[0])[1] if found else None


def _hit(
    axis: str, step: int, blocks: _Blocks, base: FloatArray, moved: FloatArray
) -> tuple[float, Shift | None]:
    """The shift of the cells that the move mends, and how many rows those have."""
    here, after = (
        np.divide(missed, rows, out=np.zeros_like(missed), where=rows > 0)
        for missed, rows in (base, moved)
    )
    rows = base[1]
    there = (rows >= _LEAST) & (moved[1] >= _LEAST)
    hit = there & (here >= MISMATCH) & (BETTER * after <= here)
    if (rows * hit).sum(axis=0).max(initial=0) < ENOUGH:
        return 0.0, None
    weight = float(rows[hit].sum())
    layers = np.flatnonzero(hit.any(axis=0))
    own = rows[hit.any(axis=1)].sum(axis=0)
    return weight, Shift(
        axis=axis,
        step=step,
        dull=dull_layers(own / own.max()),
        here=float((here * rows)[hit].sum() / weight),
        left=float((after * rows)[hit].sum() / weight),
        layers=None if len(layers) == there.any(axis=0).sum() else tuple(layers.tolist()),
        **blocks.place(hit.any(axis=1), there.any(axis=1)),
    )


def lost_shift(
    left: Selections, right: Selections, lost: BoolArray, pairs: TokenPairs
) -> Shift | None:
    """What mends tokens that stand here and there: of those ``lost`` (no layer agrees), most are
    another token's or layer's rows.

    Rows of a stranger (a draft model, another request) fit nowhere. Where a stretch of lost rows
    begins or ends, the last of them has its neighbour outside: a third that is mended is enough.
    """
    owner = pairs.owner[: len(left)]
    count = int(lost.sum())
    best: tuple[float, Shift | None] = (max(_LEAST - 1, count / 3), None)
    for axis, step in [("token", step) for step in STEPS] + [
        ("layer", step) for step in STEPS if abs(step) < left.layers
    ]:
        if axis == "token":
            ours = _neighboured(owner, step)
            ours = ours[lost[ours]]
            moved = left.at(ours), right.at(ours + step)
        else:
            ours = np.flatnonzero(lost)
            moved = moved_layers(left.at(ours), right.at(ours), step)
        after, here = _row_mismatch(*moved), _row_mismatch(left.at(ours), right.at(ours))
        mended = BETTER * after <= here
        if mended.sum() > best[0]:
            own = ours[mended]
            captured = left.at(own).overlap(right.at(own))[1].mean(axis=0)
            best = (
                float(mended.sum()),
                Shift(
                    axis=axis,
                    step=step,
                    here=float(here[mended].mean()),
                    left=float(after[mended].mean()),
                    sequences=len(np.unique(owner[own])),
                    total=pairs.n_sequences,
                    tokens=len(own),
                    dull=dull_layers(captured),
                ),
            )
    return best[1]


def _row_mismatch(left: Selections, right: Selections) -> FloatArray:
    """``(rows,)``: share of the slots that differ, over the layers that hold a selection on both
    sides; NaN where none does.
    """
    common, whole = left.overlap(right)
    rows = whole.sum(axis=1)
    missed = np.where(whole, 1 - common / left.top_k, 0.0).sum(axis=1)
    return np.asarray(np.divide(missed, rows, out=np.full(len(left), np.nan), where=rows > 0))


def dull_layers(captured: FloatArray) -> int:
    """Leading layers that hold a selection in less than half of the rows; 0 where none of them
    does.
    """
    there = np.asarray(captured) >= 0.5
    return int(np.argmax(there)) if there.any() else 0


def _of_other_layers(
    left: Selections, right: Selections, base: FloatArray
) -> tuple[float, Shift | None]:
    """Layers that hold another one's experts, however far away it is, in all sequences."""
    missed, rows = base.sum(axis=1)
    here = np.divide(missed, rows, out=np.zeros_like(missed), where=rows >= ENOUGH)
    some = np.linspace(0, len(left) - 1, min(len(left), _ROWS)).astype(np.int64)
    layer_of, after = {}, {}
    for layer in np.flatnonzero(here >= MISMATCH).tolist():
        common, whole = left.at(some, slice(layer, layer + 1)).overlap(right.at(some))
        count = whole.sum(axis=0)
        share = np.divide(
            (common * whole).sum(axis=0),
            count * left.top_k,
            out=np.zeros(len(count)),
            where=count >= _LEAST,
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
    """``(2, blocks, layers)``: slots that differ, as parts of a row, and rows that hold a selection
    on both sides.
    """
    common, whole = left.overlap(right)
    missed = np.where(whole, 1 - common / left.top_k, 0.0)
    parts = (missed, whole.astype(np.float64))
    return np.stack(
        [
            np.stack([blocks.sums(tokens, part[:, i]) for i in range(part.shape[1])], axis=1)
            for part in parts
        ]
    )


def _neighboured(owner: IntArray, step: int) -> IntArray:
    """Tokens whose sequence goes on ``step`` places further on."""
    ours = np.arange(max(0, -step), max(0, len(owner) - max(0, step)))
    return np.asarray(ours[owner[ours] == owner[ours + step]])


def moved_layers(left: Selections, right: Selections, step: int) -> tuple[Selections, Selections]:
    """The layers of ``left`` and those of ``right`` that stand ``step`` further on, where there are
    such.
    """
    begin, end = max(0, -step), left.layers - max(0, step)
    return left.at(slice(None), slice(begin, end)), right.at(
        slice(None), slice(begin + step, end + step)
    )


def moved_tokens(
    left: Selections, right: Selections, owner: IntArray, step: int
) -> tuple[Selections, Selections]:
    """The rows of ``left`` and those of ``right`` that stand ``step`` further on in the same
    sequence, where there are such.
    """
    ours = _neighboured(owner, step)
    return left.at(ours), right.at(ours + step)
