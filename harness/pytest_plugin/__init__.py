"""Decorators, items and session state of the pytest plugin; ``rollproof.plugin`` has the hooks."""

from __future__ import annotations
