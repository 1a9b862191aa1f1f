"""What the adapters import of ROLL."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any

from rollproof.stacks import missing_dependency
from rollproof.stacks._support.stand_ins import stood_in

__all__ = ["Roll", "import_roll"]

_ABSENT = (
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
_MODULES = {
    "protocol": "roll.distributed.scheduler.protocol",
    "router": "roll.distributed.scheduler.router",
    "strategy": "roll.distributed.strategy.sglang_strategy",
    "scheduler": "roll.distributed.scheduler.generate_scheduler",
    "loop": "roll.distributed.scheduler.user_defined_rollout_loop",
    "replay": "roll.third_party.megatron.router_replay_utils",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Roll:
    """The modules of one checkout."""

    version: str
    protocol: Any
    router: Any
    strategy: Any
    scheduler: Any
    loop: Any
    replay: Any


def import_roll(version: str) -> Roll:
    """Import what the adapter drives (15 to 40 s). Raises ``StackError`` for a missing dependency."""
    from rollproof.stacks.roll import RELEASE

    try:
        with _quietly(), stood_in(_ABSENT, values={"sglang": {"__version__": _SGLANG}}):
            found: dict[str, Any] = {
                name: importlib.import_module(module) for name, module in _MODULES.items()
            }
    except ImportError as error:
        raise missing_dependency("roll", version, error, RELEASE) from error
    found["router"].logger.setLevel(logging.CRITICAL)
    # the one class of SGLang's that its strategy makes something of
    found["strategy"].GenerateReqInput = SimpleNamespace
    return Roll(version=version, **found)


@contextmanager
def _quietly() -> Iterator[None]:
    """While it is imported ROLL makes a folder for its log where one works, tells of it, and takes
    over the root logger.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    os.environ.setdefault("ROLL_LOG_DIR", tempfile.mkdtemp(prefix="rollproof-roll-"))
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
