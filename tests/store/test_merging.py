"""Joining the traces of several writers, whose clocks differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Abort,
    Call,
    Reply,
    Result,
    Submit,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.core.trace import Header, Trace
from rollproof.errors import TraceError, UsageError
from rollproof.judging.checks import Verdict
from rollproof.store import TraceReader, TraceWriter, dump_trace
from rollproof.store.merging import merge_traces
from tests.recording.proxied import judged
from tests.support.command_line import output_of
from tests.support.trace_builder import contract

CONTRACT = contract(rows="none", versions="none")
LOGPROBS = np.array([-0.5])


def submit(name: str) -> Submit:
    return Submit(request=Request(request_id=name, prompt_ids=(1, 2), want_routes=False))


def call(name: str, number: int, prompt: tuple[int, ...] = (1, 2)) -> Call:
    return Call(
        call_id=number,
        request_id=name,
        server_id="s",
        prompt_ids=prompt,
        max_tokens=None,
        want_routes=False,
    )


def reply(number: int, reason: FinishReason, token: int) -> Reply:
    output = EngineOutput(token_ids=(token,), logprobs=LOGPROBS, routes=None, finish_reason=reason)
    return Reply(call_id=number, output=output)


def result(name: str, *tokens: int) -> Result:
    rollout = Rollout(
        request_id=name,
        prompt_ids=(1, 2),
        response_ids=tokens,
        finish_reason=FinishReason.STOP,
        logprobs=np.repeat(LOGPROBS, len(tokens)),
    )
    return Result(request_id=name, rollout=rollout)


def written(folder: Path, name: str, events: Sequence[tuple[float, Event]]) -> Path:
    path = folder / f"{name}.0001.arrow"
    with TraceWriter(path, Header(subject=name, contract=CONTRACT)) as out:
        for index, (at, event) in enumerate(events):
            out.append(replace(event, index=index, time=at))
    return path


def trainer_and_proxies(folder: Path, skew: float, sample: tuple[int, ...] = ()) -> list[Path]:
    """A trainer's file, and those of two proxies, between which a request moves."""
    trainer = [
        (1.0, submit("a")),
        (2.0, submit("b")),
        (3.000, submit("c")),
        (3.003, result("c", 5)),
        (4.000, submit("d")),
        (4.003, result("d", 5)),
        (9.0, result("a", *(sample or (7, 8)))),
        (9.5, result("b", 9)),
    ]
    first = [
        (1.1, call("a", 1)),
        (2.0, Abort(server_id="s", wanted="a", call_ids=(1,))),
        (2.9, reply(1, FinishReason.ABORT, 7)),
        (3.001, call("c", 2)),
        (3.002, reply(2, FinishReason.STOP, 5)),
    ]
    second = [
        (2.1, call("b", 1)),
        (4.001, call("d", 3)),
        (4.002, reply(3, FinishReason.STOP, 5)),
        (4.5, call("a", 2, (1, 2, 7))),
        (5.0, reply(1, FinishReason.STOP, 9)),
        (8.9, reply(2, FinishReason.STOP, 8)),
    ]
    return [
        written(folder, "trainer", trainer),
        written(folder, "first", [(at + skew, event) for at, event in first]),
        written(folder, "second", second),
    ]


@pytest.mark.parametrize("skew", [0.0, 300.0, -4000.0])
def test_files_of_one_run_become_one_trace(tmp_path: Path, skew: float) -> None:
    """Whatever their clocks say: each request has its calls in order, under numbers of its own."""
    paths = trainer_and_proxies(tmp_path, skew)
    report = merge_traces(paths, tmp_path / "merged")
    events = list(TraceReader(tmp_path / "merged"))
    assert 19 == len(events) == report.events
    assert list(range(19)) == [event.index for event in events]
    calls = [event for event in events if isinstance(event, Call)]
    assert 5 == len({event.call_id for event in calls})
    own = [event for event in calls if event.request_id == "a"]
    assert [(1, 2), (1, 2, 7)] == [event.prompt_ids for event in own]
    (abort,) = [event for event in events if isinstance(event, Abort)]
    assert (own[0].call_id,) == abort.call_ids
    results = judged(tmp_path / "merged")
    assert () == results.failed
    assert (Verdict.PASS, {"single-call samples": 3, "resumed samples": 1}) == (
        results["stitch.tokens"].verdict,
        dict(results["stitch.tokens"].exercised),
    )
    assert bool(skew) == any("the clock of" in note for note in report.notes)


def test_a_fault_across_files_is_found(tmp_path: Path) -> None:
    """No file alone shows it."""
    paths = trainer_and_proxies(tmp_path, 60.0, sample=(8,))
    assert () == judged(*paths).failed
    merge_traces(paths, tmp_path / "merged")
    assert "stitch.tokens" in judged(tmp_path / "merged").failed


def test_a_request_that_no_cause_orders_is_unknown(tmp_path: Path) -> None:
    """No reply ends the sample, and the clocks do not say whether the last one came before it."""
    trainer = written(tmp_path, "trainer", [(1.0, submit("a")), (3.0, result("a", 9))])
    proxy = [
        (2.0, call("a", 1)),
        (2.5, reply(1, FinishReason.ABORT, 7)),
        (2.6, call("a", 2, (1, 2, 7))),
        (2.9, reply(2, FinishReason.STOP, 8)),
    ]
    merge_traces([trainer, written(tmp_path, "proxy", proxy)], tmp_path / "merged")
    results = judged(tmp_path / "merged")
    assert () == results.failed
    assert Verdict.UNKNOWN is results["stitch.tokens"].verdict
    assert "traces of several clocks" in results["stitch.tokens"].reason


def test_labels_relate_clocks(tmp_path: Path) -> None:
    """A load comes after the update that asks for it, and before its end."""
    update = Update(version="1", label="1", phase=UpdatePhase.ASKED)
    trainer = written(
        tmp_path,
        "trainer",
        [(5.0, update), (6.0, replace(update, phase=UpdatePhase.ENDED)), (7.0, submit("a"))],
    )
    server = written(tmp_path, "server", [(1.0, Weights(server_id="s", version=None, label="1"))])
    report = merge_traces([trainer, server], tmp_path / "merged")
    assert ["update", "weights", "update", "submit"] == [
        event.kind for event in TraceReader(tmp_path / "merged")
    ]
    assert (
        "the clock of trainer is +4.500 s off that of server, and was corrected (to 0.500 s)",
    ) == (report.notes)


def test_what_is_not_certain_is_said(tmp_path: Path) -> None:
    """Files that nothing relates, unfinished ones, and clocks that were changed."""
    paths = trainer_and_proxies(tmp_path, 0.0)
    alone = written(tmp_path, "alone", [(3.0, Weights(server_id="t", version=None, label=None))])
    open_file = TraceWriter(tmp_path / "open.arrow", Header(subject="x", contract=CONTRACT))
    open_file.append(Weights(index=0, time=4.0, server_id="u", version=None, label="9"))
    open_file.flush()
    report = merge_traces([*paths, alone, tmp_path / "open.arrow"], tmp_path / "merged")
    open_file.close()
    text = "\n".join(report.notes)
    assert "open is unfinished" in text
    assert "nothing that open recorded was caused by another" in text
    jumped = tmp_path / "jumped"
    jumped.mkdir()
    trainer = [(1.0, submit("a")), (2.0, result("a", 7)), (3.0, submit("b")), (4.0, result("b", 9))]
    proxy = [
        (1.5, call("a", 1)),
        (1.6, reply(1, FinishReason.STOP, 7)),
        (93.5, call("b", 2)),
        (93.6, reply(2, FinishReason.STOP, 9)),
    ]
    report = merge_traces(
        [written(jumped, "trainer", trainer), written(jumped, "proxy", proxy)], jumped / "merged"
    )
    assert "the clock of trainer changed against the others" in report.notes[0]
    assert () == judged(jumped / "merged").failed


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    """Are refused, with the reason; also those that contradict each other."""
    one = written(tmp_path, "one", [(1.0, submit("a"))])
    two = written(tmp_path, "two", [(1.0, submit("a"))])
    with pytest.raises(UsageError, match="'a' was submitted to one and to two"):
        merge_traces([one, two], tmp_path / "merged")
    with pytest.raises(UsageError, match="There is no trace to merge"):
        merge_traces([], tmp_path / "merged")
    # each of the two files has the call of a request before the submission of the other's
    left = written(tmp_path, "left", [(1.0, call("y", 1)), (2.0, submit("x"))])
    right = written(tmp_path, "right", [(1.0, call("x", 1)), (2.0, submit("y"))])
    with pytest.raises(TraceError, match="cannot be put into one order"):
        merge_traces([left, right], tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1" + b"\0" * 90, "is not a rollproof trace: it is a Parquet file"),
        ("a.arrow", b"\x1f\x8b" + b"\0" * 90, "compressed with gzip: unpack it first"),
        ("a.arrow", b"hello", "it is in an unknown format"),
        ("a.arrow", b"", "is empty"),
    ],
)
def test_a_file_that_is_no_trace_is_named_by_what_it_is(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """As `check` does, by what it begins with."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=message):
        merge_traces([tmp_path / name], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_trace_in_json_is_judged_by_itself(tmp_path: Path) -> None:
    """Its clock counts steps, so that it has no place between the times of others."""
    path = tmp_path / "a.json"
    dump_trace(Trace(header=Header(subject="a", contract=CONTRACT), events=[]), path)
    with pytest.raises(UsageError, match=r"is a trace in JSON.* rollproof check .*a\.json$"):
        merge_traces([path], tmp_path / "merged")


def test_the_command_merges_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says what it did; a file that exists is not overwritten."""
    trainer_and_proxies(tmp_path, 60.0)
    target = tmp_path / "merged.arrow"
    text = output_of(capsys, "merge", str(tmp_path), "--to", str(target), code=0)
    assert "merged.arrow: 19 events of first, second, trainer" in text
    assert "exists: name another file with --to, or delete it." in output_of(
        capsys, "merge", str(tmp_path), "--to", str(target), code=254
    )
    (tmp_path / "empty").mkdir()
    for path, message in ((tmp_path / "none", "no trace"), (tmp_path / "empty", "no Arrow")):
        assert message in output_of(capsys, "merge", str(path), "--to", "x", code=254)
