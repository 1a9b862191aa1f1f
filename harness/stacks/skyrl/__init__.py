"""SkyRL, released and unmodified: its layout functions for routing replay."""

from __future__ import annotations
