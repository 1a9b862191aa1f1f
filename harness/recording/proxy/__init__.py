"""A reverse proxy before an engine's HTTP server that records what passes."""

from __future__ import annotations
