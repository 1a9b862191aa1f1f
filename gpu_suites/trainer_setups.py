"""Setups of trainers that are judged on GPUs, by the number of GPUs that they need."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rollproof.core.contract import LayerAxis
from rollproof.gpu_suites.gap.ranked_scorer import Division
from rollproof.replay.megatron.megatron_setups import SETUPS as MEGATRON
from rollproof.replay.megatron.megatron_setups import Dispatcher, MegatronSetup, RouterKind

__all__ = [
    "GAP_MEGATRON",
    "GAP_RANKED",
    "GAP_TRAINERS",
    "MEGATRON_SETUPS",
    "single_process",
    "summing_on_gpus",
]

_A2A = Dispatcher.ALLTOALL
# Several kinds of parallelism at once, which needs more than two GPUs.
# A packed microbatch of a rank is one sequence with its own width.
_MIXED = (
    MegatronSetup(name="tp2-pp2-ep2", tp=2, pp=2, ep=2, dispatcher=_A2A, microbatches=4),
    MegatronSetup(name="tp2-cp2", tp=2, cp=2, dispatcher=_A2A),
    MegatronSetup(
        name="ep2-pp2-vpp2",
        dp=2,
        ep=2,
        pp=2,
        vpp=2,
        dispatcher=_A2A,
        microbatches=4,
        microbatch_size=4,
    ),
    MegatronSetup(name="tp4", tp=4, dispatcher=_A2A),
    MegatronSetup(name="ep4-alltoall", dp=4, ep=4, dispatcher=_A2A, microbatch_size=4),
    MegatronSetup(
        name="packed-tp2-cp2",
        tp=2,
        cp=2,
        own_widths=True,
        microbatch_size=1,
        microbatches=4,
        dispatcher=_A2A,
        moe_layers=(1, 2, 3),
    ),
    MegatronSetup(
        name="packed-pp2-ep2-sigmoid",
        dp=2,
        pp=2,
        ep=2,
        own_widths=True,
        microbatch_size=2,
        microbatches=4,
        dispatcher=_A2A,
        router=RouterKind.SIGMOID,
        moe_layers=(1, 2, 3),
        layer_axis=LayerAxis.MOE,
    ),
)

MEGATRON_SETUPS: Mapping[str, MegatronSetup] = MappingProxyType(
    {
        setup.name: setup
        for setup in (
            *(
                MEGATRON[name]
                for name in (
                    *("single", "dense-first", "sigmoid"),
                    *(
                        "tp2",
                        "tp2-alltoall",
                        "ep2-allgather",
                        "ep2-alltoall",
                        "cp2",
                        "pp2",
                        "pp2-vpp3",
                    ),
                )
            ),
            *_MIXED,
        )
    }
)
"""Setups of megatron-core by name, those with one GPU first."""


GAP_MEGATRON: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "megatron": {},
        "megatron-tp2": {"tp": 2},
        "megatron-cp2": {"cp": 2},
        "megatron-ep2": {"dp": 2, "ep": 2},
        "megatron-pp2-vpp2": {"pp": 2, "vpp": 2},
        "megatron-tp2-pp2-ep2": {"tp": 2, "pp": 2, "ep": 2},
        "megatron-tp2-cp2": {"tp": 2, "cp": 2},
        "megatron-ep2-pp2-vpp2": {"dp": 2, "ep": 2, "pp": 2, "vpp": 2},
        "megatron-tp4": {"tp": 4},
        "megatron-ep4": {"dp": 4, "ep": 4},
    }
)
"""Trainers on megatron-core by their parallel sizes."""


GAP_RANKED: Mapping[str, tuple[Division, int]] = MappingProxyType(
    {
        "fsdp2-2": (Division.FSDP2, 2),
        "fsdp2-4": (Division.FSDP2, 4),
        "ulysses-2": (Division.ULYSSES, 2),
        "ulysses-4": (Division.ULYSSES, 4),
    }
)
"""Trainers of HF transformers on several GPUs: what is divided, and over how many."""


GAP_TRAINERS: tuple[str, ...] = ("hf", *GAP_RANKED, *GAP_MEGATRON)
"""Names that ``--rollproof-trainer`` takes."""


def single_process(setup: MegatronSetup) -> MegatronSetup:
    """Return the setup with the same model and batches on one GPU."""
    return replace(
        setup, name=f"{setup.name} on one", dp=1, cp=1, tp=1, pp=1, vpp=1, ep=1, first=None
    )


def summing_on_gpus(rank: int, _: int) -> Callable[[str], float]:
    """A task of ``Ranks`` that adds up 1 + ... + world_size over NCCL.

    Other jobs name a fault of rank 1.
    """

    def do(job: str) -> float:
        import torch

        if rank == 1 and job == "raises":
            raise ArithmeticError("rank 1 cannot count")
        if rank == 1 and job == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        # the other ranks wait in the collective, which NCCL does not end by itself
        if rank == 1 and job == "never comes":
            time.sleep(600)
        total = torch.tensor([float(rank + 1)], device="cuda")
        torch.distributed.all_reduce(total)
        return float(total.item())

    return do
