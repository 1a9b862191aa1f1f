"""Tagged samples: what every check of a sample's version tags begins with, and the one walk that
compares tags with samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rollproof.core.contract import Contract, Versions
from rollproof.core.records import Span, Version
from rollproof.invariants._shared.delivery import Delivery, delivery, missing_reason
from rollproof.invariants.versions.samplers import Sampler, key, published, samplers
from rollproof.judging.checks import Collector

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = [
    "UNPUBLISHED",
    "as_spans",
    "count_samplers",
    "judged",
    "misnamed",
    "naming",
    "only",
    "tagged",
]

UNPUBLISHED = (
    "no version was published in the trace, so nobody knows which weights sampled what: in a"
    " recording, call `trace.weights(label)` for the weights that the engines begin with, and again"
    " at each update"
)


def only(*kinds: Versions) -> Callable[[Contract], str | None]:
    """Rules a check out where the contract declares another kind of tag."""

    def applies(contract: Contract) -> str | None:
        return (
            None
            if contract.versions in kinds
            else f"the contract declares versions={str(contract.versions)!r}"
        )

    return applies


def tagged(contract: Contract) -> str | None:
    """Rules a check out where the contract declares no tag."""
    return "the contract declares versions='none'" if contract.versions is Versions.NONE else None


def naming(contract: Contract) -> str | None:
    """Rules a check out where no tag names a version that sampled: there is none, or bounds, which
    may be those of an update to come.
    """
    if contract.versions is Versions.BOUNDS:
        return "the contract declares versions='bounds', which name no version that sampled a token"
    return tagged(contract)


def judged(view: RequestView, out: Collector) -> tuple[Delivery, tuple[Sampler, ...]] | None:
    """The delivered sample and its samplers; says what is absent where there are none.

    A sample without sampled tokens has no tag to judge. Where no update was recorded, no sampler is
    known: the reason says how to tell.
    """
    found = delivery(view)
    if found is None:
        out.absent(missing_reason(view))
        return None
    parts = samplers(view)
    if parts is None:
        out.absent(found.reason or "the tokens are not those that were sampled (stitch.tokens)")
        return None
    if not view.history.updates and not any(part.labels for part in parts):
        out.absent(UNPUBLISHED)
        return None
    return (found, parts) if parts else None


def count_samplers(parts: Sequence[Sampler], out: Collector, *, tokens: str | None = None) -> bool:
    """Count how far the samplers are known exactly, and say where they are not; whether any tag can
    be judged at all.

    Tags of single tokens count those (under the counter ``tokens``), tags of the whole sample only
    where all are known.
    """
    exact = [part for part in parts if part.exact]
    several = len({part.labels for part in exact}) > 1
    if tokens is not None:
        out.exercised(tokens, sum(part.end - part.start for part in exact))
        out.exercised("samples across versions", int(several))
        if parts and not exact:
            out.absent("which version sampled the tokens is not known")
        return True
    if len(exact) == len(parts):
        out.exercised("samples across versions" if several else "samples under one version")
        return True
    if any(part.accepted is not None for part in parts):
        out.absent(
            "the versions of some tokens cannot be known: the engines showed none, a wrong one, or"
            " one for several"
        )
        return True
    out.absent("which version sampled the tokens is not known")
    return False


def as_spans(tags: Sequence[Version]) -> list[Span]:
    """Per-token tags as spans over response indexes, one for each run of equal tags."""
    spans: list[Span] = []
    at = 0
    for version, run in groupby(tags):
        end = at + sum(1 for _ in run)
        spans.append(Span(start=at, end=end, version=version))
        at = end
    return spans


def misnamed(
    view: RequestView, parts: Sequence[Sampler], spans: Iterable[Span]
) -> list[tuple[int, Version]]:
    """Response index and tag of every sampled token whose tag names a version that did not sample
    it. Both ascend, as they lie.
    """
    wrong: list[tuple[int, Version]] = []
    remaining = list(spans)
    at = 0
    for part in parts:
        while at < len(remaining) and remaining[at].end <= part.start:
            at += 1
        for number in range(at, len(remaining)):
            span = remaining[number]
            if span.start >= part.end:
                break
            if _is_wrong(view, part, span.version):
                wrong += [
                    (i, span.version)
                    for i in range(max(span.start, part.start), min(span.end, part.end))
                ]
    return wrong


def _is_wrong(view: RequestView, part: Sampler, tag: Version) -> bool:
    """Absent tags are judged by ``versions.present``, made-up ones by ``versions.published``, those
    of unknown weights elsewhere.
    """
    if tag is None or part.accepted is None or key(tag) in part.accepted:
        return False
    return published(view.history, tag) or not view.history.labels
