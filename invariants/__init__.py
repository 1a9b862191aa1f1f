"""Invariants: the checks that rollproof ships, one module per family."""

from __future__ import annotations

from rollproof.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = ()
