"""Covering: configurations of a replaying trainer in which every pair of settings that can be
combined is.

The rows are frozen in ``covering.csv``, so that a failing row has a number for good; tests take
them from there. As all configurations can be enumerated (some 10**5), what is feasible is known
exactly, and a greedy choice among them covers it.

``python -m rollproof.replay.covering`` prints what the frozen rows cover; with ``--write`` it makes
them anew.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import combinations, product
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import LayerAxis, Rows
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Mesh
from rollproof.layouts.padding import Alignment

__all__ = [
    "CPU_RANKS",
    "FACTORS",
    "coverage",
    "feasible",
    "frozen_rows",
    "generated",
    "layout_of",
    "violated",
    "world_size",
]

Config: TypeAlias = "Mapping[str, int | str]"

FACTORS: Mapping[str, tuple[int | str, ...]] = {
    "rows": ("T-1", "T", "captured-prefix"),
    "mode": ("R2", "R3"),
    "dp": (1, 2),
    "tp": (1, 2, 4),
    "ep": (1, 2, 4),
    "pp": (1, 2, 4),
    "vpp": (1, 2, 3),
    "cp": (1, 2, 4),
    "sp": (0, 1),
    "recompute": ("none", "selective", "full"),
    "packing": (0, 1),
    "dense_first": (0, 1),
    "dispatcher": ("allgather", "alltoall"),
}
"""Rows of the engine (R3) or of the recording pass (R2), mode, sizes, sequence parallelism,
recompute, packed or padded, a dense first layer, token dispatcher."""
CPU_RANKS = 4
"""Processes that a CPU run on gloo may have."""
_MOST_RANKS = 8

_RULES: Mapping[str, Callable[[Config], bool]] = {
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
"""What cannot be combined, and why."""


def _size(config: Config, name: str) -> int:
    return int(config[name])


def world_size(config: Config) -> int:
    """Ranks that a configuration takes: ``dp * tp * pp * cp``."""
    return _size(config, "dp") * _size(config, "tp") * _size(config, "pp") * _size(config, "cp")


def violated(config: Config) -> tuple[str, ...]:
    """The rules that a configuration breaks."""
    return tuple(why for why, holds in _RULES.items() if not holds(config))


def frozen_rows() -> tuple[dict[str, int | str], ...]:
    """The rows of ``covering.csv``, in order. Those with ``world_size(row) <= CPU_RANKS`` fit a CPU
    run.
    """
    text = resources.files("rollproof.replay").joinpath("covering.csv").read_text(encoding="utf-8")
    types = {name: type(values[0]) for name, values in FACTORS.items()}
    return tuple(
        {name: types[name](value) for name, value in row.items()}
        for row in csv.DictReader(io.StringIO(text))
    )


@cache
def feasible() -> npt.NDArray[np.int8]:
    """``(configurations, factors)``: the index of each factor's value, for every configuration that
    breaks no rule.
    """
    names = list(FACTORS)
    sizes = product(*(range(len(values)) for values in FACTORS.values()))
    kept = [
        row
        for row in sizes
        if not violated({name: FACTORS[name][i] for name, i in zip(names, row, strict=True)})
    ]
    return np.array(kept, dtype=np.int8)


def layout_of(row: Config, *, num_experts: int = 64, top_k: int = 2) -> Layout:
    """The layout of a row in Megatron's conventions: two layers for each model chunk, of which the
    first is dense where the row says so.
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


def coverage(rows: Iterable[Config], strength: int) -> tuple[int, int]:
    """How many of the feasible combinations of ``strength`` settings the rows hold, and how many
    there are.
    """
    held, all_of = (np.unique(_numbers(table, strength)) for table in (_indexes(rows), feasible()))
    return len(np.intersect1d(held, all_of)), len(all_of)


def generated() -> list[dict[str, int | str]]:
    """Rows that hold every feasible pair: first those that fit a CPU, greedily, then larger ones
    for what is left.

    Among the configurations with most new pairs, the one with most new triples is taken.
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


def _indexes(rows: Iterable[Config]) -> npt.NDArray[np.int8]:
    return np.array(
        [[FACTORS[name].index(row[name]) for name in FACTORS] for row in rows], dtype=np.int8
    ).reshape(-1, len(FACTORS))


def _numbers(table: npt.NDArray[np.int8], strength: int) -> npt.NDArray[np.int64]:
    """``(configurations, combinations of factors)``: a number for each combination of values; no
    factor has more than eight.
    """
    out = []
    for i, columns in enumerate(combinations(range(table.shape[1]), strength)):
        number = np.full(len(table), i, dtype=np.int64)
        for column in columns:
            number = number * 8 + table[:, column]
        out.append(number)
    return np.stack(out, axis=1)


def _main(arguments: Sequence[str]) -> int:
    path = Path(__file__).with_name("covering.csv")
    if list(arguments) == ["--write"]:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(FACTORS), lineterminator="\n")
            writer.writeheader()
            writer.writerows(generated())
    elif arguments:
        sys.stderr.write("usage: python -m rollproof.replay.covering [--write]\n")
        return 254
    rows = frozen_rows()
    fit = sum(world_size(row) <= CPU_RANKS for row in rows)
    sys.stdout.write(
        f"{len(rows)} rows, {fit} of them on at most {CPU_RANKS} ranks; {len(feasible()):,}"
        " configurations are feasible\n"
    )
    for strength in (2, 3):
        held, total = coverage(rows, strength)
        sys.stdout.write(
            f"{strength}-way: {held:,} of {total:,} combinations, {100 * held / total:.1f} %\n"
        )
    return 0 if coverage(rows, 2)[0] == coverage(rows, 2)[1] else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
