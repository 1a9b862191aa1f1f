"""Application: see ``asgi``."""

from __future__ import annotations

from rollproof.fakes.http.asgi import Cut

__all__ = ["Cut"]
