"""What the adapters import of slime."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

from rollproof.stacks import missing_dependency
from rollproof.stacks._support.stand_ins import stood_in

__all__ = ["Slime", "import_slime"]

_ABSENT = ("sglang", "sglang_router", "megatron", "wandb")
"""Packages that slime's modules import at their head: engines and trainers, which are not run here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slime:
    """The modules of one checkout, or of a release of miles, which has them from slime."""

    version: str
    rollout: Any
    types: Any
    http: Any
    misc: Any
    manager: Any
    data: Any


def import_slime(version: str) -> Slime:
    """Import what the adapters drive (5 to 10 s). Raises ``StackError`` for a missing dependency."""
    from rollproof.stacks.slime import RELEASE

    modules = {
        "rollout": "slime.rollout.sglang_rollout",
        "types": "slime.utils.types",
        "http": "slime.utils.http_utils",
        "misc": "slime.utils.misc",
        "manager": "slime.ray.rollout",
        "data": "slime.utils.data",
    }
    try:
        with stood_in(_ABSENT):
            found = {name: importlib.import_module(module) for name, module in modules.items()}
    except ImportError as error:
        raise missing_dependency("slime", version, error, RELEASE) from error
    logging.getLogger("slime").setLevel(logging.CRITICAL)
    return Slime(version=version, **found)
