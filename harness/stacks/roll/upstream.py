"""The modules of ROLL that the adapters drive."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any

from rollproof.stacks._support.stand_ins import stub_packages
from rollproof.stacks._support.upstream import upstream
from rollproof.stacks.roll.release import RELEASE

__all__ = ["Roll", "import_roll"]

_STUBBED = (
    "codetiming",
    "grpc",
    "mcore_adapter",
    "megatron",
    "modelscope",
    "more_itertools",
    "opentelemetry",
    "sglang",
    "transfer_queue",
)
"""Packages that ROLL's modules import at their head: an engine, trainers, tracing, hubs. None of
them is run here.
"""
_SGLANG = "0.5.7"
"""The newest SGLang that ROLL has a patch for: it refuses others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roll:
    """The modules of a checkout."""

    version: str
    protocol: Any
    router: Any
    strategy: Any
    scheduler: Any
    loop: Any
    replay: Any


def import_roll(version: str) -> Roll:
    """Import what the adapters drive (15 to 40 s). Raises ``StackError`` for a missing package."""
    with _quiet(), stub_packages(_STUBBED, values={"sglang": {"__version__": _SGLANG}}):
        modules = upstream(
            RELEASE,
            version,
            {
                "protocol": "roll.distributed.scheduler.protocol",
                "router": "roll.distributed.scheduler.router",
                "strategy": "roll.distributed.strategy.sglang_strategy",
                "scheduler": "roll.distributed.scheduler.generate_scheduler",
                "loop": "roll.distributed.scheduler.user_defined_rollout_loop",
                "replay": "roll.third_party.megatron.router_replay_utils",
            },
        )
    modules["router"].logger.setLevel(logging.CRITICAL)
    # the only class of SGLang's that its strategy makes an instance of
    modules["strategy"].GenerateReqInput = SimpleNamespace
    return Roll(version=version, **modules)


@contextmanager
def _quiet() -> Iterator[None]:
    """Undo what ROLL does when it is imported: it makes a folder for its log in the working
    directory, prints where, and takes over the root logger.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    # a folder of its own, so that none is made where somebody works
    os.environ.setdefault("ROLL_LOG_DIR", tempfile.mkdtemp(prefix="rollproof-roll-"))
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
