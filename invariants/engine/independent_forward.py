"""Compares what an engine returned with an independent forward pass of each served version.

Two forward passes in float32 agree except for rounding. If two experts' scores are so close that
rounding decides, a row may differ for that reason alone, and so may everything after it: those
values are *doubtful* and never reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract, KvPolicy, LayerAxis, Logprobs, Rows
from rollproof.core.engine_contract import SamplingOption
from rollproof.core.events.rollout import Call, Reference, Reply, Result, Weights
from rollproof.core.records import EngineOutput, IntArray, LogprobArray
from rollproof.invariants._shared.event_check import EventCheck

if TYPE_CHECKING:
    from rollproof.judging.checks import Collector
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "NEAR_TIE",
    "TOLERANCE",
    "Fit",
    "Mask",
    "PerReply",
    "captured_rows",
    "fit_of",
    "logprobs_of",
    "moe_rows",
    "readable",
]

TOLERANCE = 1e-4
"""Nats within which two float32 forward passes agree; measured between vLLM and transformers on one
machine: at most 1e-5.
"""
NEAR_TIE = 2e-4
"""The relative difference of two scores below which rounding in float32 may decide between them."""
Mask: TypeAlias = "npt.NDArray[np.bool_]"


@dataclass(frozen=True, slots=True)
class Fit:
    """How one reply fits the reference of one version. Arrays are empty if the reply has no
    logprobs or no readable routes.

    version: The version.
    tokens: ``(tokens,)``: the logprob is the reference's.
    doubtful_tokens: ``(tokens,)``: a near-tie before it leaves that open.
    rows: ``(rows,)``: the row is the reference's.
    doubtful_rows: ``(rows,)``: a near-tie at or before it leaves that open.
    other_modes: As ``tokens``, in each mode that the engine does not declare.
    """

    version: str
    tokens: Mask
    doubtful_tokens: Mask
    rows: Mask
    doubtful_rows: Mask
    other_modes: Mapping[Logprobs, Mask]

    def is_of_another_mode(self) -> Logprobs | None:
        """Return the undeclared mode of which all logprobs are, if the declared one is not."""
        if (self.tokens | self.doubtful_tokens).all():
            return None
        return next(
            (
                mode
                for mode, matching in self.other_modes.items()
                if (matching | self.doubtful_tokens).all()
            ),
            None,
        )


def logprobs_of(
    contract: Contract, call: Call, reference: Reference
) -> Mapping[Logprobs, LogprobArray | None]:
    """Return what the reference expects of a call in each mode, ``(T,)`` each.

    ``None``: the reference, or the contract, does not say.
    """
    options = [option for option in SamplingOption if option in call.sampling]
    raw: LogprobArray | None = reference.logprobs
    scaled: LogprobArray | None = reference.scaled
    processed: LogprobArray | None = reference.processed if options else reference.scaled
    after = contract.engine.penalised_logprobs if contract.engine is not None else None
    if any(option.penalty for option in options) and after is not False:
        raw = reference.penalised if after else None
        scaled = reference.penalised_scaled if after else None
    return {
        Logprobs.RAW: raw,
        Logprobs.TEMPERATURE_SCALED: scaled,
        Logprobs.PROCESSED: processed,
    }


def fit_of(contract: Contract, call: Call, output: EngineOutput, reference: Reference) -> Fit:
    """Compare a reply with a reference under the engine's contract."""
    sent = len(call.prompt_ids)
    count = len(output.token_ids)
    rows = doubtful_rows = np.zeros(0, dtype=bool)
    first_tie = np.inf
    if readable(contract, output):
        captured = captured_rows(contract, output)
        wrong, near_ties = _differences(contract, captured, output.routes_start, reference)
        rows = np.zeros(len(captured), dtype=bool)
        rows[: len(wrong)] = ~wrong.any(axis=1)
        flips = np.flatnonzero(near_ties.any(axis=1))
        first_tie = output.routes_start + int(flips[0]) if len(flips) else np.inf
        # Behind a near-tie every hidden state may differ, so later rows are doubtful as well.
        doubtful_rows = np.arange(len(rows)) + output.routes_start >= first_tie
    tokens = doubtful_tokens = np.zeros(0, dtype=bool)
    others: dict[Logprobs, Mask] = {}
    if output.logprobs is not None and len(output.logprobs) == count:
        modes = logprobs_of(contract, call, reference)
        declared = modes.get(contract.logprobs)
        doubtful_tokens = np.arange(count) + sent > first_tie
        if declared is None:
            tokens, doubtful_tokens = np.zeros(count, dtype=bool), np.ones(count, dtype=bool)
        else:
            tokens = _close(output.logprobs, declared[sent:])
            # rounding decides whether the token was left out, or it was left out: engine.sampling
            # judges that
            doubtful_tokens = doubtful_tokens | ~np.isfinite(declared[sent:])
            others = {
                mode: _close(output.logprobs, values[sent:])
                for mode, values in modes.items()
                if mode is not contract.logprobs
                and values is not None
                and not _close(declared[sent:], values[sent:]).all()
            }
    return Fit(str(reference.version), tokens, doubtful_tokens, rows, doubtful_rows, others)


def _close(left: LogprobArray, right: LogprobArray) -> Mask:
    with np.errstate(invalid="ignore"):
        near: Mask = np.abs(left - right) <= TOLERANCE
    return near


def readable(contract: Contract, output: EngineOutput) -> bool:
    """Return whether the reply has routes of the declared layers and top-k, so that they can be
    compared.
    """
    routes = output.routes
    return (
        contract.has_routes
        and routes is not None
        and bool(len(routes))
        and routes.shape[1:] == (contract.route_layers, contract.top_k)
    )


def captured_rows(contract: Contract, output: EngineOutput) -> IntArray:
    """Return the rows that a forward pass computed: all, or all except the filler at the end."""
    assert output.routes is not None
    return output.routes[:-1] if contract.rows is Rows.ALL else output.routes


def moe_rows(contract: Contract, routes: IntArray) -> IntArray:
    """Return an engine's rows of the MoE layers: ``(rows, moe layers, top_k)``."""
    return (
        routes
        if contract.layer_axis is LayerAxis.MOE
        else routes[:, list(contract.moe_layers or ())]
    )


def _differences(
    contract: Contract, captured: IntArray, start: int, reference: Reference
) -> tuple[Mask, Mask]:
    """Return the cells with different sets of experts, ``(rows, moe layers)`` each: those that
    rounding cannot explain, and near-ties.
    """
    moe = list(contract.moe_layers or ())
    # Rows beyond those of the reference were never forwarded.
    expected = reference.routes[start : start + len(captured), moe].astype(np.int64)
    actual = moe_rows(contract, captured)[: len(expected)].astype(np.int64)
    near_ties = reference.margins[start : start + len(captured), moe] < NEAR_TIE
    differs = (np.sort(actual, axis=2) != np.sort(expected, axis=2)).any(axis=2)
    return differs & ~near_ties, differs & near_ties


class PerReply(EventCheck):
    """A check that gets each reply with its call and the references that follow it (``judge``)."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self.contract: Contract = context.header.engine or context.contract
        self.calls: dict[int, Call] = {}
        self.updates: int = 0
        self._reply: Reply | None = None
        self._references: list[Reference] = []

    @property
    def kv_outlives_weights(self) -> bool:
        """Whether the engine declares that KV of older weights may be used: then no single version
        explains its values.
        """
        return self.updates > 0 and self.contract.kv_policy is KvPolicy.KEEP

    def judge(
        self, call: Call, reply: Reply, references: Sequence[Reference], out: Collector
    ) -> None:
        """Judge one reply; ``references`` is empty without an independent forward pass."""
        raise NotImplementedError(f"{type(self).__name__} must judge the replies that it is shown")

    def on_call(self, event: Call, out: Collector) -> None:
        self._flush(out)
        self.calls[event.call_id] = event

    def on_weights(self, event: Weights, out: Collector) -> None:
        self._flush(out)
        # The load at index 0 is the start-up.
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
