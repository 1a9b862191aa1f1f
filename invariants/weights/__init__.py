"""Weights: what weight updates, pauses and caches may do to the samples in flight."""

from __future__ import annotations
