"""Loading a table out of a file that anybody may have written.

Nothing of the file is used before it was validated: an offset or a size that points outside of its
buffer would end the process, not raise. A small file that claims to hold gigabytes is refused.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from operator import ne
from pathlib import Path
from typing import Any

from rollproof.errors import GapError
from rollproof.gap.plain_tables import CSV, JSONL, ZIP, load_plain_table, stored_size

__all__ = ["load_table"]

_PARQUET, _ARROW, _STREAM = "Parquet", "Arrow", "Arrow stream"
_MARKS = {b"PAR1": _PARQUET, b"ARRO": _ARROW, b"\xff\xff\xff\xff": _STREAM, b"PK\x03\x04": ZIP}
_SUFFIXES = {".jsonl": JSONL, ".ndjson": JSONL, ".csv": CSV}
_ALWAYS = 1 << 28
"""Bytes that any file may expand to."""
_EXPANSION = 1000
"""How many times its size a larger file may expand to: logprobs hardly compress."""
_BATCH = 1 << 16
"""Rows of a Parquet file that are read at a time, so that its size is known early."""


def load_table(path: Path, choose: Callable[[Any], list[str]]) -> Any:
    """Return some columns of a file as a ``pyarrow.Table`` whose every value may be read.

    Args:
        path: The file.
        choose: Returns the names of the columns to load, given the file's ``pyarrow.Schema``.

    Raises:
        GapError: The file is of no known kind, is damaged, was cut short, or expands to more than
            a file of its size can hold. What ``choose`` raises.
    """
    import pyarrow as pa

    kind = _kind(path)
    try:
        if kind in (JSONL, CSV, ZIP):
            table = _plain(path, choose, kind)
        elif kind == _PARQUET:
            table = _parquet(path, choose)
        else:
            table = _arrow(path, choose, kind)
    except GapError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise GapError(
            f"{path} begins as {kind.split()[0]} does and cannot be read to its end: it is damaged,"
            " or was cut short. Write it again."
        ) from error
    _validate(table, path)
    return table


def _parquet(path: Path, choose: Callable[[Any], list[str]]) -> Any:
    import pyarrow.parquet as pq

    # checks the checksums of pages that have one
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        _check_names(file, path)
        names = choose(file.schema_arrow)
        batches = file.iter_batches(_BATCH, columns=names)
        table = _joined(path, file.schema_arrow, names, batches)
        if table.num_rows != file.metadata.num_rows:
            raise GapError(
                f"{path} says that it has {file.metadata.num_rows:,} rows, and {table.num_rows:,}"
                " can be read: it is damaged. Write it again."
            )
        return table


def _plain(path: Path, choose: Callable[[Any], list[str]], kind: str) -> Any:
    if kind == ZIP:
        _bound(path, stored_size(path))
    table = load_plain_table(path, kind)
    return table.select(choose(table.schema))


def _check_names(file: Any, path: Path) -> None:
    """Raise ``GapError`` if the name of a column is damaged: a column that need not be there would
    be missed in silence.
    """
    import pyarrow as pa

    # No checksum covers the footer of a Parquet file, but Arrow stores its own schema in it, too.
    # Not the names in the row groups: pyarrow ends the process if some of their values are damaged.
    encoded = (file.metadata.metadata or {}).get(b"ARROW:schema")
    if encoded is None:
        return
    stored = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded))).names
    for name, again in zip(file.schema_arrow.names, stored, strict=False):
        # other differences are renamed columns: not every tool keeps both
        if len(name) == len(again) and sum(map(ne, name, again)) == 1:
            raise GapError(
                f"{path} calls a column both {name!r} and {again!r}: it is damaged. Write it again."
            )


def _arrow(path: Path, choose: Callable[[Any], list[str]], kind: str) -> Any:
    import pyarrow as pa

    # Mapped instead of read: the columns may be larger than memory. The buffer has an end, so that
    # a column which a damaged file places behind it is an error and no SIGBUS.
    with pa.memory_map(str(path)) as mapped:
        source = pa.BufferReader(mapped.read_buffer())
        if kind == _ARROW:
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
            return _joined(path, file.schema, choose(file.schema), batches)
        stream = pa.ipc.open_stream(source)
        return _joined(path, stream.schema, choose(stream.schema), stream)


def _joined(path: Path, schema: Any, names: list[str], batches: Iterable[Any]) -> Any:
    """Return the named columns of batches as a table. Raises ``GapError`` as soon as they take more
    than the file can hold.
    """
    import pyarrow as pa

    kept, size = [], 0
    for batch in batches:
        kept.append(batch.select(names))
        size += sum(map(_own_size, kept[-1].columns))
        _bound(path, size)
    return pa.Table.from_batches(kept, pa.schema([schema.field(name) for name in names]))


def _own_size(array: Any) -> int:
    """Return the bytes of an array's buffers, without a look at values that may be damaged."""
    return sum(buffer.size for buffer in array.buffers() if buffer is not None)


def _bound(path: Path, size: int) -> None:
    """Raise ``GapError`` if the file is too small to hold so many bytes honestly."""
    stored = path.stat().st_size
    if size > max(_ALWAYS, _EXPANSION * stored):
        raise GapError(
            f"{path} is {stored:,} bytes and claims to hold {size / 2**30:,.1f} GiB: it is damaged,"
            " or was made to fill memory. Write it again."
        )


def _validate(table: Any, path: Path) -> None:
    """Raise ``GapError`` naming the first column whose buffers do not fit its values."""
    import pyarrow as pa

    for name in table.column_names:
        row = 0
        for chunk in table.column(name).chunks:
            try:
                chunk.validate(full=True)
            except (pa.ArrowException, ValueError, OSError) as error:
                raise GapError(
                    f"{path}: column {name} is damaged within rows {row:,} to"
                    f" {row + max(0, len(chunk) - 1):,}: {_one_line(error)}. Write it again."
                ) from error
            row += len(chunk)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _kind(path: Path) -> str:
    """Return what kind of file it is, by its first bytes or, of a text, by its suffix."""
    if path.is_dir():
        raise GapError(f"{path} is a folder: name the file in it.")
    if not path.exists():
        raise GapError(f"There is no file {path}.")
    if not path.is_file():
        raise GapError(
            f"{path} is not a regular file (but a pipe, a terminal or a device): Parquet is read"
            " from its end, so write it to a file first."
        )
    try:
        # pyarrow raises UnicodeEncodeError for such names, far from here
        str(path).encode()
        with path.open("rb") as file:
            mark = file.read(4)
    except UnicodeEncodeError as error:
        raise GapError(
            f"{path} cannot be opened by Arrow: its name holds bytes that are not UTF-8. Rename it."
        ) from error
    except OSError as error:
        raise GapError(f"{path} cannot be opened: {error.strerror}.") from error
    kind = _MARKS.get(mark) or _SUFFIXES.get(path.suffix.lower())
    if not mark or kind is None:
        problem = "is empty" if not mark else "is neither Parquet nor Arrow"
        raise GapError(
            f"{path} {problem}: records are written by pyarrow.parquet.write_table, numpy.savez or"
            " torch.save, or are a .jsonl or .csv file (docs/gap.md); a trace goes with --rollout."
        )
    return kind
