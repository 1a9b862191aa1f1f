"""The columns of JSONL, CSV, NumPy archives and torch files are those of a Parquet file."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.errors import GapError
from rollproof.gap.pair_files import read_pairs

COLUMNS: dict[str, Any] = {
    "sequence_id": np.array([0, 0, 1]),
    "rollout_logprob": np.array([-0.5, -1.0, -1.5]),
    "trainer_logprob": np.array([-0.25, -1.0, -2.0]),
    "mask": np.array([True, False, True]),
}


def as_jsonl(path: Path, columns: dict[str, Any]) -> Path:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.with_suffix(".jsonl").write_text(
        "".join(json.dumps(row, default=lambda value: value.tolist()) + "\n" for row in rows)
    )
    return path.with_suffix(".jsonl")


def as_csv(path: Path, columns: dict[str, Any]) -> Path:
    rows = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.with_suffix(".csv").write_text("\n".join([",".join(columns), *rows]) + "\n")
    return path.with_suffix(".csv")


def as_npz(path: Path, columns: dict[str, Any]) -> Path:
    np.savez(path.with_suffix(".npz"), **columns)
    return path.with_suffix(".npz")


def as_torch(path: Path, columns: dict[str, Any]) -> Path:
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    torch.save(tensors, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


WRITERS = [as_jsonl, as_csv, as_npz, as_torch]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_row_a_token(tmp_path: Path, write: Callable[[Path, dict[str, Any]], Path]) -> None:
    """Masked tokens are left out, the others are in their sequences."""
    pairs = read_pairs(write(tmp_path / "t", COLUMNS))
    assert [-0.5, -1.5] == pairs.rollout.tolist()
    assert [-0.25, -2.0] == pairs.trainer.tolist()
    assert [0, 1] == list(pairs.sequences)


def test_a_line_of_json_may_be_a_sequence(tmp_path: Path) -> None:
    """Lists in its columns, as in a Parquet file; NaN is what Python writes of a NaN."""
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"sequence_id": "a", "rollout_logprob": [-1, -0.5], "trainer_logprob": [NaN, -0.5],'
        ' "mask": [1, 1]}\n'
    )
    pairs = read_pairs(path)
    assert [-1.0, -0.5] == pairs.rollout.tolist()
    assert [False, True] == pairs.finite.tolist()


@pytest.mark.parametrize("write", [as_npz, as_torch], ids=lambda write: write.__name__)
def test_arrays_keep_their_axes(
    tmp_path: Path, write: Callable[[Path, dict[str, Any]], Path]
) -> None:
    """Routes are (tokens, layers, experts)."""
    routes = np.arange(3 * 2 * 2).reshape(3, 2, 2)
    columns = COLUMNS | {"rollout_routes": routes, "trainer_routes": routes}
    pairs = read_pairs(write(tmp_path / "t", columns))
    assert routes[[0, 2]].tolist() == pairs.routes["rollout_routes"].tolist()


def test_half_precision_of_torch_is_read(tmp_path: Path) -> None:
    """NumPy has no bfloat16."""
    torch = pytest.importorskip("torch")
    columns = {name: torch.from_numpy(column) for name, column in COLUMNS.items()}
    columns["rollout_logprob"] = columns["rollout_logprob"].bfloat16()
    torch.save(columns, tmp_path / "t.pt")
    assert [-0.5, -1.5] == read_pairs(tmp_path / "t.pt").rollout.tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask": np.ones(2)}, r"differ in length \(.*mask 2\)"),
        ({"mask": np.array(1.0)}, r"mask has shape \(\)"),
        ({"mask": np.array([1j, 1j, 1j])}, "mask has shape .* and dtype complex128"),
    ],
)
def test_arrays_that_are_no_columns_are_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """Column, shape and dtype."""
    with pytest.raises(GapError, match=said):
        read_pairs(as_npz(tmp_path / "t", COLUMNS | changes))


def test_an_archive_of_objects_is_refused(tmp_path: Path) -> None:
    """NumPy would unpickle them."""
    with pytest.raises(GapError, match="allow_pickle=False"):
        read_pairs(as_npz(tmp_path / "t", COLUMNS | {"mask": np.array([{}, {}, {}])}))


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_file_that_was_cut_is_an_error(
    tmp_path: Path, write: Callable[[Path, dict[str, Any]], Path]
) -> None:
    """Wherever it was cut, but for the end of a line of text."""
    path = write(tmp_path / "t", COLUMNS)
    whole = path.read_bytes()
    for end in range(len(whole) - 3, 4, -max(1, len(whole) // 20)):
        path.write_bytes(whole[:end].rstrip(b"\n"))
        with pytest.raises(GapError):
            read_pairs(path)


def test_an_archive_that_expands_beyond_reason_is_refused(tmp_path: Path) -> None:
    """A megabyte of zeros that claims to be a gigabyte."""
    path = tmp_path / "t.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("mask.npy", b"\0" * (300 << 20))
    with pytest.raises(GapError, match="claims to hold"):
        read_pairs(path)


def test_an_archive_whose_directory_is_damaged_is_refused(tmp_path: Path) -> None:
    """A name that is marked as UTF-8 and is none: zipfile raises an error of its own kind."""
    path = as_npz(tmp_path / "t", COLUMNS)
    damaged = bytearray(path.read_bytes())
    entry = damaged.index(b"PK\x01\x02")
    damaged[entry + 9] |= 0x08
    damaged[entry + 46] = 0xFF
    path.write_bytes(damaged)
    with pytest.raises(GapError, match="an archive with a damaged directory"):
        read_pairs(path)
