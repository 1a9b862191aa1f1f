"""What may be compared, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollproof.errors import GapError
from rollproof.gap.pair_files import read_pairs
from rollproof.gap.token_pairs import TokenPairs


def _columns(**changes: Any) -> dict[str, Any]:
    base = {
        "rollout_logprob": [-0.5, -1.0, -0.1, -2.0],
        "trainer_logprob": [-0.4, -1.1, -0.1, -2.5],
        "sequence_id": [0, 0, 1, 1],
        "mask": [True, True, True, True],
    }
    return {**base, **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer_logprob": [-0.4, -1.1, -0.1]}, "differ in length .*trainer_logprob 3"),
        ({"trainer_logprob": [0.4, 1.1, 0.1, 2.5]}, "4 of 4 values above 0 .*sign flipped"),
        ({"trainer_logprob": [[-0.4, -1.1], [-0.1, -2.5]]}, r"must have one axis .*\(2, 2\)"),
        ({"trainer_logprob": ["a", "b", "c", "d"]}, "trainer_logprob must hold numbers"),
        ({"mask": [0, 1, 2, 1]}, "mask must hold true and false"),
        ({"mask": [0.5, 1, 1, 1]}, "mask must hold true and false"),
        ({"sequence_id": [0, None, 1, 1]}, "sequence_id holds missing values"),
        ({"sequence_id": [0.0, float("nan"), 1, 1]}, "sequence_id holds missing values"),
        (
            {"token_id": [1, 2, 3, 4], "trainer_token_id": [1, 2, 3, 5]},
            "different tokens in 1 row .*row 3, 4 at the rollout, 5 at the trainer",
        ),
        ({"colour": [1, 2, 3, 4]}, "No column is named colour"),
        (
            {"rollout_routes": [[1, 2], [1, 2], [1, 2], [1, 2]]},
            r"rollout_routes must be an integer array \(tokens, layers, top_k\)",
        ),
        ({"by_version": {3: [-1.0]}}, "trainer_logprob@3 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], words: str) -> None:
    """Columns that do not fit are refused with the column, the first place and the next step."""
    with pytest.raises(GapError, match=words):
        TokenPairs.of(**_columns(**changes))


def test_differences_under_the_mask_do_not_count() -> None:
    """Tokens that the loss does not count may differ, be missing or be positive on either side."""
    pairs = TokenPairs.of(
        **_columns(
            mask=[True, False, True, True],
            trainer_logprob=[-0.4, 7.0, -0.1, -2.5],
            token_id=[1, 2, 3, 4],
            trainer_token_id=[1, 9, 3, 4],
        )
    )
    assert (3, 1, [0, 1]) == (pairs.n_tokens, pairs.masked, list(pairs.sequences))


def test_rows_in_any_order_come_together_by_sequence_and_position() -> None:
    """Shuffled rows are laid out by sequence, and by position within one."""
    pairs = TokenPairs.of(
        rollout_logprob=[-0.4, -0.1, -0.3, -0.2],
        trainer_logprob=[-1.4, -1.1, -1.3, -1.2],
        sequence_id=["b", "a", "b", "a"],
        mask=[1, 1, 1, 1],
        position=[1, 0, 0, 1],
    )
    assert [-0.1, -0.2, -0.3, -0.4] == pairs.rollout.tolist()
    assert (["a", "b"], [0, 2]) == (list(pairs.sequences), pairs.starts.tolist())
    assert {
        "sequence": "b",
        "position": 1,
        "rollout_logprob": -0.4,
        "trainer_logprob": -1.4,
    } == pairs.describe(3)


def test_rounding_just_above_zero_is_accepted() -> None:
    """A logprob of 1e-6, as fused kernels return for a certain token, is no error."""
    assert 4 == TokenPairs.of(**_columns(trainer_logprob=[1e-6, -1.1, -0.1, -2.5])).n_tokens


def _written(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path)  # type: ignore[no-untyped-call]
    return path


def test_a_file_of_tokens_and_one_of_sequences_hold_the_same_pairs(tmp_path: Path) -> None:
    """A row a token and a row a sequence with lists are read to equal pairs; what is no list holds
    for the whole sequence.
    """
    flat = read_pairs(_written(tmp_path / "flat.parquet", _columns(version=[3, 3, 4, 4])))
    nested = read_pairs(
        _written(
            tmp_path / "nested.parquet",
            {
                "sequence_id": ["0", "1"],
                "rollout_logprob": [[-0.5, -1.0], [-0.1, -2.0]],
                "trainer_logprob": [[-0.4, -1.1], [-0.1, -2.5]],
                "mask": [[True, True], [True, True]],
                "version": [3, 4],
            },
        )
    )
    assert flat.rollout.tolist() == nested.rollout.tolist()
    assert [3, 3, 4, 4] == nested.columns["version"].tolist() == flat.columns["version"].tolist()


def test_an_arrow_file_is_read_like_a_parquet_file(tmp_path: Path) -> None:
    """Arrow IPC files and streams hold pairs as well."""
    table = pa.table(_columns())
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as stream:
        stream.write_table(table)
    assert [4, 4] == [
        read_pairs(tmp_path / name).n_tokens for name in ("file.arrow", "stream.arrow")
    ]


def test_other_names_of_columns_are_given(tmp_path: Path) -> None:
    """``renamed`` tells which column of a file is meant; routes and versions come along."""
    columns = _columns(old=[-0.4, -1.1, -0.1, -2.5], rollout_routes=[[[0, 1], [2, 3]]] * 4)
    columns["trainer_logprob@2"] = columns.pop("trainer_logprob")
    pairs = read_pairs(
        _written(tmp_path / "t.parquet", columns), renamed={"trainer_logprob": "old"}
    )
    assert [-0.4, -1.1, -0.1, -2.5] == pairs.trainer.tolist() == pairs.by_version[2].tolist()
    assert (4, 2, 2) == pairs.routes["rollout_routes"].shape


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"sequence_id": [1], "rollout_log_prob": [-1.0], "mask": [1]},
            "no column rollout_logprob,.*rollout_logprob=rollout_log_prob",
        ),
        (_columns(mask=[True, None, True, True]), "mask holds 1 missing values"),
        (
            _columns(rollout_routes=[[[0, 1]], [[0, 1]], [[0, 1], [2, 3]], [[0, 1]]]),
            "rollout_routes must have the same number of layers",
        ),
        (
            _columns(
                rollout_logprob=[[-0.5], [-1.0], [-0.1, -2.0], [-0.1]],
                trainer_logprob=[[-0.5], [-1.0], [-0.1], [-0.1]],
                mask=[[True]] * 4,
            ),
            "differ in length in row 2",
        ),
    ],
)
def test_files_that_hold_something_else_are_refused(
    tmp_path: Path, columns: dict[str, Any], words: str
) -> None:
    """A file without a column, with missing values or with uneven lists is refused with what it
    holds.
    """
    with pytest.raises(GapError, match=words):
        read_pairs(_written(tmp_path / "t.parquet", columns))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: records are written by"),
        (b"PAR1", "begins as Parquet does and cannot be read to its end"),
        (b"PAR1" + bytes(100), "begins as Parquet does and cannot be read to its end"),
        (b"ARROW1" + bytes(100), "begins as Arrow does and cannot be read to its end"),
        (b"\xff\xff\xff\xff" + bytes(100), "begins as Arrow does and cannot be read to its end"),
        (b"import rollproof\n", "is neither Parquet nor Arrow: records are written by"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """Empty, truncated and foreign files are told as such, in our own words."""
    path = tmp_path / "junk.parquet"
    path.write_bytes(content)
    with pytest.raises(GapError, match=words) as raised:
        read_pairs(path)
    assert "magic" not in str(raised.value).lower()


def test_what_is_no_plain_file_is_told(tmp_path: Path) -> None:
    """A folder, a device and a path to nothing are each called what they are."""
    for path, words in (
        (tmp_path, "is a folder: name the file in it"),
        (Path("/dev/null"), "is not a regular file"),
        (tmp_path / "x", "There is no file"),
    ):
        with pytest.raises(GapError, match=words):
            read_pairs(path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    """A wrong path is told as such."""
    with pytest.raises(GapError, match="There is no file"):
        read_pairs(tmp_path / "none.parquet")
