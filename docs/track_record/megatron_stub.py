"""Stands in for Megatron's process groups: functions that ask which rank they run on are told the first one of small groups."""

from importlib.metadata import version

import torch
from megatron.core import parallel_state as mpu

MEGATRON = f"on megatron-core {version('megatron-core')}:"


def sizes(**given):
    """``sizes(tensor=1, context=1, pipeline=2, virtual_pipeline=2)``; ranks are 0."""
    for name in ("tensor", "context", "pipeline", "virtual_pipeline"):
        kind = name if name == "context" else f"{name}_model"
        setattr(mpu, f"get_{kind}_parallel_world_size", lambda *_, name=name: given.get(name, 1))
        setattr(mpu, f"get_{kind}_parallel_rank", lambda *_: 0)
        setattr(mpu, f"get_{kind}_parallel_group", lambda *_: None)
    torch.distributed.get_world_size = lambda group=None: given.get("pipeline", 1)


def gathers(pieces):
    """What ``all_gather_object`` finds on the other ranks."""
    torch.distributed.all_gather_object = lambda into, mine, group=None: into.__setitem__(
        slice(None), pieces
    )
