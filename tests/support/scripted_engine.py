"""Replies of an engine with three layers, the middle one dense, and what one check says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import (
    EngineTerms,
    PauseMode,
    ReplyKey,
    SamplingOption,
    StreamMode,
)
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Reference, Reply, Weights
from rollproof.core.records import EngineOutput, FinishReason, Version
from rollproof.core.trace import Header, Trace
from rollproof.judging.checks import CheckResult, Finding
from tests.support.trace_builder import contract
from tests.support.trace_script import check

MOE_LAYERS = (0, 2)
_ALL_KEYS = (ReplyKey.LOGPROBS, ReplyKey.ROUTES)


def engine_contract(*, terms: dict[str, Any] | None = None, **changes: Any) -> Contract:
    """The contract of an engine with 8 experts, two a token, and raw logprobs."""
    declared: dict[str, Any] = {
        "max_length": 64,
        "pause_modes": (PauseMode.ABORT,),
        "stream_modes": (StreamMode.FINAL, StreamMode.CUMULATIVE, StreamMode.DELTA),
        "keys_finished": _ALL_KEYS,
        "keys_aborted": _ALL_KEYS,
        "seeded": True,
        "samples": True,
        "sampling": tuple(SamplingOption),
    }
    fields: dict[str, Any] = {
        "rows": "T-1",
        "resume": "engine",
        "layer_axis": "all",
        "num_layers": 3,
        "moe_layers": MOE_LAYERS,
        "num_experts": 8,
        "top_k": 2,
        "filler": "none",
        "dtype": "uint8",
    }
    return contract(**{**fields, "engine": EngineTerms(**{**declared, **(terms or {})}), **changes})


def call(number: int = 1, prompt: int = 3, **changes: Any) -> Call:
    """A call with ``prompt`` tokens."""
    fields: dict[str, Any] = {
        "request_id": f"r{number}",
        "server_id": "e0",
        "prompt_ids": tuple(range(10, 10 + prompt)),
        "max_tokens": 8,
        "sampling": {"temperature": 1.0},
    }
    return Call(call_id=number, **{**fields, **changes})


def reference(made: Call, tokens: int = 4, version: Version = 0, **changes: Any) -> Reference:
    """What weights give for a call and ``tokens`` sampled ones; other versions give other values.

    At position p layer l chooses experts p + l + version and the one after it.
    """
    total = len(made.prompt_ids) + tokens
    places, layers = np.indices((total, 3))
    shift = version if isinstance(version, int) else 0
    first = (places + layers + shift) % 8
    routes = np.stack([first, (first + 1) % 8], axis=2)
    routes[:, 1] = 0
    logprobs = -1.0 - shift - np.arange(total) / 8
    fields: dict[str, Any] = {
        "logprobs": logprobs,
        "scaled": logprobs * 2,
        "routes": routes,
        "margins": np.ones((total, 3)),
        "orders": np.ones((total, 3)),
    }
    return Reference(call_id=made.call_id, version=version, **{**fields, **changes})


def reply(made: Call, expected: Reference, reason: str = "length", **changes: Any) -> Reply:
    """The reply of these weights."""
    sent, total = len(made.prompt_ids), len(expected.logprobs)
    fields: dict[str, Any] = {
        "token_ids": tuple(range(30, 30 + total - sent)),
        "logprobs": expected.logprobs[sent:].copy(),
        "routes": expected.routes[made.routes_start : total - 1].astype(np.uint8),
        "routes_start": made.routes_start,
        "finish_reason": FinishReason(reason),
    }
    return Reply(call_id=made.call_id, output=EngineOutput(**{**fields, **changes}))


def with_rows(made: Reply, rows: dict[tuple[int, int], Sequence[int]]) -> Reply:
    """The reply with other experts, by row and layer."""
    assert made.output.routes is not None
    routes = made.output.routes.copy()
    for (row, layer), experts in rows.items():
        routes[row, layer] = experts
    return replace(made, output=replace(made.output, routes=routes))


def load(version: int = 0, *, identity: bool = False) -> Weights:
    """Weights that are loaded: those at the start of a trace come with the engine."""
    return Weights(server_id="e0", version=version, label=version, identity=identity)


def judged(
    check_id: str,
    *events: Event,
    terms: dict[str, Any] | None = None,
    **changes: Any,
) -> CheckResult:
    """The result of a check on these events."""
    declared = engine_contract(terms=terms, **changes)
    header = Header(subject="scripted", contract=declared, engine=declared, about="engines")
    return check(check_id, Trace(header=header, events=()).with_events(events))


def texts(finding: Finding) -> tuple[str, str, str, dict[str, Any]]:
    """What a finding says: title, expected, observed, place."""
    return finding.title, finding.expected, finding.observed, dict(finding.where)
