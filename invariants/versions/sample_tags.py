"""Version checks on samples: every tag names the weights that sampled the tokens it speaks of.

A ``sample`` tag is right when it names any version that sampled a token of the sample: one label
cannot say more, and stacks differ in which of several they keep. ``min`` and ``max`` run over
versions that sampled tokens, so a call without tokens counts for nothing. Labels compare as
``samplers.key`` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rollproof.core.contract import Versions
from rollproof.core.records import Rollout, Version
from rollproof.invariants._shared.delivery import missing_reason
from rollproof.invariants._shared.event_check import case_actions
from rollproof.invariants._shared.phrases import count, listing, verb, version_name
from rollproof.invariants.versions.samplers import (
    Key,
    Sampler,
    key,
    order,
    published,
    reply_samplers,
)
from rollproof.invariants.versions.tagged_samples import (
    UNPUBLISHED,
    count_samplers,
    judged,
    naming,
    only,
    tagged,
)
from rollproof.invariants.versions.version_phrases import sampled_by, tag_list, tags_of
from rollproof.invariants.weights.update_races import SKEWED
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = [
    "versions_bounds",
    "versions_call_tags",
    "versions_min_max",
    "versions_present",
    "versions_published",
    "versions_sample_tag",
]

_OF_THE_SAMPLE = (Versions.SAMPLE, Versions.MIN_MAX, Versions.BOUNDS)
"""Tags of which a sample has one for all of its tokens."""


@request_check(
    "versions.present",
    promise=(
        "A declared version tag is there whenever the engine showed one; version 0 is a version,"
        " not a missing value."
    ),
    needs="a delivered sample, and engines that show versions",
    exercised_by=("tags", "tags of version 0"),
    applies=tagged,
)
def versions_present(view: RequestView, out: Collector) -> None:
    """Look for tags that are ``None`` or empty although the engine told the version of the tokens.

    A tag for the whole sample may be unknown as soon as one of its tokens is.
    """
    both = judged(view, out)
    if both is None:
        return
    rollout, parts = both[0].rollout, both[1]
    if (
        view.contract.versions is Versions.BOUNDS
        and rollout.min_version is not None
        and rollout.max_version is not None
    ):
        # counters of the stack's own: whether the engines show versions does not matter
        out.exercised("tags of version 0", int(0 in (rollout.min_version, rollout.max_version)))
        out.exercised("tags")
        return
    told = [part for part in parts if part.shown is not None and part.labels and not part.misled]
    if not told or (len(told) < len(parts) and view.contract.versions in _OF_THE_SAMPLE):
        out.absent("the engines showed no version for some of the tokens")
        return
    out.exercised("tags")
    out.exercised("tags of version 0", int(any(part.shown == 0 for part in told)))
    gone = _absent_tags(view, rollout, told)
    if gone:
        out.finding(
            f"The sample carries no {listing(gone, 'or')}, although the engine showed"
            f" {sampled_by(told, shown=True)}",
            kind=f"no {listing(gone, 'or')}",
            expected=(
                f"{listing(gone)} of the tokens, as declared by"
                f" versions={str(view.contract.versions)!r}"
            ),
            observed=", ".join(f"{name} is absent" for name in gone),
            where=view.place(version=told[0].shown),
            hint=(
                "Version 0 is false in a condition: `if version:` drops it, `if version is not"
                " None:` keeps it."
                if all(part.shown == 0 for part in told)
                else (
                    "The tag was dropped on its way; without it staleness cannot be bounded, nor"
                    " the sample scored under its own weights."
                )
            ),
        )


def _absent_tags(view: RequestView, rollout: Rollout, told: Sequence[Sampler]) -> list[str]:
    """Names of the declared tags that are not there."""
    kind = view.contract.versions
    if kind is Versions.SAMPLE:
        return ["version"] if rollout.version is None else []
    if kind in (Versions.MIN_MAX, Versions.BOUNDS):
        return [
            name
            for name, tag in (
                ("min version", rollout.min_version),
                ("max version", rollout.max_version),
            )
            if tag is None
        ]
    if kind is Versions.CALL:
        return [] if rollout.call_versions else ["call versions"]
    if kind is Versions.SPAN:
        return [] if any(span.version is not None for span in rollout.spans) else ["spans"]
    tags = rollout.token_versions
    return (
        []
        if tags is not None
        and any(tag is not None for part in told for tag in tags[part.start : part.end])
        else ["token versions"]
    )


@request_check(
    "versions.published",
    promise="A tag names a version that was published, never one made up.",
    needs="a delivered sample with tags, and the weight updates of the run",
    exercised_by="tags",
    applies=naming,
)
def versions_published(view: RequestView, out: Collector) -> None:
    """Look every tag of the sample up among the published labels."""
    rollout = view.rollout
    if rollout is None:
        out.absent(missing_reason(view))
        return
    if not view.history.labels:
        out.absent(UNPUBLISHED)
        return
    tags = tags_of(view, rollout)
    out.exercised("tags", len(tags))
    stray = [tag for tag in tags if not published(view.history, tag)]
    if not stray:
        return
    labels = sorted(view.history.labels, key=view.history.rank_of)  # type: ignore[arg-type]  # every label has a rank
    out.finding(
        f"The sample is tagged with {listing(version_name(tag) for tag in stray[:4])}, never"
        " published",
        kind="a tag that was never published",
        expected=f"one of the published labels: {tag_list(labels)}",
        observed=tag_list(stray),
        where=view.place(version=stray[0]),
        hint=(
            "A counter that runs ahead of the updates, or a default for unknown: mark what is"
            " unknown as None."
        ),
    )


@request_check(
    "versions.sample-tag",
    promise="The one version of a sample is one that sampled a token of it.",
    needs="a delivered sample, and the versions that sampled its tokens",
    exercised_by=("samples under one version", "samples across versions"),
    applies=only(Versions.SAMPLE),
)
def versions_sample_tag(view: RequestView, out: Collector) -> None:
    """Compare ``version`` with the samplers."""
    both = judged(view, out)
    if both is None:
        return
    rollout, parts = both[0].rollout, both[1]
    tag = rollout.version
    if tag is None or not published(view.history, tag):
        out.absent("the samples carry no published version")
        return
    if not count_samplers(parts, out):
        return
    if any(part.accepted is None or key(tag) in part.accepted for part in parts):
        return
    out.finding(
        f"The sample is tagged with {version_name(tag)}, which sampled none of its"
        f" {count(parts[-1].end, 'token')}",
        kind="a tag that sampled no token",
        expected=f"a version that sampled it: {sampled_by(parts)}",
        observed=version_name(tag),
        where=view.place(version=tag),
        hint=_stale_hint(view, key(tag), parts),
    )


def _stale_hint(view: RequestView, tag: Key, parts: Sequence[Sampler]) -> str:
    empty = (attempt.consumed for attempt in view.segments)
    if any(
        reply is not None and not reply.output.token_ids and key(reply.output.version) == tag
        for reply in empty
    ):
        return (
            "It is the version of a call that was aborted before its first token: a call without"
            " tokens must not set the tag."
        )
    ranks = order(view.history, [tag, *(label for part in parts for label in part.labels or ())])
    if ranks is not None and ranks[tag] > max(
        ranks[label] for part in parts for label in part.labels or ()
    ):
        return (
            "It was published after the tokens were sampled: the tag was read after the reply had"
            " come, not with it (AReaL #1569)."
        )
    return (
        "It was current before the tokens were sampled: a tag of the time of scheduling bounds"
        " staleness, but does not name the sampler. Take it from the reply, or declare"
        " versions='none'."
    )


@request_check(
    "versions.min-max",
    promise=(
        "The min and max tags are the oldest and newest version that sampled a token; calls without"
        " tokens do not count."
    ),
    needs="a delivered sample, and the versions that sampled its tokens",
    exercised_by=("samples under one version", "samples across versions"),
    applies=only(Versions.MIN_MAX),
)
def versions_min_max(view: RequestView, out: Collector) -> None:
    """Compare ``min_version`` and ``max_version`` with the samplers."""
    both = judged(view, out)
    if both is None:
        return
    rollout, parts = both[0].rollout, both[1]
    low, high = rollout.min_version, rollout.max_version
    if (
        low is None
        or high is None
        or not (published(view.history, low) and published(view.history, high))
    ):
        out.absent("the samples carry no published min and max version")
        return
    sampled = reply_samplers(view)
    sets = [part.accepted for part in sampled]
    known = [labels for labels in sets if labels is not None]
    kept = known[: len(parts)]
    ranks = order(
        view.history,
        [
            key(low),
            key(high),
            *(label for labels in known for label in labels if label is not None),
        ],
    )
    if ranks is None:
        out.absent("the order of the versions is not known")
        return
    if not count_samplers(parts, out) or len(known) < len(sets):
        return
    lowest, highest = _lowest(kept, ranks), _highest(kept, ranks)
    # tokens that a limit of the sample cut off may count or not
    right = {"min": {*lowest, *_lowest(known, ranks)}, "max": {*highest, *_highest(known, ranks)}}
    wrong = [name for name, tag in (("min", low), ("max", high)) if key(tag) not in right[name]]
    if not wrong:
        return
    out.finding(
        f"The {listing(wrong)} version of the sample {verb(len(wrong), 'is', 'are')} not that of"
        " its tokens",
        kind=f"the {listing(wrong)} version is not that of the tokens",
        expected=(
            f"min {tag_list(lowest, 'or')}, max {tag_list(highest, 'or')}: {sampled_by(parts)}"
        ),
        observed=f"min {low}, max {high}",
        where=view.place(version=low if "min" in wrong else high),
        hint=_min_max_hint(view, low if "min" in wrong else high, low, high, parts),
    )


def _lowest(sets: Sequence[frozenset[Key]], ranks: dict[Key, int]) -> list[Key]:
    """The labels that can be the smallest when each set contributes one."""
    bound = min(max(ranks[label] for label in labels if label is not None) for labels in sets)
    return sorted(
        {
            label
            for labels in sets
            for label in labels
            if label is not None and ranks[label] <= bound
        },
        key=ranks.__getitem__,
    )


def _highest(sets: Sequence[frozenset[Key]], ranks: dict[Key, int]) -> list[Key]:
    """The labels that can be the greatest when each set contributes one."""
    bound = max(min(ranks[label] for label in labels if label is not None) for labels in sets)
    return sorted(
        {
            label
            for labels in sets
            for label in labels
            if label is not None and ranks[label] >= bound
        },
        key=ranks.__getitem__,
    )


def _min_max_hint(
    view: RequestView, tag: Version, low: Version, high: Version, parts: Sequence[Sampler]
) -> str:
    sampled = {label for part in parts for label in part.labels or ()}
    empty = [
        attempt.number
        for attempt in view.segments
        if attempt.consumed is not None and not attempt.consumed.output.token_ids
    ]
    if key(tag) not in sampled and empty:
        return (
            f"No token was sampled by {version_name(tag)}; call {empty[0]} was aborted before its"
            " first one. Update the tags only when a reply brings tokens, else samples look staler"
            " than they are (verl's FullyAsyncLLMServerClient, up to 0.9.1)."
        )
    zero = (
        " Or version 0 was skipped by `if version:`; ask `if version is not None:` (verl's"
        " ToolAgentLoop)."
        if 0 in sampled and key(low)
        else ""
    )
    if key(low) == key(high):
        return (
            "One call's tag stands for all: keep the smallest and the greatest over all calls that"
            " brought tokens, also across turns." + zero
        )
    return (
        "EventCheck both tags over every reply that brought tokens, whatever their order: versions go"
        " back when a replica lags behind." + zero
    )


@request_check(
    "versions.bounds",
    promise=(
        "No token of a sample was sampled under a version older than its lower bound, or newer than"
        " its upper one."
    ),
    needs="a delivered sample, and the versions that sampled its tokens",
    exercised_by=("samples under one version", "samples across versions"),
    applies=only(Versions.BOUNDS),
)
def versions_bounds(view: RequestView, out: Collector) -> None:
    """Look for tokens whose every possible version lies outside ``min_version`` to ``max_version``."""
    both = judged(view, out)
    if both is None:
        return
    rollout, parts = both[0].rollout, both[1]
    low, high = rollout.min_version, rollout.max_version
    if low is None or high is None:
        out.absent("the samples carry no two bounds")
        return
    known = [
        (part, frozenset(label for label in part.accepted or () if label is not None))
        for part in parts
    ]
    ranks = order(
        view.history, [key(low), key(high), *(label for _, labels in known for label in labels)]
    )
    if ranks is None:
        out.absent(
            "the order of the versions is not known: a bound was never published, and not all are"
            " numbers"
        )
        return
    older = [
        part
        for part, labels in known
        if labels and max(ranks[label] for label in labels) < ranks[key(low)]
    ]
    newer = [
        part
        for part, labels in known
        if labels and min(ranks[label] for label in labels) > ranks[key(high)]
    ]
    if newer and case_actions(view.header, "skew"):
        out.absent(
            SKEWED
        )  # nobody told the stack of these weights, so no counter of its own can bound them
        return
    if not count_samplers(parts, out) or not (older or newer):
        return
    out.finding(
        f"Tokens of the sample were sampled by weights {'older' if older else 'newer'} than its"
        f" {'lower' if older else 'upper'} bound",
        expected=f"bounds that enclose {sampled_by(older or newer)}",
        observed=f"min {low}, max {high}",
        where=view.place(index=(older or newer)[0].start, version=low if older else high),
        hint=(
            "The counter was raised while the engines still sampled under the old weights, and a"
            " rollout that began then read it: raise what the lower bound is read from after the"
            " update."
            if older
            else (
                "The counter was raised when the engines already sampled under the new weights, and"
                " a rollout that ended by then did not see it: raise what the upper bound is read"
                " from before the update."
            )
        ),
    )


@request_check(
    "versions.call-tags",
    promise=(
        "There is one tag per engine call that brought tokens, in order, and it names a version"
        " that sampled tokens of that call."
    ),
    needs="a delivered sample, and the versions that sampled its tokens",
    exercised_by=("tags of calls", "samples across versions"),
    applies=only(Versions.CALL),
)
def versions_call_tags(view: RequestView, out: Collector) -> None:
    """Match the list of tags with the calls; calls without tokens, with tokens given up, or of a
    broken stream may have a tag or none.
    """
    both = judged(view, out)
    if both is None:
        return
    rollout, parts = both[0].rollout, both[1]
    tags = rollout.call_versions
    if not tags or not all(tag is None or published(view.history, tag) for tag in tags):
        out.absent("the samples carry no published call versions")
        return
    accepted = _by_call(parts)
    out.exercised("tags of calls", sum(1 for labels in accepted.values() if labels is not None))
    out.exercised("samples across versions", int(len({part.labels for part in parts}) > 1))
    calls = [
        (
            attempt.number,
            attempt.number not in accepted or attempt.partial is not None,
            accepted.get(attempt.number),
        )
        for attempt in view.segments
    ]
    if not _matches(tags, calls):
        _call_finding(view, tags, calls, parts, out)


def _by_call(parts: Iterable[Sampler]) -> dict[int, frozenset[Key] | None]:
    """What each call's tag may be; ``None``: anything."""
    out: dict[int, frozenset[Key] | None] = {}
    for part in parts:
        before = out.get(part.attempt, frozenset())
        free = part.accepted is None or before is None
        out[part.attempt] = (
            None if free else (before or frozenset()) | (part.accepted or frozenset())
        )
    return out


def _matches(
    tags: Sequence[Version], calls: Sequence[tuple[int, bool, frozenset[Key] | None]]
) -> bool:
    """Whether the tags can be read off the calls in order, some optional ones left out."""
    places = {0}
    for _, optional, labels in calls:
        step = {
            place + 1
            for place in places
            if place < len(tags) and (labels is None or key(tags[place]) in labels)
        }
        places = step | places if optional else step
    return len(tags) in places


def _call_finding(
    view: RequestView,
    tags: Sequence[Version],
    calls: Sequence[tuple[int, bool, frozenset[Key] | None]],
    parts: Sequence[Sampler],
    out: Collector,
) -> None:
    needed = [call for call in calls if not call[1]]
    for row in (needed, calls):
        if len(row) == len(tags):
            wrong = next(
                (
                    i
                    for i, (_, _, labels) in enumerate(row)
                    if labels is not None and key(tags[i]) not in labels
                ),
                0,
            )
            title = (
                f"Call {row[wrong][0]} is tagged with {version_name(tags[wrong])}, which sampled"
                " none of its tokens"
            )
            place, kind = row[wrong][0], "a call's tag sampled none of its tokens"
            break
    else:
        title, place = (
            (
                f"The sample has {count(len(tags), 'call version')} for"
                f" {count(len(needed), 'call')} that brought tokens"
            ),
            None,
        )
        kind = "another number of tags than of calls"
    out.finding(
        title,
        kind=kind,
        expected=f"one tag per call with tokens: {sampled_by(parts)}",
        observed=tag_list(tags),
        where=view.place(call=place),
        hint=(
            "Each tag must come from its own reply; a call that was lost, or brought nothing, must"
            " not shift the others."
        ),
    )
