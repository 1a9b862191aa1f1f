"""Batch: a conversion of finished samples carries every per-token field to its place."""

from __future__ import annotations
