"""Colours, style, axes and scales of all plots of a gap.

Imports matplotlib (the extra ``report``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

__all__ = [
    "BLUE",
    "COLOURS",
    "CYCLE",
    "GRID",
    "INK",
    "MUTED",
    "RED",
    "WIDTH",
    "Axes",
    "Plot",
    "log_scale",
    "new_figure",
    "shortened",
    "style",
]

COLOURS: Mapping[str, str] = {
    "ink": "#1b1b1c",
    "muted": "#66676b",
    "grid": "#d9dadd",
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "orange": "#e69f00",
    "sky": "#56b4e9",
    "purple": "#cc79a7",
}
"""Names and light colours; the page replaces them by its variables of these names."""
INK: str = COLOURS["ink"]
MUTED: str = COLOURS["muted"]
GRID: str = COLOURS["grid"]
BLUE: str = COLOURS["blue"]
RED: str = COLOURS["vermilion"]
CYCLE: tuple[str, ...] = ("blue", "orange", "green", "purple", "sky", "vermilion")
WIDTH: float = 4.4
"""Inches. A phone shows such a figure at about its real size, so its text stays readable."""
_STYLE: Mapping[str, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "text.parse_math": False,  # names come from the user's file: a dollar sign is no formula
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlecolor": INK,
    "axes.unicode_minus": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "grid.color": GRID,
    "figure.constrained_layout.use": True,
}
Axes: TypeAlias = Any


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plot:
    """A plot.

    Attributes:
        name: its file name.
        title: its title.
        about: how to read it.
        figure: the figure of matplotlib.
    """

    name: str
    title: str
    about: str
    figure: Any


def style(*, salt: str = "rollproof") -> AbstractContextManager[None]:
    """Return the style that plots are drawn and saved in, as a context.

    ``salt`` makes the ids in an SVG unique, and the same each time.
    """
    settings: Any = {**_STYLE, "svg.hashsalt": salt}
    return rc_context(settings)


def new_figure(height: float) -> tuple[Any, Axes]:
    """Return a figure of the common width, ``height`` inches high, and its axes."""
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.subplots()


# Letters of a tick's label that an axis has room for at each of its ticks
_LETTERS = 4


def log_scale(axes: Axes, which: str, *, max_ticks: int = 6) -> None:
    """Set a log scale with at most ``max_ticks`` ticks in plain numbers.

    They are at 1, 2 and 5 if the axis spans less than two decades.
    """
    axis = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}scale")("log")
    low, high = getattr(axes, f"get_{which}lim")()
    steps = (1, 2, 5) if high / low < 80 else (1,)
    ticks = [
        tick
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for step in steps
        if low <= (tick := step * 10.0**power) <= high
    ]
    if which == "x":
        # long labels touch: 0.0005, 0.001 and 0.002 do where 0.005, 0.02 and 0.1 do not
        longest = max((len(f"{tick:g}") for tick in ticks), default=1)
        max_ticks = max(2, min(max_ticks, max_ticks * _LETTERS // longest))
    ticks = ticks[:: -(-len(ticks) // max_ticks)] if ticks else [low, high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def shortened(text: str, length: int, *, end: bool = False) -> str:
    """Return the first ``length`` characters of a text, or with ``end`` the last ones."""
    clean = "".join(char if char.isprintable() else "?" for char in text)
    if len(clean) <= length:
        return clean
    return (
        f"\N{HORIZONTAL ELLIPSIS}{clean[1 - length :]}"
        if end
        else f"{clean[: length - 1]}\N{HORIZONTAL ELLIPSIS}"
    )
