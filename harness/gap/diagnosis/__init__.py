"""Diagnosis: which kind of cause the pattern of a gap points to."""

from __future__ import annotations
