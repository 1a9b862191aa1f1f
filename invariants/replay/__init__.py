"""Replay: what a trainer's routers execute is what the samples' routes say."""

from __future__ import annotations
