"""The modules of slime that the adapters drive."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rollproof.stacks._support.stand_ins import stub_packages
from rollproof.stacks._support.upstream import upstream
from rollproof.stacks.slime.release import RELEASE

__all__ = ["Slime", "import_loss", "import_slime"]

_STUBBED = ("sglang", "sglang_router", "megatron", "wandb")
"""Packages that slime's modules import at their head: engines and trainers, which are not run here.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slime:
    """The modules of a checkout of slime, or of a release of miles, which has them from slime."""

    version: str
    rollout: Any
    types: Any
    http: Any
    misc: Any
    manager: Any
    data: Any


def import_slime(version: str) -> Slime:
    """Import what the adapters drive (5 to 10 s). Raises ``StackError`` for a missing package."""
    with stub_packages(_STUBBED):
        modules = upstream(
            RELEASE,
            version,
            {
                "rollout": "slime.rollout.sglang_rollout",
                "types": "slime.utils.types",
                "http": "slime.utils.http_utils",
                "misc": "slime.utils.misc",
                "manager": "slime.ray.rollout",
                "data": "slime.utils.data",
            },
        )
    logging.getLogger("slime").setLevel(logging.CRITICAL)
    return Slime(version=version, **modules)


def import_loss(version: str) -> Any:
    """Import slime's losses (5 to 10 s). Raises ``StackError`` for a missing package."""
    with stub_packages((*_STUBBED, "transformer_engine"), even_if_installed=True):
        return upstream(RELEASE, version, {"loss": "slime.backends.megatron_utils.loss"})["loss"]
