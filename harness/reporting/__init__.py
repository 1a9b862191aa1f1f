"""Reporting: reports as text for people."""

from __future__ import annotations
