"""Records that cannot be compared, at every door: an error, a named failure, or an undecided
verdict that says what is missing.
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

from rollproof.cli.app import run
from rollproof.errors import ConformanceError, GapError, UsageError
from rollproof.gap import gap_lines, measure
from rollproof.gap.hf_trainer import HfTrainer
from rollproof.gap.pair_files import read_pairs
from rollproof.gap.scored_rollouts import score_rollouts
from rollproof.judging.report import ExitCode
from rollproof.reporting.text import text_of
from rollproof.store import dump_trace
from tests.support.resumed_trace import ROLLOUT, resumed
from tests.support.trace_builder import TraceBuilder, contract

N = 400
RNG = np.random.default_rng(0)
ROUTES = np.argsort(RNG.random((N, 3, 8)), axis=2)[:, :, :2]


def records(**changes: Any) -> dict[str, Any]:
    """A healthy gap of 20 sequences of 20 tokens, but for ``changes``."""
    rollout = -np.random.default_rng(1).exponential(0.4, N)
    base = {
        "sequence_id": np.arange(N) // 20,
        "rollout_logprob": rollout,
        "trainer_logprob": rollout - 1e-4,
        "mask": np.ones(N, bool),
    }
    return base | {
        name: value(base[name].copy()) if callable(value) else value
        for name, value in changes.items()
    }


def put(value: Any, at: Any = 7) -> Any:
    def change(column: Any) -> Any:
        column[at] = value
        return column

    return change


FIRST = {name: column[:1] for name, column in records().items()}
NONE = {name: column[:0] for name, column in records().items()}
BROKEN = [
    (
        "nan",
        records(trainer_logprob=put(np.nan)),
        "fail",
        "1 token has a logprob that is not finite",
    ),
    (
        "minus infinity",
        records(rollout_logprob=put(-np.inf)),
        "fail",
        "1 token has a logprob that is not finite",
    ),
    (
        "stands for minus infinity",
        records(rollout_logprob=put(-9999.0)),
        "fail",
        "1 token has a logprob that is not finite",
    ),
    (
        "least float",
        records(trainer_logprob=put(np.finfo(np.float64).min)),
        "fail",
        "1 token has a logprob that is not finite",
    ),
    (
        "nothing but nan",
        records(rollout_logprob=np.full(N, np.nan)),
        "fail",
        "400 tokens have a logprob that is not finite",
    ),
    (
        "positive",
        records(trainer_logprob=lambda own: -own),
        "error",
        "trainer_logprob holds 400 of 400 values above 0",
    ),
    (
        "one positive",
        records(rollout_logprob=put(0.5)),
        "error",
        r"holds 1 of 400 values above 0 \(the first: 0.5 at row 7",
    ),
    (
        "positive under a version",
        records(**{"trainer_logprob@3": np.full(N, 0.5)}),
        "error",
        "trainer_logprob@3 holds 400 of 400 values",
    ),
    ("no mask", records(mask=None), "error", "mask"),
    ("a mask of weights", records(mask=np.full(N, 0.5)), "error", "mask must hold true and false"),
    (
        "versions beyond exact floats",
        records(version=np.full(N, 1e300)),
        "error",
        "1e.300 in row 0 .a float does not hold it exactly",
    ),
    ("all masked", records(mask=np.zeros(N)), "open", "the mask excludes all 400"),
    ("no row", NONE, "open", "the mask excludes all 0"),
    ("one token", FIRST, "open", "1 sequence is too few"),
    ("one sequence", records(sequence_id=np.zeros(N, int)), "open", "1 sequence is too few"),
    (
        "a vocabulary of one",
        records(rollout_logprob=np.zeros(N), trainer_logprob=np.zeros(N)),
        "open",
        "pearson cannot be computed",
    ),
    (
        "a uniform law",
        records(rollout_logprob=np.full(N, -1.0), trainer_logprob=np.full(N, -1.0)),
        "open",
        "pearson cannot be computed",
    ),
    (
        "other tokens",
        records(token_id=np.arange(N), trainer_token_id=np.arange(N) // 2),
        "error",
        "different tokens in 399 rows",
    ),
    (
        "a sequence twice",
        records(position=np.arange(N) % 10),
        "error",
        r"200 tokens have the sequence_id and the position of another",
    ),
    (
        "routes without layers",
        records(rollout_routes=ROUTES[:, 0]),
        "error",
        "must (be an integer array|hold (for each token )?a list of layers)",
    ),
    (
        "routes of other layers",
        records(rollout_routes=ROUTES, trainer_routes=ROUTES[:, :2]),
        "error",
        "differ in shape",
    ),
    (
        "routes of other top-k",
        records(rollout_routes=ROUTES, trainer_routes=ROUTES[:, :, :1]),
        "error",
        "differ in shape",
    ),
    (
        "a negative temperature",
        records(temperature=np.full(N, -1.0)),
        "error",
        r"temperature must be a number of at least 0; it is -1",
    ),
    (
        "a temperature in words",
        records(temperature=np.full(N, "hot")),
        "error",
        "temperature must hold one number a token",
    ),
    (
        "positions in words",
        records(position=np.full(N, "x")),
        "error",
        "position must hold one number a token",
    ),
    (
        "resumes in words",
        records(since_resume=np.full(N, "x")),
        "error",
        "since_resume must hold one number a token",
    ),
    (
        "batches of nothing",
        records(batch=np.full(N, np.nan)),
        "error",
        "batch holds missing values",
    ),
    (
        "logprobs in words",
        records(trainer_logprob=np.full(N, "x")),
        "error",
        "trainer_logprob must hold numbers",
    ),
]
CASES = pytest.mark.parametrize(
    ("columns", "outcome", "words"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)


def as_arguments(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns of a file as those of ``measure``."""
    by_version = {int(name.split("@")[1]): columns[name] for name in columns if "@" in name}
    plain = {name: value for name, value in columns.items() if "@" not in name}
    return plain | ({"by_version": by_version} if by_version else {})


@CASES
def test_measure_says_what_is_wrong(columns: dict[str, Any], outcome: str, words: str) -> None:
    """A call of ``measure`` raises ``GapError``, or its report has the words and the verdict."""
    if outcome == "error":
        with pytest.raises(GapError, match=words):
            measure(**as_arguments(columns))
        return
    report = measure(**as_arguments(columns), resamples=100)
    assert {"fail": "fail", "open": "inconclusive"}[outcome] == report.verdict
    assert re.search(words, text_of(gap_lines(report)))


@CASES
def test_the_fixture_says_what_is_wrong(
    columns: dict[str, Any], outcome: str, words: str, rollproof_gap: Any
) -> None:
    """The fixture raises the same error, or fails the test with the report."""
    own = as_arguments(columns)
    with pytest.raises(GapError if outcome == "error" else ConformanceError, match=words):
        rollproof_gap(own.pop("rollout_logprob"), own.pop("trainer_logprob"), **own, resamples=100)


@CASES
def test_the_command_says_what_is_wrong(
    columns: dict[str, Any],
    outcome: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a file, the command ends with the code of wrong use and one line, or with the report and
    the verdict's code.
    """
    table = {
        name: list(value) if "routes" in name else value
        for name, value in columns.items()
        if value is not None
    }
    table = {
        name: pa.array([row.tolist() for row in value]) if "routes" in name else value
        for name, value in table.items()
    }
    pq.write_table(pa.table(table), tmp_path / "records.parquet")
    code = run(["gap", str(tmp_path / "records.parquet"), "--resamples", "100"])
    out, err = capsys.readouterr()
    assert {"error": ExitCode.USAGE, "fail": ExitCode.FAIL, "open": ExitCode.UNKNOWN}[
        outcome
    ] == code
    assert re.search(words, err if outcome == "error" else out)
    if outcome == "error":
        assert 1 == len(err.strip().splitlines())


def test_columns_of_other_lengths() -> None:
    """A column that is shorter than the others is told with every column's length."""
    with pytest.raises(
        GapError,
        match=(
            r"differ in length \(rollout_logprob 400, trainer_logprob 399, sequence_id 400,"
            r" mask 400"
        ),
    ):
        measure(**records(trainer_logprob=lambda own: own[:-1]))


def test_labels_of_any_kind() -> None:
    """Versions, replicas and parts may be missing for some tokens, or for all, and of several
    kinds: such tokens are left out.
    """
    mixed = np.array([1, "a", None, np.nan] * (N // 4), dtype=object)
    for column in (mixed, np.full(N, None), np.where(np.arange(N) % 3, 1.0, np.nan)):
        report = measure(
            **records(version=column, replica=column, part=column, current_version=column),
            resamples=100,
        )
        assert ["numerics only"] == [cause.name for cause in report.causes]
        assert all(
            bucket.label not in ("None", "nan") for row in report.buckets.values() for bucket in row
        )


def test_scores_of_a_version_that_are_missing() -> None:
    """Versions whose scores are missing for some tokens, or for all, are compared where they are
    known, without a warning.
    """
    scores = {
        1: np.full(N, np.nan),
        2: records()["trainer_logprob"],
        3: np.where(np.arange(N) % 2, np.nan, -3.0),
    }
    report = measure(**records(version=np.full(N, 2)), by_version=scores, resamples=100)
    assert ["numerics only"] == [cause.name for cause in report.causes]


@pytest.mark.parametrize("resamples", [0, 1, -3, True, 2.5])
def test_too_few_resamples(resamples: Any) -> None:
    """An interval needs resamples: what is no number of them is refused."""
    with pytest.raises(UsageError, match="must be a whole number of at least 50"):
        measure(**records(), resamples=resamples)


TRACES = [
    (
        "nan",
        {"logprobs": np.array([-1.0, np.nan, -0.5, -0.75])},
        {},
        "fail",
        "1 token has a logprob that is not finite",
    ),
    (
        "positive",
        {"logprobs": -ROLLOUT},
        {},
        "error",
        "rollout_logprob holds 4 of 4 values above 0",
    ),
    (
        "all masked",
        {"loss_mask": np.zeros(4, dtype=np.int64)},
        {},
        "open",
        "the mask excludes all 4",
    ),
    ("one sequence", {}, {}, "open", "1 sequence is too few"),
    (
        "too few logprobs",
        {"logprobs": ROLLOUT[:2]},
        {},
        "error",
        "another number of logprobs than response tokens",
    ),
    ("no logprobs", {"logprobs": None}, {}, "error", "have no logprobs"),
    (
        "trainer's nan",
        {},
        {"trainer_logprob": [[-1.0, np.nan, -0.5, -0.75]]},
        "fail",
        "1 token has a logprob that is not finite",
    ),
    (
        "trainer's positive",
        {},
        {"trainer_logprob": [[1.0] * 4]},
        "error",
        "trainer_logprob holds 4 of 4 values above 0",
    ),
    ("trainer's too few", {}, {"trainer_logprob": [[-1.0] * 3]}, "error", "r0, 3 for 4"),
    (
        "trainer's other tokens",
        {},
        {"token_id": [[4, 5, 6, 8]]},
        "error",
        "different tokens in 1 row ",
    ),
    ("another request's", {}, {"sequence_id": ["r9"]}, "error", "has no rows for 1 of 1 rollouts"),
]


@pytest.mark.parametrize(
    ("result", "side", "outcome", "words"),
    [row[1:] for row in TRACES],
    ids=[row[0] for row in TRACES],
)
def test_a_trace_says_what_is_wrong(
    result: dict[str, Any],
    side: dict[str, Any],
    outcome: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a trace and a trainer's file, the command ends as it does of one file."""
    dump_trace(resumed(**result), tmp_path / "trace.json")
    columns = {"sequence_id": ["r0"], "trainer_logprob": [[-1.0, -0.25, -0.5, -0.75]], **side}
    pq.write_table(pa.table(columns), tmp_path / "trainer.parquet")
    code = run(
        [
            "gap",
            "--rollout",
            str(tmp_path / "trace.json"),
            "--trainer",
            str(tmp_path / "trainer.parquet"),
            "--resamples",
            "100",
        ]
    )
    out, err = capsys.readouterr()
    assert {"error": ExitCode.USAGE, "fail": ExitCode.FAIL, "open": ExitCode.UNKNOWN}[
        outcome
    ] == code
    assert re.search(words, err if outcome == "error" else out)


def _called(tmp_path: Path, *temperatures: float | None) -> Path:
    """A trace of one request a temperature, whose calls declare it."""
    builder = TraceBuilder(contract()).weights(1)
    for number, temperature in enumerate(temperatures):
        name = f"r{number}"
        sampling = {} if temperature is None else {"temperature": temperature}
        builder.submit(name, prompt=(1, 2, 3))
        builder.reply(
            builder.call((1, 2, 3), request_id=name, sampling=sampling), (4, 5, 6, 7), prompt_len=3
        )
        builder.result((4, 5, 6, 7), name, prompt=(1, 2, 3), logprobs=ROLLOUT)
    dump_trace(builder.trace(), tmp_path / "trace.json")
    return tmp_path / "trace.json"


class Told(HfTrainer):
    """Scores nothing, but hears at which temperature."""

    def score(self, rollouts: Any, *, version: Any, replay: bool) -> Any:
        return [np.full(4, -self._temperature) for _ in rollouts]


def test_the_temperature_of_the_calls_is_that_of_the_scoring(tmp_path: Path) -> None:
    """A trainer scores at the temperature that the calls declare, at 1 where none does or where
    they are greedy; the pairs have it.
    """
    for declared, used in (((0.7, 0.7), -0.7), ((None,), -1.0), ((0.0, 0.0), -1.0)):
        pairs = score_rollouts(_called(tmp_path, *declared), Told("nowhere"))
        assert {used} == set(pairs.trainer.tolist())
    assert {0.0} == set(pairs.columns["temperature"].tolist())
    assert (
        -0.7 == score_rollouts(_called(tmp_path, 0.7), Told("nowhere", temperature=0.7)).trainer[0]
    )


@pytest.mark.parametrize(
    ("declared", "temperature", "words"),
    [
        (
            (0.7, 0.7),
            1.0,
            "sampled at temperature 0.7, but would be scored at 1: those are different",
        ),
        (
            (0.7, 1.0),
            None,
            "sampled at temperatures 0.7 and 1: score the rollouts of one temperature at a time",
        ),
    ],
)
def test_a_wrong_temperature_is_refused(
    tmp_path: Path, declared: tuple[float, ...], temperature: float | None, words: str
) -> None:
    """Another temperature than the calls', or several, would compare different distributions."""
    with pytest.raises(GapError, match=words):
        score_rollouts(_called(tmp_path, *declared), Told("nowhere", temperature=temperature))


def test_greedy_tokens_are_told() -> None:
    """Tokens that were no draws are compared, and the report says what they cannot estimate."""
    report = measure(**records(temperature=np.zeros(N)), resamples=100)
    assert any("400 tokens were chosen greedily" in note for note in report.notes)


def test_a_column_that_stands_twice_or_for_two_is_refused(tmp_path: Path) -> None:
    """Which of them is meant cannot be told: neither is taken silently."""
    table = pa.table(
        {
            name: np.asarray(column)
            for name, column in records().items()
            if np.asarray(column).ndim == 1
        }
    )
    pq.write_table(table, tmp_path / "one.parquet")
    with pytest.raises(
        GapError,
        match="the column rollout_logprob cannot be rollout_logprob and trainer_logprob at once",
    ):
        read_pairs(tmp_path / "one.parquet", renamed={"trainer_logprob": "rollout_logprob"})
    doubled = table.append_column("rollout_logprob", table.column("rollout_logprob"))
    with pa.ipc.new_stream(tmp_path / "two.arrow", doubled.schema) as writer:
        writer.write_table(doubled)
    with pytest.raises(GapError, match="has 2 columns named rollout_logprob"):
        read_pairs(tmp_path / "two.arrow")


@pytest.mark.parametrize("broken", ["text", "length"])
def test_damaged_values_of_arrow_files_are_refused(tmp_path: Path, broken: str) -> None:
    """Text that is no UTF-8, and a column that the file places behind its own end: the second once
    ended the process. Arrow 24 and older read such a column from the bytes that are there, which
    are its values.
    """
    size = 4096
    table = pa.table(
        {
            "sequence_id": ["seq"] * size,
            "rollout_logprob": np.full(size, -1.0),
            "trainer_logprob": np.full(size, -1.0),
            "mask": np.ones(size, np.int8),
        }
    )
    path = tmp_path / "pairs.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    content = bytearray(path.read_bytes())
    if broken == "text":
        place = content.index(b"seqseq")
        content[place] = 0xFF
    else:
        # the length of the column of logprobs, in the metadata of the batch
        place = content.index((8 * size).to_bytes(8, "little"))
        content[place : place + 8] = (1 << 30).to_bytes(8, "little")
    path.write_bytes(bytes(content))
    words = {"text": "column sequence_id is damaged", "length": "it is damaged, or was cut short"}
    if broken == "length" and int(pa.__version__.partition(".")[0]) < 25:
        pairs = read_pairs(path)
        assert [-1.0] * size == pairs.rollout.tolist() == pairs.trainer.tolist()
        return
    with pytest.raises(GapError, match=words[broken]):
        read_pairs(path)


def test_versions_in_words_are_those_of_the_columns(tmp_path: Path) -> None:
    """A tag "0" is that of ``trainer_logprob@0``, whether the file holds versions as numbers or as
    text.
    """
    columns = {
        name: np.asarray(column)
        for name, column in records().items()
        if np.asarray(column).ndim == 1
    }
    scored = {
        **columns,
        "trainer_logprob@0": columns["trainer_logprob"],
        "trainer_logprob@v1": columns["trainer_logprob"],
    }
    for tags, expected in (
        (np.zeros(len(columns["mask"]), int), {0, "v1"}),
        (np.full(len(columns["mask"]), "0"), {"0", "v1"}),
    ):
        pq.write_table(pa.table({**scored, "version": tags}), tmp_path / "scored.parquet")
        assert expected == set(read_pairs(tmp_path / "scored.parquet").by_version)


def test_ids_beyond_64_bits_stay_apart() -> None:
    """Hashes and uuids of any width are names: none is rounded into another."""
    numbers = np.arange(N) // 20
    for ids in (
        [2**70 + int(x) for x in numbers],
        [2**63 + int(x) if x % 2 else 2**62 + int(x) for x in numbers],
    ):
        assert (
            20
            == measure(
                **records(sequence_id=lambda _, ids=ids: ids), resamples=100
            ).panel.n_sequences
        )  # type: ignore[misc]


def test_ids_in_bytes_are_text(tmp_path: Path) -> None:
    """Names that a file holds as bytes are told as text, in JSON too."""
    ids = np.array([f"r{x // 20}".encode() for x in range(N)])
    for labels in (ids, ids.astype(object)):
        report = measure(**records(sequence_id=labels, token_id=labels), resamples=100)
        assert str(report.panel.worst[0]["sequence"]).startswith("r")
        assert json.dumps(report.to_dict())


@pytest.mark.parametrize("name", ["mask", "rollout_logprob", "sequence_id"])
def test_a_masked_array_is_refused(name: str) -> None:
    """Its mask would be dropped silently, and what lies below it counted."""
    with pytest.raises(GapError, match=f"^{name} is a masked array of numpy"):
        measure(
            **records(**{name: lambda column: np.ma.masked_array(column, mask=numbers_below(100))})
        )


def numbers_below(limit: int) -> Any:
    return np.arange(N) < limit
