"""``engine.stream`` and ``engine.identity``: what a stream is made of, and what equal weights may
change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.engine_contract import StreamMode
from rollproof.core.events.rollout import Call, Chunk, Reference, Reply, Weights
from rollproof.core.records import EngineOutput
from rollproof.core.trace import Trace
from rollproof.engines.engine_targets import fake_target
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.verification.engines import run_experiments
from rollproof.verification.traces import judge


def _judged(trace: Trace, check: str) -> CheckResult:
    return judge(trace, default_registry().select([check]))[check]


@pytest.fixture(scope="module")
def streams() -> Trace:
    """Calls in every stream mode on a correct engine."""
    return run_experiments(fake_target("vllm"), only=["streams"]).traces[0]


def _streamed(trace: Trace, mode: StreamMode) -> tuple[list[Chunk], Reply]:
    """The chunks of the first call of this mode with four tokens or more, and its reply."""
    calls = [e.call_id for e in trace.events if isinstance(e, Call) and e.stream is mode]
    reply = next(
        e
        for e in trace.events
        if isinstance(e, Reply) and e.call_id in calls and len(e.output.token_ids) >= 4
    )
    return [e for e in trace.events if isinstance(e, Chunk) and e.call_id == reply.call_id], reply


def _with_chunk(trace: Trace, old: Chunk, *new: Chunk) -> Trace:
    events: list[Any] = []
    for event in trace.events:
        events += new if event is old else [event]
    return trace.with_events(events)


_MODES = [StreamMode.CUMULATIVE, StreamMode.DELTA]


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize(
    ("number", "change", "problem"),
    [
        (1, {"finished": True}, "2 chunks are marked as the last"),
        (-1, {"finished": False}, "0 chunks are marked as the last"),
        (0, {"rows": 3}, "a chunk before the last one has routes"),
        (-2, {"rows": 3}, "a chunk before the last one has routes"),
        (-1, {"rows": 3}, "the last chunk has 3 rows"),
        (-1, {"rows": None}, "the last chunk has None rows"),
    ],
)
def test_each_fault_of_a_stream_is_named(
    streams: Trace, mode: StreamMode, number: int, change: dict[str, Any], problem: str
) -> None:
    """The first fault is told, with the mode, the number of chunks and the end of the reply."""
    chunks, reply = _streamed(streams, mode)
    wrong = _with_chunk(streams, chunks[number], replace(chunks[number], **change))
    result = _judged(wrong, "engine.stream")
    assert (Verdict.FAIL, 1) == (result.verdict, result.found)
    finding, output = result.findings[0], reply.output
    assert output.routes is not None
    assert finding.observed == (
        f"{problem} ({mode}, {len(chunks)} chunks, ended by {output.finish_reason})"
    )
    assert finding.expected == (
        f"{len(output.token_ids)} tokens, {list(output.token_ids[-4:])} at the end, and"
        f" {len(output.routes)} rows on the last chunk"
    )
    assert reply.call_id == finding.where["call"]


@pytest.mark.parametrize("mode", _MODES)
def test_a_lost_chunk_is_found(streams: Trace, mode: StreamMode) -> None:
    """Of a stream of differences its tokens are missing; in a cumulative one nothing is."""
    chunks, _ = _streamed(streams, mode)
    result = _judged(_with_chunk(streams, chunks[1]), "engine.stream")
    if mode is StreamMode.CUMULATIVE:
        assert Verdict.PASS is result.verdict
    else:
        assert "the chunks make" in result.findings[0].observed


def test_a_chunk_that_does_not_continue_the_one_before_it_is_found(streams: Trace) -> None:
    """Its first token is another one; the next chunk shows the right one again."""
    chunks, _ = _streamed(streams, StreamMode.CUMULATIVE)
    first = replace(chunks[0], token_ids=(99, *chunks[0].token_ids[1:]))
    result = _judged(_with_chunk(streams, chunks[0], first), "engine.stream")
    assert result.findings[0].observed.startswith("a chunk does not continue the previous one")


@pytest.fixture(scope="module")
def identity() -> Trace:
    """The same calls before and after an update to equal weights."""
    return run_experiments(fake_target("vllm"), only=["identity"]).traces[0]


def _last(trace: Trace, change: Callable[[EngineOutput], EngineOutput]) -> Trace:
    """Change the output of the last reply."""
    reply = [event for event in trace.events if isinstance(event, Reply)][-1]
    changed = replace(reply, output=change(reply.output))
    return trace.with_events([changed if event is reply else event for event in trace.events])


def test_equal_weights_change_nothing(identity: Trace) -> None:
    """Calls are compared across the update, and without one they are not."""
    passed = _judged(identity, "engine.identity")
    assert (Verdict.PASS, True) == (passed.verdict, bool(passed.exercised))
    none = identity.with_events([e for e in identity.events if not isinstance(e, Weights)])
    assert Verdict.UNKNOWN is _judged(none, "engine.identity").verdict
    real = [
        replace(e, identity=False, version=5) if isinstance(e, Weights) and e.index else e
        for e in identity.events
    ]
    assert Verdict.UNKNOWN is _judged(identity.with_events(real), "engine.identity").verdict


@pytest.mark.parametrize(("gap", "found"), [(0.5, True), (0.0, False)])
def test_other_logprobs_are_found(identity: Trace, gap: float, found: bool) -> None:
    """Beyond the tolerance; without logprobs there is nothing to compare."""

    def change(output: EngineOutput) -> EngineOutput:
        assert output.logprobs is not None
        return replace(output, logprobs=output.logprobs - gap)

    result = _judged(_last(identity, change), "engine.identity")
    assert found is (Verdict.FAIL is result.verdict)
    if found:
        assert "logprobs differ by up to 0.5 nats" == result.findings[0].observed
    bare = _last(identity, lambda output: replace(output, logprobs=None))
    assert Verdict.PASS is _judged(bare, "engine.identity").verdict


def test_another_order_of_experts_is_told_of_its_layers(identity: Trace) -> None:
    """If the scores decide the order; where they are close, rounding may turn it."""

    def change(output: EngineOutput) -> EngineOutput:
        assert output.routes is not None
        routes = output.routes.copy()
        column = routes.shape[1] - 1
        routes[:, column] = routes[:, column, ::-1]
        return replace(output, routes=routes)

    turned = _last(identity, change)
    finding = _judged(turned, "engine.identity").findings[0]
    layers = identity.header.contract.num_layers
    assert f"the experts of a row are in another order, in layers [{(layers or 0) - 1}]" == (
        finding.observed
    )
    for name in ("margins", "orders"):
        close = [
            replace(e, **{name: np.zeros_like(getattr(e, name))}) if isinstance(e, Reference) else e
            for e in turned.events
        ]
        assert Verdict.PASS is _judged(turned.with_events(close), "engine.identity").verdict
