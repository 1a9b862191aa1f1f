"""Save a recorded trace, if need be in another place."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rollproof.core.error_text import describe_error
from rollproof.core.trace import Trace
from rollproof.errors import TraceError

__all__ = ["save_trace"]


def save_trace(trace: Trace, path: Path) -> TraceError | None:
    """Write a trace to a file, or to a temporary one if that fails; returns the error if it did."""
    from rollproof.store import dump_trace

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dump_trace(trace, path)
    except (TraceError, OSError) as error:
        try:
            # A run with real engines may have taken hours.
            fallback = Path(tempfile.mkdtemp(prefix="rollproof-")) / path.name
            dump_trace(trace, fallback)
        except (TraceError, OSError):
            return TraceError(f"The recorded trace could not be saved: {describe_error(error)}.")
        return TraceError(
            f"The recorded trace could not be saved as {path}: {describe_error(error)}. It was"
            f" saved as {fallback}."
        )
    return None
