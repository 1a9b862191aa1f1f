"""The diagnosis of a gap: which kind of cause its pattern points to."""

from __future__ import annotations
