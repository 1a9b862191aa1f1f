"""Version tags of a sample, at the granularity that a contract declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollproof.core.contract import Versions
from rollproof.core.records import Span, Version
from rollproof.fakes.engine.flavours import VersionTag

__all__ = ["finest_tag", "tags"]


def finest_tag(wanted: Versions, shown: VersionTag, *, overtaken: bool) -> Versions:
    """The tag that can be given truly where engines show ``shown``; ``overtaken``: updates may
    overtake running calls.

    One label a call says which weights sampled its tokens only where no update can overtake it.
    """
    spans = shown in (VersionTag.SPANS, VersionTag.SPANS_AND_LAST)
    scalar = shown in (VersionTag.EMISSION, VersionTag.ADMISSION)
    return wanted if spans or (scalar and not overtaken) else Versions.NONE


def tags(
    kind: Versions, labels: Sequence[Version], mask: Sequence[int], calls: Sequence[Version]
) -> dict[str, Any]:
    """Fields of a ``Rollout`` for a tag of ``kind``.

    ``labels`` and ``mask`` are over response tokens, ``calls`` over the calls that sampled any.
    Tokens of the environment (mask 0) have no version. Minimum, maximum and the one version of a
    sample, which is that of its last token, are taken over the tokens whose version is known.
    Bounds are as narrow as can be.
    """
    known = [label for label, own in zip(labels, mask, strict=True) if own and label is not None]
    extremes = {"min_version": min(known, default=None), "max_version": max(known, default=None)}
    made: Mapping[Versions, dict[str, Any]] = {
        Versions.NONE: {},
        Versions.SAMPLE: {"version": known[-1] if known else None},
        Versions.MIN_MAX: extremes,
        Versions.BOUNDS: extremes,
        Versions.CALL: {"call_versions": tuple(calls)},
        Versions.SPAN: {"spans": _spans(labels)},
        Versions.TOKEN: {"token_versions": tuple(labels)},
    }
    return made[kind]


def _spans(labels: Sequence[Version]) -> tuple[Span, ...]:
    out: list[Span] = []
    for i, label in enumerate(labels):
        if out and out[-1].version == label:
            out[-1] = Span(start=out[-1].start, end=i + 1, version=label)
        else:
            out.append(Span(start=i, end=i + 1, version=label))
    return tuple(out)
