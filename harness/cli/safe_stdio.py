"""Standard streams that never raise: closed ones, a full disk, an encoding that lacks characters.

None of that may change a verdict: what cannot be written is dropped, and the first reason is kept.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["open_streams", "stdout_failure"]


class _Dropping(io.FileIO):
    """A file that drops what it cannot write, and keeps the first reason.

    A broken pipe is raised: it ends the command, as users of ``head`` expect.
    """

    failure: str | None = None

    def write(self, data: Any) -> int:
        """Write ``data``, or drop it once a write has failed."""
        if self.failure is None:
            try:
                return super().write(data)
            except BrokenPipeError:
                raise
            except OSError as error:
                self.failure = error.strerror or str(error)
        return memoryview(data).nbytes


def open_streams() -> None:
    """Replace the standard streams by streams that only raise for a broken pipe.

    ``sys.__stdout__`` stays ``None`` if standard output was closed (``>&-``).
    """
    # A closed stream is opened on the null device, because a file that is opened later would get
    # its number, and what is printed would go into that file.
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - open as long as the process runs
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
    """Return why standard output could not be written, or ``None``; flush it before."""
    if sys.__stdout__ is None:
        return "it is closed"
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.failure if isinstance(raw, _Dropping) else None
