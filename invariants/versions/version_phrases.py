"""Version words: phrases of the findings about version tags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rollproof.core.records import Version
from rollproof.invariants._shared.phrases import listing, ranges
from rollproof.invariants.versions.samplers import Key, Sampler, samplers

if TYPE_CHECKING:
    from rollproof.core.records import Rollout
    from rollproof.judging.request_view import RequestView

__all__ = ["sampled_by", "tag_list", "tags_of"]


def tag_list(tags: Iterable[Version], last: str = "and") -> str:
    """``0, 1 and "step-2"``; beyond eight the rest is counted."""
    texts = [_tag(tag) for tag in tags]
    if len(texts) > 8:
        texts = [*texts[:8], f"{len(texts) - 8} more"]
    return listing(texts, last)


def sampled_by(parts: Sequence[Sampler], shown: bool = False) -> str:
    """``version 0 for tokens 0-2, version 1 for token 3``: who sampled what, or who is shown to
    have.
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
    """Every tag of a sample once, ``None`` left out; tags of tokens that the environment wrote do
    not count.
    """
    found: dict[Version, None] = dict.fromkeys(
        (rollout.version, rollout.min_version, rollout.max_version, *rollout.call_versions)
    )
    parts = samplers(view)
    if rollout.token_versions is not None:
        pieces = (
            [rollout.token_versions]
            if parts is None
            else [rollout.token_versions[part.start : part.end] for part in parts]
        )
        for piece in pieces:
            found.update(dict.fromkeys(piece))
    for span in rollout.spans:
        if parts is None or any(span.start < part.end and part.start < span.end for part in parts):
            found[span.version] = None
    found.pop(None, None)
    return list(found)


def _tag(tag: Version) -> str:
    return "none" if tag is None else f'"{tag}"' if isinstance(tag, str) else str(tag)
