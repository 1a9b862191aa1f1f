"""Told rollouts: a request, its engine calls one after another, and the sample that a correct stack
makes of them.

The sample is made by plain concatenation, so that it does not depend on the reference stitch that
it tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollproof.core.events.rollout import Result
from rollproof.core.oracle import Oracle
from rollproof.core.records import FinishReason, Rollout, Span, Version
from rollproof.core.trace import Trace
from rollproof.invariants import stitch, versions
from rollproof.judging.registry import Registry
from rollproof.verification.traces import judge
from tests.support.trace_builder import TraceBuilder
from tests.support.trace_script import TraceScript

__all__ = [
    "REGISTRY",
    "RESUMED",
    "SAMPLED",
    "ScriptedCall",
    "blamed",
    "sample_of",
    "script_rollout",
    "with_sample",
]

REGISTRY = Registry([*stitch.CHECKS, *versions.CHECKS])
_SAME = object()


@dataclass(frozen=True, kw_only=True)
class ScriptedCall:
    """One engine call: what it sampled, under which weights, how it ended.

    ``shown`` is the label that the engine shows (default: the true one), ``observed`` the tokens of
    the environment before the call, ``lost`` whether the reply is lost on its way, ``restart``
    whether the call starts again from the prompt. ``call`` and ``reply`` override fields of the two
    events, ``output`` those of the engine's output.
    """

    tokens: tuple[int, ...] = ()
    reason: str = "abort"
    version: int | str = 0
    shown: Any = _SAME
    logprobs: bool = True
    observed: tuple[int, ...] = ()
    lost: bool = False
    restart: bool = False
    server: str = "s0"
    call: Mapping[str, Any] = field(default_factory=dict)
    reply: Mapping[str, Any] = field(default_factory=dict)
    output: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _ClientState:
    """What the stack has so far."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    mask: tuple[int, ...] = ()
    labels: tuple[Version, ...] = ()
    calls: tuple[Version, ...] = ()
    turn: int = 0


def script_rollout(
    *parts: ScriptedCall,
    request_id: str = "r0",
    prompt: tuple[int, ...] = (1, 2),
    budget: int | None = 8,
    labels: Mapping[Any, Version] | None = None,
    request: Mapping[str, Any] | None = None,
    sample: Mapping[str, Any] | None = None,
    event: Mapping[str, Any] | None = None,
    recorded: bool = True,
    script: TraceScript | None = None,
    **contract: Any,
) -> TraceScript:
    """The whole story of one request, told correctly; ``sample`` overrides fields of the delivered
    sample.

    ``labels`` maps versions to the labels under which they are published (their own number unless
    given); ``recorded`` is whether the environment's words are recorded as observations; ``script``
    continues an earlier script.
    """
    out = script if script is not None else TraceScript(**contract)
    labels = labels or {}
    out.submit(request_id, prompt, budget, **(request or {}))
    state, serving = _ClientState(), _serving(out)
    for part in parts:
        if serving.get(part.server) != part.version:
            out.weights(part.version, part.server, label=labels.get(part.version, part.version))  # type: ignore[arg-type]
            serving[part.server] = part.version
        _call(
            out,
            part,
            request_id,
            prompt,
            budget,
            state,
            labels.get(part.version, part.version),
            recorded,
        )
    last = next((part for part in reversed(parts) if not part.lost), None)
    made = _sample(out, state, last.reason if last is not None else "abort")
    out.result(
        request_id=request_id, prompt=prompt, event=dict(event or {}), **{**made, **(sample or {})}
    )
    return out


def blamed(trace: Trace | TraceBuilder, oracle: Oracle | None = None) -> set[str]:
    """The checks on stitching and versions that find something. A check that crashes fails the
    test.
    """
    judgement = judge(trace.trace() if isinstance(trace, TraceBuilder) else trace, REGISTRY, oracle)
    assert not [
        (result.id, result.reason) for result in judgement.results if "crashed" in result.reason
    ]
    return set(judgement.failed)


def sample_of(trace: Trace) -> Rollout:
    """The sample that is handed over last."""
    result = trace.events[-1]
    assert isinstance(result, Result)
    assert result.rollout is not None
    return result.rollout


def with_sample(trace: Trace, rollout: Rollout) -> Trace:
    """The trace with another last sample."""
    result = trace.events[-1]
    assert isinstance(result, Result)
    return trace.with_events([*trace.events[:-1], replace(result, rollout=rollout)])


def _serving(out: TraceScript) -> dict[str, Any]:
    if not hasattr(out, "serving"):
        out.serving = {}  # type: ignore[attr-defined]
    found: dict[str, Any] = out.serving  # type: ignore[attr-defined]
    return found


def _call(
    out: TraceScript,
    part: ScriptedCall,
    request_id: str,
    prompt: tuple[int, ...],
    budget: int | None,
    state: _ClientState,
    label: Version,
    recorded: bool,
) -> None:
    if part.restart:
        state.__init__()  # type: ignore[misc]
    if part.observed:
        if recorded:
            out.observe(*part.observed, request_id=request_id)
        _extend(state, part.observed, (np.nan,) * len(part.observed), 0, None)
        state.turn = len(state.ids)
    left = None if budget is None else budget - (len(state.ids) - state.turn)
    call = out.call(
        **{
            "prompt": prompt + state.ids,
            "request_id": request_id,
            "max_tokens": left,
            "server": part.server,
            **part.call,
        }
    )
    count = len(part.tokens)
    values = tuple(-(0.25 + 0.5 * i + 0.125 * len(state.ids)) for i in range(count))
    shown = label if part.shown is _SAME else part.shown
    output = {
        "logprobs": np.array(values) if part.logprobs and count else None,
        "version": shown,
        **part.output,
    }
    spans = (Span(start=0, end=count, version=part.version),) if count else ()
    out.reply(
        call,
        part.tokens,
        part.reason,
        output=output,
        **{"true_tokens": spans, "delivered": not part.lost, **part.reply},
    )
    if part.lost:
        return
    _extend(state, part.tokens, values if part.logprobs else (np.nan,) * count, 1, label)
    if count:
        state.calls += (label,)


def _extend(
    state: _ClientState, ids: tuple[int, ...], logprobs: tuple[float, ...], own: int, label: Version
) -> None:
    state.ids += ids
    state.logprobs += logprobs
    state.mask += (own,) * len(ids)
    state.labels += (label,) * len(ids)


def _sample(out: TraceScript, state: _ClientState, reason: str) -> dict[str, Any]:
    contract = out.header.contract
    sampled = [label for label, own in zip(state.labels, state.mask, strict=True) if own]
    numbers = [label for label in sampled if label is not None]
    spans = tuple(Span(start=i, end=i + 1, version=label) for i, label in enumerate(state.labels))
    tags: dict[str, dict[str, Any]] = {
        "sample": {"version": sampled[-1] if sampled else None},
        "min-max": {
            "min_version": min(numbers, default=None),
            "max_version": max(numbers, default=None),
        },
        "bounds": {
            "min_version": min(numbers, default=None),
            "max_version": max(numbers, default=None),
        },
        "call": {"call_versions": state.calls},
        "span": {"spans": spans},
        "token": {"token_versions": state.labels},
    }
    return {
        "response": state.ids,
        "logprobs": np.array(state.logprobs) if contract.logprobs != "none" else None,
        "loss_mask": np.array(state.mask, dtype=np.int64) if contract.loss_mask else None,
        "finish_reason": FinishReason(reason),
        **tags.get(contract.versions, {}),
    }


RESUMED = (
    ScriptedCall(tokens=(11, 12, 13)),
    ScriptedCall(tokens=(21, 22), version=1),
    ScriptedCall(tokens=(31, 32, 33), version=1, reason="length"),
)
"""A rollout that was resumed twice, under newer weights."""
SAMPLED = (11, 12, 13, 21, 22, 31, 32, 33)
"""What the calls of ``RESUMED`` sampled."""
