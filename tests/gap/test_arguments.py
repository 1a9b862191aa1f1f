"""Arguments and labels of the wrong kind: an error of ours that names them, never another
package's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollproof.cli.app import run
from rollproof.errors import GapError, SubjectError, UsageError
from rollproof.gap import Limits, limits_named, measure, measure_rollouts, score_rollouts
from rollproof.gap.pair_files import read_pairs
from rollproof.judging.report import ExitCode
from rollproof.store import dump_trace
from tests.support.resumed_trace import resumed

N = 400
ROLLOUT = -np.random.default_rng(1).exponential(0.4, N)


def gap(**changes: Any) -> Any:
    """A healthy gap of 20 sequences of 20 tokens, but for ``changes``."""
    columns = {
        "sequence_id": np.arange(N) // 20,
        "rollout_logprob": ROLLOUT,
        "trainer_logprob": ROLLOUT - 1e-4,
        "mask": np.ones(N),
    }
    return measure(**{**columns, "resamples": 100, **changes})


class Scorer:
    """Scores nothing, and returns what it is told to."""

    def __init__(self, made: Any = None) -> None:
        self.made = made

    def score(self, rollouts: Any, *, version: Any, replay: bool) -> Any:
        return self.made


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"replica": 1.0}, GapError, r"replica must have one axis \(tokens\), not shape \(\)"),
        (
            {"mask": np.ones(N, complex)},
            GapError,
            "mask must hold true and false, or 0 and 1: Cannot cast",
        ),
        ({"trainer_logprob": ["x" * 9000] * N}, GapError, r"must hold numbers .*characters\)\.$"),
        ({"seed": -1}, UsageError, "seed=-1 must be a whole number of at least 0"),
        ({"seed": "a"}, UsageError, "seed='a' must be a whole number"),
        ({"seed": 1.5}, UsageError, "seed=1.5 must be a whole number"),
        ({"seed": True}, UsageError, "seed=True must be a whole number"),
        ({"resamples": "100"}, UsageError, "resamples='100' must be a whole number"),
        ({"resamples": 10**12}, UsageError, "at most 1,000,000"),
        ({"subject": None}, UsageError, "subject=None must be text"),
        ({"limits": 3}, UsageError, "limits=3 must be the name of a profile"),
        ({"limits": "dense"}, UsageError, "No limits are named 'dense'. Choose one of"),
        ({"limits_file": 3}, UsageError, "limits_file=3 must be a path"),
        ({"limits_file": "nowhere.toml"}, GapError, "limits in nowhere.toml cannot be read"),
        ({"limits_file": "a\0b"}, GapError, "cannot be read: embedded null"),
        (
            {"limits": limits_named(), "limits_file": "mine.toml"},
            UsageError,
            "limits is a profile, so limits_file cannot add to it",
        ),
        (
            {"by_version": [ROLLOUT]},
            GapError,
            "by_version must map each weight version to a column of logprobs, not be a list",
        ),
        ({"by_version": {1.5: ROLLOUT}}, GapError, "by_version has the version 1.5"),
        ({"by_version": {1: "x"}}, GapError, "trainer_logprob@1 must"),
        (
            {"position": np.arange(N) - 1},
            GapError,
            "position must be a whole number of at least 0 .*; it is -1 in row 0",
        ),
        (
            {"position": np.arange(N) + 0.5},
            GapError,
            "position must be a whole number .*; it is 0.5 in row 0",
        ),
        ({"position": np.full(N, 1e300)}, GapError, r"it is 1e\+300 in row 0"),
        ({"position": np.full(N, np.nan)}, GapError, "it is nan in row 0"),
        (
            {"since_resume": np.full(N, 0.5)},
            GapError,
            "since_resume must be a whole number .*; it is 0.5",
        ),
        (
            {"since_resume": np.full(N, -np.inf)},
            GapError,
            "since_resume must be a whole number .*; it is -inf",
        ),
        (
            {"temperature": np.full(N, np.inf)},
            GapError,
            "temperature must be a number of at least 0; it is inf",
        ),
        (
            {"version": np.full(N, np.inf)},
            GapError,
            "version must hold whole numbers or text; it is inf in row 0",
        ),
        (
            {"version": np.array([1, "a", -np.inf, 2] * 100, dtype=object)},
            GapError,
            "version must hold .*; it is -inf in row 2",
        ),
        ({"version": np.arange(N) / 2}, GapError, "version must hold .*; it is 0.5 in row 1"),
        (
            {"replica": [{"a": 1}] * N},
            GapError,
            "replica must hold whole numbers or text, not values of type dict",
        ),
        (
            {"sequence_id": [{"prompt": 1}] * N},
            GapError,
            "sequence_id must hold whole numbers or text, not values of type dict",
        ),
        (
            {"sequence_id": np.arange(N) / 20},
            GapError,
            "sequence_id must hold .*; it is 0.05 in row 1",
        ),
        (
            {"sequence_id": [[1], [2, 3]] * 200},
            GapError,
            "sequence_id cannot be made an array of numpy",
        ),
        (
            {"sequence_id": np.full(N, "2026-11-28", "datetime64[D]")},
            GapError,
            "sequence_id must hold whole numbers or text",
        ),
        ({"mask": [[1], [1, 0]]}, GapError, "mask cannot be made an array of numpy"),
        ({"rollout_logprob": None}, GapError, "rollout_logprob"),
        ({"rollout_logprob": ROLLOUT + 1j}, GapError, "rollout_logprob must hold numbers"),
        (
            {"rollout_routes": [[[1], [2]], [[1]]]},
            GapError,
            "rollout_routes cannot be made an array of numpy",
        ),
        (
            {"rollout_routes": np.zeros((N, 2, 0), int)},
            GapError,
            "rollout_routes must be an integer array",
        ),
    ],
)
def test_an_argument_of_the_wrong_kind(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Each is refused with its name, what it is, and what it is to be."""
    with pytest.raises(error, match=words):
        gap(**changes)


def test_a_limits_file_by_name(tmp_path: Path) -> None:
    """A path in text will do, for rollouts too."""
    path = tmp_path / "mine.toml"
    path.write_text('[profile.mine.limits.k1]\ntarget = 0\nwarn = 1\nfail = 2\nsource = "here"\n')
    assert "mine" == gap(limits_file=str(path)).limits.profile
    assert isinstance(limits_named("mine", override=str(path)), Limits)
    with pytest.raises(GapError, match="nothing to compare"):
        measure_rollouts([], Scorer(), limits_file=str(path))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: score_rollouts(3, Scorer()), UsageError, "rollouts must be records .* not a int"),  # type: ignore[arg-type]
        (
            lambda: score_rollouts([3], Scorer()),
            GapError,
            "A rollout must be a rollproof.Rollout, not int",
        ),  # type: ignore[list-item]
        (
            lambda: score_rollouts([], object()),
            UsageError,
            r"A trainer has a method score\(rollouts",
        ),  # type: ignore[arg-type]
        (
            lambda: score_rollouts([], Scorer(), provenance="mine"),
            UsageError,
            "provenance='mine' is not one of: as-sampled, latest",
        ),
        (
            lambda: score_rollouts("nowhere.json", Scorer()),
            UsageError,
            "There is no trace at nowhere.json",
        ),
        (lambda: measure_rollouts([], Scorer(), seed="x"), UsageError, "seed='x' must be"),  # type: ignore[arg-type]
    ],
)
def test_rollouts_and_trainers_of_the_wrong_kind(
    call: Callable[[], Any], error: type[Exception], words: str
) -> None:
    """What is no rollout and what does not score is refused before anything is scored."""
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (
            {"sequence_id": [{"prompt": i // 20} for i in range(N)]},
            r"sequence_id is of type struct<prompt: int64>: write plain numbers, text or lists",
        ),
        (
            {"sequence_id": pa.array(np.arange(N), pa.timestamp("ns"))},
            r"sequence_id is of type timestamp\[ns\]: write plain numbers, text or lists",
        ),
        (
            {
                "sequence_id": np.arange(N),
                "rollout_logprob": [[-1.0]] * N,
                "trainer_logprob": [[[-1.0]]] * N,
            },
            r"trainer_logprob is of type list<.*>>: it must hold one value for each token, in a",
        ),
        (
            {"rollout_routes": [[1]] * N},
            r"of type list<.*int64>: it must hold for each token a list of layers, each a list of",
        ),
        ({"position": -np.arange(N)}, "position must be a whole number of at least 0"),
        ({"version": np.full(N, np.inf)}, "version must hold whole numbers or text; it is inf"),
    ],
)
def test_columns_of_the_wrong_kind_in_a_file(
    column: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A file's columns are held to the same."""
    table = {
        "sequence_id": np.arange(N) // 20,
        "rollout_logprob": ROLLOUT,
        "trainer_logprob": ROLLOUT,
        "mask": np.ones(N),
        **column,
    }
    pq.write_table(pa.table(table), tmp_path / "records.parquet")
    with pytest.raises(GapError, match=words):
        read_pairs(tmp_path / "records.parquet")


def test_a_program_in_place_of_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``rollproof gap mine.py``: one line in our own words, which says what records are."""
    (tmp_path / "mine.py").write_text("import rollproof\n")
    assert ExitCode.USAGE == run(["gap", str(tmp_path / "mine.py")])
    output = capsys.readouterr().err
    assert (
        "mine.py is neither Parquet nor Arrow: records are written by pyarrow.parquet.write_table"
        in output
    )
    assert 1 == len(output.strip().splitlines())


@pytest.mark.parametrize(
    ("sides", "where"),
    [
        ((0.0, 0.0), "on both sides"),
        ((0.0, -0.5), "at the rollout alone"),
        ((-0.5, 0.0), "at the trainer alone"),
    ],
)
@pytest.mark.parametrize("left", [False, True])
def test_padding_that_the_mask_counts_is_told(
    sides: tuple[float, float], where: str, left: bool
) -> None:
    """Long ends of exact zeros look like padding, on whichever side they stand; shorter ones, and
    masked ones, do not.
    """
    rollout = -np.random.default_rng(0).exponential(0.4, (30, 50)) - 1e-3
    trainer = rollout - 1e-4
    place = np.arange(50)[None] if left else 49 - np.arange(50)[None]
    padded = place < np.where(np.arange(30) < 10, 20, 10)[:, None]
    columns = {"sequence_id": np.repeat(np.arange(30), 50), "resamples": 100}
    arguments = [
        np.where(padded, value, own).ravel()
        for value, own in zip(sides, (rollout, trainer), strict=True)
    ]
    output = (
        f"200 tokens at the ends of 10 sequences have a logprob of exactly 0 {where}, as padding"
        " has."
    )
    assert any(
        note.startswith(output) for note in measure(*arguments, mask=np.ones(1500), **columns).notes
    )
    assert not any(
        "padding" in note for note in measure(*arguments, mask=~padded.ravel(), **columns).notes
    )


def test_a_sharp_model_s_last_tokens_are_no_padding() -> None:
    """A handful of certain tokens at the end of each sequence is how answers end."""
    rollout = np.where(np.arange(N) % 40 > 30, 0.0, ROLLOUT)
    assert not any(
        "padding" in note
        for note in gap(
            rollout_logprob=rollout, trainer_logprob=rollout, sequence_id=np.arange(N) // 40
        ).notes
    )


class Raising:
    """A trainer whose forward breaks."""

    def score(self, rollouts: Any, *, version: Any, replay: bool) -> Any:
        raise ValueError("shapes do not fit")


def test_what_a_trainer_of_the_user_raises_is_told_as_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no internal error: the line names the exception and where it came from, at a call and
    at the command.
    """
    dump_trace(resumed(), tmp_path / "trace.json")
    with pytest.raises(
        SubjectError,
        match=(
            r"The trainer's score raised ValueError: shapes do not fit \(test_arguments.py:\d+, in"
            r" score\)"
        ),
    ):
        score_rollouts(tmp_path / "trace.json", Raising())
    assert ExitCode.USAGE == run(
        ["gap", "--rollout", str(tmp_path / "trace.json"), "--trainer", "json:loads"]
    )
    assert re.search(
        "--trainer json:loads was called without arguments and raised TypeError: loads.. missing",
        capsys.readouterr().err,
    )
