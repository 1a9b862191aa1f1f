"""Find out which weights produced each value that an engine returned.

A real engine does not say which weights computed a row or a logprob; the values do. The reference
forwards every call of a recorded experiment under each version that the engine served, and each
token and row is attributed to the version that gives its value. If none does, it is ``"mixed"``:
computed over KV of several versions, or wrong. If two experts' scores are so close that rounding
decides, the values after them may differ for that reason alone, and stay unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias, runtime_checkable

from rollproof.core.contract import Contract, Provenance
from rollproof.core.engine_contract import SamplingOption
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Reference, Reply, Weights
from rollproof.core.records import (
    EngineOutput,
    IntArray,
    LogprobArray,
    Scalar,
    Span,
    Version,
    spread,
)
from rollproof.core.trace import Trace
from rollproof.invariants.engine.independent_forward import Mask, fit_of

__all__ = ["MIXED", "Oracle", "attributed"]

MIXED = "mixed"
"""The version of values that no single version explains, as in the rest of rollproof."""
_Values: TypeAlias = "tuple[LogprobArray, LogprobArray, IntArray, LogprobArray, LogprobArray]"


class Oracle(Protocol):
    """An independent forward, under the weights of each version."""

    def forward(
        self, version: str, ids: Sequence[int], temperature: float
    ) -> tuple[LogprobArray, LogprobArray, IntArray, LogprobArray, LogprobArray]:
        """Return the fields ``logprobs``, ``scaled``, ``routes``, ``margins`` and ``orders`` of a
        ``rollproof.core.events.rollout.Reference`` for ``ids``.

        An oracle may also have ``sampled(version, ids, sampling, start)``, which returns the fields
        ``penalised``, ``penalised_scaled`` and ``processed`` for a call with these parameters, of
        which ``ids[:start]`` is the prompt. Without it, calls with other parameters than
        temperature and seed are not compared.
        """
        ...


@runtime_checkable
class _SamplingOracle(Protocol):
    def sampled(
        self, version: str, ids: Sequence[int], sampling: Mapping[str, Scalar], start: int
    ) -> tuple[LogprobArray, LogprobArray, LogprobArray]: ...


def attributed(
    trace: Trace, oracle: Oracle | None, progress: Callable[[str], None] | None = None
) -> Trace:
    """Add to each reply ``true_tokens``, ``true_rows`` and a ``Reference`` per version.

    Without an oracle the trace is returned as it is.
    """
    if oracle is None:
        return trace
    contract = trace.header.engine or trace.header.contract
    forwards = _Forwards(oracle, trace.header.profile, progress)
    calls: dict[int, Call] = {}
    served: dict[str, None] = {}
    labels: dict[Version, str] = {}
    out: list[Event] = []
    for event in trace.events:
        if isinstance(event, Weights):
            served[str(event.version)] = None
            labels[event.label] = str(event.version)
        elif isinstance(event, Call):
            calls[event.call_id] = event
        if isinstance(event, Reply):
            call = calls[event.call_id]
            references = forwards.references(call, event.output, list(served))
            tokens, rows = _explained(contract, call, event.output, references, labels)
            out += [replace(event, index=-1, true_tokens=tokens, true_rows=rows), *references]
        else:
            out.append(event)
    return trace.with_events(out)


class _Forwards:
    """The values of the oracle, computed once for each sequence, weights and temperature."""

    def __init__(
        self, oracle: Oracle, experiment: str, progress: Callable[[str], None] | None
    ) -> None:
        self._oracle, self._experiment, self._progress = oracle, experiment, progress
        self._values: dict[tuple[str, tuple[int, ...], float], _Values] = {}

    def references(
        self, call: Call, output: EngineOutput, versions: Sequence[str]
    ) -> list[Reference]:
        """Return the reference of each version; none if the engine returned no values."""
        ids = call.prompt_ids + output.token_ids
        temperature = float(call.sampling.get("temperature") or 0.0)
        references = []
        for version in versions if output.token_ids or output.routes is not None else ():
            key = (version, ids, temperature)
            if key not in self._values:
                if self._progress is not None:
                    self._progress(
                        f"reference forward: {self._experiment}, call {call.call_id}, weights"
                        f" {version}"
                    )
                self._values[key] = self._oracle.forward(version, ids, temperature)
            logprobs, scaled, routes, margins, orders = self._values[key]
            penalised = penalised_scaled = processed = None
            if isinstance(self._oracle, _SamplingOracle) and any(
                option in call.sampling for option in SamplingOption
            ):
                penalised, penalised_scaled, processed = self._oracle.sampled(
                    version, ids, call.sampling, len(call.prompt_ids)
                )
            references.append(
                Reference(
                    call_id=call.call_id,
                    version=version,
                    logprobs=logprobs,
                    scaled=scaled,
                    routes=routes,
                    margins=margins,
                    orders=orders,
                    penalised=penalised,
                    penalised_scaled=penalised_scaled,
                    processed=processed,
                )
            )
        return references


def _explained(
    contract: Contract,
    call: Call,
    output: EngineOutput,
    references: Sequence[Reference],
    labels: Mapping[Version, str],
) -> tuple[tuple[Span, ...] | None, tuple[Span, ...] | None]:
    """Return ``true_tokens`` and ``true_rows`` of a reply; ``None`` without values."""
    sent, count = len(call.prompt_ids), len(output.token_ids)
    shown = [
        labels.get(label)
        for label in (spread(output.spans, count) if output.spans else [output.version] * count)
    ]
    fits = [fit_of(contract, call, output, reference) for reference in references]
    tokens = rows = None
    if fits and len(fits[0].tokens):
        explained = [(fit.version, fit.tokens, fit.doubtful_tokens) for fit in fits]
        tokens = _spans(explained, shown, 0)
    if fits and len(fits[0].rows):
        # the forward of position i predicts the token at i + 1: a row's version is expected to be
        # that token's
        start = output.routes_start
        first = shown[0] if shown else None
        predicted = [first] * max(0, sent - 1 - start) + shown[max(0, start - sent + 1) :]
        # then a row may be of a later forward than the token that it predicts
        late = contract.provenance is Provenance.LATEST_PREFILL
        rows = _spans(
            [(fit.version, fit.rows, fit.doubtful_rows) for fit in fits],
            () if late else predicted,
            start,
        )
    return tokens, rows


def _spans(
    explained: Sequence[tuple[str, Mask, Mask]], expected: Sequence[Version], start: int
) -> tuple[Span, ...]:
    """Return the version of each value: the expected one if it fits, else the one that explains the
    longest stretch.

    A value that no version explains is mixed if there are several versions, and unknown if there is
    only one.
    """
    named: list[Version] = []
    run: set[str] = set()
    begun = 0
    for place in range(len(explained[0][1])):
        fitting = {version for version, fits, _ in explained if fits[place]}
        label = expected[place] if place < len(expected) else None
        if isinstance(label, str) and label in fitting:
            fitting = {label}
        if not run & fitting:
            run, begun = fitting, place
        run &= fitting
        if not fitting:
            doubtful = len(explained) == 1 or any(doubts[place] for _, _, doubts in explained)
            named.append(None if doubtful else MIXED)
        else:
            named[begun:] = [min(run)] * (place + 1 - begun)
    spans: list[Span] = []
    for place, version in enumerate(named, start):
        if spans and spans[-1].version == version:
            spans[-1] = replace(spans[-1], end=place + 1)
        else:
            spans.append(Span(start=place, end=place + 1, version=version))
    return tuple(spans)
