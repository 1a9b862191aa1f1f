"""Generate the covering array of ``rollproof.replay.megatron.covered_setups``, and count its pairs.

``python -m tools.covering_array`` prints what the frozen rows cover; with ``--write`` it generates
them again. All configurations can be enumerated (some 10**5), so what is feasible is known exactly,
and a greedy choice among them covers it.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path

import numpy as np
import numpy.typing as npt

import rollproof.replay
from rollproof.core.contract import LayerAxis, Rows
from rollproof.layouts import Alignment, Layout, Mesh
from rollproof.replay.megatron.covered_setups import (
    CPU_RANKS,
    FACTORS,
    CoveringRow,
    frozen_rows,
    world_size,
)

__all__ = ["coverage", "feasible", "generated", "layout_of", "violated"]

_MOST_RANKS = 8

_RULES: Mapping[str, Callable[[CoveringRow], bool]] = {
    "the trainer itself records one row per token (R2 with rows T)": lambda c: (
        c["mode"] == "R3" or c["rows"] == "T"
    ),
    "chunks alternate between pipeline ranks (vpp > 1 needs pp > 1)": lambda c: (
        c["vpp"] == 1 or c["pp"] != 1
    ),
    "rows are sliced over tensor-parallel ranks (sp needs tp > 1)": lambda c: (
        not c["sp"] or c["tp"] != 1
    ),
    "Megatron wants sp where tp > 1 and ep > 1": lambda c: (
        c["tp"] == 1 or c["ep"] == 1 or c["sp"] == 1
    ),
    "experts are divided over the ranks of one pipeline stage (ep divides dp * tp * cp)": (
        lambda c: _size(c, "dp") * _size(c, "tp") * _size(c, "cp") % _size(c, "ep") == 0
    ),
    f"at most {_MOST_RANKS} ranks": lambda c: world_size(c) <= _MOST_RANKS,
}
"""What cannot be combined, with the reason as the key."""


def _size(config: CoveringRow, name: str) -> int:
    return int(config[name])


def violated(config: CoveringRow) -> tuple[str, ...]:
    """Return the rules that a configuration breaks."""
    return tuple(why for why, holds in _RULES.items() if not holds(config))


@cache
def feasible() -> npt.NDArray[np.int8]:
    """Return the index of each factor's value for every configuration that breaks no rule:
    ``(configurations, factors)``.
    """
    names = list(FACTORS)
    sizes = product(*(range(len(values)) for values in FACTORS.values()))
    sound = [
        row
        for row in sizes
        if not violated({name: FACTORS[name][i] for name, i in zip(names, row, strict=True)})
    ]
    return np.array(sound, dtype=np.int8)


def layout_of(row: CoveringRow, *, num_experts: int = 64, top_k: int = 2) -> Layout:
    """Return the layout of a row in Megatron's conventions.

    It has two layers for each model chunk; the first one is dense if the row says so.
    """
    layers = 2 * _size(row, "pp") * _size(row, "vpp")
    sizes = {name: _size(row, name) for name in ("dp", "tp", "pp", "vpp", "cp")}
    return Layout(
        num_layers=layers,
        num_experts=num_experts,
        top_k=top_k,
        moe_layers=tuple(range(_size(row, "dense_first"), layers)),
        layer_axis=LayerAxis.MOE if row["mode"] == "R2" else LayerAxis.ALL,
        held=Rows(str(row["rows"])),
        mesh=Mesh(**sizes, sequence_parallel=bool(row["sp"])),
        packed=bool(row["packing"]),
        alignment=Alignment(by=("tp", "2cp")),
    )


def coverage(rows: Iterable[CoveringRow], strength: int) -> tuple[int, int]:
    """Count the feasible combinations of ``strength`` settings: those in the rows, and all."""
    covered, every = (
        np.unique(_numbers(table, strength)) for table in (_indexes(rows), feasible())
    )
    return len(np.intersect1d(covered, every)), len(every)


def generated() -> list[dict[str, int | str]]:
    """Return rows that cover every feasible pair, by a greedy choice.

    Rows that fit a CPU come first, then larger ones for what is left. Among the configurations with
    most new pairs, the one with most new triples is taken.
    """
    table = feasible()
    ranks = np.array([world_size(_config(row)) for row in table])
    pairs, triples = _numbers(table, 2), _numbers(table, 3)
    new_pairs, new_triples = (
        np.ones(int(numbers.max()) + 1, dtype=bool) for numbers in (pairs, triples)
    )
    chosen = []
    for pool in (np.flatnonzero(ranks <= CPU_RANKS), np.arange(len(table))):
        while (gains := new_pairs[pairs[pool]].sum(axis=1)).max():
            tied = pool[gains == gains.max()]
            best = int(tied[new_triples[triples[tied]].sum(axis=1).argmax()])
            chosen.append(best)
            new_pairs[pairs[best]] = new_triples[triples[best]] = False
    return [_config(table[i]) for i in chosen]


def _config(row: npt.NDArray[np.int8]) -> dict[str, int | str]:
    return {name: FACTORS[name][int(i)] for name, i in zip(FACTORS, row, strict=True)}


def _indexes(rows: Iterable[CoveringRow]) -> npt.NDArray[np.int8]:
    return np.array(
        [[FACTORS[name].index(row[name]) for name in FACTORS] for row in rows], dtype=np.int8
    ).reshape(-1, len(FACTORS))


def _numbers(table: npt.NDArray[np.int8], strength: int) -> npt.NDArray[np.int64]:
    """Return a number for each combination of values: ``(configurations, combinations)``.

    No factor has more than eight values.
    """
    out = []
    for i, columns in enumerate(combinations(range(table.shape[1]), strength)):
        number = np.full(len(table), i, dtype=np.int64)
        for column in columns:
            number = number * 8 + table[:, column]
        out.append(number)
    return np.stack(out, axis=1)


def _main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--write"]:
        path = Path(*rollproof.replay.__path__) / "covering.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(FACTORS), lineterminator="\n")
            writer.writeheader()
            writer.writerows(generated())
    elif arguments:
        sys.stderr.write("usage: python -m tools.covering_array [--write]\n")
        return 254
    rows = frozen_rows()
    fit = sum(world_size(row) <= CPU_RANKS for row in rows)
    sys.stdout.write(
        f"{len(rows)} rows, {fit} of them on at most {CPU_RANKS} ranks; {len(feasible()):,}"
        " configurations are feasible\n"
    )
    for strength in (2, 3):
        covered, total = coverage(rows, strength)
        sys.stdout.write(
            f"{strength}-way: {covered:,} of {total:,} combinations, {covered / total:.1%}\n"
        )
    return 0 if coverage(rows, 2)[0] == coverage(rows, 2)[1] else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
