"""Misplacing: how a known bug of layout functions is run, on the small scope of the functions in
which it shows.
"""

from __future__ import annotations

from functools import partial
from random import Random

from rollproof.core.trace import Trace
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_layouts import MegatronLike
from rollproof.layouts.layout_cases import layout_calls
from rollproof.verification.layouts import record_layouts

__all__ = ["layout_bug"]

_MOST = 70
"""Calls of a function beyond which its small scope is thinned: fifty bugs must be judged in a few
seconds.
"""


def layout_bug(
    name: str,
    summary: str,
    refs: tuple[str, ...],
    make: type[MegatronLike],
    functions: str,
    *kills: str,
    also: tuple[str, ...] = (),
) -> KnownBug:
    """A known bug of layout functions; ``functions`` are those in which it shows, ``kills`` and
    ``also`` checks without their family.
    """
    return KnownBug(
        id=f"layout-{name}",
        summary=summary,
        refs=refs,
        record=partial(_recorded, make, f"layout-{name}", tuple(functions.split())),
        kills=tuple(f"layout.{check}" for check in kills),
        also=tuple(f"layout.{check}" for check in also),
    )


def _recorded(make: type[MegatronLike], name: str, functions: tuple[str, ...]) -> Trace:
    """The small scope, thinned where it is large."""
    calls = []
    for one in functions:
        scope = list(layout_calls(one, make.layout, draws=0))
        calls += [
            (one, scope[i])
            for i in sorted(Random(0).sample(range(len(scope)), min(len(scope), _MOST)))
        ]
    return record_layouts(make, name=name, calls=calls)
