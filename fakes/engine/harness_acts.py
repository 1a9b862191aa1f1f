"""Whether what is done to a server is rollproof's own doing, and not the stack's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["acts_for_harness", "harness_acts"]

# a context variable, so that engines that override `load` need not pass it on
_HARNESS_ACTS: ContextVar[bool] = ContextVar("rollproof_harness_acts", default=False)


@contextmanager
def harness_acts() -> Iterator[None]:
    """Record what is done to servers within the block as rollproof's own doing."""
    token = _HARNESS_ACTS.set(True)
    try:
        yield
    finally:
        _HARNESS_ACTS.reset(token)


def acts_for_harness() -> bool:
    """Return whether this is within such a block."""
    return _HARNESS_ACTS.get()
