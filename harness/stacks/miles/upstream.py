"""What the adapters import of miles."""

from __future__ import annotations

import importlib
import logging

from rollproof.stacks import missing_dependency
from rollproof.stacks._support.stand_ins import stood_in
from rollproof.stacks.slime.upstream import Slime

__all__ = ["import_miles"]

_ABSENT = ("sglang", "sglang_router", "megatron", "wandb")
"""Engines and trainers. The wheel brings copies of SGLang and Megatron, which need a GPU's
packages; nothing of them is run here.
"""
_ROUTER = "0.3.2"
"""The router for which miles asks at ``/workers``."""


def import_miles(version: str) -> Slime:
    """Import what the adapters drive (5 to 10 s). Raises ``StackError`` for a missing dependency."""
    from rollproof.stacks.miles import RELEASE

    modules = {
        "rollout": "miles.rollout.sglang_rollout",
        "types": "miles.utils.types",
        "http": "miles.utils.http_utils",
        "misc": "miles.utils.misc",
        "manager": "miles.ray.rollout",
        "data": "miles.utils.data",
    }
    try:
        with stood_in(_ABSENT, instead=True, values={"sglang_router": {"__version__": _ROUTER}}):
            found = {name: importlib.import_module(module) for name, module in modules.items()}
    except ImportError as error:
        raise missing_dependency("miles", version, error, RELEASE) from error
    logging.getLogger("miles").setLevel(logging.CRITICAL)
    return Slime(version=version, **found)
