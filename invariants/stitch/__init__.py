"""Stitch: a response is exactly what was sampled, and ends as it says."""

from __future__ import annotations
