"""Hypothesis strategies for cases beyond the small scope."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from rollproof.core.case import ActionKind, Case, Model
from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.verification.schedules.drawing import Draws, Limits, draw_case, draw_model

__all__ = ["cases", "models"]

_T = TypeVar("_T")
_integers = functools.cache(st.integers)


class _HypothesisDraws:
    """Choices by Hypothesis, which shrinks them towards the first and the smallest."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(_integers(low, high))

    def pick(self, options: Sequence[_T]) -> _T:
        return options[self.integer(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        # Hypothesis shrinks to 0, which must be False: the case without what was drawn
        return self.integer(0, 99) >= 100 - percent

    def several(self, low: int, high: int, item: Callable[[Draws], _T]) -> list[_T]:
        return self._draw(st.lists(_item(item), min_size=low, max_size=high)) if high else []


@st.composite
def _item(draw: st.DrawFn, item: Callable[[Draws], _T]) -> _T:
    return item(_HypothesisDraws(draw))


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    flavour: str,
    contract: Contract,
    kinds: Sequence[ActionKind] | None = None,
    model: Model | None = None,
    modes: Sequence[PauseMode] | None = None,
    limits: Limits | None = None,
) -> Case:
    """Cases of one flavour under ``contract``: several requests and servers, engine options,
    models, faults.

    Each case first draws the subset of ``kinds`` (default: all) that may occur in it (swarm
    testing, Groce et al., ISSTA 2012), then actions of these. ``model`` fixes the model instead of
    drawing one; ``modes`` are the pause modes (default: ``modes_for``).
    """
    return draw_case(
        _HypothesisDraws(draw),
        flavour=flavour,
        contract=contract,
        kinds=kinds,
        model=model,
        modes=modes,
        limits=limits,
    )


@st.composite
def models(draw: st.DrawFn, *, layers: int = 6) -> Model:
    """Models of up to ``layers`` layers: leading dense layers or none, 2 to 1024 experts, top-k 1
    to 16.
    """
    return draw_model(_HypothesisDraws(draw), layers)
