"""The plots of a gap as figures that are narrow enough for a phone, each with an explanation.

Imports matplotlib, which comes with the extra ``report``. Colours are Okabe and Ito's, which
colour-blind people can distinguish; no plot depends on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from rollproof.gap.buckets import Bucket
from rollproof.gap.html.distribution_plots import (
    draw_layers,
    draw_scatter,
    draw_tail,
    draw_timelines,
)
from rollproof.gap.html.plot_parts import (
    BLUE,
    COLOURS,
    INK,
    MUTED,
    RED,
    WIDTH,
    Plot,
    log_scale,
    new_figure,
    shortened,
    style,
)
from rollproof.gap.intervals import Interval
from rollproof.gap.limits import Limit, Side

if TYPE_CHECKING:
    from rollproof.gap.gap_report import GapReport
    from rollproof.gap.localise.localisation import Localisation, SiteGap
    from rollproof.gap.trainer_comparison import Comparison

__all__ = ["COLOURS", "Plot", "draw_localisation", "draw_plots", "style"]

# A mean |d| or k3 below this is rounding, and would stretch a log scale over empty decades
_NEGLIGIBLE = 1e-12
_NAMES: Mapping[str, str] = {
    "staleness": "age of the weights, in versions",
    "since_resume": "tokens since a resume",
    "part": "part of the sequence",
    "replica": "engine replica",
    "version": "weight version",
    "position_decile": "place in the sequence, 0 to 1",
    "rollout_logprob_decile": "rollout logprob, in nats",
    "temperature": "sampling temperature",
    "pack_index": "place in the packed row",
}


def draw_plots(
    report: GapReport,
    comparison: Comparison | None = None,
    localisation: Localisation | None = None,
) -> Iterator[Plot]:
    """Yield every plot that the report's data allow, in the order of the page."""
    with style():
        for draw in _PLOTS:
            plot = draw(report)
            if plot is not None:
                yield plot
        for number, (row, buckets) in enumerate(report.buckets.items(), 1):
            plot = _draw_buckets(row, buckets)
            # a group has a name of the user's, which need not be one of a file
            yield plot if row in _NAMES else replace(plot, name=f"by-group-{number}")
        if comparison is not None:
            yield _draw_effects(comparison)
        if localisation is not None:
            yield from draw_localisation(localisation)


def _draw_limits(report: GapReport) -> Plot | None:
    rows = [
        (name, report.panel.metrics[name], report.limits.limits[name]) for name in report.verdicts
    ]
    rows = [row for row in rows if row[2].fail > 0 and math.isfinite(row[1].value)]
    if not rows:
        return None
    figure, axes = new_figure(0.9 + 0.27 * len(rows))
    floor = 1e-3
    for place, (name, interval, limit) in enumerate(rows):
        value, low, high = (max(end, floor) for end in _against_limit(interval, limit))
        colour = {"pass": COLOURS["green"], "fail": RED}.get(
            str(report.verdicts[name]), COLOURS["orange"]
        )
        axes.plot([low, high], [place, place], color=colour, lw=2.2, solid_capstyle="butt")
        axes.plot(
            value,
            place,
            {"pass": "o", "fail": "X"}.get(str(report.verdicts[name]), "D"),
            color=colour,
            ms=6,
        )
        target = _badness(limit.target, limit)
        if target > 0:
            axes.plot(
                max(target / _badness(limit.fail, limit), floor),
                place,
                "|",
                color=MUTED,
                ms=9,
                mew=1.2,
            )
    axes.axvline(1.0, color=INK, lw=1)
    log_scale(axes, "x")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("distance from equality / limit")
    axes.grid(axis="x")
    return Plot(
        name="limits",
        title="Each metric against its limit",
        about=(
            "Beyond the line at 1 a limit is broken. Bars are 95 % intervals; the tick is what a"
            " healthy run of this class shows. Round: pass, cross: fail, diamond: undecided."
        ),
        figure=figure,
    )


def _badness(value: float, limit: Limit) -> float:
    """Return the distance from a perfect match, which is 1 for a correlation or a ratio, else 0."""
    if limit.side is Side.BELOW:
        return max(1.0 - value, 0.0)
    ideal = 1.0 if limit.metric.startswith("token_mult_prob_error") else 0.0
    return abs(value - ideal)


def _against_limit(interval: Interval, limit: Limit) -> tuple[float, float, float]:
    value, low, high = (
        _badness(end, limit) if math.isfinite(end) else math.nan
        for end in (interval.value, interval.low, interval.high)
    )
    low, high = (
        (value, value) if math.isnan(low) or math.isnan(high) else (min(low, high), max(low, high))
    )
    if limit.side is Side.BOTH and interval.low < 0 < interval.high:
        low = 0.0
    room = _badness(limit.fail, limit)
    return value / room, low / room, high / room


def _draw_buckets(row: str, buckets: Sequence[Bucket]) -> Plot:
    figure = Figure(figsize=(WIDTH, 1.1 + 0.26 * len(buckets)))
    left, right = figure.subplots(1, 2, sharey=True, gridspec_kw={"wspace": 0.12})
    for axes, label, name in ((left, "k3 (nats)", "k3"), (right, "mean |d| (nats)", "abs_diff")):
        values = [getattr(bucket, name) for bucket in buckets]
        shown = [interval.value for interval in values if interval.value > _NEGLIGIBLE]
        # whiskers of a part with a handful of uneven sequences may span twenty decades: the axis
        # cuts them
        floor, top = min(shown, default=1.0) / 20, max(shown, default=1.0) * 20
        ends = [
            min(max(end, floor), top)
            for interval in values
            for end in (interval.low, interval.high, interval.value)
            if math.isfinite(end)
        ]
        for place, interval in enumerate(values):
            if math.isfinite(interval.low) and math.isfinite(interval.high):
                axes.plot(
                    [interval.low, interval.high],
                    [place, place],
                    color=BLUE,
                    lw=2,
                    solid_capstyle="butt",
                )
            if math.isfinite(interval.value):
                axes.plot(max(interval.value, floor), place, "o", color=BLUE, ms=4.5)
        if ends and max(ends) > 8 * min(ends):
            room = max(1.3, (max(ends) / min(ends)) ** 0.05)
            axes.set_xlim(min(ends) / room, max(ends) * room)
            log_scale(axes, "x", max_ticks=3)
        else:
            # without room, points without whiskers would be on the frame
            axes.set_xlim(0.0, 1.12 * max(ends) if ends and max(ends) > 0 else None)
            axes.locator_params(axis="x", nbins=3)
        axes.set_xlabel(label)
        axes.grid(axis="x")
    left.set_yticks(
        range(len(buckets)), [shortened(bucket.label, 24) for bucket in buckets], fontsize=8
    )
    left.set_ylim(len(buckets) - 0.5, -0.5)
    return Plot(
        name=f"by-{row.replace('_', '-')}",
        title=f"By {_NAMES.get(row, row)}",
        about=(
            "Each part of the tokens alone, with its 95 % interval (k3 of few tokens has none);"
            " parts differ by more than chance if their intervals of mean |d| do not overlap."
        ),
        figure=figure,
    )


def _draw_effects(comparison: Comparison) -> Plot:
    rows = [("this", effect) for effect in comparison.effects]
    rows += [
        (f"control: {name}", effect) for name, row in comparison.controls.items() for effect in row
    ]
    figure, axes = new_figure(1.1 + 0.42 * len(rows))
    for place, (_, effect) in enumerate(rows):
        colour, mark = {"pass": (COLOURS["green"], "o"), "fail": (RED, "X")}.get(
            str(effect.verdict), (COLOURS["orange"], "D")
        )
        if effect.ratio.value > 0:
            axes.plot(effect.ratio.value, place, mark, color=colour, ms=6)
        if effect.ratio.low > 0:
            axes.plot(
                [effect.ratio.low, effect.ratio.high],
                [place, place],
                color=colour,
                lw=2.2,
                solid_capstyle="butt",
            )
    axes.axvline(1.0, color=INK, lw=1)
    log_scale(axes, "x")
    axes.set_yticks(
        range(len(rows)),
        [f"{shortened(name, 34)}\n{effect.metric}" for name, effect in rows],
        fontsize=8,
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"ratio to {shortened(comparison.against, 24, end=True)}", fontsize=8)
    axes.grid(axis="x")
    return Plot(
        name="comparison",
        title="Replay on and off",
        about=(
            "Ratios on the same tokens, with 95 % intervals. Replay is to come out left of 1; a"
            " control with wrong routes right of it."
        ),
        figure=figure,
    )


_PLOTS: Sequence[Callable[[GapReport], Plot | None]] = (
    _draw_limits,
    draw_scatter,
    draw_tail,
    draw_layers,
    draw_timelines,
)


# Where a log scale shows exact agreement
_FLOOR = 1e-9
_TICKS = 12


def draw_localisation(localisation: Localisation) -> Iterator[Plot]:
    """Yield the places, and the growth if the model has layers."""
    yield _draw_places(localisation)
    if len(localisation.growth) > 1:
        yield _draw_growth(localisation)


def _draw_places(localisation: Localisation) -> Plot:
    sites = [gap for gap in localisation.sites if gap.site.role != "selection"]
    figure, axes = new_figure(3.0)
    steps = range(len(sites))
    sizes = [
        value
        for gap in sites
        for value in (gap.alone, gap.rounding)
        if math.isfinite(value) and value > _FLOOR
    ]
    # the axis has room for the legend
    low, high = (min(sizes) / 20, max(sizes) * 30) if sizes else (_FLOOR, 1.0)
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
        axes.annotate(
            str(first.site),
            (place, max(first.alone, low)),
            xytext=(-9 if right else 9, 3),
            textcoords="offset points",
            ha="right" if right else "left",
            color=RED,
            fontsize=8,
        )
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


def _draw_growth(localisation: Localisation) -> Plot:
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
                [max(v, _FLOOR) for _, v in points],
                mark,
                color=colour,
                lw=1.6,
                ms=4,
                label=label,
            )
    axes.plot(
        range(len(rows)),
        [max(gap.carried_rounding, _FLOOR) for gap in rows],
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
    starts: list[tuple[int, str]] = []
    last = None
    for i, gap in enumerate(sites):
        layer = gap.site.layer
        if layer != last and 0 <= layer < 1 << 30:
            starts.append((i, str(layer)))
        last = layer
    return starts[:: -(-len(starts) // _TICKS) or 1]
