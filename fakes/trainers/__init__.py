"""Reference trainers, layouts and batch conversions."""

from __future__ import annotations
