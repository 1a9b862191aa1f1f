"""Table: pairs of logprobs out of a Parquet or Arrow file.

One row a token (``sequence_id``, ``rollout_logprob``, ``trainer_logprob``, ``mask``, and what else
``COLUMNS`` lists), or one row a sequence, whose per-token columns are lists.
``trainer_logprob@VERSION`` holds the trainer's logprobs under another version.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.errors import GapError
from rollproof.gap.token_pairs import COLUMNS, TokenPairs

__all__ = ["read_columns", "read_pairs"]

REQUIRED = ("sequence_id", "rollout_logprob", "trainer_logprob", "mask")
_BY_VERSION = "trainer_logprob@"
_ROUTES = ("rollout_routes", "trainer_routes")
_MAY_MISS = (
    "rollout_logprob",
    "trainer_logprob",
    "current_logprob",
    "version",
    "current_version",
    "replica",
    "part",
)
"""Columns that need not have a value for every token: what a missing one means is theirs to say."""


def read_pairs(path: Path, *, renamed: Mapping[str, str] | None = None) -> TokenPairs:
    """The pairs of a Parquet file (or of an Arrow IPC file or stream).

    ``renamed`` maps names of ``COLUMNS`` to the file's own names for them. Raises ``GapError`` for
    a file that cannot be read, lacks a column, or holds something else in one; columns that are not
    known are left alone.
    """
    values, by_version = read_columns(path, required=REQUIRED, renamed=renamed)
    return TokenPairs.of(by_version=by_version, **values)


def read_columns(
    path: Path, *, required: Sequence[str], renamed: Mapping[str, str] | None = None
) -> tuple[dict[str, npt.NDArray[Any]], dict[int | str, npt.NDArray[Any]]]:
    """The known columns of a file, one entry a token: by name, and those of
    ``trainer_logprob@VERSION`` by version.

    Raises as ``read_pairs`` does where one of ``required`` is not there.
    """
    import pyarrow as pa

    table = _load(path, dict(renamed or {}), required)
    try:
        columns = {name: _plain(table.column(name)) for name in table.column_names}
        listed = {
            name
            for name, column in columns.items()
            if _depth(column.type) > (2 if name in _ROUTES else 0)
        }
        if listed:
            columns = _flattened(columns, listed, path)
        values = {name: _numpy(name, column) for name, column in columns.items()}
    except pa.ArrowNotImplementedError as error:
        kinds = ", ".join(f"{name} {table.column(name).type}" for name in table.column_names)
        raise GapError(
            f"{path} has a column of a kind that Arrow cannot work with ({kinds}): write plain"
            " numbers, text or lists."
        ) from error
    tags = values.get("version")
    number = (
        int if tags is None or tags.dtype.kind not in "OUS" else str
    )  # a tag "0" is that of trainer_logprob@0
    by_version = {
        _version(name, number, path): values.pop(name)
        for name in list(values)
        if name.startswith(_BY_VERSION)
    }
    return values, by_version


def _load(path: Path, renamed: dict[str, str], required: Sequence[str]) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    stray = sorted(set(renamed) - set(COLUMNS))
    if stray:
        raise GapError(
            f"No column is named {', '.join(stray)}; the names that a file's columns can stand for"
            f" are {', '.join(COLUMNS)}."
        )
    mark = _mark(path)
    try:
        if mark == _PARQUET:
            names = pq.read_schema(path).names
            return _named(
                pq.read_table(path, columns=_wanted(names, renamed, required, path)), renamed
            )
        with pa.memory_map(str(path)) as source:
            opened = pa.ipc.open_file(source) if mark == _ARROW else pa.ipc.open_stream(source)
            table = opened.read_all()
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, GapError):
            raise
        kind = "Parquet" if mark == _PARQUET else "Arrow"
        raise GapError(
            f"{path} begins as {kind} does and cannot be read to its end: it is damaged, or was cut"
            " short. Write it anew."
        ) from error
    return _named(table.select(_wanted(table.column_names, renamed, required, path)), renamed)


_PARQUET, _ARROW, _STREAM = b"PAR1", b"ARRO", b"\xff\xff\xff\xff"


def _mark(path: Path) -> bytes:
    """How the file begins. Raises ``GapError`` where it is none, or neither Parquet nor Arrow."""
    if path.is_dir():
        raise GapError(f"{path} is a folder: name the file in it.")
    if not path.exists():
        raise GapError(f"There is no file {path}.")
    if not path.is_file():
        raise GapError(
            f"{path} is no plain file (a pipe, a terminal or a device): Parquet is read from its"
            " end, so write it to a file first."
        )
    try:
        str(path).encode()
        with path.open("rb") as file:
            mark = file.read(4)
    except UnicodeEncodeError as error:
        raise GapError(
            f"{path} cannot be opened by Arrow: its name holds bytes that are no UTF-8. Rename it."
        ) from error
    except OSError as error:
        raise GapError(f"{path} cannot be opened: {error.strerror}.") from error
    if mark not in (_PARQUET, _ARROW, _STREAM):
        what = "is empty" if not mark else "is neither Parquet nor Arrow"
        raise GapError(
            f"{path} {what}: records are written by pyarrow.parquet.write_table (docs/gap.md); a"
            " trace goes with --rollout."
        )
    return mark


def _wanted(
    names: list[str], renamed: Mapping[str, str], required: Sequence[str], path: Path
) -> list[str]:
    """The file's own names of the columns that are read."""
    lacking = [f"{ours} (given as {theirs!r})" if ours != theirs else ours for ours, theirs in
               ((name, renamed.get(name, name)) for name in {**dict.fromkeys(required), **renamed}) if theirs not in names]  # fmt: skip
    if lacking:
        near = {
            name: difflib.get_close_matches(name.split(" ")[0], names, n=1, cutoff=0.5)
            for name in lacking
        }
        guess = "; ".join(
            f"--column {name.split(' ')[0]}={found[0]}" for name, found in near.items() if found
        )
        raise GapError(
            f"{path} has no column {', '.join(lacking)}. It has {', '.join(names) or 'none'}. Say"
            " which of them it is with --column"
            f" NAME=THEIRS{f' (perhaps {guess})' if guess else ''}, or add it (docs/gap.md)."
        )
    known = [renamed.get(name, name) for name in COLUMNS if renamed.get(name, name) in names]
    twice = [name for name, count in Counter(known).items() if count > 1]
    if twice:
        ours = [name for name in COLUMNS if renamed.get(name, name) == twice[0]]
        raise GapError(
            f"{path}: the column {twice[0]} cannot be {' and '.join(ours)} at once; name another"
            " with --column NAME=THEIRS."
        )
    wanted = known + [name for name in names if name.startswith(_BY_VERSION)]
    doubled = [name for name in wanted if names.count(name) > 1]
    if doubled:
        raise GapError(
            f"{path} has {names.count(doubled[0])} columns named {doubled[0]}: which of them is"
            " meant cannot be told."
        )
    return wanted


def _named(table: Any, renamed: Mapping[str, str]) -> Any:
    ours = {theirs: name for name, theirs in renamed.items()}
    return table.rename_columns([ours.get(name, name) for name in table.column_names])


def _plain(column: Any) -> Any:
    """A column of views (of lists, text or bytes) or of runs as one of plain values, which every
    function of Arrow takes.
    """
    import pyarrow as pa

    if not any(kind in str(column.type) for kind in ("_view", "run_end_encoded")):
        return column
    return pa.chunked_array(
        [_without_views(chunk) for chunk in column.chunks or [column.combine_chunks()]]
    )


def _without_views(array: Any) -> Any:
    """Lists are put together anew: of views that were read from a file, pyarrow casts the last one
    wrongly (26.0.1).
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = str(array.type).partition("<")[0]
    if kind == "run_end_encoded":
        return _without_views(pc.call_function("run_end_decode", [array]))
    if kind in ("string_view", "binary_view"):
        return array.cast(pa.string() if kind == "string_view" else pa.binary())
    if "_view" not in str(array.type) or "list" not in kind:
        return array
    lengths: Any = array.sizes if kind.endswith("_view") else pc.list_value_length(array)
    lengths = lengths.fill_null(0).to_numpy(zero_copy_only=False)
    absent = array.is_null()
    offsets = np.concatenate(
        [[0], np.cumsum(np.where(absent.to_numpy(zero_copy_only=False), 0, lengths))]
    )
    mask = absent if array.null_count else None
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), _without_views(array.flatten()), mask=mask
    )


def _depth(kind: Any) -> int:
    import pyarrow.types as pt

    depth = 0
    while pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth


def _flattened(columns: Mapping[str, Any], listed: set[str], path: Path) -> dict[str, Any]:
    """One row a token, from one row a sequence: lists are laid end to end, and what is no list
    holds for all its sequence's tokens.
    """
    import pyarrow.compute as pc

    for name in sorted(listed):
        if columns[name].null_count:
            row = int(np.argmax(columns[name].is_null().to_numpy(zero_copy_only=False)))
            raise GapError(
                f"{path}: {name} holds no list in row {row}: write an empty one for a sequence"
                " without tokens."
            )
    lengths = {
        name: pc.list_value_length(columns[name]).to_numpy(zero_copy_only=False) for name in listed
    }
    first = next(iter(lengths))
    for name, found in lengths.items():
        if not np.array_equal(found, lengths[first]):
            row = (
                int(np.flatnonzero(found != lengths[first])[0])
                if len(found) == len(lengths[first])
                else 0
            )
            raise GapError(
                f"{path}: {name} and {first} differ in length in row {row}: each list needs one"
                " entry per token."
            )
    if "sequence_id" in columns and "sequence_id" not in listed and "position" not in listed:
        _one_row_each(columns["sequence_id"], path)
    parents = pc.list_parent_indices(columns[first])
    return {
        name: pc.list_flatten(column) if name in listed else column.take(parents)
        for name, column in columns.items()
    }


def _one_row_each(column: Any, path: Path) -> None:
    """Raise ``GapError`` where two rows have one sequence_id: which of them a position is in could
    not be told.
    """
    ids = [str(name) for name in column.to_pylist()]
    twice = next((name for name, count in Counter(ids).items() if count > 1), None)
    if twice is not None:
        rows = [row for row, name in enumerate(ids) if name == twice][:2]
        raise GapError(
            f"{path}: rows {rows[0]} and {rows[1]} both have the sequence_id {twice}: a row is a"
            " sequence, so give each sample one of its own, such as prompt and number of the"
            " sample (or add position, where rows are parts of one sequence)."
        )


def _numpy(name: str, column: Any) -> npt.NDArray[Any]:
    if name in _ROUTES:
        return _route_array(name, column)
    if _depth(column.type):
        raise GapError(f"{name} holds lists where the other columns hold one value a token.")
    kind = str(column.type)
    if kind in ("string", "large_string") or kind.startswith("dictionary"):
        # codes instead of ten million Python strings
        encoded = (
            column.dictionary_encode().combine_chunks()
            if not kind.startswith("dictionary")
            else column.combine_chunks()
        )
        if encoded.null_count and name not in _MAY_MISS:
            raise GapError(
                f"{name} holds {encoded.null_count:,} missing values: every token must have one."
            )
        if name == "sequence_id":
            words = np.asarray(encoded.dictionary.to_pylist())
            return np.asarray(words[encoded.indices.to_numpy()])
        words = np.asarray(
            [*encoded.dictionary.to_pylist(), None], dtype=object
        )  # the last is that of -1
        return np.asarray(words[encoded.indices.fill_null(-1).to_numpy()])
    if column.null_count and name not in _MAY_MISS and not name.startswith(_BY_VERSION):
        raise GapError(
            f"{name} holds {column.null_count:,} missing values: every token must have one."
        )
    values = column.to_numpy()
    return np.asarray(values)


def _route_array(name: str, column: Any) -> npt.NDArray[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if _depth(flat.type) != 2:
        raise GapError(f"{name} must hold a list of layers a token, each a list of experts.")
    sizes = []
    for _ in range(2):
        lengths = np.unique(pc.list_value_length(flat).to_numpy(zero_copy_only=False))
        if len(lengths) != 1 or flat.null_count:
            raise GapError(
                f"{name} must have the same number of layers and of experts in every row; a row"
                " without a capture holds -1."
            )
        sizes.append(int(lengths[0]))
        flat = pc.list_flatten(flat)
    return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(-1, *sizes)


def _version(name: str, number: type[int | str], path: Path) -> int | str:
    text = name.removeprefix(_BY_VERSION)
    if not text:
        raise GapError(
            f"{path}: the column {name} names no version behind its sign: trainer_logprob@VERSION."
        )
    return number(text) if text.lstrip("-").isdigit() else text
