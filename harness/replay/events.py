"""Public events of trainers: the steps that they run and what they report."""

from __future__ import annotations

from rollproof.core.events.replay import (
    Action,
    Install,
    Outcome,
    Phase,
    Purpose,
    Residue,
    Routing,
    Step,
)

__all__ = [
    "Action",
    "Install",
    "Outcome",
    "Phase",
    "Purpose",
    "Residue",
    "Routing",
    "Step",
]
