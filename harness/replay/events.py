"""Public events of trainers: what a step is asked for and what it reports."""

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
