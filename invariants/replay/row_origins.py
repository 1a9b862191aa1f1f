"""Replay origins: where the ids come from that a router executed in place of its target, in words,
and what it usually means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray
from rollproof.invariants._shared.phrases import verb
from rollproof.judging.expected_rows import ExpectedRows

__all__ = ["Origin", "Strays", "told_origin"]

_Places: TypeAlias = "npt.NDArray[np.int64]"
_NOWHERE = -3
"""An id that no router executes."""
_SHOWN = 4


class Strays(NamedTuple):
    """Rows that are wrong: ``executed`` ``(rows, top_k)`` ascending, ``place`` and ``column``
    ``(rows,)``; the step's ``targets``.

    ``native`` is what the routers would choose by themselves, where that is known, ``earlier`` the
    targets of steps before, by name.
    """

    executed: IntArray
    place: _Places
    column: _Places
    targets: ExpectedRows
    native: IntArray | None
    earlier: tuple[tuple[str, ExpectedRows], ...]

    @property
    def sample(self) -> _Places:
        """``(rows,)``: which sample a row is of."""
        return np.searchsorted(self.targets.starts, self.place, side="right") - 1

    @property
    def position(self) -> _Places:
        """``(rows,)``: its position in that sample."""
        return self.place - self.targets.starts[self.sample]


class Origin(NamedTuple):
    """What the rows would hold if they came from somewhere ``(rows, top_k)``, that place in words,
    and what it usually means.
    """

    values: IntArray
    words: str
    hint: str


def told_origin(strays: Strays) -> tuple[str, str]:
    """The origin that explains most of the rows, in words, and a hint; no words and no hint where
    none explains more than half of them.
    """
    total = len(strays.executed)
    most, found = 0.5 * total, ("", "")
    for make in _ORIGINS:
        for origin in make(strays):
            hits = int((np.sort(origin.values, axis=1) == strays.executed).all(axis=1).sum())
            if hits > most:
                most, found = (
                    hits,
                    (
                        f"; {hits} of these {total} {verb(hits, 'is', 'are')} {origin.words}",
                        origin.hint,
                    ),
                )
    return found


def _at(targets: ExpectedRows, sample: _Places, position: _Places, column: _Places) -> IntArray:
    """The targets of places that may not exist."""
    if not len(targets.experts):
        return np.full((len(sample), targets.experts.shape[2]), _NOWHERE)
    inside = (sample >= 0) & (sample < len(targets.lengths)) & (position >= 0)
    inside &= position < np.array([*targets.lengths, 0])[np.where(inside, sample, -1)]
    inside &= (column >= 0) & (column < len(targets.layers))
    place = np.where(inside, targets.starts[np.where(inside, sample, 0)] + position, 0)
    return np.where(inside[:, None], targets.experts[place, np.where(inside, column, 0)], _NOWHERE)


def _narrowed(strays: Strays) -> Iterator[Origin]:
    target = strays.targets.experts[strays.place, strays.column]
    for name in ("uint8", "int8"):
        values = target.astype(name).astype(np.int32)
        if (values != target).any():
            yield Origin(values, f"the target wrapped into {name}", _TOO_NARROW)


def _zeros(strays: Strays) -> Iterator[Origin]:
    alone = np.asarray((strays.executed <= 0).all(axis=1))
    yield Origin(
        np.where(alone[:, None], strays.executed, _NOWHERE), "rows of expert 0 alone", _PADDING
    )


def _shifted(strays: Strays) -> Iterator[Origin]:
    for by in (-1, 1, -2, 2):
        values = _at(strays.targets, strays.sample, strays.position + by, strays.column)
        yield Origin(values, f"the target of the position {_away(by)}", _SHIFT)


def _of_other_layers(strays: Strays) -> Iterator[Origin]:
    for by in _steps(len(strays.targets.layers)):
        values = _at(strays.targets, strays.sample, strays.position, strays.column + by)
        yield Origin(values, f"the target of the MoE layer {_away(by)}", _LAYER)


def _of_layers_in_another_order(strays: Strays) -> Iterator[Origin]:
    """Each layer on its own: which other one's targets most of its rows executed."""
    of = np.full(len(strays.targets.layers), _NOWHERE)
    for column in np.unique(strays.column).tolist():
        rows = strays.column == column
        for other in range(len(of)):
            values = np.sort(strays.targets.experts[strays.place[rows], other], axis=1)
            if other != column and (values == strays.executed[rows]).all(axis=1).mean() > 0.5:
                of[column] = other
    if (of >= 0).any():
        layers = strays.targets.layers
        told = [
            f"layer {layers[int(mine)]} executes that of layer {layers[int(of[mine])]}"
            for mine in np.flatnonzero(of >= 0)
        ]
        rest = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        values = _at(strays.targets, strays.sample, strays.position, of[strays.column])
        yield Origin(
            values, f"the target of another MoE layer ({', '.join(told[:_SHOWN])}{rest})", _LAYER
        )


def _own(strays: Strays) -> Iterator[Origin]:
    if strays.native is not None:
        yield Origin(
            strays.native[strays.place, strays.column], "what the router chooses by itself", _NATIVE
        )


def _of_other_samples(strays: Strays) -> Iterator[Origin]:
    for by in _steps(len(strays.targets.lengths)):
        values = _at(strays.targets, strays.sample + by, strays.position, strays.column)
        yield Origin(values, f"the target of the same position in the sample {_away(by)}", _SAMPLE)


def _stale(strays: Strays) -> Iterator[Origin]:
    for name, targets in strays.earlier:
        yield Origin(
            _at(targets, strays.sample, strays.position, strays.column),
            f"the target of step {name!r}",
            _STALE,
        )


def _steps(size: int) -> list[int]:
    return [step for far in range(1, size) for step in (-far, far)]


def _away(by: int) -> str:
    way = "before" if by < 0 else "after"
    return way if abs(by) == 1 else f"{abs(by)} {way}"


_ORIGINS: tuple[Callable[[Strays], Iterator[Origin]], ...] = (
    _narrowed,
    _zeros,
    _shifted,
    _of_other_layers,
    _of_layers_in_another_order,
    _own,
    _of_other_samples,
    _stale,
)
_TOO_NARROW = (
    "The type does not hold every expert id: choose it from num_experts (verl#5240, verl#7407)."
)
_PADDING = (
    "Rows of padding were replayed: mask them, or fill them with distinct experts (verl#4986,"
    " slime#822)."
)
_SHIFT = (
    "Row p is consumed by the token at position p, which predicts the next one: logprobs shift,"
    " routes do not (slime#1045, slime#1052)."
)
_LAYER = (
    "Map payload columns to routers by global layer: dense layers, pipeline offsets, chunks and MTP"
    " layers shift a count (verl#5037, slime#819, NeMo-RL#3903)."
)
_NATIVE = (
    "No target reached the router: replay is off there, targets went to routers that are not in use"
    " (verl#7340), or an empty queue falls back to native routing without a word (verl"
    " router_replay_patch.py)."
)
_SAMPLE = (
    "Routes must go with their sample through splitting, balancing and reordering, and to their own"
    " microbatch in every chunk."
)
_STALE = (
    "A target outlived its step: targets and queues must be cleared after every step, a"
    " forward-only one too (SkyRL#1908)."
)
