"""Reading token pairs out of a Parquet or Arrow file.

One row a token (``sequence_id``, ``rollout_logprob``, ``trainer_logprob``, ``mask``, and the others
of ``COLUMNS``), or one row a sequence with lists in the columns that differ between its tokens.
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
from rollproof.gap.table_files import load_table
from rollproof.gap.token_pairs import COLUMNS, TokenPairs

__all__ = ["read_columns", "read_pairs"]

_REQUIRED = ("sequence_id", "rollout_logprob", "trainer_logprob", "mask")
_BY_VERSION = "trainer_logprob@"
_GROUP = "group "
_ROUTES = ("rollout_routes", "trainer_routes")
# Columns that need not have a value for every token; `TokenPairs` says what that means
_INCOMPLETE = (
    "rollout_logprob",
    "trainer_logprob",
    "current_logprob",
    "previous_logprob",
    "version",
    "current_version",
    "replica",
    "part",
)


_USUAL: Mapping[str, Sequence[str]] = {
    "sequence_id": (
        *("id", "uid", "uuid", "rid", "idx", "index", "request_id", "sample_id", "sample_index"),
        *("seq_id", "traj_id", "trajectory_id", "rollout_id"),
    ),
}
"""Names that frameworks have for a column, and that are not like ours."""


def read_pairs(
    path: Path, *, renamed: Mapping[str, str] | None = None, groups: Sequence[str] = ()
) -> TokenPairs:
    """Return the pairs of a Parquet file (or of an Arrow IPC file or stream).

    Columns that are not in ``COLUMNS`` are ignored, unless they are groups. In a file with one row
    a sequence, ``sequence_id`` may be missing: the rows are then numbered.

    Args:
        path: the file.
        renamed: names of ``COLUMNS`` to the file's own names for them.
        groups: columns of the file whose values are compared with one another.

    Raises:
        GapError: the file cannot be read, lacks a column, or a column holds wrong values.
    """
    values, by_version = read_columns(
        path, required=_REQUIRED, renamed=renamed, groups=groups, number_rows=True
    )
    labels = {name: values.pop(_GROUP + name) for name in groups}
    return TokenPairs.of(by_version=by_version, groups=labels, **values)


def read_columns(
    path: Path,
    *,
    required: Sequence[str],
    renamed: Mapping[str, str] | None = None,
    groups: Sequence[str] = (),
    number_rows: bool = False,
) -> tuple[dict[str, npt.NDArray[Any]], dict[int | str, npt.NDArray[Any]]]:
    """Return the columns of a file, one entry a token.

    The columns of ``COLUMNS`` are by name, the ``groups`` by their name after ``group ``, those of
    ``trainer_logprob@VERSION`` by version. ``number_rows``: a file with one row a sequence need
    not name its sequences. Raises as ``read_pairs`` does, also if one of ``required`` is missing.
    """
    import pyarrow as pa

    table = _load(path, dict(renamed or {}), required, groups, number_rows=number_rows)
    try:
        columns = {name: _plain(table.column(name)) for name in table.column_names}
        lists = {
            name
            for name, column in columns.items()
            if _depth(column.type) > (2 if name in _ROUTES else 0)
        }
        if lists:
            columns = _flattened(columns, lists, path, number_rows=number_rows)
        for name, column in columns.items():
            if name not in table.column_names:  # the number of the row
                continue
            _require_depth(name, column, table.column(name).type, path, by_sequence=bool(lists))
        values = {name: _numpy(name, column) for name, column in columns.items()}
    except pa.ArrowNotImplementedError as error:
        # plain values in a form of lists, runs or views that this release of Arrow has no code for
        kinds = ", ".join(f"{name} {table.column(name).type}" for name in table.column_names)
        raise GapError(
            f"{path} has a column of a kind that Arrow cannot work with ({kinds}): write plain"
            " numbers, text or lists."
        ) from error
    tags = values.get("version")
    # a tag "0" is the version of trainer_logprob@0
    number = int if tags is None or tags.dtype.kind not in "OUS" else str
    by_version = {
        _version(name, number, path): values.pop(name)
        for name in list(values)
        if name.startswith(_BY_VERSION)
    }
    return values, by_version


def _load(
    path: Path,
    renamed: dict[str, str],
    required: Sequence[str],
    groups: Sequence[str],
    *,
    number_rows: bool,
) -> Any:
    unknown = sorted(set(renamed) - set(COLUMNS))
    if unknown:
        raise GapError(
            f"No column is named {', '.join(unknown)}; the names that a file's columns can stand"
            f" for are {', '.join(COLUMNS)}."
        )

    def chosen(schema: Any) -> list[str]:
        needed = required
        if number_rows and "sequence_id" not in renamed and _has_lists(schema, renamed, required):
            needed = [name for name in required if name != "sequence_id"]
        read = _columns_to_read(schema, renamed, needed, path)
        return list(dict.fromkeys([*read, *_group_columns(schema.names, groups, path)]))

    table = load_table(path, chosen)
    _check_kinds(table, path)
    return _with_groups(table, renamed, groups)


def _has_lists(schema: Any, renamed: Mapping[str, str], required: Sequence[str]) -> bool:
    """Return whether the file has one row a sequence.

    If none of the columns that tell has a name that is known, those of numbers tell: a file whose
    logprobs have other names has the same form.
    """
    theirs = [renamed.get(name, name) for name in required if name.endswith("_logprob")]
    told = [name for name in schema.names if name in theirs] or schema.names
    return any(field.name in told and _depth(field.type) == 1 for field in schema)


def _check_kinds(table: Any, path: Path) -> None:
    """Raise ``GapError`` for a column that holds neither numbers nor text."""
    import pyarrow.types as pt

    for name in table.column_names:
        kind = table.column(name).type
        while hasattr(kind, "value_type"):  # lists, dictionaries and runs of values
            kind = kind.value_type
        if not (
            pt.is_boolean(kind)
            or pt.is_integer(kind)
            or pt.is_floating(kind)
            or pt.is_null(kind)
            or "string" in str(kind)
        ):
            raise GapError(
                f"{path}: {name} is of type {kind}: write plain numbers, text or lists of them."
            )


def _columns_to_read(
    schema: Any, renamed: Mapping[str, str], required: Sequence[str], path: Path
) -> list[str]:
    """Return the file's own names of the columns that are read."""
    names: list[str] = list(schema.names)
    lacking = []
    for name in {**dict.fromkeys(required), **renamed}:
        theirs = renamed.get(name, name)
        if theirs not in names:
            lacking.append(name if name == theirs else f"{name} (given as {theirs!r})")
    if lacking:
        guess = _guessed(lacking, schema, renamed)
        raise GapError(
            f"{path} has no column {', '.join(lacking)}. It has {', '.join(names) or 'none'}. Say"
            " which of them it is with --column"
            f" NAME=THEIRS{f' (perhaps {guess})' if guess else ''}, or add it (docs/gap.md)."
        )
    read = [renamed.get(name, name) for name in COLUMNS if renamed.get(name, name) in names]
    twice = [name for name, count in Counter(read).items() if count > 1]
    if twice:
        ours = [name for name in COLUMNS if renamed.get(name, name) == twice[0]]
        raise GapError(
            f"{path}: the column {twice[0]} cannot be {' and '.join(ours)} at once; name another"
            " with --column NAME=THEIRS."
        )
    read += [name for name in names if name.startswith(_BY_VERSION)]
    repeated = [name for name in read if names.count(name) > 1]
    if repeated:
        raise GapError(
            f"{path} has {names.count(repeated[0])} columns named {repeated[0]}: give each its own"
            " name."
        )
    return read


def _guessed(lacking: Sequence[str], schema: Any, renamed: Mapping[str, str]) -> str:
    """Return options that name columns for those that are lacking, if they would be accepted."""
    # a column cannot be two at once, nor can two columns of one name be told apart
    free = {name for name, count in Counter(schema.names).items() if count == 1}
    free -= {*COLUMNS, *renamed.values()}
    guesses = []
    for name in (text.split(" ")[0] for text in lacking):
        candidates = [
            own
            for own in schema.names
            if own in free and _may_be(name, schema.field(own).type, own)
        ]
        known = [own for own in candidates if own.lower() in _USUAL.get(name, ())]
        # the name is probably one of another project, or misspelt
        match = known[:1] or difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
        within = [own for own in candidates if name in own]
        if not match and len(within) == 1:  # response_mask for mask
            match = within
        if match:
            free.remove(match[0])
            guesses.append(f"--column {name}={match[0]}")
    return " ".join(guesses)


def _may_be(name: str, kind: Any, own: str) -> bool:
    """Whether a column of that Arrow type could hold ``name``."""
    import pyarrow.types as pt

    if own.startswith(_BY_VERSION):
        return False
    depth = _depth(kind)
    if name in _ROUTES:
        return depth >= 2
    if name == "sequence_id":
        # other lists would be taken for the sequences of single tokens
        return depth == 0 and not pt.is_floating(kind)
    for _ in range(depth):
        kind = kind.value_type
    if depth > 1:
        return False
    if name.endswith("_logprob"):
        return pt.is_floating(kind)
    if name == "mask":
        return pt.is_boolean(kind) or pt.is_integer(kind) or pt.is_floating(kind)
    return True


def _group_columns(names: Sequence[str], groups: Sequence[str], path: Path) -> list[str]:
    """Return the columns of groups. Raises ``GapError`` if one is missing or ambiguous."""
    for name in groups:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            guess = f" (perhaps --group {near[0]})" if near else ""
            raise GapError(
                f"{path} has no column {name} to group by{guess}. It has"
                f" {', '.join(names) or 'none'}."
            )
        if list(names).count(name) > 1:
            raise GapError(
                f"{path} has {list(names).count(name)} columns named {name}: give each its own"
                " name."
            )
    return list(groups)


def _with_groups(table: Any, renamed: Mapping[str, str], groups: Sequence[str]) -> Any:
    """Return the table under our names, with the groups as columns of their own."""
    labels = {name: table.column(name) for name in groups}
    ours = {renamed.get(name, name) for name in COLUMNS}
    read = [name for name in table.column_names if name in ours or name.startswith(_BY_VERSION)]
    table = _named(table.select(read), renamed)
    for name, column in labels.items():
        table = table.append_column(_GROUP + name, column)
    return table


def _named(table: Any, renamed: Mapping[str, str]) -> Any:
    ours = {theirs: name for name, theirs in renamed.items()}
    return table.rename_columns([ours.get(name, name) for name in table.column_names])


def _plain(column: Any) -> Any:
    """Return a column of views or of runs as one of plain values, which all of Arrow supports."""
    import pyarrow as pa

    if not any(kind in str(column.type) for kind in ("_view", "run_end_encoded")):
        return column
    return pa.chunked_array(
        [_without_views(chunk) for chunk in column.chunks or [column.combine_chunks()]]
    )


def _without_views(array: Any) -> Any:
    """Return an array of lists, text or bytes without views."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = str(array.type).partition("<")[0]
    if kind == "run_end_encoded":
        return _without_views(pc.call_function("run_end_decode", [array]))
    if kind in ("string_view", "binary_view"):
        return array.cast(pa.string() if kind == "string_view" else pa.binary())
    if "_view" not in str(array.type) or "list" not in kind:
        return array
    # lists are built again, since pyarrow 26.0.1 casts the last view that a file holds wrongly
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


def _flattened(
    columns: Mapping[str, Any], lists: set[str], path: Path, *, number_rows: bool
) -> dict[str, Any]:
    """Turn one row a sequence into one row a token.

    Lists are laid end to end; a value that is no list holds for all tokens of its sequence.
    ``number_rows``: the number of its row is the id of a sequence without one.
    """
    import pyarrow.compute as pc

    for name in sorted(lists):
        if columns[name].null_count:
            row = int(np.argmax(columns[name].is_null().to_numpy(zero_copy_only=False)))
            raise GapError(
                f"{path}: {name} has no list in row {row}: write an empty one for a sequence"
                " without tokens."
            )
    lengths = {
        name: pc.list_value_length(columns[name]).to_numpy(zero_copy_only=False) for name in lists
    }
    first = next(iter(lengths))
    for name, own in lengths.items():
        if not np.array_equal(own, lengths[first]):
            comparable = len(own) == len(lengths[first])
            row = int(np.flatnonzero(own != lengths[first])[0]) if comparable else 0
            raise GapError(
                f"{path}: {name} and {first} differ in length in row {row}: each list needs one"
                " entry per token."
            )
    if "sequence_id" in columns and "sequence_id" not in lists and "position" not in lists:
        _require_distinct_ids(columns["sequence_id"], path)
    # the row of each token, to repeat the columns that hold one value a sequence
    parents = pc.list_parent_indices(columns[first])
    values = {
        name: pc.list_flatten(column) if name in lists else column.take(parents)
        for name, column in columns.items()
    }
    return {"sequence_id": parents, **values} if number_rows else values


def _require_depth(name: str, column: Any, kind: Any, path: Path, *, by_sequence: bool) -> None:
    """Raise ``GapError`` for a column whose lists are nested otherwise than its values need.

    Args:
        name: The name of the column.
        column: The column with one row a token.
        kind: The type that the file has for it.
        path: The file.
        by_sequence: Whether the file has one row a sequence.
    """
    if _depth(column.type) == (2 if name in _ROUTES else 0):
        return
    if name in _ROUTES:
        expected = "for each token a list of layers, each a list of experts"
    else:
        expected = "one value for each token"
    rows = ", in a list for each row, which is a sequence here" if by_sequence else ""
    raise GapError(f"{path}: {name} is of type {kind}: it must hold {expected}{rows}.")


def _require_distinct_ids(column: Any, path: Path) -> None:
    """Raise ``GapError`` if two rows share a sequence_id: their positions would be ambiguous."""
    ids = [str(name) for name in column.to_pylist()]
    twice = next((name for name, count in Counter(ids).items() if count > 1), None)
    if twice is not None:
        rows = [row for row, name in enumerate(ids) if name == twice][:2]
        raise GapError(
            f"{path}: rows {rows[0]} and {rows[1]} both have the sequence_id {twice}: each row is a"
            " sequence, so give each sample its own id, such as prompt and number of the sample"
            " (or add position, if rows are parts of one sequence)."
        )


def _numpy(name: str, column: Any) -> npt.NDArray[Any]:
    if name in _ROUTES:
        return _route_array(name, column)
    kind = str(column.type)
    if kind in ("string", "large_string") or kind.startswith("dictionary"):
        # codes instead of ten million Python strings
        encoded = (
            column.dictionary_encode().combine_chunks()
            if not kind.startswith("dictionary")
            else column.combine_chunks()
        )
        if encoded.null_count and not _may_lack(name):
            raise GapError(
                f"{name} holds {encoded.null_count:,} missing values: every token must have one."
            )
        if name == "sequence_id":
            words = np.asarray(encoded.dictionary.to_pylist())
            return np.asarray(words[encoded.indices.to_numpy()])
        # the last one is that of code -1
        words = np.asarray([*encoded.dictionary.to_pylist(), None], dtype=object)
        return np.asarray(words[encoded.indices.fill_null(-1).to_numpy()])
    if column.null_count and not _may_lack(name):
        raise GapError(
            f"{name} holds {column.null_count:,} missing values: every token must have one."
        )
    values = column.to_numpy()
    return np.asarray(values)


def _may_lack(name: str) -> bool:
    """Whether some tokens need no value in a column."""
    return name in _INCOMPLETE or name.startswith((_BY_VERSION, _GROUP))


def _route_array(name: str, column: Any) -> npt.NDArray[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
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
            f"{path}: the column {name} names no version after its sign: trainer_logprob@VERSION."
        )
    return number(text) if text.lstrip("-").isdigit() else text
