"""Versions: every tag names the weights that sampled its tokens."""

from __future__ import annotations
