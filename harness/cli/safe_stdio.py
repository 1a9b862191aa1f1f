"""Streams: standard output and error as a command finds them: closed, on a full disk, in an
encoding that lacks characters.

None of that changes a verdict: what cannot be shown is dropped, and why is kept for whoever must
know.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["open_streams", "stdout_failure"]


class _Dropping(io.FileIO):
    """A file that drops what it cannot write, and keeps the first reason. A reader that went away
    is another matter.
    """

    failure: str | None = None

    def write(self, data: Any) -> int:
        """All of ``data``, or nothing once a write has failed."""
        if self.failure is None:
            try:
                return super().write(data)
            except BrokenPipeError:
                raise
            except OSError as error:
                self.failure = error.strerror or str(error)
        return memoryview(data).nbytes


def open_streams() -> None:
    """Replace the standard streams by ones that never fail, but for a pipe that nobody reads.

    A closed one (``>&-``) gets a place to write to: a file opened later would take its number.
    ``sys.__stdout__`` stays ``None`` then, which tells that it was closed.
    """
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - it stays open as long as the process runs
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as above
        elif isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = _Dropping(stream.fileno(), "w", closefd=False)
            text = io.TextIOWrapper(
                io.BufferedWriter(raw),
                stream.encoding,
                "backslashreplace",
                line_buffering=stream.line_buffering,
            )
            setattr(sys, name, text)


def stdout_failure() -> str | None:
    """Why standard output takes nothing, as far as it was flushed; ``None`` where it does."""
    if sys.__stdout__ is None:
        return "it is closed"
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.failure if isinstance(raw, _Dropping) else None
