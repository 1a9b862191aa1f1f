"""The modules of TRL that the adapters drive."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rollproof.stacks._support.upstream import upstream
from rollproof.stacks.trl.release import RELEASE

__all__ = ["Trl", "import_trl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trl:
    """The modules of an installed release."""

    version: str
    worker: Any
    trainer: Any


def import_trl(version: str) -> Trl:
    """Import TRL's asynchronous GRPO (10 s). Raises ``StackError`` for a missing package."""
    package = "trl.experimental.async_grpo."
    modules = upstream(
        RELEASE,
        version,
        {
            "worker": package + "async_rollout_worker",
            "trainer": package + "async_grpo_trainer",
            "partial_state": "accelerate:PartialState",
        },
    )
    # accelerate's loggers raise until there is one
    modules.pop("partial_state")()
    logging.getLogger("trl").setLevel(logging.CRITICAL)
    for module in modules.values():
        module.logger.logger.setLevel(logging.CRITICAL)
    return Trl(version=version, **modules)
