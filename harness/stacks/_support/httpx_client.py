"""HTTP clients of httpx without certificates."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["without_certificates"]

_MODULE, _NAME = "httpx._transports.default", "create_ssl_context"


@contextmanager
def without_certificates() -> Iterator[None]:
    """Make httpx read no certificates for new clients, until the context ends."""
    # Reading those of the machine takes 50 ms a client, longer than a small case. Nothing is
    # encrypted here, so none would be used.
    module: Any = importlib.import_module(_MODULE)
    real = getattr(module, _NAME, None)
    # a private name of httpx; without the patch clients only take longer
    if real is None:
        yield
        return
    setattr(module, _NAME, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(module, _NAME, real)
