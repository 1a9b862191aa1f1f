"""Engine evidence: what an engine returned beside what an independent forward of each served
version makes of the same tokens.

Two forwards in float32 agree but for rounding. Where two experts' scores are so close that rounding
decides, a row may differ for that reason alone, and so may everything behind it: those values are
*doubtful*, and nobody is blamed for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract, KvPolicy, LayerAxis, Logprobs, Rows
from rollproof.core.events.rollout import Call, Reference, Reply, Result, Weights
from rollproof.core.records import EngineOutput, IntArray
from rollproof.invariants._shared.event_check import EventCheck

if TYPE_CHECKING:
    from rollproof.judging.checks import Collector
    from rollproof.judging.judge import JudgeContext

__all__ = [
    "NEAR_TIE",
    "TOLERANCE",
    "Fit",
    "Mask",
    "PerReply",
    "captured_rows",
    "fit_of",
    "moe_rows",
    "readable",
]

TOLERANCE = 1e-4
"""Nats within which two float32 forwards agree; measured between vLLM and transformers on one
machine: 1e-5 at most.
"""
NEAR_TIE = 2e-4
"""Part of itself by which a score must exceed another one for rounding in float32 not to decide
between them.
"""
Mask: TypeAlias = "npt.NDArray[np.bool_]"


@dataclass(frozen=True, slots=True)
class Fit:
    """How one reply fits the reference of one version.

    ``tokens`` ``(tokens,)`` and ``rows`` ``(rows,)`` say where the value is the reference's,
    ``doubtful_tokens`` and ``doubtful_rows`` where a near-tie at or before it leaves that open.
    Empty where the reply has no logprobs or no readable routes. ``other_mode`` is as ``tokens``,
    for logprobs in the mode that the engine does not declare.
    """

    version: str
    tokens: Mask
    doubtful_tokens: Mask
    rows: Mask
    doubtful_rows: Mask
    other_mode: Mask


def fit_of(contract: Contract, sent: int, output: EngineOutput, reference: Reference) -> Fit:
    """Compare a reply to a call of ``sent`` prompt tokens with a reference, under the engine's
    contract.
    """
    count = len(output.token_ids)
    rows = doubtful_rows = np.zeros(0, dtype=bool)
    tie = np.inf
    if readable(contract, output):
        captured = captured_rows(contract, output)
        wrong, close = _differing(contract, captured, output.routes_start, reference)
        rows = np.zeros(len(captured), dtype=bool)
        rows[: len(wrong)] = ~wrong.any(axis=1)
        flips = np.flatnonzero(close.any(axis=1))
        tie = output.routes_start + int(flips[0]) if len(flips) else np.inf
        doubtful_rows = np.arange(len(rows)) + output.routes_start >= tie
    tokens = doubtful_tokens = other = np.zeros(0, dtype=bool)
    if output.logprobs is not None and len(output.logprobs) == count:
        modes = (reference.logprobs[sent:], reference.scaled[sent:])
        mine, others = modes if contract.logprobs is Logprobs.RAW else modes[::-1]
        tokens = np.abs(output.logprobs - mine) <= TOLERANCE
        other = np.abs(output.logprobs - others) <= TOLERANCE
        doubtful_tokens = np.arange(count) + sent > tie
    return Fit(str(reference.version), tokens, doubtful_tokens, rows, doubtful_rows, other)


def readable(contract: Contract, output: EngineOutput) -> bool:
    """Whether the reply has routes of the declared layers and top-k, so that they can be compared
    at all.
    """
    routes = output.routes
    return (
        contract.has_routes
        and routes is not None
        and bool(len(routes))
        and routes.shape[1:] == (contract.route_layers, contract.top_k)
    )


def captured_rows(contract: Contract, output: EngineOutput) -> IntArray:
    """The rows that a forward computed: all, or all but the filler at the end."""
    assert output.routes is not None
    return output.routes[:-1] if contract.rows is Rows.ALL else output.routes


def moe_rows(contract: Contract, routes: IntArray) -> IntArray:
    """An engine's rows on the MoE layers only: ``(rows, moe layers, top_k)``."""
    return (
        routes
        if contract.layer_axis is LayerAxis.MOE
        else routes[:, list(contract.moe_layers or ())]
    )


def _differing(
    contract: Contract, captured: IntArray, start: int, reference: Reference
) -> tuple[Mask, Mask]:
    """Cells whose sets of experts differ: where rounding is no reason, and where a near-tie may be
    one; ``(rows, moe layers)`` each.

    Compares as many rows as the reference has; what an engine returned beyond that was never
    forwarded.
    """
    moe = list(contract.moe_layers or ())
    want = reference.routes[start : start + len(captured), moe].astype(np.int64)
    got = moe_rows(contract, captured)[: len(want)].astype(np.int64)
    close = reference.margins[start : start + len(captured), moe] < NEAR_TIE
    differs = (np.sort(got, axis=2) != np.sort(want, axis=2)).any(axis=2)
    return differs & ~close, differs & close


class PerReply(EventCheck):
    """A fold that is shown each reply with its call and the references that follow it: ``judge``."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self.contract: Contract = context.header.engine or context.contract
        self.calls: dict[int, Call] = {}
        self.updates: int = 0
        self._reply: Reply | None = None
        self._references: list[Reference] = []

    @property
    def over_kept_kv(self) -> bool:
        """Whether KV of older weights may serve by declaration: then no single version explains
        what is returned.
        """
        return self.updates > 0 and self.contract.kv_policy is KvPolicy.KEEP

    def judge(
        self, call: Call, reply: Reply, references: Sequence[Reference], out: Collector
    ) -> None:
        """Judge one reply. ``references`` is empty where there is no independent forward."""
        raise NotImplementedError(f"{type(self).__name__} must judge the replies that it is shown")

    def on_call(self, event: Call, out: Collector) -> None:
        self._flush(out)
        self.calls[event.call_id] = event

    def on_weights(self, event: Weights, out: Collector) -> None:
        self._flush(out)
        self.updates += event.index > 0 and event.loaded and not event.identity

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._flush(out)
        self._reply = event

    def on_reference(self, event: Reference, out: Collector) -> None:
        self._references.append(event)

    def on_result(self, event: Result, out: Collector) -> None:
        self._flush(out)

    def finish(self, out: Collector) -> None:
        self._flush(out)

    def _flush(self, out: Collector) -> None:
        reply, references = self._reply, self._references
        self._reply, self._references = None, []
        if reply is not None and reply.call_id in self.calls:
            self.judge(self.calls[reply.call_id], reply, references, out)
