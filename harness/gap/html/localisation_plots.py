"""Pictures of a localisation: what each place does differently, and how the difference grows with
depth. Imports matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollproof.gap.html.plot_parts import BLUE, COLOURS, MUTED, RED, Plot, log_scale, new_figure

if TYPE_CHECKING:
    from rollproof.gap.localise.localisation import Localisation, SiteGap

__all__ = ["draw_localisation"]

_LEAST = 1e-9
"""Exact agreement, on a log scale."""
_TICKS = 12


def draw_localisation(localisation: Localisation) -> Iterator[Plot]:
    """The places, and the growth where the model has layers."""
    yield _places(localisation)
    if len(localisation.growth) > 1:
        yield _growth(localisation)


def _places(localisation: Localisation) -> Plot:
    sites = [gap for gap in localisation.sites if gap.site.role != "selection"]
    figure, axes = new_figure(3.0)
    steps = range(len(sites))
    known = [
        value
        for gap in sites
        for value in (gap.alone, gap.rounding)
        if math.isfinite(value) and value > _LEAST
    ]
    low, high = (
        (min(known) / 20, max(known) * 30) if known else (_LEAST, 1.0)
    )  # room for the legend
    axes.fill_between(
        steps,
        low,
        [max(gap.rounding, low) for gap in sites],
        color=COLOURS["sky"],
        alpha=0.35,
        lw=0,
        step="mid",
    )
    inside = [(i, gap) for i, gap in enumerate(sites) if not gap.parts]
    axes.plot(
        [i for i, _ in inside],
        [max(gap.alone, low) for _, gap in inside],
        "o",
        color=BLUE,
        ms=3,
        label="within rounding",
    )
    beyond = [(i, gap) for i, gap in enumerate(sites) if gap.parts]
    if beyond:
        axes.plot(
            [i for i, _ in beyond],
            [max(gap.alone, low) for _, gap in beyond],
            "X",
            color=RED,
            ms=8,
            label="beyond rounding",
        )
        place, first = beyond[0]
        right = place > len(sites) / 2
        axes.annotate(str(first.site), (place, max(first.alone, low)), xytext=(-9 if right else 9, 3), textcoords="offset points",
                      ha="right" if right else "left", color=RED, fontsize=8)  # fmt: skip
    axes.set_ylim(low, high)
    log_scale(axes, "y")
    marks = _layer_starts(sites)
    axes.set_xticks([i for i, _ in marks], [name for _, name in marks], fontsize=8)
    axes.set_xlabel("layer (each place in the order of the forward)")
    axes.set_ylabel("relative difference")
    axes.grid(axis="y")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    return Plot(
        name="places",
        title="What each place does differently",
        about=(
            "Each module was given the first side's values. The band is what rounding does there; a"
            " cross lies beyond it."
        ),
        figure=figure,
    )


def _growth(localisation: Localisation) -> Plot:
    rows = localisation.growth
    figure, axes = new_figure(2.8)
    lines = [
        ("own values", "carried", BLUE, "o-"),
        ("experts replayed", "replayed", COLOURS["orange"], "s--"),
    ]
    for label, name, colour, mark in lines:
        points = [
            (i, getattr(gap, name))
            for i, gap in enumerate(rows)
            if math.isfinite(getattr(gap, name))
        ]
        if points:
            axes.plot(
                [i for i, _ in points],
                [max(v, _LEAST) for _, v in points],
                mark,
                color=colour,
                lw=1.6,
                ms=4,
                label=label,
            )
    axes.plot(
        range(len(rows)),
        [max(gap.carried_rounding, _LEAST) for gap in rows],
        ":",
        color=MUTED,
        lw=1.8,
        label="rounding",
    )
    log_scale(axes, "y")
    every = -(-len(rows) // _TICKS)
    names = ["end" if i == len(rows) - 1 else str(gap.site.layer) for i, gap in enumerate(rows)]
    axes.set_xticks(range(0, len(rows), every), names[::every], fontsize=8)
    axes.set_xlabel("residual stream before layer")
    axes.set_ylabel("relative difference")
    axes.grid(axis="y")
    axes.legend(fontsize=8, frameon=False)
    return Plot(
        name="growth",
        title="How the difference grows with depth",
        about=(
            "Root mean square over tokens, relative to the values' own. Where the line leaves"
            " rounding, something else came in."
        ),
        figure=figure,
    )


def _layer_starts(sites: list[SiteGap]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    last = None
    for i, gap in enumerate(sites):
        layer = gap.site.layer
        if layer != last and 0 <= layer < 1 << 30:
            found.append((i, str(layer)))
        last = layer
    return found[:: -(-len(found) // _TICKS) or 1]
