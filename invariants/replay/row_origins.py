"""Finds out where the ids come from that a router executed in place of its target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray
from rollproof.invariants._shared.phrases import verb
from rollproof.judging.expected_rows import ExpectedRows

__all__ = ["Mismatches", "Origin", "explain_mismatches"]

_Places: TypeAlias = "npt.NDArray[np.int64]"
_NO_EXPERT = -3
"""An id that no router executes."""
_MAX_LAYERS = 4


class Mismatches(NamedTuple):
    """Rows that executed other experts than their target.

    executed: ``(rows, top_k)``, ascending ids.
    place: ``(rows,)``: the index of the token among all tokens of the step.
    column: ``(rows,)``: the number of the MoE layer.
    targets: The targets of the step.
    native: What the routers would choose by themselves, if that is known.
    earlier: The targets of earlier steps, by name.
    """

    executed: IntArray
    place: _Places
    column: _Places
    targets: ExpectedRows
    native: IntArray | None
    earlier: tuple[tuple[str, ExpectedRows], ...]

    @property
    def sample(self) -> _Places:
        """``(rows,)``: the index of the row's sample."""
        return np.searchsorted(self.targets.starts, self.place, side="right") - 1

    @property
    def position(self) -> _Places:
        """``(rows,)``: the position in that sample."""
        return self.place - self.targets.starts[self.sample]


class Origin(NamedTuple):
    """A possible source of the rows.

    values: What the rows would hold, ``(rows, top_k)``.
    words: The source in words.
    hint: What it usually means.
    """

    values: IntArray
    words: str
    hint: str


def explain_mismatches(mismatches: Mismatches) -> tuple[str, str]:
    """Return the source that explains more than half of the rows, in words, and its hint; otherwise
    two empty strings.
    """
    total = len(mismatches.executed)
    best, explanation = 0.5 * total, ("", "")
    # The first of two equally good explanations wins, so the order is that of plausibility.
    for make in _ORIGINS:
        for origin in make(mismatches):
            matches = int((np.sort(origin.values, axis=1) == mismatches.executed).all(axis=1).sum())
            if matches > best:
                best, explanation = (
                    matches,
                    (
                        f"; {matches} of these {total} {verb(matches, 'is', 'are')} {origin.words}",
                        origin.hint,
                    ),
                )
    return explanation


def _targets_at(
    targets: ExpectedRows, sample: _Places, position: _Places, column: _Places
) -> IntArray:
    """Return the targets of places that may not exist."""
    inside = (sample >= 0) & (sample < len(targets.lengths)) & (position >= 0)
    inside &= (column >= 0) & (column < len(targets.layers))
    inside[inside] = position[inside] < np.array(targets.lengths)[sample[inside]]
    values = np.full((len(sample), targets.experts.shape[2]), _NO_EXPERT)
    place = targets.starts[sample[inside]] + position[inside]
    values[inside] = targets.experts[place, column[inside]]
    return values


def _narrowed(mismatches: Mismatches) -> Iterator[Origin]:
    target = mismatches.targets.experts[mismatches.place, mismatches.column]
    # The casts of verl#5240 and verl#7407.
    for name in ("uint8", "int8"):
        values = target.astype(name).astype(np.int32)
        yield Origin(values, f"the target wrapped into {name}", _TOO_NARROW)


def _zeros(mismatches: Mismatches) -> Iterator[Origin]:
    only_zero = np.asarray((mismatches.executed <= 0).all(axis=1))
    yield Origin(
        np.where(only_zero[:, None], mismatches.executed, _NO_EXPERT),
        "rows of only expert 0",
        _PADDING,
    )


def _shifted(mismatches: Mismatches) -> Iterator[Origin]:
    # Logprobs shift by one, routes do not: the usual mistake (slime#1045, slime#1052).
    for offset in (-1, 1, -2, 2):
        values = _targets_at(
            mismatches.targets, mismatches.sample, mismatches.position + offset, mismatches.column
        )
        yield Origin(values, f"the target of the position {_away(offset)}", _SHIFT)


def _of_other_layers(mismatches: Mismatches) -> Iterator[Origin]:
    for offset in _steps(len(mismatches.targets.layers)):
        values = _targets_at(
            mismatches.targets, mismatches.sample, mismatches.position, mismatches.column + offset
        )
        yield Origin(values, f"the target of the MoE layer {_away(offset)}", _LAYER)


def _of_layers_in_another_order(mismatches: Mismatches) -> Iterator[Origin]:
    """Find for each layer another one, if most of its rows executed that one's targets."""
    source_of = np.full(len(mismatches.targets.layers), _NO_EXPERT)
    for column in np.unique(mismatches.column).tolist():
        rows = mismatches.column == column
        for other in range(len(source_of)):
            values = np.sort(mismatches.targets.experts[mismatches.place[rows], other], axis=1)
            if other != column and (values == mismatches.executed[rows]).all(axis=1).mean() > 0.5:
                source_of[column] = other
    if (source_of >= 0).any():
        layers = mismatches.targets.layers
        texts = [
            (
                f"layer {layers[int(layer_index)]} executes that of layer"
                f" {layers[int(source_of[layer_index])]}"
            )
            for layer_index in np.flatnonzero(source_of >= 0)
        ]
        rest = f" and {len(texts) - _MAX_LAYERS} more" if len(texts) > _MAX_LAYERS else ""
        values = _targets_at(
            mismatches.targets, mismatches.sample, mismatches.position, source_of[mismatches.column]
        )
        yield Origin(
            values,
            f"the target of another MoE layer ({', '.join(texts[:_MAX_LAYERS])}{rest})",
            _LAYER,
        )


def _own_choice(mismatches: Mismatches) -> Iterator[Origin]:
    if mismatches.native is not None:
        yield Origin(
            mismatches.native[mismatches.place, mismatches.column],
            "what the router chooses by itself",
            _NATIVE,
        )


def _of_other_samples(mismatches: Mismatches) -> Iterator[Origin]:
    for offset in _steps(len(mismatches.targets.lengths)):
        values = _targets_at(
            mismatches.targets, mismatches.sample + offset, mismatches.position, mismatches.column
        )
        yield Origin(
            values, f"the target of the same position in the sample {_away(offset)}", _SAMPLE
        )


def _stale(mismatches: Mismatches) -> Iterator[Origin]:
    # SkyRL#1908: a queue filled by one step fed the next one.
    for name, targets in mismatches.earlier:
        yield Origin(
            _targets_at(targets, mismatches.sample, mismatches.position, mismatches.column),
            f"the target of step {name!r}",
            _STALE,
        )


def _steps(size: int) -> list[int]:
    return [step for distance in range(1, size) for step in (-distance, distance)]


def _away(offset: int) -> str:
    direction = "before" if offset < 0 else "after"
    return direction if abs(offset) == 1 else f"{abs(offset)} {direction}"


_ORIGINS: tuple[Callable[[Mismatches], Iterator[Origin]], ...] = (
    _narrowed,
    _zeros,
    _shifted,
    _of_other_layers,
    _of_layers_in_another_order,
    _own_choice,
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
    "Map payload columns to routers by global layer: dense layers, pipeline offsets, chunks"
    " and MTP layers shift any count (verl#5037, slime#819, NeMo-RL#3903)."
)
_NATIVE = (
    "No target reached the router: replay is off there, targets went to unused routers"
    " (verl#7340), or an empty queue silently falls back to native routing (verl"
    " router_replay_patch.py)."
)
_SAMPLE = (
    "Routes must stay with their sample through splitting, balancing and reordering, and"
    " reach its microbatch in every chunk."
)
_STALE = (
    "A target outlived its step: clear targets and queues after every step, even a"
    " forward-only one (SkyRL#1908)."
)
