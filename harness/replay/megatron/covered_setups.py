"""Covering: the rows of the covering array that run on megatron-core with CPU ranks, as setups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rollproof.core.contract import LayerAxis, Rows
from rollproof.core.replay_contract import Recompute, ReplayMode
from rollproof.replay.covering import CPU_RANKS, frozen_rows, world_size
from rollproof.replay.megatron.megatron_setups import Dispatcher, Setup

__all__ = ["covering_setups", "unfit"]

_ROWS = {"T-1": Rows.FORWARDED, "T": Rows.ALL, "captured-prefix": Rows.CAPTURED_PREFIX}


def covering_setups() -> Iterator[tuple[int, Setup, Recompute]]:
    """``(row number, setup, recompute)`` for each row that is not ``unfit``.

    A packed row has one sequence to a microbatch of a rank: without Transformer Engine no attention
    keeps several apart. Its length is its own, except with the allgather dispatcher, for which
    Megatron refuses that. Layers are as many as chunks, at least four. In mode R2 payloads have
    columns for MoE layers only, as the trainer records them.
    """
    for number, row in enumerate(frozen_rows()):
        if unfit(row):
            continue
        dp, packed, stages = int(row["dp"]), bool(row["packing"]), int(row["pp"]) * int(row["vpp"])
        layers = -(-4 // stages) * stages
        dispatcher = Dispatcher(str(row["dispatcher"]))
        setup = Setup(
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


def unfit(row: Mapping[str, int | str]) -> str:
    """Why a row is not run on CPU ranks; empty where it is."""
    if world_size(row) > CPU_RANKS:
        return f"needs {world_size(row)} processes, above {CPU_RANKS}"
    if int(row["tp"]) > 1 and not row["sp"]:
        return (
            "Megatron refuses to train MoE layers on tensor-parallel ranks without sequence"
            " parallelism"
        )
    return ""
