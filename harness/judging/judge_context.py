"""State of a trace that is being judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollproof.core.contract import Contract
from rollproof.core.oracle import Oracle
from rollproof.core.trace import Header
from rollproof.judging.request_view import RequestView
from rollproof.judging.weight_history import WeightHistory

__all__ = ["JudgeContext"]


@dataclass(slots=True)
class JudgeContext:
    """State that all checks of a trace share."""

    header: Header
    contract: Contract
    oracle: Oracle | None
    history: WeightHistory = field(default_factory=WeightHistory)
    open: dict[str, RequestView] = field(default_factory=dict)
    shared: dict[type, Any] = field(default_factory=dict)
    """Data that the checks of one family compute together, by its class."""
