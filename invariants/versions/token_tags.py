"""Version checks on spans and per-token tags: they lie where the tokens are, and each names its
token's sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollproof.core.contract import Versions
from rollproof.core.records import Rollout, Span, Version
from rollproof.invariants._shared.delivery import existing_delivery
from rollproof.invariants._shared.phrases import count, ranges, share, verb, version_name
from rollproof.invariants.versions.samplers import Sampler, key, order, samplers
from rollproof.invariants.versions.tagged_samples import (
    as_spans,
    count_samplers,
    judged,
    misnamed,
    only,
)
from rollproof.invariants.versions.version_phrases import sampled_by, tag_list
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = [
    "versions_one_tag_per_token",
    "versions_span_tags",
    "versions_spans_cover",
    "versions_token_tags",
]


@request_check(
    "versions.spans-cover",
    promise=(
        "Version spans lie in order, do not overlap, and cover every sampled token of the response."
    ),
    needs="a delivered sample with spans",
    exercised_by="spans",
    applies=only(Versions.SPAN),
)
def versions_spans_cover(view: RequestView, out: Collector) -> None:
    """Walk over the spans. Empty spans are harmless; tokens of the environment need none."""
    found = existing_delivery(view, out)
    if found is None:
        return
    spans, parts = found.rollout.spans, samplers(view)
    if parts is None:
        out.absent(found.reason or "the tokens are not those that were sampled (stitch.tokens)")
        return
    if not spans or not parts:
        return
    out.exercised("spans", len(spans))
    fault = _span_fault(spans, len(found.rollout.response_ids), parts)
    if fault is None:
        return
    title, index, kind = fault
    out.finding(
        title,
        kind=kind,
        expected=(
            f"spans in order, from 0 to {len(found.rollout.response_ids)}, without gap or overlap"
        ),
        observed=", ".join(
            f"{span.start}-{span.end}: {version_name(span.version)}" for span in spans[:8]
        )
        + (", ..." if len(spans) > 8 else ""),
        where=view.place(index=index),
        hint=(
            "Each reply's spans count from its own first token: on a resume they must be moved by"
            " what was sampled before."
        ),
    )


def _span_fault(
    spans: Sequence[Span], length: int, parts: Sequence[Sampler]
) -> tuple[str, int, str] | None:
    """What is wrong, at which token, and in a few words for all places alike."""
    at = 0
    gaps: list[tuple[int, int]] = []
    for number, span in enumerate(spans):
        if span.end < span.start or span.start < 0 or span.end > length:
            title = (
                f"Span {number} ({span.start} to {span.end}) does not lie in the response of"
                f" {count(length, 'token')}"
            )
            return title, max(0, span.start), "a span does not lie in the response"
        if span.end == span.start:
            continue
        if span.start < at:
            title = (
                f"Span {number} begins at {span.start}, before the one before it has ended at {at}"
            )
            return title, span.start, "spans overlap"
        if span.start > at:
            gaps.append((at, span.start))
        at = span.end
    if at < length:
        gaps.append((at, length))
    bare = [
        i
        for low, high in gaps
        for part in parts
        for i in range(max(low, part.start), min(high, part.end))
    ]
    if bare:
        sampled = sum(part.end - part.start for part in parts)
        title = (
            f"{share(len(bare), sampled, 'sampled token')} {verb(len(bare), 'lies', 'lie')} in no"
            f" span: {ranges(bare)}"
        )
        return title, bare[0], "tokens lie in no span"
    return None


@request_check(
    "versions.span-tags",
    promise="The version of a span sampled every token in it.",
    needs="a delivered sample with spans, and the versions that sampled its tokens",
    exercised_by=("tokens in spans", "samples across versions"),
    applies=only(Versions.SPAN),
)
def versions_span_tags(view: RequestView, out: Collector) -> None:
    """Compare each span with the samplers below it."""
    both = judged(view, out)
    if both is None:
        return
    found, parts = both
    spans = found.rollout.spans
    if not spans or _span_fault(spans, len(found.rollout.response_ids), parts) is not None:
        return
    count_samplers(parts, out, tokens="tokens in spans")
    _wrong_tags(view, found.rollout, parts, misnamed(view, parts, spans), out)


@request_check(
    "versions.one-tag-per-token",
    promise="There is exactly one version tag per response token.",
    needs="a delivered sample with per-token tags",
    exercised_by="samples with token tags",
    applies=only(Versions.TOKEN),
)
def versions_one_tag_per_token(view: RequestView, out: Collector) -> None:
    """Compare the two lengths."""
    found = existing_delivery(view, out)
    if found is None:
        return
    tags, tokens = found.rollout.token_versions, len(found.rollout.response_ids)
    if tags is None:
        out.absent("the samples carry no token versions")
        return
    out.exercised("samples with token tags")
    if len(tags) == tokens or found.fits(len(tags)):
        return
    out.finding(
        f"The sample has {count(len(tags), 'version tag')} for {count(tokens, 'token')}",
        kind="fewer tags than tokens" if len(tags) < tokens else "more tags than tokens",
        expected=f"one version per response token: {tokens}",
        observed=f"{len(tags)}: {tag_list(tags)}",
        where=view.place(),
        hint="Tags must be appended with the tokens of each segment; prompt tokens have none.",
    )


@request_check(
    "versions.token-tags",
    promise="The version tag of a token is the version that sampled it.",
    needs="a delivered sample with per-token tags, and the versions that sampled its tokens",
    exercised_by=("tokens", "samples across versions"),
    applies=only(Versions.TOKEN),
)
def versions_token_tags(view: RequestView, out: Collector) -> None:
    """Compare tag by tag with the samplers."""
    both = judged(view, out)
    if both is None:
        return
    found, parts = both
    tags = found.rollout.token_versions
    if tags is None or len(tags) != len(found.rollout.response_ids):
        return
    count_samplers(parts, out, tokens="tokens")
    _wrong_tags(view, found.rollout, parts, misnamed(view, parts, as_spans(tags)), out)


def _wrong_tags(
    view: RequestView,
    rollout: Rollout,
    parts: Sequence[Sampler],
    wrong: Sequence[tuple[int, Version]],
    out: Collector,
) -> None:
    if not wrong:
        return
    indexes = [index for index, _ in wrong]
    tags = list(dict.fromkeys(tag for _, tag in wrong))
    first = wrong[0]
    part = next(part for part in parts if part.start <= first[0] < part.end)
    ranks = order(view.history, [key(first[1]), *(part.labels or ())])
    later = ranks is not None and all(
        ranks[key(first[1])] > ranks[label] for label in part.labels or ()
    )
    total = sum(part.end - part.start for part in parts)
    out.finding(
        f"{share(len(wrong), total, 'sampled token')} {verb(len(wrong), 'carries', 'carry')} a"
        f" version that did not sample {verb(len(wrong), 'it', 'them')}",
        kind=(
            "tagged with a later version"
            if later
            else "tagged with an earlier version, or none of the engine's"
        ),
        expected=sampled_by(parts),
        observed=f"version {tag_list(tags)} at response index {ranges(indexes)}",
        where=view.place(
            index=first[0],
            segment=view.segment_of(len(rollout.prompt_ids) + first[0]),
            version=first[1],
        ),
        hint=(
            "The tag was published after the token was sampled: it was read after the reply had"
            " come, not with it (AReaL #1569)."
            if later
            else (
                "An older tag was kept when the weights changed: read the version anew with every"
                " reply."
            )
        ),
    )
