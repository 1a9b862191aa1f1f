"""Setups from a covering array: every feasible pair of settings is in one of its rows.

The rows are frozen in ``covering.csv``, so that a failing row keeps its number;
``tools.covering_array`` generated them, and counts what they cover. Those that fit the CPU ranks
of megatron-core become setups.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import TypeAlias

from rollproof.core.contract import LayerAxis, Rows
from rollproof.core.replay_contract import Recompute, ReplayMode
from rollproof.replay.megatron.megatron_setups import Dispatcher, MegatronSetup

__all__ = [
    "CPU_RANKS",
    "FACTORS",
    "CoveringRow",
    "covering_setups",
    "frozen_rows",
    "unfit",
    "world_size",
]

CoveringRow: TypeAlias = "Mapping[str, int | str]"
"""The value of each factor."""

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
"""Route rows of the engine (R3) or of the recording pass (R2), mode, parallel sizes, sequence
parallelism, recompute, packed or padded, a dense first layer, token dispatcher.
"""
CPU_RANKS = 4
"""Most processes of a CPU run on gloo."""
_ROWS = {"T-1": Rows.FORWARDED, "T": Rows.ALL, "captured-prefix": Rows.CAPTURED_PREFIX}


def frozen_rows() -> tuple[dict[str, int | str], ...]:
    """Return the rows of ``covering.csv``, in order."""
    text = resources.files("rollproof.replay").joinpath("covering.csv").read_text(encoding="utf-8")
    types = {name: type(values[0]) for name, values in FACTORS.items()}
    return tuple(
        {name: types[name](value) for name, value in row.items()}
        for row in csv.DictReader(io.StringIO(text))
    )


def world_size(row: CoveringRow) -> int:
    """Return the number of ranks that a row takes: ``dp * tp * pp * cp``."""
    return int(row["dp"]) * int(row["tp"]) * int(row["pp"]) * int(row["cp"])


def covering_setups() -> Iterator[tuple[int, MegatronSetup, Recompute]]:
    """Yield ``(row number, setup, recompute)`` for each row that is not ``unfit``.

    There are as many layers as chunks, at least four. In mode R2 payloads have columns for MoE
    layers only, as the trainer records them.
    """
    for number, row in enumerate(frozen_rows()):
        if unfit(row):
            continue
        # a packed row has one sequence to a microbatch of a rank: without Transformer Engine no
        # attention keeps several apart. Its length is its own, except with the allgather
        # dispatcher, for which Megatron refuses that
        dp, packed, stages = int(row["dp"]), bool(row["packing"]), int(row["pp"]) * int(row["vpp"])
        layers = -(-4 // stages) * stages
        dispatcher = Dispatcher(str(row["dispatcher"]))
        setup = MegatronSetup(
            name=f"covering-{number}",
            dp=dp,
            cp=int(row["cp"]),
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            vpp=int(row["vpp"]),
            ep=int(row["ep"]),
            dispatcher=dispatcher,
            num_layers=layers,
            moe_layers=tuple(range(int(row["dense_first"]), layers)),
            mode=ReplayMode(str(row["mode"])),
            rows=_ROWS[str(row["rows"])],
            layer_axis=LayerAxis.MOE if row["mode"] == "R2" else LayerAxis.ALL,
            own_widths=packed and dispatcher is Dispatcher.ALLTOALL,
            microbatches=4,
            microbatch_size=dp if packed else 2 * dp,
        )
        yield number, setup, Recompute(str(row["recompute"]))


def unfit(row: CoveringRow) -> str:
    """Return why a row does not run on CPU ranks; empty if it does."""
    if world_size(row) > CPU_RANKS:
        return f"needs {world_size(row)} processes, above {CPU_RANKS}"
    if int(row["tp"]) > 1 and not row["sp"]:
        return (
            "Megatron refuses to train MoE layers on tensor-parallel ranks without sequence"
            " parallelism"
        )
    return ""
