"""Fake engine: scheduler, calls in flight, KV cache, fleet."""

from __future__ import annotations
