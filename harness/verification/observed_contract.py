"""What a run shows of the contract's fields, beside what the subject declares.

A wrong contract makes findings of correct code, and hides faults of wrong code. This reads the
fields off the samples and calls of a run: a declaration looks wrong if most samples are otherwise.
What only some samples show is left to the checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rollproof.core.contract import Contract, Filler, Rows
from rollproof.core.records import FinishReason, IntArray, Rollout
from rollproof.core.subjects import SubjectFactory
from rollproof.judging.checks import Check, Collector, request_check
from rollproof.judging.report import Report
from rollproof.judging.request_view import RequestView
from rollproof.verification.rollouts import run_conformance

__all__ = ["FieldReading", "observe_contract"]

_ID = "observed.contract"
_MOST = 0.5
"""The share of samples beyond which a declaration looks wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldReading:
    """A field of the contract: what is declared, and what a run showed.

    declared: The declared value.
    observed: What samples and calls showed, with counts; empty if a run shows nothing of the field.
    fits: Whether most of it fits the declaration; ``None`` if nothing was seen.
    """

    field: str
    declared: str
    observed: str
    fits: bool | None


def observe_contract(
    factory: SubjectFactory, **options: Any
) -> tuple[tuple[FieldReading, ...], Report]:
    """Run a subject, and compare its contract with what the run shows.

    Args:
        factory: Makes a fresh subject for each case.
        options: Further arguments of ``run_conformance``: ``profile``, ``seed``, ``flavours``.

    Returns:
        A reading for each field, and the report of the run.

    Raises:
        SubjectError: A subject that cannot be run.
        UsageError: A wrong argument.
    """
    seen = _Seen()
    report = run_conformance(factory, checks=[seen.as_check()], only=[_ID], canary=False, **options)
    if seen.error is not None:  # the judge takes it for a crash of a check, and goes on
        raise seen.error
    return seen.readings(), report


class _Seen:
    """Counts of values, by field."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.fitting: dict[str, Counter[bool]] = {}
        self.contract: Contract | None = None
        self.error: Exception | None = None

    def as_check(self) -> Check:
        """Return a check that is shown every request, and finds nothing."""

        @request_check(
            _ID,
            promise="Nothing is promised: it reads the contract's fields off the samples.",
            needs="samples",
            exercised_by="requests",
        )
        def observe(view: RequestView, out: Collector) -> None:
            out.exercised("requests")
            try:
                self.add(view)
            except Exception as error:
                self.error = self.error or error
                raise

        return observe

    def add(self, view: RequestView) -> None:
        """Count what a request shows."""
        self.contract = view.contract
        for field, value, fits in _of_request(view):
            self.counts.setdefault(field, Counter())[value] += 1
            self.fitting.setdefault(field, Counter())[fits] += 1

    def readings(self) -> tuple[FieldReading, ...]:
        """Return a reading for each declared field."""
        if self.contract is None:
            return ()
        return tuple(
            self._reading(field.name, getattr(self.contract, field.name))
            for field in fields(Contract)
        )

    def _reading(self, field: str, declared: Any) -> FieldReading:
        counts, fitting = self.counts.get(field), self.fitting.get(field)
        shown = (
            ", ".join(f"{value} ({count:,})" for value, count in counts.most_common(4))
            if (counts)
            else ""
        )
        return FieldReading(
            field=field,
            declared=_text(declared),
            observed=shown,
            fits=None if not fitting else fitting[True] > _MOST * fitting.total(),
        )


def _text(value: Any) -> str:
    if value is None:
        return "not declared"
    return str(value) if isinstance(value, str) else repr(value)


_Found = Iterator[tuple[str, str, bool]]
"""Triples of a field, a value that a request shows, and whether the declaration allows it."""


def _of_request(view: RequestView) -> _Found:
    yield from _of_calls(view)
    sample = view.rollout
    if sample is None:
        if view.results and _was_aborted(view) and not _partial(view):
            yield "partial_off", "dropped", view.contract.partial_off in (None, "dropped")
        return
    yield from _of_end(view, sample)
    if sample.response_ids:
        yield from _of_tags(view.contract, sample)
        yield from _of_logprobs(view, sample)
        yield from _of_mask(view.contract, sample)
        if view.request.want_routes:
            yield from _of_routes(view.contract, sample)


def _of_calls(view: RequestView) -> _Found:
    contract, request = view.contract, view.request
    replies = [attempt.consumed for attempt in view.attempts]
    cut = [
        reply is not None and reply.output.finish_reason is FinishReason.ABORT for reply in replies
    ]
    if any(cut[:-1]):
        yield "resume", "client: a call after an abort", contract.resume == "client"
    if view.observations:
        yield "multi_turn", "answers of the environment", contract.multi_turn
    if request.media is not None and view.attempts:
        carried = all(attempt.call.media == request.media for attempt in view.attempts)
        yield (
            "multimodal",
            "media in every call" if carried else "media left out",
            carried == contract.multimodal,
        )
    if request.sampling and view.attempts:
        forwarded = all(
            dict(request.sampling).items() <= dict(attempt.call.sampling).items()
            for attempt in view.attempts
        )
        # a stack's own parameters may be the caller's
        allowed = forwarded or contract.sampling != "forwarded"
        yield "sampling", "forwarded" if forwarded else "own", allowed


def _of_end(view: RequestView, sample: Rollout) -> _Found:
    contract = view.contract
    reason = sample.finish_reason
    yield (
        "finish_reason",
        "none" if reason is None else "a reason",
        (reason is not None) == contract.finish_reason,
    )
    if reason is FinishReason.ABORT:
        surfaces = contract.abort_surfaces or not _partial(view)
        yield "abort_surfaces", "samples that end by abort", surfaces
        if not _partial(view):
            yield "partial_off", "surfaced", contract.partial_off in (None, "surfaced")


def _of_tags(contract: Contract, sample: Rollout) -> _Found:
    tags = {
        "sample": sample.version is not None,
        "min-max": sample.min_version is not None or sample.max_version is not None,
        "call": bool(sample.call_versions),
        "span": bool(sample.spans),
        "token": sample.token_versions is not None,
    }
    found = [name for name, there in tags.items() if there]
    declared = "min-max" if contract.versions == "bounds" else str(contract.versions)
    # unlabelled weights leave a sample without a tag, so its absence says nothing
    if found or declared == "none":
        yield "versions", " and ".join(found) or "none", declared in (found or ["none"])


def _of_logprobs(view: RequestView, sample: Rollout) -> _Found:
    contract = view.contract
    if not view.request.want_logprobs:
        return
    there = sample.logprobs is not None and len(sample.logprobs) > 0
    yield "logprobs", "there" if there else "none", there == (contract.logprobs != "none")
    if sample.logprobs is not None and np.isnan(sample.logprobs).any():
        masked = sample.loss_mask is not None and len(sample.loss_mask) == len(sample.logprobs)
        hidden = masked and not np.asarray(sample.loss_mask)[np.isnan(sample.logprobs)].any()
        value = "NaN under mask 0" if hidden else "NaN"
        yield "missing_logprobs", value, contract.missing_logprobs in ("masked", "nan")


def _of_mask(contract: Contract, sample: Rollout) -> _Found:
    there = sample.loss_mask is not None
    yield "loss_mask", "there" if there else "none", there == contract.loss_mask


def _of_routes(contract: Contract, sample: Rollout) -> _Found:
    if sample.routes is None:
        yield "rows", "none", contract.rows is Rows.NONE
        return
    routes = np.asarray(sample.routes)
    rows = sample.routes_start + len(routes)
    held = {sample.total: "T", sample.total - 1: "T-1"}.get(
        rows, "captured-prefix" if rows < sample.total else "more than tokens"
    )
    allowed = (
        ("captured-prefix", "T-1", "T")
        if contract.rows is Rows.CAPTURED_PREFIX
        else (str(contract.rows),)
    )
    yield "rows", held, held in allowed
    if routes.ndim != 3 or not contract.has_routes:
        yield "layer_axis", f"{routes.ndim} axes instead of 3", False
        return
    layers = routes.shape[1]
    names = {contract.num_layers: "all", len(contract.routed_layers): "moe"}
    yield "layer_axis", names.get(layers, f"{layers} layers"), layers == contract.route_layers
    yield "top_k", str(routes.shape[2]), routes.shape[2] == contract.top_k
    yield "dtype", str(routes.dtype), str(routes.dtype) in contract.dtypes
    if routes.size:
        within = int(routes.max()) < contract.expert_count
        yield "num_experts", "ids below it" if within else "larger ids", within
    if held == "T" and contract.rows is Rows.ALL:
        yield from _of_last_row(contract, routes)


def _of_last_row(contract: Contract, routes: IntArray) -> _Found:
    if not routes.shape[2]:
        return
    value = next((name for name, looks in _LOOKS.items() if looks(routes)), None)
    if value is not None:
        yield "final_row", str(value), value is contract.final_row


_LOOKS: Mapping[Filler, Callable[[IntArray], bool]] = {
    Filler.MINUS_ONE: lambda rows: bool((rows[-1] == -1).all()),
    Filler.ZEROS: lambda rows: rows.shape[2] > 1 and not rows[-1].any(),
    Filler.ARANGE: lambda rows: bool((rows[-1] == np.arange(rows.shape[2])).all()),
    Filler.PREVIOUS: lambda rows: len(rows) > 1 and bool((rows[-1] == rows[-2]).all()),
}
"""Whether the last row looks like a filler."""


def _was_aborted(view: RequestView) -> bool:
    return any(
        reply is not None and reply.output.finish_reason is FinishReason.ABORT
        for reply in (attempt.consumed for attempt in view.attempts)
    )


def _partial(view: RequestView) -> bool:
    case = None if view.header is None else view.header.case
    return case is None or bool(case.get("partial", True))
