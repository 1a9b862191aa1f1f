"""Checks on spans and per-token tags: they align with the tokens, and each names its token's
sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollproof.core.contract import Versions
from rollproof.core.records import Rollout, Span, Version
from rollproof.invariants._shared.delivery import existing_delivery
from rollproof.invariants._shared.phrases import count, ranges, share, verb, version_name
from rollproof.invariants.versions.samplers import Sampler, key, order
from rollproof.invariants.versions.tagged_samples import (
    aligned_samplers,
    as_spans,
    count_samplers,
    judged,
    mislabelled,
    only,
    sampled_by,
    tag_list,
)
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
        "Version spans are in order, do not overlap, and cover every sampled token of the response."
    ),
    needs="a delivered sample with spans",
    exercised_by="spans",
    applies=only(Versions.SPAN),
)
def versions_spans_cover(view: RequestView, out: Collector) -> None:
    """Check the order and coverage of the spans. Empty spans are harmless; tokens of the
    environment need none.
    """
    both = aligned_samplers(view, out)
    if both is None:
        return
    delivered, parts = both
    spans = delivered.rollout.spans
    if not spans or not parts:
        return
    out.exercised("spans", len(spans))
    fault = _span_fault(spans, len(delivered.rollout.response_ids), parts)
    if fault is None:
        return
    title, index, kind = fault
    out.finding(
        title,
        kind=kind,
        expected=(
            f"spans in order, from 0 to {len(delivered.rollout.response_ids)}, without gap or"
            " overlap"
        ),
        observed=", ".join(
            f"{span.start}-{span.end}: {version_name(span.version)}" for span in spans[:8]
        )
        + (", ..." if len(spans) > 8 else ""),
        where=view.place(index=index),
        hint=(
            "Each reply's spans count from its own first token: on a resume, add the number"
            " of tokens sampled before."
        ),
    )


def _span_fault(
    spans: Sequence[Span], length: int, parts: Sequence[Sampler]
) -> tuple[str, int, str] | None:
    """Return title, token and kind of what is wrong with the spans, or ``None``."""
    position = 0
    # before each span and after the last one, mostly empty
    gaps: list[tuple[int, int]] = []
    for number, span in enumerate(spans):
        if span.end < span.start or span.start < 0 or span.end > length:
            title = (
                f"Span {number} ({span.start} to {span.end}) does not lie in the response of"
                f" {count(length, 'token')}"
            )
            return title, max(0, span.start), "a span does not lie in the response"
        # An abort before the first token leaves an empty span, which tags nothing.
        if span.end == span.start:
            continue
        if span.start < position:
            title = (
                f"Span {number} begins at {span.start}, before the one before it has ended at"
                f" {position}"
            )
            return title, span.start, "spans overlap"
        gaps.append((position, span.start))
        position = span.end
    gaps.append((position, length))
    uncovered = [
        i
        for low, high in gaps
        for part in parts
        for i in range(max(low, part.start), min(high, part.end))
    ]
    if uncovered:
        sampled = sum(part.end - part.start for part in parts)
        title = (
            f"{share(len(uncovered), sampled, 'sampled token')}"
            f" {verb(len(uncovered), 'lies', 'lie')} in no span: {ranges(uncovered)}"
        )
        return title, uncovered[0], "tokens lie in no span"
    return None


@request_check(
    "versions.span-tags",
    promise="The version of a span sampled every token in it.",
    needs="a delivered sample with spans, and the versions that sampled its tokens",
    exercised_by=("tokens in spans", "samples across versions"),
    applies=only(Versions.SPAN),
)
def versions_span_tags(view: RequestView, out: Collector) -> None:
    """Compare each span with the samplers of its tokens."""
    both = judged(view, out)
    if both is None:
        return
    delivered, parts = both
    spans = delivered.rollout.spans
    if not spans or _span_fault(spans, len(delivered.rollout.response_ids), parts) is not None:
        return
    count_samplers(parts, out, tokens="tokens in spans")
    _wrong_tags(view, delivered.rollout, parts, mislabelled(view, parts, spans), out)


@request_check(
    "versions.one-tag-per-token",
    promise="There is exactly one version tag per response token.",
    needs="a delivered sample with per-token tags",
    exercised_by="samples with token tags",
    applies=only(Versions.TOKEN),
)
def versions_one_tag_per_token(view: RequestView, out: Collector) -> None:
    """Compare the two lengths."""
    delivered = existing_delivery(view, out)
    if delivered is None:
        return
    tags, tokens = delivered.rollout.token_versions, len(delivered.rollout.response_ids)
    if tags is None:
        out.absent("the samples carry no token versions")
        return
    out.exercised("samples with token tags")
    if delivered.fits(len(tags)):
        return
    out.finding(
        f"The sample has {count(len(tags), 'version tag')} for {count(tokens, 'token')}",
        kind="fewer tags than tokens" if len(tags) < tokens else "more tags than tokens",
        expected=f"one version per response token: {tokens}",
        observed=f"{len(tags)}: {tag_list(tags)}" if tags else "none",
        where=view.place(),
        hint="Append tags with the tokens of each segment; prompt tokens have none.",
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
    delivered, parts = both
    tags = delivered.rollout.token_versions
    # one-tag-per-token reports other lengths.
    if tags is None or len(tags) != len(delivered.rollout.response_ids):
        return
    count_samplers(parts, out, tokens="tokens")
    _wrong_tags(view, delivered.rollout, parts, mislabelled(view, parts, as_spans(tags)), out)


def _wrong_tags(
    view: RequestView,
    rollout: Rollout,
    parts: Sequence[Sampler],
    wrong: Sequence[tuple[int, Version]],
    out: Collector,
) -> None:
    """Report the tokens that are tagged with a version that did not sample them."""
    if not wrong:
        return
    indexes = [index for index, _ in wrong]
    tags = list(dict.fromkeys(tag for _, tag in wrong))
    first = wrong[0]
    part = next(part for part in parts if part.start <= first[0] < part.end)
    ranks = order(view.history, [key(first[1]), *(part.labels or ())])
    # A later version points to a tag read after the reply (AReaL #1569), an earlier one to a tag
    # kept across an update.
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
        hint=_tag_hint(rollout, parts, later=later),
    )


def _tag_hint(rollout: Rollout, parts: Sequence[Sampler], *, later: bool) -> str:
    if _are_closed_up(rollout, parts):
        return (
            "The tags are right, and not at their tokens: tokens of the environment have none, so"
            " that each turn after them is tagged too early. Append a tag (None) for each of these"
            " tokens too."
        )
    if later:
        return (
            "The tag was published after the token was sampled: it was read after the reply, not"
            " with it (AReaL #1569)."
        )
    return "An older tag was kept when the weights changed: read the version with every reply."


def _are_closed_up(rollout: Rollout, parts: Sequence[Sampler]) -> bool:
    """Whether there are tags of the sampled tokens alone, one after the other without the gaps that
    the environment's tokens leave.
    """
    tags = rollout.token_versions
    sampled = sum(part.end - part.start for part in parts)
    if tags is None or sampled == len(tags) or any(tag is not None for tag in tags[sampled:]):
        return False
    place = 0
    for part in parts:
        length = part.end - part.start
        if any(key(tag) not in (part.labels or ()) for tag in tags[place : place + length]):
            return False
        place += length
    return True
