"""Files of records: rows that are sequences, columns with gaps, kinds of Arrow; nothing is merged,
dropped or left out in silence.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollproof.errors import GapError
from rollproof.gap import measure, measure_pairs
from rollproof.gap.intervals import Interval
from rollproof.gap.limits import limits_named
from rollproof.gap.pair_files import read_pairs

SEQUENCES, LENGTH = 20, 20
N = SEQUENCES * LENGTH
ROLLOUT = -np.random.default_rng(1).exponential(0.4, N)
TOKENS: dict[str, Any] = {
    "sequence_id": np.arange(N) // LENGTH,
    "rollout_logprob": ROLLOUT,
    "trainer_logprob": ROLLOUT - 1e-4,
    "mask": np.ones(N, bool),
}


def listed(column: Any) -> list[Any]:
    return [row.tolist() for row in np.asarray(column).reshape(SEQUENCES, LENGTH)]


ROWS = {name: listed(column) for name, column in TOKENS.items()} | {
    "sequence_id": np.arange(SEQUENCES)
}


def write(path: Path, columns: Any) -> Path:
    pq.write_table(
        columns if isinstance(columns, pa.Table) else pa.table(columns), path / "records.parquet"
    )  # type: ignore[no-untyped-call]
    return path / "records.parquet"


def test_two_rows_of_one_name_are_no_sequence(tmp_path: Path) -> None:
    """A row is a sequence: samples of one prompt under one name would become one sequence; parts
    that have positions may.
    """
    ids = np.arange(SEQUENCES) // 2
    with pytest.raises(
        GapError,
        match=(
            "rows 0 and 1 both have the sequence_id 0: each row is a sequence, so give each sample"
            " its own id"
        ),
    ):
        read_pairs(write(tmp_path, {**ROWS, "sequence_id": ids}))
    parts = {**ROWS, "sequence_id": ids, "position": listed(np.arange(N) % (2 * LENGTH))}
    assert SEQUENCES // 2 == read_pairs(write(tmp_path, parts)).n_sequences


@pytest.mark.parametrize(
    "names", [("rollout_logprob",), ("rollout_logprob", "trainer_logprob", "mask")]
)
def test_a_missing_list_is_told_with_its_row(tmp_path: Path, names: tuple[str, ...]) -> None:
    """A row without a list is neither an empty sequence nor a difference in length."""
    rows = {
        name: [*column[:3], None, *column[4:]] if name in names else column
        for name, column in ROWS.items()
    }
    with pytest.raises(GapError, match=f"{min(names)} has no list in row 3: write an empty one"):
        read_pairs(write(tmp_path, rows))


def test_empty_lists_are_sequences_without_tokens(tmp_path: Path) -> None:
    """They are left out, and all others are read."""
    rows = {
        name: column if name == "sequence_id" else [[], *column[1:]]
        for name, column in ROWS.items()
    }
    assert (SEQUENCES - 1, N - LENGTH) == (
        (pairs := read_pairs(write(tmp_path, rows))).n_sequences,
        pairs.n_tokens,
    )


@pytest.mark.parametrize("name", ["version", "replica", "part", "current_version"])
@pytest.mark.parametrize(
    "values", [[3, None], ["a", None], [None, None]], ids=["numbers", "text", "nothing"]
)
def test_labels_that_are_missing_for_some_tokens(
    tmp_path: Path, name: str, values: list[Any]
) -> None:
    """A file may leave out what a call of ``measure`` may: such tokens are in no bucket of it."""
    column = pa.array(values * (N // 2))
    report = measure_pairs(
        read_pairs(write(tmp_path, {**TOKENS, name: column})), limits=limits_named(), resamples=100
    )
    called = measure(**TOKENS, **{name: np.array(values * (N // 2), dtype=object)}, resamples=100)
    assert called.to_dict()["buckets"] == report.to_dict()["buckets"]
    assert all(
        bucket.label not in ("None", "nan") for row in report.buckets.values() for bucket in row
    )


@pytest.mark.parametrize("kind", ["list_view", "large_list", "fixed_size_list"])
def test_every_kind_of_list(tmp_path: Path, kind: str) -> None:
    """Lists by any of Arrow's layouts are read alike."""
    if kind == "list_view" and int(pa.__version__.partition(".")[0]) < 19:
        pytest.skip("this pyarrow writes no list views into Parquet files")
    made = {
        "list_view": pa.list_view(pa.float64()),
        "large_list": pa.large_list(pa.float64()),
        "fixed_size_list": pa.list_(pa.float64(), LENGTH),
    }
    rows = {
        name: pa.array(column, made[kind]) if "logprob" in name else column
        for name, column in ROWS.items()
    }
    assert np.array_equal(ROLLOUT, read_pairs(write(tmp_path, pa.table(rows))).rollout)


def test_a_version_without_a_name(tmp_path: Path) -> None:
    """``trainer_logprob@`` says of no version what it holds."""
    with pytest.raises(GapError, match="the column trainer_logprob@ names no version"):
        read_pairs(write(tmp_path, {**TOKENS, "trainer_logprob@": ROLLOUT}))


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (None, "and no token has a version"),
        (np.full(N, 3), r"and no token has one of them as its version \(3\)"),
        (np.full(N, "v3"), None),
    ],
)
def test_scores_of_versions_that_no_token_has_are_told(tags: Any, message: str | None) -> None:
    """``trainer_logprob@v3`` is not that of version 3: what could not be looked at is said."""
    more = {} if tags is None else {"version": tags}
    report = measure(**TOKENS, **more, by_version={"v3": ROLLOUT, "v4": ROLLOUT}, resamples=100)
    notes = [
        note
        for note in report.notes
        if note.startswith("trainer_logprob@VERSION is there for v3, v4, ")
    ]
    assert (message is None) == (not notes)
    if message is not None:
        assert notes[0].endswith(": whether another version sampled was not checked.")
        assert re.search(message, notes[0])


def test_sequences_in_pieces_are_told() -> None:
    """Rows of a sequence in several places may be samples of one prompt under one name; with a
    position their order is known.
    """
    order = np.argsort(np.arange(N) % LENGTH, kind="stable")
    mixed = {name: column[order] for name, column in TOKENS.items()}
    assert any(
        note.startswith("The rows of 20 sequences are in several places")
        for note in measure(**mixed, resamples=100).notes
    )
    for whole in (
        measure(**mixed, position=order % LENGTH, resamples=100),
        measure(**TOKENS, resamples=100),
    ):
        assert not any("several places" in note for note in whole.notes)


@pytest.mark.parametrize(
    "kind", ["string_view", "dictionary", "runs", "list_view", "views in lists"]
)
def test_kinds_of_arrow_that_few_functions_take(tmp_path: Path, kind: str) -> None:
    """Views and runs are read as the values that they stand for, also in a file with one row a
    sequence.
    """
    if not hasattr(pa, "list_view"):
        pytest.skip("this pyarrow has no views")
    names = [f"s{number}" for number in range(SEQUENCES)]
    changes: dict[str, Any] = {
        "string_view": lambda: {"sequence_id": pa.array(names, pa.string_view())},
        "dictionary": lambda: {"replica": pa.array(["a"] * SEQUENCES).dictionary_encode()},
        "runs": lambda: {"version": pa.RunEndEncodedArray.from_arrays([SEQUENCES], [3])},
        "list_view": lambda: {"mask": pa.array(ROWS["mask"], pa.list_view(pa.bool_()))},
        "views in lists": lambda: {
            "part": pa.array([["response"] * LENGTH] * SEQUENCES, pa.list_(pa.string_view()))
        },
    }[kind]()
    path = tmp_path / "records.arrow"
    table = pa.table({**ROWS, **changes})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert (N, SEQUENCES) == ((found := read_pairs(path)).n_tokens, found.n_sequences)


def test_names_that_are_records_are_refused(tmp_path: Path) -> None:
    """Also in a file with one row a sequence, whose names are compared first."""
    with pytest.raises(GapError, match="sequence_id is of type struct"):
        read_pairs(
            write(
                tmp_path,
                {**ROWS, "sequence_id": [{"prompt": number} for number in range(SEQUENCES)]},
            )
        )


def test_what_is_missing_is_null_in_json() -> None:
    """JSON has no NaN: a layer whose rows hold no selection, and a token id that is missing, are
    null.
    """
    routes = np.argsort(np.random.default_rng(2).random((N, 3, 8)), axis=2)[:, :, :2]
    routes[:, 0] = -1
    report = measure(
        **TOKENS,
        rollout_routes=routes,
        trainer_routes=routes,
        token_id=np.full(N, np.nan),
        resamples=100,
    )
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [[None, None], [0.0, 0.0], [0.0, 0.0]] == found["per_layer"]
    assert found["worst"][0]["token_id"] is None


def test_a_limit_that_no_number_of_tokens_decides() -> None:
    """An interval without an end in sight is undecided, and no number is told; nor does it
    overflow.
    """
    limit = limits_named("moe-bf16").limits["abs_diff_mean"]
    for high in (1e250, float("inf")):
        assert limit.tokens_needed(Interval(value=0.01, low=0.0, high=high), 100) is None
    assert 400 == limit.tokens_needed(Interval(value=0.01, low=0.0, high=0.09), 100)


@pytest.mark.parametrize(
    ("lacking", "more", "suggested"),
    [
        ("trainer_logprob", {}, None),
        ("trainer_logprob", {"old_trainer_logprobs": ROLLOUT}, "old_trainer_logprobs"),
        ("trainer_logprob", {"trainer_logprob@3": ROLLOUT, "current_logprob": ROLLOUT}, None),
        ("trainer_logprob", {"trainer_log_prob_dtype": ["bf16"] * N}, None),
        ("mask", {"task": ["maths"] * N}, None),
        ("mask", {"loss_mask": np.ones(N, bool), "task": ["maths"] * N}, "loss_mask"),
        ("mask", {"response_mask": np.ones(N, bool)}, "response_mask"),
        ("mask", {"response_mask": np.ones(N, bool), "attention_mask": np.ones(N, bool)}, None),
        ("sequence_id", {"sequence": np.arange(N) // LENGTH}, "sequence"),
        ("sequence_id", {"uid": np.arange(N) // LENGTH, "response_id": ROLLOUT}, "uid"),
    ],
)
def test_a_suggested_column_is_accepted(
    tmp_path: Path, lacking: str, more: dict[str, Any], suggested: str | None
) -> None:
    """Nothing is suggested that would be refused: a column that has a meaning already, text as a
    logprob, scores under one version.
    """
    columns = {name: column for name, column in TOKENS.items() if name != lacking}
    path = write(tmp_path, {**columns, **more})
    with pytest.raises(GapError, match=f"has no column {lacking}") as error:
        read_pairs(path)

    options = dict(re.findall(r"--column (\w+)=([\w@]+)", str(error.value)))
    options.pop("NAME", None)
    assert ({} if suggested is None else {lacking: suggested}) == options
    if options:
        assert SEQUENCES == read_pairs(path, renamed=options).n_sequences


def test_columns_of_one_name_are_not_suggested(tmp_path: Path) -> None:
    """Which of two is meant cannot be said; nor is it an error of another kind."""
    path = tmp_path / "tokens.csv"
    path.write_text("sequence_id,rollout_logprob,trainer_logprob,masks,masks\na,-1.0,-1.0,1,1\n")
    with pytest.raises(GapError, match="has no column mask") as error:
        read_pairs(path)
    assert "perhaps" not in str(error.value)


def test_rows_that_are_sequences_need_no_name(tmp_path: Path) -> None:
    """A row of lists is a sequence, so its number is a name as good as any. Lists are never
    suggested for one: of token ids they would make sequences of the tokens that are equal.
    """
    rows = {name: column for name, column in ROWS.items() if name != "sequence_id"}
    path = write(tmp_path, {**rows, "response_ids": rows["mask"]})
    assert SEQUENCES == read_pairs(path).n_sequences
    named = read_pairs(write(tmp_path, ROWS))
    assert named.starts.tolist() == read_pairs(path).starts.tolist()

    theirs = {"response_ids": rows["mask"], **{f"a_{name}": rows[name] for name in rows}}
    with pytest.raises(GapError, match="has no column rollout_logprob, trainer_logprob, mask"):
        read_pairs(write(tmp_path, theirs))


def test_two_lacking_columns_are_not_the_same_one(tmp_path: Path) -> None:
    """One column of the file is suggested once."""
    columns = {name: TOKENS[name] for name in ("sequence_id", "mask")}
    path = write(tmp_path, {**columns, "a_logprob": ROLLOUT, "behaviour_logprob": ROLLOUT})
    with pytest.raises(GapError, match="has no column") as error:
        read_pairs(path)

    options = dict(re.findall(r"--column (\w+_logprob)=(\w+)", str(error.value)))
    assert len(set(options.values())) == len(options)
    assert SEQUENCES == read_pairs(path, renamed=options).n_sequences
