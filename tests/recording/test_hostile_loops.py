"""``record_live`` in a loop whose objects are of any type, or raise when they are looked at."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollproof
from rollproof.core.events.rollout import Submit, Unrecorded
from rollproof.core.records import BatchRow, EngineOutput, FinishReason, Request, Rollout
from rollproof.recording.live_recorder import LiveRecorder
from rollproof.recording.recorder import EngineCall
from tests.recording.proxied import events_of
from tests.support.recorded_stack import CONTRACT


class Raising:
    """Something that raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)

    def __repr__(self) -> str:
        raise ZeroDivisionError("repr")


class FailedTensor:
    """A tensor of a device that failed."""

    def clone(self) -> Any:
        raise RuntimeError("device-side assert")


class Endless(list[Any]):
    """A list without a length."""

    def __len__(self) -> int:
        raise OverflowError("no length")


def _in_itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


ODD: dict[str, Callable[[], Any]] = {
    "raising": Raising,
    "failed tensor": FailedTensor,
    "endless": Endless,
    "in itself": _in_itself,
    "half a character": lambda: "\ud800",
    "huge number": lambda: 10**5000,
    "objects": lambda: np.array([object()]),
    "number": lambda: 1.5,
    "function": lambda: len,
    "nothing": lambda: None,
}


def _rollout(**fields: Any) -> Rollout:
    sound: dict[str, Any] = {
        "request_id": "r0",
        "prompt_ids": (1,),
        "response_ids": (2,),
        "finish_reason": FinishReason.LENGTH,
    }
    return Rollout(**{**sound, **fields})


def _row(**fields: Any) -> BatchRow:
    sound: dict[str, Any] = {"token_ids": [1], "attention": [1], "loss_mask": [1]}
    return BatchRow(**{**sound, "request_id": "r0", **fields})


def _call(recorder: LiveRecorder, call: Any, output: Any) -> None:
    engine = recorder.engine(lambda: 7, to_call=lambda: call, to_output=lambda _: output)
    assert 7 == engine()


def _report(recorder: LiveRecorder, odd: Any) -> None:
    """Give an odd object to every method, and as every field of a record."""
    recorder.submit(odd)
    recorder.result(odd)
    recorder.result(request_id=odd)
    recorder.result(request_id="r0", error=odd)
    recorder.observation("r0", odd)
    recorder.observation(odd, [1])
    recorder.update(odd, odd, odd)
    recorder.weights(odd, label=odd, server=odd, loaded=odd)
    recorder.pause(odd, server=odd)
    recorder.resume(server=odd)
    recorder.abort(odd, server=odd)
    recorder.batch(odd, odd, name=odd)
    recorder.batch([odd], [odd])
    for name in ("request_id", "prompt_ids", "max_tokens", "sampling", "turns"):
        fields: dict[str, Any] = {"request_id": "r0", "prompt_ids": (1,), name: odd}
        recorder.submit(Request(**fields))
    for name in ("prompt_ids", "response_ids", "logprobs", "routes", "columns", "values", "extra"):
        recorder.result(_rollout(**{name: odd}))
        recorder.batch([_rollout(**{name: odd})], [])
    for name in ("token_ids", "attention", "logprobs", "routes", "columns", "values"):
        recorder.batch([], [_row(**{name: odd})])
    output = EngineOutput(
        token_ids=(1,), logprobs=None, routes=None, finish_reason=FinishReason.LENGTH
    )
    sound: dict[str, Any] = {"prompt_ids": (1,), "max_tokens": 1}
    for name in ("prompt_ids", "sampling", "request_id", "server_id", "max_tokens", "media"):
        _call(recorder, EngineCall(**{**sound, name: odd}), output)
    for name in ("token_ids", "logprobs", "routes", "spans", "version", "native", "message"):
        sampled: dict[str, Any] = {"token_ids": (1,), "logprobs": None, "routes": None, name: odd}
        made = EngineOutput(finish_reason=FinishReason.LENGTH, **sampled)
        _call(recorder, EngineCall(**sound), made)
    _call(recorder, odd, odd)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_object_neither_ends_the_loop_nor_damages_the_trace(
    name: str, tmp_path: Path
) -> None:
    """It is counted as unreadable, and all that was recorded can be read."""
    with rollproof.record_live(tmp_path, CONTRACT) as recorder:
        _report(recorder, ODD[name]())
        recorder.submit(Request(request_id="last", prompt_ids=(1,)))
    events = [event for path in recorder.paths for event in events_of(path)]

    assert ("", True) == (recorder.counts.failure, recorder.counts.unreadable > 10)
    assert "last" in [event.request.request_id for event in events if isinstance(event, Submit)]


def test_a_request_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    """Only the checks that concern it become unknown."""
    with rollproof.record_live(tmp_path, CONTRACT) as recorder:
        recorder.submit(Request(request_id="r0", prompt_ids=FailedTensor()))  # type: ignore[arg-type]
    (event,) = events_of(recorder.paths[0])

    assert isinstance(event, Unrecorded)
    assert ("r0", "a Request cannot be copied: RuntimeError: device-side assert.") == (
        event.request_id,
        event.reason,
    )


def test_a_call_that_is_not_recorded_has_no_end_either(tmp_path: Path) -> None:
    """An end without a beginning would be a fault of the stack."""
    sound = EngineOutput(
        token_ids=(1,), logprobs=None, routes=None, finish_reason=FinishReason.LENGTH
    )
    with rollproof.record_live(tmp_path, CONTRACT) as recorder:
        _call(recorder, EngineCall(prompt_ids=FailedTensor(), max_tokens=1), sound)  # type: ignore[arg-type]
    (event,) = events_of(recorder.paths[0])

    assert isinstance(event, Unrecorded)
    assert 1 == event.call_id


# the warning of Python 3.12 is about what is tested here
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_leaves_the_trace_alone(tmp_path: Path) -> None:
    """What it reports is not recorded, and said; its end does not seal the trace of its parent."""
    recorder = rollproof.record_live(tmp_path, CONTRACT)

    def child() -> None:
        recorder.submit(Request(request_id="child", prompt_ids=(1,)))
        recorder.close()
        counts = recorder.counts
        assert (1, True) == (counts.dropped, "call record_live() in each" in str(counts))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    recorder.submit(Request(request_id="parent", prompt_ids=(1,)))
    recorder.close()

    assert 0 == process.exitcode
    assert ["submit"] == [event.kind for event in events_of(recorder.paths[0])]
