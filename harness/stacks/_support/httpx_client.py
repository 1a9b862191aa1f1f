"""Certificates: httpx reads those of the machine whenever a client is made, which takes 50 ms:
longer than a small case.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["without_certificates"]

_MODULE, _NAME = "httpx._transports.default", "create_ssl_context"


@contextmanager
def without_certificates() -> Iterator[None]:
    """HTTP clients that are made inside read no certificates. Everything is spoken in the clear
    here, so none would be used.
    """
    module: Any = importlib.import_module(_MODULE)
    real = getattr(module, _NAME, None)
    if real is None:  # a private name of httpx: without it clients only take longer
        yield
        return
    setattr(module, _NAME, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(module, _NAME, real)
