"""Hooks on the routers of a model that see what code under test made of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["last_forward_hook"]


@contextmanager
def last_forward_hook(module: Any, hook: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Call ``hook(module, inputs, output)`` after every other forward hook of ``module``."""
    # torch calls hooks in the order of their registration, and code under test registers its own
    # after an observer (SkyRL#1772 replaces the router's output in a hook)
    handle = module.register_forward_hook(hook)

    def move_to_end(_module: Any, _inputs: Any) -> None:
        module._forward_hooks.move_to_end(handle.id)

    before = module.register_forward_pre_hook(move_to_end)
    try:
        yield
    finally:
        before.remove()
        handle.remove()
