"""Pytest plugin: the items, decorators and hooks behind the entry point ``rollproof.plugin``."""

from __future__ import annotations
