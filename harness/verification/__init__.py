"""Verification: runs a subject of any kind, judges its traces and reports."""

from __future__ import annotations
