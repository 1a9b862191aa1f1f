"""A recorded trace of rollouts, joined with a trainer's logprobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollproof.core.events.training import Score
from rollproof.core.trace import Trace
from rollproof.errors import GapError, TraceError
from rollproof.gap.scored_rollouts import join_trace
from rollproof.store import TraceWriter
from tests.support.resumed_trace import ROLLOUT, resumed
from tests.support.trace_builder import TraceBuilder, contract


def _score(version: int, *logprobs: float, request: str = "r0", scorer: str = "fsdp") -> Score:
    return Score(
        request_id=request,
        version=version,
        scorer=scorer,
        logprobs=np.array(logprobs, dtype=np.float64),
    )


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def write(*traces: Trace) -> Path:
        (tmp_path / "trace.arrow").unlink(missing_ok=True)
        for trace in traces:
            with TraceWriter(tmp_path / "trace.arrow", trace.header, mode="a") as writer:
                for event in trace.events:
                    writer.append(event)
        return tmp_path / "trace.arrow"

    return write


def _parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_each_segment_is_scored_by_its_own_version(saved: Callable[..., Path]) -> None:
    """Of scores under both versions every token takes that of the version that sampled it, and both
    stay at hand.
    """
    trace = resumed(
        _score(1, -1.1, -1.2, -1.3, -1.4),
        _score(2, -2.1, -2.2, -2.3, -2.4),
        _score(1, 0, 0, 0, 0, scorer="other"),
    )
    pairs = join_trace(saved(trace), "score:fsdp")
    assert [-1.1, -1.2, -2.3, -2.4] == pairs.trainer.tolist()
    assert ROLLOUT.tolist() == pairs.rollout.tolist()
    assert {1: [-1.1, -1.2, -1.3, -1.4], 2: [-2.1, -2.2, -2.3, -2.4]} == {
        v: column.tolist() for v, column in pairs.by_version.items()
    }
    assert [3, 4, 5, 6] == pairs.columns["position"].tolist()
    assert [1, 1, 2, 2] == pairs.columns["version"].tolist()
    assert [-1, -1, 0, 1] == pairs.columns["since_resume"].tolist()


def test_one_score_is_of_current_weights(saved: Callable[..., Path]) -> None:
    """A single score under newer weights scores all tokens, and its version gives their age."""
    pairs = join_trace(saved(resumed(_score(5, -1.0, -1.0, -1.0, -1.0))), "score:fsdp")
    assert [5, 5, 5, 5] == pairs.columns["current_version"].tolist()
    assert {} == pairs.by_version


def test_a_parquet_file_is_joined_by_request(saved: Callable[..., Path], tmp_path: Path) -> None:
    """Rows are matched by the request's id, in any order of the requests; its tokens are compared
    where it has them.
    """
    trace = saved(resumed(requests=("r0", "r1")))
    ids = ["r1"] * 4 + ["r0"] * 4
    spec = _parquet(
        tmp_path / "t.parquet",
        sequence_id=ids,
        trainer_logprob=-np.arange(8.0),
        token_id=[4, 5, 6, 7] * 2,
    )
    pairs = join_trace(trace, spec)
    assert ["r0", "r1"] == list(pairs.sequences)
    assert [-4.0, -5.0, -6.0, -7.0, 0.0, -1.0, -2.0, -3.0] == pairs.trainer.tolist()
    wrong = _parquet(
        tmp_path / "w.parquet",
        sequence_id=ids,
        trainer_logprob=-np.arange(8.0),
        token_id=[4, 5, 6, 8] * 2,
    )
    with pytest.raises(GapError, match="Rollout and trainer hold different tokens in 2 rows"):
        join_trace(trace, wrong)


def test_episodes_are_told_apart(saved: Callable[..., Path], tmp_path: Path) -> None:
    """Two episodes with a request of one name are two sequences, called by episode."""
    trace = saved(resumed(), resumed())
    spec = _parquet(
        tmp_path / "t.parquet",
        sequence_id=["0:r0", "1:r0"],
        trainer_logprob=[[-1.0] * 4, [-2.0] * 4],
    )
    assert ["0:r0", "1:r0"] == list(join_trace(trace, spec).sequences)


def test_what_is_not_told_is_left_out(saved: Callable[..., Path]) -> None:
    """Without version tags, and with replies that are not the response end to end, those columns
    are not there.
    """
    score = _score(1, -1.0, -1.0, -1.0, -1.0)
    assert "version" not in join_trace(saved(resumed(score, spans=())), "score:fsdp").columns
    builder = TraceBuilder(contract()).weights(1).submit(prompt=(1, 2, 3))
    builder.reply(builder.call((1, 2, 3)), (4, 5, 9, 9), prompt_len=3)
    builder.result((4, 5, 6, 7), prompt=(1, 2, 3), logprobs=ROLLOUT)
    assert "since_resume" not in join_trace(saved(builder.add(score).trace()), "score:fsdp").columns


@pytest.mark.parametrize(
    ("trace", "spec", "message"),
    [
        (
            resumed(),
            "score:fsdp",
            r"1 of 1 rollouts have no score by 'fsdp' in the trace \(the first: r0\)",
        ),
        (
            resumed(_score(1, -1.0)),
            "score:fsdp",
            r"the scores under 1: 1 rollouts have another number .* \(the first: r0, 1 for 4\)",
        ),
        (
            resumed(_score(1, *ROLLOUT), _score(3, *ROLLOUT)),
            "score:fsdp",
            "Rollout r0 has several scores and no score under version 2",
        ),
        (
            resumed(_score(1, *ROLLOUT), _score(3, *ROLLOUT), spans=()),
            "score:fsdp",
            "several scores and no version for each of its tokens",
        ),
        (
            resumed(logprobs=None),
            "score:fsdp",
            r"1 of 1 rollouts in .* have no logprobs \(the first: r0\)",
        ),
        (
            resumed(logprobs=ROLLOUT[:2]),
            "score:fsdp",
            "the rollout's logprobs: 1 rollouts have another number",
        ),
        (TraceBuilder(contract()).trace(), "score:fsdp", "holds no finished rollout"),
    ],
)
def test_what_cannot_be_joined_is_refused(
    saved: Callable[..., Path], trace: Trace, spec: str, message: str
) -> None:
    """If one side lacks what the other has, the error says what, how often, and where first."""
    with pytest.raises(GapError, match=message):
        join_trace(saved(trace), spec)


def test_a_parquet_file_that_does_not_fit_is_refused(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    """Rows of other requests, too few rows, and a file without the columns are told apart."""
    trace = saved(resumed())
    with pytest.raises(GapError, match=r"has no rows for 1 of 1 rollouts \(the first: r0\)"):
        join_trace(
            trace, _parquet(tmp_path / "a.parquet", sequence_id=["x"], trainer_logprob=[-1.0])
        )
    with pytest.raises(
        GapError, match=r"\(the first: r0, 1 for 4\). One logprob is needed for each response token"
    ):
        join_trace(
            trace, _parquet(tmp_path / "b.parquet", sequence_id=["r0"], trainer_logprob=[-1.0])
        )
    with pytest.raises(GapError, match="has no column trainer_logprob"):
        join_trace(trace, _parquet(tmp_path / "c.parquet", sequence_id=["r0"]))
    with pytest.raises(TraceError, match="is not a rollproof trace"):
        join_trace(Path(_parquet(tmp_path / "d.parquet", sequence_id=["r0"])), "score:fsdp")
