"""Public: the spy that a trainer reports its routers to."""

from __future__ import annotations

from rollproof.core.router_spy import (
    InjectedFailure,
    Spy,
    UnsupportedStep,
    direction,
    identify,
    ids_of_map,
    is_whole,
    sketch,
)

__all__ = [
    "InjectedFailure",
    "Spy",
    "UnsupportedStep",
    "direction",
    "identify",
    "ids_of_map",
    "is_whole",
    "sketch",
]
