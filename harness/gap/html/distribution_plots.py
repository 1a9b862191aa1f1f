"""Plots of the tokens' distribution: logprobs, tail of |d|, routers by layer, timelines.

Each is drawn from a summary of bounded size, whatever the number of tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator

from rollproof.gap.agreement import overlap
from rollproof.gap.html.plot_parts import (
    BLUE,
    COLOURS,
    CYCLE,
    INK,
    MUTED,
    RED,
    Axes,
    Plot,
    log_scale,
    new_figure,
    shortened,
)
from rollproof.gap.token_pairs import FloatArray, TokenPairs

if TYPE_CHECKING:
    from rollproof.gap.gap_report import GapReport

__all__ = [
    "Density",
    "LayerMap",
    "Run",
    "Tail",
    "Timeline",
    "density",
    "draw_layers",
    "draw_scatter",
    "draw_tail",
    "draw_timelines",
    "layer_map",
    "tail",
    "timelines",
]

_CELLS = 48
# Logprobs below this share the lowest cells: one token at -60 must not squeeze all others
_LOWEST = -16.0
_POINTS = 240
_COLUMNS = 10
_TIMELINES = 8
# Worst tokens that a timeline marks; more would merge
_MARKS = 40
LARGE = 0.5
"""|d| from which a timeline marks a token: rho beyond 1.6."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Density:
    """Tokens by their two logprobs.

    Attributes:
        edges: ``(cells + 1,)``: the logprobs between cells.
        counts: ``(cells, cells)``: rows are the trainer's logprob, columns the rollout's.
        cut: tokens below the lowest edge on either axis; they are counted in its cells.
    """

    edges: FloatArray
    counts: npt.NDArray[np.int64]
    cut: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tail:
    """How many tokens have how large a |d|.

    Attributes:
        size: ``(points,)``, ascending: |d|.
        share: ``(points,)``: share of the tokens with a larger |d|.
        zero: share of the tokens with |d| = 0.
    """

    size: FloatArray
    share: FloatArray
    zero: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerMap:
    """Where the experts differ.

    Attributes:
        mismatch: ``(layers, columns)``: slot mismatch by layer of the routes' axis and by tenth of
            the sequence; NaN if nothing was captured.
    """

    mismatch: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Positions that one version sampled.

    Attributes:
        first: the first position.
        last: the position after the last.
        version: the version; ``None`` if it is unknown.
    """

    first: int
    last: int
    version: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The history of one sequence.

    Attributes:
        sequence: its name.
        runs: which versions sampled it.
        resumes: positions at which it was resumed.
        worst: positions and sizes of the largest |d|.
    """

    sequence: str
    runs: tuple[Run, ...]
    resumes: tuple[int, ...]
    worst: tuple[tuple[int, float], ...]


def density(pairs: TokenPairs) -> Density | None:
    """Count tokens by their two logprobs; ``None`` without a finite pair."""
    finite = pairs.finite
    if not finite.any():
        return None
    left, right = pairs.rollout[finite], pairs.trainer[finite]
    lowest = max(_LOWEST, float(min(left.min(), right.min(), -1e-3)))
    edges = np.linspace(lowest, 0.0, _CELLS + 1)
    column, row = (
        np.clip(np.searchsorted(edges, values, side="right") - 1, 0, _CELLS - 1)
        for values in (left, right)
    )
    counts = np.bincount(row * _CELLS + column, minlength=_CELLS * _CELLS).reshape(_CELLS, _CELLS)
    return Density(edges=edges, counts=counts, cut=int(((left < lowest) | (right < lowest)).sum()))


def tail(pairs: TokenPairs) -> Tail | None:
    """Return the share of tokens beyond each size of |d|; ``None`` if no |d| is above 0."""
    size = pairs.abs_diff
    size = size[np.isfinite(size)]
    above = np.sort(size[size > 0])
    if not len(above):
        return None
    # even steps on the log scale of the share, so that each of the last tokens has a point
    rank = np.unique(np.round(len(above) - np.geomspace(1, len(above), _POINTS)).astype(np.int64))
    return Tail(
        size=above[rank], share=(len(above) - rank) / len(size), zero=1 - len(above) / len(size)
    )


def layer_map(pairs: TokenPairs) -> LayerMap | None:
    """Return where in depth and sequence the experts differ; ``None`` without two routes."""
    left, right = pairs.routes.get("rollout_routes"), pairs.routes.get("trainer_routes")
    if left is None or right is None or not len(left):
        return None
    tokens, layers, top_k = left.shape
    column = np.minimum(
        pairs.index_in_sequence * _COLUMNS // np.repeat(pairs.lengths, pairs.lengths), _COLUMNS - 1
    )
    missed, seen = np.zeros((_COLUMNS, layers)), np.zeros((_COLUMNS, layers))
    step = 1 << 16
    for begin in range(0, tokens, step):
        common, complete = overlap(left[begin : begin + step], right[begin : begin + step])
        place = column[begin : begin + step]
        np.add.at(missed, place, np.where(complete, (top_k - common) / top_k, 0.0))
        np.add.at(seen, place, complete)
    return LayerMap(
        mismatch=np.divide(missed, seen, out=np.full_like(missed, np.nan), where=seen > 0).T
    )


def timelines(pairs: TokenPairs, *, count: int = _TIMELINES) -> tuple[Timeline, ...]:
    """Return the ``count`` sequences with most versions and resumes, then largest mean |d|.

    There are none if neither column exists.
    """
    version, since = pairs.columns.get("version"), pairs.columns.get("since_resume")
    if (version is None and since is None) or not pairs.n_tokens:
        return ()
    size = np.nan_to_num(pairs.abs_diff)
    inside = np.ones(pairs.n_tokens, bool)
    inside[pairs.starts] = False
    turns = np.zeros(pairs.n_tokens)
    if version is not None:
        turns[1:] += (version[1:] != version[:-1]) & inside[1:]
    if since is not None:
        turns += since == 0
    rank = np.lexsort(
        (
            -np.add.reduceat(size, pairs.starts) / pairs.lengths,
            -np.add.reduceat(turns, pairs.starts),
        )
    )
    return tuple(_timeline(pairs, int(sequence), size) for sequence in rank[:count])


def _timeline(pairs: TokenPairs, sequence: int, size: FloatArray) -> Timeline:
    begin = int(pairs.starts[sequence])
    own = slice(begin, begin + int(pairs.lengths[sequence]))
    count = own.stop - own.start
    place = (
        np.asarray(pairs.columns["position"][own], dtype=np.int64)
        if "position" in pairs.columns
        else np.arange(count)
    )
    version = (
        pairs.columns["version"][own]
        if "version" in pairs.columns
        else np.full(count, None, dtype=object)
    )
    # a gap in the positions (tokens that the mask leaves out) ends a run too
    turns = np.flatnonzero((version[1:] != version[:-1]) | (np.diff(place) != 1)) + 1
    runs = [
        Run(first=int(place[first]), last=int(place[last - 1]) + 1, version=_plain(version[first]))
        for first, last in zip([0, *turns], [*turns, count], strict=True)
    ]
    since = (
        pairs.columns["since_resume"][own]
        if "since_resume" in pairs.columns
        else np.full(count, -1)
    )
    large = np.flatnonzero(size[own] > LARGE)
    large = np.sort(large[np.argsort(-size[own][large], kind="stable")[:_MARKS]])
    return Timeline(
        sequence=str(_plain(pairs.sequences[sequence])),
        runs=tuple(_joined(runs)),
        resumes=tuple(int(place[i]) for i in np.flatnonzero(since == 0)),
        worst=tuple((int(place[i]), float(size[own][i])) for i in large),
    )


def _joined(runs: Sequence[Run], max_runs: int = 200) -> Sequence[Run]:
    """Join adjacent runs of one version if there are too many to be distinguished."""
    if len(runs) <= max_runs:
        return runs
    out = [runs[0]]
    for run in runs[1:]:
        if run.version == out[-1].version:
            out[-1] = Run(first=out[-1].first, last=run.last, version=run.version)
        else:
            out.append(run)
    return out[:max_runs]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


# Rows of the heat map; a deeper model's layers share them
_LAYERS = 96


_SHADES = 6


# Bounds of the heat map's shades: equal for every report, so that a healthy one looks pale
_MISMATCH = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


_TAUS = (2, 10)


def draw_scatter(report: GapReport) -> Plot | None:
    """Draw the tokens by their two logprobs."""
    cells = density(report.pairs)
    if cells is None:
        return None
    figure, axes = new_figure(3.2)
    counts = cells.counts.astype(float)
    highest = max(float(counts.max()), 2.0)
    shades = _shaded(
        axes, cells.edges, cells.edges, counts, np.geomspace(1.0, highest, _SHADES + 1)
    )
    low = float(cells.edges[0])
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
        f" Tokens below {low:.0f} nats ({cells.cut:,}) are counted in the outermost cells."
        if cells.cut
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


def draw_tail(report: GapReport) -> Plot | None:
    """Draw the share of tokens beyond each |d|."""
    curve = tail(report.pairs)
    if curve is None:
        return None
    figure, axes = new_figure(3.3)
    axes.plot(curve.size, curve.share, color=BLUE, lw=1.8, drawstyle="steps-post")
    axes.set(xlabel="|d| (nats)", ylabel="share of tokens beyond")
    left = max(float(curve.size[-1]) * 1e-6, float(curve.size[0]))
    right = float(curve.size[-1]) * 3
    axes.set_xlim(left, right)
    axes.set_ylim(float(curve.share.min()) / 2, 1.3)
    log_scale(axes, "x")
    log_scale(axes, "y")
    for name, label, place in (
        ("abs_diff_p50", "p50", 0.5),
        ("abs_diff_p99", "p99", 0.01),
        ("abs_diff_p999", "p99.9", 0.001),
    ):
        value = report.panel.metrics[name].value
        if value > left:
            axes.plot(value, place, "o", color=RED, ms=5)
            # on the free side of the curve, away from the lines
            apart = (
                {"xytext": (-6, -3), "ha": "right", "va": "top"}
                if value < math.log(_TAUS[0])
                else {"xytext": (6, 3)}
            )
            axes.annotate(label, (value, place), textcoords="offset points", **apart)
    for tau in _TAUS:
        if left < math.log(tau) < right:
            axes.axvline(math.log(tau), color=MUTED, lw=0.8, ls=":")
            side = (-3, "right") if tau == _TAUS[0] else (3, "left")
            axes.annotate(
                f"F({tau})",
                (math.log(tau), 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(side[0], 2),
                ha=side[1],
                va="bottom",
                textcoords="offset points",
                color=MUTED,
                annotation_clip=False,
            )
    axes.grid()
    zero = f" {curve.zero:.1%} of the tokens have equal logprobs." if curve.zero else ""
    return Plot(
        name="tail",
        title="How large |d| gets",
        about=(
            "The share of tokens whose logprobs differ by more, both axes on a log scale. A bend"
            f" that flattens to the right is a second, rarer cause; a straight fall is noise.{zero}"
        ),
        figure=figure,
    )


def draw_layers(report: GapReport) -> Plot | None:
    """Draw the mismatch of the routers by layer and place in the sequence."""
    layer_mismatch = layer_map(report.pairs)
    if layer_mismatch is None:
        return None
    mismatch = layer_mismatch.mismatch
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


def draw_timelines(report: GapReport) -> Plot | None:
    """Draw the sequences with most versions and resumes."""
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
                label = shortened(
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
    axes.set_yticks(range(len(rows)), [shortened(row.sequence, 14) for row in rows])
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


def _shaded(
    axes: Axes, across: Any, down: Any, values: Any, ends: Any
) -> list[tuple[float, float, float]]:
    """Draw cells of ``values`` ``(rows, columns)``, by the shades' ``ends``.

    Returns ``(from, to, alpha)`` of each shade; nothing if no value is above 0.
    """
    # one outline a shade: small, and readable on any background
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


def _version_order(version: Any) -> tuple[bool, float, str]:
    number = isinstance(version, int | float)
    return not number, float(version) if number else 0.0, str(version)
