"""Singly: what a subclass of the coded policy says of one sequence holds where an engine asks for
many, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollproof.core.records import IntArray, LogprobArray, Version
    from rollproof.fakes.coded.policy import CodedPolicy, State, Stretch

__all__ = ["follow_overrides"]


def follow_overrides(cls: type) -> None:
    """Where ``cls`` has a method for one from nearer than the method for many, the latter becomes a
    loop over the former.
    """
    for many, (singles, loop) in _LOOPS.items():
        if min(_place(cls, single) for single in singles) < _place(cls, many):
            setattr(cls, many, loop)


def _place(cls: type, name: str) -> int:
    """From how far up the line of its bases ``cls`` has ``name``."""
    return next(place for place, base in enumerate(cls.__mro__) if name in vars(base))


def _draw(
    policy: CodedPolicy, version: Version, state: State, count: int
) -> tuple[list[int], State]:
    tokens = []
    for _ in range(count):
        tokens.append(policy.next_token(version, state))
        state = policy.extend(state, tokens[-1])
    return tokens, state


def _draw_many(
    policy: CodedPolicy, version: Version, states: Sequence[State], count: int
) -> list[tuple[list[int], State]]:
    return [policy.draw(version, state, count) for state in states]


def _logprobs_many(
    policy: CodedPolicy, stretches: Sequence[Stretch], hashes: object = None
) -> list[LogprobArray]:
    return [policy.logprobs_spans(*one) for one in stretches]


def _routes_many(
    policy: CodedPolicy, stretches: Sequence[Stretch], hashes: object = None
) -> list[IntArray]:
    return [policy.routes_spans(*one) for one in stretches]


_LOOPS: Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "draw": (("next_token", "extend"), _draw),
    "draw_many": (("draw",), _draw_many),
    "logprobs_many": (("logprobs_spans",), _logprobs_many),
    "routes_many": (("routes_spans",), _routes_many),
}
"""Methods for many, in an order in which each finds those before it settled; the methods for one;
the loops.
"""
