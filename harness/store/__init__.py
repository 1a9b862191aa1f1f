"""Traces in files: Arrow for long ones, JSON for those that a person mails. Both are safe to read,
whoever wrote them.

``open_trace`` recognises a file by its content. pyarrow is imported when an Arrow trace is opened
or written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from rollproof.core.events.base import Event
from rollproof.core.trace import Header
from rollproof.errors import TraceError
from rollproof.store.arrow_format import TraceReader, TraceWriter
from rollproof.store.growing import GrowingTrace
from rollproof.store.json_format import JsonTrace, dump_trace, load_trace
from rollproof.store.stream import CONTINUATION, Ending, open_file

__all__ = [
    "Ending",
    "GrowingTrace",
    "TraceReader",
    "TraceSource",
    "TraceWriter",
    "dump_trace",
    "load_trace",
    "open_trace",
]


class TraceSource(Protocol):
    """A trace that can be read, in either form."""

    path: Path
    offset: int
    """About how many bytes an iteration has read."""
    ending: Ending | None
    """How the trace ended: set when an iteration came to its end."""

    @property
    def sealed(self) -> bool:
        """Whether damage of the file is noticed."""
        ...

    @property
    def header(self) -> Header:
        """The header of the first episode."""
        ...

    def __iter__(self) -> Iterator[Event]:
        """The events of all episodes, one after the other."""
        ...

    def episodes(self) -> Iterator[tuple[Header, Iterator[Event]]]:
        """Each episode's header and events, streaming."""
        ...


def open_trace(path: str | os.PathLike[str]) -> TraceSource:
    """Open a trace in either form, recognised by its content. Its name does not matter.

    Raises:
        UsageError: There is no file.
        TraceVersionError: The trace was written by a newer rollproof.
        TraceError: It is not a trace.
    """
    source = Path(path)
    with open_file(source, "r") as file:
        start = file.read(64)
    if start.startswith(CONTINUATION):
        return TraceReader(source)
    if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return JsonTrace(source)
    if not start:
        raise TraceError(f"{source} is empty: its writer was killed before it wrote anything.")
    kind = next(
        (text for magic, text in _FOREIGN.items() if start.startswith(magic)),
        "in an unknown format",
    )
    raise TraceError(
        f"{source} is not a rollproof trace: it is {kind}. Traces are Arrow streams or JSON,"
        " written by rollproof."
    )


_FOREIGN: Mapping[bytes, str] = {
    b"ARROW1": "an Arrow file (of the random-access kind)",
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "compressed with gzip: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it first",
    b"PK": "a zip archive (also .npz and .pt files are): unpack it first",
    b"\x93NUMPY": "a numpy array",
    b"\x80": "probably a pickle, which is never opened because it can run code",
}
