"""What the checks of a sample's version tags share: their opening, the comparison of tags with
samplers, and phrases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rollproof.core.contract import Contract, Versions
from rollproof.core.records import Span, Version
from rollproof.invariants._shared.delivery import Delivery, existing_delivery
from rollproof.invariants._shared.phrases import listing, ranges
from rollproof.invariants.versions.samplers import Key, Sampler, key, published, samplers
from rollproof.judging.checks import Collector

if TYPE_CHECKING:
    from rollproof.core.records import Rollout
    from rollproof.judging.request_view import RequestView

__all__ = [
    "UNPUBLISHED",
    "aligned_samplers",
    "as_spans",
    "count_samplers",
    "judged",
    "mislabelled",
    "naming",
    "only",
    "sampled_by",
    "tag_list",
    "tagged",
    "tags_of",
]

UNPUBLISHED = (
    "no version was published in the trace, so it is not known which weights sampled the"
    " tokens: in a recording, call `trace.weights(label)` for the weights that the engines"
    " start with, and again at each update"
)


def only(*kinds: Versions) -> Callable[[Contract], str | None]:
    """Return a rule that excludes contracts with another kind of tag."""

    def applies(contract: Contract) -> str | None:
        return (
            None
            if contract.versions in kinds
            else f"the contract declares versions={str(contract.versions)!r}"
        )

    return applies


def tagged(contract: Contract) -> str | None:
    """Return why no check of tags applies: the contract declares none."""
    return "the contract declares versions='none'" if contract.versions is Versions.NONE else None


def naming(contract: Contract) -> str | None:
    """Return why no tag names a version that sampled: there is none, or only bounds, which may be
    those of an update to come.
    """
    if contract.versions is Versions.BOUNDS:
        return "the contract declares versions='bounds', which name no version that sampled a token"
    return tagged(contract)


def aligned_samplers(
    view: RequestView, out: Collector
) -> tuple[Delivery, tuple[Sampler, ...]] | None:
    """Return the delivered sample and its samplers, or report why they are not known."""
    sample = existing_delivery(view, out)
    if sample is None:
        return None
    parts = samplers(view)
    if parts is None:
        out.absent(sample.reason or "the tokens are not those that were sampled (stitch.tokens)")
        return None
    return sample, parts


def judged(view: RequestView, out: Collector) -> tuple[Delivery, tuple[Sampler, ...]] | None:
    """Return the delivered sample and its samplers if there is a tag to judge.

    A sample without sampled tokens has none. If no update was recorded, no sampler is known.
    """
    both = aligned_samplers(view, out)
    if both is None:
        return None
    if not view.history.updates and not any(part.labels for part in both[1]):
        out.absent(UNPUBLISHED)
        return None
    return both if both[1] else None


def count_samplers(parts: Sequence[Sampler], out: Collector, *, tokens: str | None = None) -> bool:
    """Count how far the samplers are known exactly, and report where they are not.

    Tags of single tokens count those (under the counter ``tokens``), tags of the entire sample only
    if all are known.

    Returns:
        Whether any tag can be judged.
    """
    exact = [part for part in parts if part.exact]
    across_versions = len({part.labels for part in exact}) > 1
    if tokens is not None:
        out.exercised(tokens, sum(part.end - part.start for part in exact))
        out.exercised("samples across versions", int(across_versions))
        if parts and not exact:
            out.absent("which version sampled the tokens is not known")
        return True
    if len(exact) == len(parts):
        out.exercised("samples across versions" if across_versions else "samples under one version")
        return True
    if any(part.accepted is not None for part in parts):
        out.absent(
            "the versions of some tokens are not known: the engines showed none, a wrong one,"
            " or one for several"
        )
        return True
    out.absent("which version sampled the tokens is not known")
    return False


def as_spans(tags: Sequence[Version]) -> list[Span]:
    """Return per-token tags as spans over response indexes, one for each run of equal tags."""
    spans: list[Span] = []
    index = 0
    for version, run in groupby(tags):
        end = index + sum(1 for _ in run)
        spans.append(Span(start=index, end=end, version=version))
        index = end
    return spans


def mislabelled(
    view: RequestView, parts: Sequence[Sampler], spans: Iterable[Span]
) -> list[tuple[int, Version]]:
    """Return response index and tag of every sampled token that is tagged with a version that did
    not sample it, in order.
    """
    wrong: list[tuple[int, Version]] = []
    remaining = list(spans)
    index = 0
    for part in parts:
        while index < len(remaining) and remaining[index].end <= part.start:
            index += 1
        # Both lists ascend, so that one pass is enough even for per-token tags of a long response.
        for number in range(index, len(remaining)):
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
    """Return whether a tag names another published version than one of the samplers'."""
    # versions.present judges absent tags, versions.published made-up ones, and
    # versions.unlabelled-update and unknown-stays-unknown those of unknown weights.
    if tag is None or part.accepted is None or key(tag) in part.accepted:
        return False
    return published(view.history, tag) or not view.history.labels


def tag_list(tags: Iterable[Version], last: str = "and") -> str:
    """Return ``0, 1 and "step-2"``; beyond eight the rest is counted."""
    texts = [_tag(tag) for tag in tags]
    # Per-token tags can be thousands of different labels.
    if len(texts) > 8:
        texts = [*texts[:8], f"{len(texts) - 8} more"]
    return listing(texts, last)


def sampled_by(parts: Sequence[Sampler], shown: bool = False) -> str:
    """Return ``version 0 for tokens 0-2, version 1 for token 3``, by the true versions or by those
    shown.
    """
    by_label: dict[tuple[Key, ...], list[int]] = {}
    for part in parts:
        labels: tuple[Key, ...] = (
            (part.shown,) if shown else tuple(sorted(part.labels or (), key=str))
        )
        by_label.setdefault(labels, []).extend(range(part.start, part.end))
    texts = []
    for labels, indexes in by_label.items():
        name = f"version {tag_list(labels, 'or')}" if labels else "weights without a label"
        texts.append(f"{name} for token{'s' if len(indexes) > 1 else ''} {ranges(indexes)}")
    return ", ".join(texts)


def tags_of(view: RequestView, rollout: Rollout) -> list[Version]:
    """Return every tag of a sample once, without ``None`` and tags of the environment's tokens."""
    tags: dict[Version, None] = dict.fromkeys(
        (rollout.version, rollout.min_version, rollout.max_version, *rollout.call_versions)
    )
    parts = samplers(view)
    if rollout.token_versions is not None:
        tag_lists = (
            [rollout.token_versions]
            if parts is None
            else [rollout.token_versions[part.start : part.end] for part in parts]
        )
        for tags_of_part in tag_lists:
            tags.update(dict.fromkeys(tags_of_part))
    for span in rollout.spans:
        if parts is None or any(span.start < part.end and part.start < span.end for part in parts):
            tags[span.version] = None
    tags.pop(None, None)
    return list(tags)


def _tag(tag: Version) -> str:
    return "none" if tag is None else f'"{tag}"' if isinstance(tag, str) else str(tag)
