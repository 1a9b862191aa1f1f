"""Attribution: which weights produced each value that an engine returned, found by an independent
forward under each of them.

A real engine does not say which weights computed a row or a logprob; the values do. Every call of a
recorded experiment is forwarded by the reference under each version that the engine served, and
each token and row is given to the version whose value it has. Where none has it, it is ``"mixed"``:
computed over KV of several versions, or wrong. Where two experts' scores are so close that rounding
decides, what follows may differ for that reason alone, and stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from rollproof.core.contract import Contract, Provenance
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Reference, Reply, Weights
from rollproof.core.records import EngineOutput, IntArray, LogprobArray, Span, Version, spread
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
        """The fields ``logprobs``, ``scaled``, ``routes``, ``margins`` and ``orders`` of a
        ``rollproof.core.events.rollout.Reference`` for ``ids``.
        """
        ...


def attributed(
    trace: Trace, oracle: Oracle | None, progress: Callable[[str], None] | None = None
) -> Trace:
    """The trace with a ``Reference`` per call and version behind each reply, and with the replies'
    ``true_tokens`` and ``true_rows``.

    Without an oracle nothing is known of the values, and the trace stays as it is.
    """
    if oracle is None:
        return trace
    contract = trace.header.engine or trace.header.contract
    known = _Known(oracle, trace.header.profile, progress)
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
            references = known.references(call, event.output, list(served))
            tokens, rows = _explained(contract, call, event.output, references, labels)
            out += [replace(event, index=-1, true_tokens=tokens, true_rows=rows), *references]
        else:
            out.append(event)
    return trace.with_events(out)


class _Known:
    """The oracle, asked once for each sequence, weights and temperature."""

    def __init__(self, oracle: Oracle, what: str, progress: Callable[[str], None] | None) -> None:
        self._oracle, self._what, self._progress = oracle, what, progress
        self._values: dict[tuple[str, tuple[int, ...], float], _Values] = {}

    def references(
        self, call: Call, output: EngineOutput, versions: Sequence[str]
    ) -> list[Reference]:
        """What each version makes of the call's tokens; nothing where the engine returned none."""
        ids = call.prompt_ids + output.token_ids
        temperature = float(call.sampling.get("temperature") or 0.0)
        references = []
        for version in versions if output.token_ids or output.routes is not None else ():
            key = (version, ids, temperature)
            if key not in self._values:
                if self._progress is not None:
                    self._progress(
                        f"reference forward: {self._what}, call {call.call_id}, weights {version}"
                    )
                self._values[key] = self._oracle.forward(version, ids, temperature)
            logprobs, scaled, routes, margins, orders = self._values[key]
            references.append(
                Reference(
                    call_id=call.call_id,
                    version=version,
                    logprobs=logprobs,
                    scaled=scaled,
                    routes=routes,
                    margins=margins,
                    orders=orders,
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
    """``true_tokens`` and ``true_rows`` of a reply; ``None`` where the engine returned no values to
    tell them by.
    """
    sent, count = len(call.prompt_ids), len(output.token_ids)
    shown = [
        labels.get(label)
        for label in (spread(output.spans, count) if output.spans else [output.version] * count)
    ]
    fits = [fit_of(contract, sent, output, reference) for reference in references]
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
        late = (
            contract.provenance is Provenance.LATEST_PREFILL
        )  # whose forward a row is of is then not told by the token that it predicts
        rows = _spans(
            [(fit.version, fit.rows, fit.doubtful_rows) for fit in fits],
            () if late else predicted,
            start,
        )
    return tokens, rows


def _spans(
    explained: Sequence[tuple[str, Mask, Mask]], expected: Sequence[Version], start: int
) -> tuple[Span, ...]:
    """The version of each value: the expected one where it fits, else one that explains the longest
    stretch.

    What no version explains is mixed where there are several of them, and unknown where there is
    one.
    """
    named: list[Version] = []
    run: set[str] = set()
    begun = 0
    for place in range(len(explained[0][1])):
        good = {version for version, fits, _ in explained if fits[place]}
        wanted = expected[place] if place < len(expected) else None
        if isinstance(wanted, str) and wanted in good:
            good = {wanted}
        if not run & good:
            run, begun = good, place
        run &= good
        if not good:
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
