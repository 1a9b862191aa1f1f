"""What the adapters import of TRL."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

from rollproof.stacks import missing_dependency

__all__ = ["Trl", "import_trl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trl:
    """The modules of one installed release."""

    version: str
    worker: Any
    trainer: Any


def import_trl(version: str) -> Trl:
    """Import TRL's asynchronous GRPO (10 s). Raises ``StackError`` for a missing dependency."""
    from rollproof.stacks.trl import RELEASE

    package = "trl.experimental.async_grpo."
    try:
        worker = importlib.import_module(package + "async_rollout_worker")
        trainer = importlib.import_module(package + "async_grpo_trainer")
        # its loggers refuse to say anything before
        importlib.import_module("accelerate").PartialState()
    except ImportError as error:
        raise missing_dependency("trl", version, error, RELEASE) from error
    logging.getLogger("trl").setLevel(logging.CRITICAL)
    for module in (worker, trainer):
        module.logger.logger.setLevel(logging.CRITICAL)
    return Trl(version=version, worker=worker, trainer=trainer)
