"""Checks, verdicts and reports, and the views of a trace that checks read."""

from __future__ import annotations
