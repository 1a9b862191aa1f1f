"""Lifecycle: every request ends once, nothing is lost or left running."""

from __future__ import annotations
