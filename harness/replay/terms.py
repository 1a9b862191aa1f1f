"""Public: what a contract declares about routing replay."""

from __future__ import annotations

from rollproof.core.replay_contract import (
    Defect,
    FreeRows,
    Installs,
    Recompute,
    ReplayMode,
    ReplayTerms,
)

__all__ = [
    "Defect",
    "FreeRows",
    "Installs",
    "Recompute",
    "ReplayMode",
    "ReplayTerms",
]
