"""Tables in the files that people have beside Parquet and Arrow: JSONL, CSV, a NumPy archive, or
what ``torch.save`` writes of a dict of columns.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.errors import GapError
from rollproof.gap.torch_files import is_torch_file, load_torch

__all__ = ["CSV", "JSONL", "ZIP", "load_plain_table", "stored_size"]

JSONL, CSV, ZIP = "JSONL", "CSV", "NumPy or torch"


def load_plain_table(path: Path, kind: str) -> Any:
    """Return a file as a ``pyarrow.Table``.

    Args:
        path: The file.
        kind: ``JSONL``, ``CSV``, or ``ZIP``, in which archives of NumPy and of torch are.

    Raises:
        GapError: The file is damaged, or its columns cannot be those of a table.
    """
    import pyarrow as pa

    try:
        if kind == JSONL:
            from pyarrow import json

            return json.read_json(path)
        if kind == CSV:
            from pyarrow import csv

            _require_last_line(path)
            return csv.read_csv(path)
    except pa.ArrowException as error:
        raise GapError(f"{path} cannot be read as {kind}: {_one_line(error)}.") from error
    columns = _torch_columns(path) if is_torch_file(path) else _numpy_columns(path)
    for name, values in columns.items():
        if values.ndim == 0 or values.dtype.kind not in "biufUS":
            raise GapError(
                f"{path}: {name} has shape {values.shape} and dtype {values.dtype}: a column has an"
                " entry a token, of numbers or text."
            )
    if len({len(values) for values in columns.values()}) > 1:
        lengths = ", ".join(f"{name} {len(values):,}" for name, values in columns.items())
        raise GapError(f"{path}: its columns differ in length ({lengths}): one entry a token each.")
    return pa.table({name: _arrow(values) for name, values in columns.items()})


def stored_size(path: Path) -> int:
    """Return the bytes that the members of an archive expand to, as its directory says.

    Raises ``GapError`` if it has no directory, which is at its end, or a damaged one.
    """
    try:
        with zipfile.ZipFile(path) as file:
            return sum(member.file_size for member in file.infolist())
    except zipfile.BadZipFile as error:
        raise GapError(
            f"{path} begins as an archive of NumPy or torch does, and has no directory at its end:"
            " it was cut short. Write it again."
        ) from error
    # names that are no text, and versions of the format that do not exist
    except (ValueError, NotImplementedError) as error:
        raise GapError(
            f"{path} is an archive with a damaged directory ({_one_line(error)}). Write it again."
        ) from error


def _numpy_columns(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            columns = {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy and zipfile raise whatever a damaged archive says
        raise GapError(
            f"{path} is neither an archive of numpy.savez nor a file of torch.save, or is damaged"
            f" ({_one_line(error)})."
        ) from error
    return columns


def _torch_columns(path: Path) -> dict[str, npt.NDArray[Any]]:
    value = load_torch(path)
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise GapError(
            f"{path} holds a {type(value).__name__}: save a dict of columns by name (docs/gap.md)."
        )
    return {name: _array(path, name, column) for name, column in value.items()}


def _array(path: Path, name: str, column: Any) -> npt.NDArray[Any]:
    try:
        # numpy has no bfloat16
        if hasattr(column, "is_floating_point") and column.is_floating_point():
            column = column.double()
        return np.asarray(column)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GapError(f"{path}: {name} holds neither numbers nor text.") from error


def _require_last_line(path: Path) -> None:
    """Raise ``GapError`` if the last line has no end: half a number is a number too."""
    with path.open("rb") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            raise GapError(
                f"{path}: the last line has no newline at its end, so the file may have been cut"
                " within a number. Write it again, or end the line if it is whole."
            )


def _arrow(values: npt.NDArray[Any]) -> Any:
    """Return an array ``(n, ...)`` as a column whose entries are lists where it has more axes."""
    import pyarrow as pa

    column = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in values.shape[:0:-1]:
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
