"""SGLang as an engine under test."""

from __future__ import annotations
