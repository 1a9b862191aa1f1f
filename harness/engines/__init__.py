"""Rollout engines under test: adapters of vLLM and SGLang, and the experiments that drive them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollproof.engines.engine_targets import EngineTarget

__all__ = ["EngineTarget"]


def __getattr__(name: str) -> Any:
    # lazily: the processes of engines import their modules from this package, and need few of them
    if name != "EngineTarget":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollproof.engines.engine_targets import EngineTarget

    return EngineTarget
