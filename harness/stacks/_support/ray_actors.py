"""Actors: classes as they are without Ray."""

from __future__ import annotations

from typing import Any

__all__ = ["taken"]


def taken(actor: Any) -> Any:
    """The class inside of what ``ray.remote`` made of it; a class that it was not asked of as it
    is.
    """
    return getattr(getattr(actor, "__ray_metadata__", None), "modified_class", actor)
