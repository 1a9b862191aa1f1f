"""Plots: the pictures of a gap as figures, narrow enough for a phone, each with what it shows in
words.

Imports matplotlib, which comes with the extra ``report``. Colours are Okabe and Ito's, which
colour-blind people tell apart; no picture depends on colour alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator

from rollproof.gap.buckets import Bucket
from rollproof.gap.html.distribution_plots import LARGE, density, layer_map, tail, timelines
from rollproof.gap.html.localisation_plots import draw_localisation
from rollproof.gap.html.plot_parts import (
    BLUE,
    COLOURS,
    CYCLE,
    INK,
    MUTED,
    RED,
    WIDTH,
    Axes,
    Plot,
    log_scale,
    new_figure,
    style,
)
from rollproof.gap.intervals import Interval
from rollproof.gap.limits import Limit, Side

if TYPE_CHECKING:
    from rollproof.gap.gap_report import GapReport
    from rollproof.gap.localise.localisation import Localisation
    from rollproof.gap.trainer_comparison import Comparison

__all__ = ["COLOURS", "Plot", "draw_plots", "style"]

_LAYERS = 96
"""Rows of the heat map; a deeper model's layers share them."""
_SHADES = 6
_MISMATCH = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Bounds of the heat map's shades: the same for every report, so that a healthy one looks pale."""
_TAUS = (2, 10)
_NOTHING = 1e-12
"""A mean |d| or k3 below this is rounding, and would stretch a log scale over decades of nothing."""
_NAMES: Mapping[str, str] = {
    "staleness": "age of the weights, in versions",
    "since_resume": "tokens since a resume",
    "part": "part of the sequence",
    "replica": "engine replica",
    "version": "weight version",
    "position_decile": "place in the sequence, 0 to 1",
    "rollout_logprob_decile": "rollout logprob, in nats",
    "temperature": "sampling temperature",
}
"""What a row of buckets is by."""


def draw_plots(
    report: GapReport,
    comparison: Comparison | None = None,
    localisation: Localisation | None = None,
) -> Iterator[Plot]:
    """Every plot that the report's data allow, in the order of the page."""
    with style():
        for maker in _MAKERS:
            plot = maker(report)
            if plot is not None:
                yield plot
        for row, buckets in report.buckets.items():
            yield _drift(row, buckets)
        if comparison is not None:
            yield _effects(comparison)
        if localisation is not None:
            yield from draw_localisation(localisation)


def _limits(report: GapReport) -> Plot | None:
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
    """The distance from a perfect match: 1 for a correlation and for a ratio, else 0."""
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


def _scatter(report: GapReport) -> Plot | None:
    found = density(report.pairs)
    if found is None:
        return None
    figure, axes = new_figure(3.2)
    counts = found.counts.astype(float)
    most = max(float(counts.max()), 2.0)
    shades = _shaded(axes, found.edges, found.edges, counts, np.geomspace(1.0, most, _SHADES + 1))
    low = float(found.edges[0])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
    axes.plot([low, 0], [low, 0], color=RED, lw=1, ls=(0, (4, 3)))
    axes.set(
        xlim=(low, 0),
        ylim=(low, 0),
        xlabel="rollout logprob (nats)",
        ylabel="trainer logprob (nats)",
    )
    _legend(axes, shades, "tokens")
    cut = (
        f" Tokens below {low:.0f} nats ({found.cut:,}) are counted in the outermost cells."
        if found.cut
        else ""
    )
    return Plot(
        name="scatter",
        title="Rollout against trainer",
        about=(
            "Tokens by their two logprobs; equal ones lie on the dashed line. A tilt is a"
            " temperature, a shift to one side a truncated support, a cloud without a line a"
            f" misalignment.{cut}"
        ),
        figure=figure,
    )


def _tail(report: GapReport) -> Plot | None:
    found = tail(report.pairs)
    if found is None:
        return None
    figure, axes = new_figure(3.3)
    axes.plot(found.size, found.share, color=BLUE, lw=1.8, drawstyle="steps-post")
    axes.set(xlabel="|d| (nats)", ylabel="share of tokens beyond")
    least, most = max(float(found.size[-1]) * 1e-6, float(found.size[0])), float(found.size[-1]) * 3
    axes.set_xlim(least, most)
    axes.set_ylim(float(found.share.min()) / 2, 1.3)
    log_scale(axes, "x")
    log_scale(axes, "y")
    for name, label, place in (
        ("abs_diff_p50", "p50", 0.5),
        ("abs_diff_p99", "p99", 0.01),
        ("abs_diff_p999", "p99.9", 0.001),
    ):
        value = report.panel.metrics[name].value
        if value > least:
            axes.plot(value, place, "o", color=RED, ms=5)
            # on the free side of the curve, and away from the lines
            apart = (
                {"xytext": (-6, -3), "ha": "right", "va": "top"}
                if value < math.log(_TAUS[0])
                else {"xytext": (6, 3)}
            )
            axes.annotate(label, (value, place), textcoords="offset points", **apart)
    for tau in _TAUS:
        if least < math.log(tau) < most:
            axes.axvline(math.log(tau), color=MUTED, lw=0.8, ls=":")
            side = (-3, "right") if tau == _TAUS[0] else (3, "left")
            axes.annotate(
                f"F({tau})", (math.log(tau), 1.0), xycoords=("data", "axes fraction"), xytext=(side[0], 2), ha=side[1], va="bottom",
                textcoords="offset points", color=MUTED, annotation_clip=False,
            )  # fmt: skip
    axes.grid()
    zero = f" {found.zero:.1%} of the tokens have equal logprobs." if found.zero else ""
    return Plot(
        name="tail",
        title="How large |d| gets",
        about=(
            "The share of tokens whose logprobs differ by more, both axes on a log scale. A bend"
            f" that flattens to the right is a second, rarer cause; a straight fall is noise.{zero}"
        ),
        figure=figure,
    )


def _layers(report: GapReport) -> Plot | None:
    found = layer_map(report.pairs)
    if found is None:
        return None
    mismatch = found.mismatch
    layers, columns = mismatch.shape
    figure, axes = new_figure(min(1.5 + 0.24 * layers, 5.5))
    if layers > _LAYERS:
        cuts = np.array_split(np.arange(layers), _LAYERS)
        mismatch = np.stack([np.nanmean(mismatch[rows], axis=0) for rows in cuts])
    steps = np.linspace(0, layers, len(mismatch) + 1)
    shades = _shaded(axes, np.linspace(0, 1, columns + 1), steps, mismatch, np.array(_MISMATCH))
    axes.set(
        xlim=(0, 1),
        ylim=(layers, 0),
        xlabel="place in the sequence, 0 to 1",
        ylabel="layer of the routes' axis",
    )
    if layers <= 16:
        axes.set_yticks(np.arange(layers) + 0.5, [str(layer) for layer in range(layers)])
    _legend(axes, shades, "slots that differ", percent=True)
    return Plot(
        name="routers",
        title="Where the experts differ",
        about=(
            "Share of expert slots that the other side did not choose, by layer and place; blank:"
            " none differ, or nothing was captured. A full layer is a shifted one, a full column a"
            " misaligned end; numerics grow slowly with depth."
        ),
        figure=figure,
    )


def _timelines(report: GapReport) -> Plot | None:
    rows = timelines(report.pairs)
    if not rows:
        return None
    figure, axes = new_figure(1.1 + 0.42 * len(rows))
    versions = list(
        dict.fromkeys(sorted((run.version for row in rows for run in row.runs), key=_version_order))
    )
    end = max(run.last for row in rows for run in row.runs)
    for place, row in enumerate(rows):
        for run in row.runs:
            colour = (
                COLOURS[CYCLE[versions.index(run.version) % len(CYCLE)]]
                if run.version is not None
                else MUTED
            )
            axes.barh(
                place,
                run.last - run.first,
                left=run.first,
                height=0.42,
                color=colour,
                alpha=0.65,
                lw=0,
            )
            if run.version is not None and run.last - run.first > 0.06 * end:
                label = _cut(
                    str(run.version) if isinstance(run.version, str) else f"v{run.version}", 8
                )
                # between the bars of resumes, where a version spans some
                ends = [
                    run.first,
                    *(at for at in row.resumes if run.first < at < run.last),
                    run.last,
                ]
                begin, stop = max(itertools.pairwise(ends), key=lambda pair: pair[1] - pair[0])
                axes.text((begin + stop) / 2, place, label, ha="center", va="center", fontsize=8)
        if row.worst:
            axes.plot(
                [at for at, _ in row.worst], [place - 0.33] * len(row.worst), "v", color=RED, ms=3.5
            )
        if row.resumes:
            axes.vlines(row.resumes, place - 0.3, place + 0.3, color=INK, lw=1.6)
    axes.set_yticks(range(len(rows)), [_cut(row.sequence, 14) for row in rows])
    axes.set(
        xlim=(0, end), ylim=(len(rows) - 0.4, -0.7), xlabel="position (tokens)", ylabel="sequence"
    )
    return Plot(
        name="timeline",
        title="Token timelines",
        about=(
            "Sequences with the most versions and resumes. Colour and label: the version that"
            f" sampled; bars across: aborted and resumed there; triangles: |d| above {LARGE}."
            " Triangles behind a bar point to the resume, triangles in one colour to a version."
        ),
        figure=figure,
    )


def _drift(row: str, buckets: Sequence[Bucket]) -> Plot:
    figure = Figure(figsize=(WIDTH, 1.1 + 0.26 * len(buckets)))
    left, right = figure.subplots(1, 2, sharey=True, gridspec_kw={"wspace": 0.12})
    for axes, label, name in ((left, "k3 (nats)", "k3"), (right, "mean |d| (nats)", "abs_diff")):
        values = [getattr(bucket, name) for bucket in buckets]
        shown = [interval.value for interval in values if interval.value > _NOTHING]
        # whiskers of a part with a handful of uneven sequences may span twenty decades: they leave
        # the axis
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
            log_scale(axes, "x", most=3)
        else:
            # points without whiskers would stand on the frame
            axes.set_xlim(0.0, 1.12 * max(ends) if ends and max(ends) > 0 else None)
            axes.locator_params(axis="x", nbins=3)
        axes.set_xlabel(label)
        axes.grid(axis="x")
    left.set_yticks(range(len(buckets)), [_cut(bucket.label, 24) for bucket in buckets], fontsize=8)
    left.set_ylim(len(buckets) - 0.5, -0.5)
    return Plot(
        name=f"by-{row.replace('_', '-')}",
        title=f"By {_NAMES.get(row, row)}",
        about=(
            "Each part of the tokens alone, with its 95 % interval (k3 of few tokens has none);"
            " parts whose intervals of mean |d| do not overlap differ by more than chance."
        ),
        figure=figure,
    )


def _effects(comparison: Comparison) -> Plot:
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
        [f"{_cut(name, 34)}\n{effect.metric}" for name, effect in rows],
        fontsize=8,
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"ratio to {_cut(comparison.against, 24, end=True)}", fontsize=8)
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


_MAKERS: Sequence[Callable[[GapReport], Plot | None]] = (
    _limits,
    _scatter,
    _tail,
    _layers,
    _timelines,
)


def _shaded(
    axes: Axes, across: Any, down: Any, values: Any, ends: Any
) -> list[tuple[float, float, float]]:
    """Cells of ``values`` ``(rows, columns)`` as one outline a shade (small, and readable on any
    ground), by the shades' ``ends``.

    Returns ``(from, to, alpha)`` of each; nothing where no value is above 0.
    """
    if not (np.isfinite(values) & (values > 0)).any():
        return []
    shade = np.clip(np.searchsorted(ends, values, side="right") - 1, 0, _SHADES - 1)
    out = []
    for level in range(_SHADES):
        cells = np.argwhere((shade == level) & np.isfinite(values) & (values > 0))
        alpha = 0.2 + 0.8 * level / (_SHADES - 1)
        out.append((float(ends[level]), float(ends[level + 1]), alpha))
        if len(cells):
            outline = Outline.make_compound_path(
                *(_cell(across, down, row, column) for row, column in cells)
            )
            axes.add_patch(PathPatch(outline, facecolor=BLUE, alpha=alpha, lw=0))
    return out


def _cell(across: Any, down: Any, row: int, column: int) -> Outline:
    left, right, top, bottom = across[column], across[column + 1], down[row], down[row + 1]
    return Outline(
        [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], closed=True
    )


def _legend(
    axes: Axes, shades: Sequence[tuple[float, float, float]], title: str, *, percent: bool = False
) -> None:
    if not shades:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color=MUTED)
        return
    form = ".1%" if percent else ",.0f"
    square: Any = Rectangle  # its constructor is not typed
    handles = [
        square(
            (0, 0),
            1,
            1,
            facecolor=BLUE,
            alpha=alpha,
            lw=0,
            label=f"\N{GREATER-THAN OR EQUAL TO} {low:{form}}" if low else "> 0",
        )
        for low, _, alpha in reversed(shades)
    ]
    # a legend of the figure, not of the axes: only for that the layout makes room
    axes.figure.legend(
        handles=handles,
        title=title,
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        handlelength=1.2,
    )


def _cut(text: str, most: int, *, end: bool = False) -> str:
    """At most that many characters: the first, or of a path the last."""
    clean = "".join(char if char.isprintable() else "?" for char in text)
    if len(clean) <= most:
        return clean
    return (
        f"\N{HORIZONTAL ELLIPSIS}{clean[1 - most :]}"
        if end
        else f"{clean[: most - 1]}\N{HORIZONTAL ELLIPSIS}"
    )


def _version_order(version: Any) -> tuple[bool, float, str]:
    number = isinstance(version, int | float)
    return not number, float(version) if number else 0.0, str(version)
