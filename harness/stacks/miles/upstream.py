"""The modules of miles that the adapters drive."""

from __future__ import annotations

import logging
from typing import Any

from rollproof.stacks._support.stand_ins import stub_packages
from rollproof.stacks._support.upstream import upstream
from rollproof.stacks.miles.release import RELEASE
from rollproof.stacks.slime.upstream import Slime

__all__ = ["import_loss", "import_miles"]

_STUBBED = ("sglang", "sglang_router", "megatron", "wandb")
"""Engines and trainers. The wheel brings copies of SGLang and Megatron, which need a GPU's
packages; nothing of them is run here.
"""
_ROUTER = "0.3.2"
"""A release of the router whose ``/workers`` miles calls; it asks older ones elsewhere."""


def import_miles(version: str) -> Slime:
    """Import what the adapters drive (5 to 10 s). Raises ``StackError`` for a missing package."""
    values = {"sglang_router": {"__version__": _ROUTER}}
    with stub_packages(_STUBBED, even_if_installed=True, values=values):
        modules = upstream(
            RELEASE,
            version,
            {
                "rollout": "miles.rollout.sglang_rollout",
                "types": "miles.utils.types",
                "http": "miles.utils.http_utils",
                "misc": "miles.utils.misc",
                "manager": "miles.ray.rollout",
                "data": "miles.utils.data",
            },
        )
    logging.getLogger("miles").setLevel(logging.CRITICAL)
    return Slime(version=version, **modules)


def import_loss(version: str) -> Any:
    """Import miles's losses (5 to 10 s). Raises ``StackError`` for a missing package."""
    with stub_packages((*_STUBBED, "transformer_engine"), even_if_installed=True):
        return upstream(RELEASE, version, {"loss": "miles.backends.training_utils.loss"})["loss"]
