"""Checks on the tags of samples: every tag names the weights that sampled the tokens it stands for.

A ``sample`` tag is right if it names any version that sampled a token of the sample: one label
cannot say more, and stacks differ in which of several they store. ``min`` and ``max`` are over
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
from rollproof.invariants._shared.phrases import call_id, count, listing, verb, version_name
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
    sampled_by,
    tag_list,
    tagged,
    tags_of,
)
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

_ONE_PER_SAMPLE = (Versions.SAMPLE, Versions.MIN_MAX, Versions.BOUNDS)
"""Tags of which a sample has one for all of its tokens."""
_NO_TOKENS = " A call without tokens shows no version: leave its tag out."


def _has_empty_reply(view: RequestView) -> bool:
    """Return whether a call of the request was answered without a token."""
    return any(not reply.output.token_ids for attempt in view.attempts for reply in attempt.replies)


@request_check(
    "versions.present",
    promise=(
        "A declared version tag is present whenever the engine showed one; version 0 is a"
        " version, not a missing value."
    ),
    needs="a delivered sample, and engines that show versions",
    exercised_by=("tags", "tags of version 0"),
    applies=tagged,
)
def versions_present(view: RequestView, out: Collector) -> None:
    """Look for tags that are ``None`` or empty although the engine showed the version of the
    tokens.
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
        # The stack counts versions itself: whether the engines show them does not matter.
        out.exercised("tags of version 0", int(0 in (rollout.min_version, rollout.max_version)))
        out.exercised("tags")
        return
    shown_parts = [
        part for part in parts if part.shown is not None and part.labels and not part.misled
    ]
    # A tag for the entire sample may be unknown as soon as one of its tokens is.
    if not shown_parts or (
        len(shown_parts) < len(parts) and view.contract.versions in _ONE_PER_SAMPLE
    ):
        out.absent("the engines showed no version for some of the tokens")
        return
    out.exercised("tags")
    out.exercised("tags of version 0", int(any(part.shown == 0 for part in shown_parts)))
    # Version 0 is falsy: `if version:` drops it, as in verl's ToolAgentLoop.
    missing = _absent_tags(view, rollout, shown_parts)
    if missing:
        names = listing(missing, "or")
        # The field is there, and says nothing.
        empty = any("None" in observed for observed in missing.values())
        out.finding(
            f"The sample {'names no version in its' if empty else 'carries no'} {names}, although"
            f" the engine showed {sampled_by(shown_parts, shown=True)}",
            kind=f"{names} without a version" if empty else f"no {names}",
            expected=(
                f"{listing(missing)} of the tokens, as declared by"
                f" versions={str(view.contract.versions)!r}"
            ),
            observed=", ".join(missing.values()),
            where=view.place(version=shown_parts[0].shown),
            hint=(
                "Version 0 is false in a condition: `if version:` drops it, `if version is"
                " not None:` does not."
                if all(part.shown == 0 for part in shown_parts)
                # an unknown version of other tokens may have been spread over these
                and len(shown_parts) == len(parts)
                else "The engine showed no version for other tokens of the sample: that of one"
                " token or call was given to all of them. Tag every token by its own reply."
                if len(shown_parts) < len(parts)
                else (
                    "The stack dropped the tag; without it staleness cannot be bounded, and"
                    " the sample cannot be scored under its own weights."
                )
            )
            + (_NO_TOKENS if _has_empty_reply(view) else ""),
        )


def _absent_tags(
    view: RequestView, rollout: Rollout, shown_parts: Sequence[Sampler]
) -> dict[str, str]:
    """Return the names of the declared tags that are missing, and what is there in their place."""
    kind = view.contract.versions
    single: dict[str, Version] = {}
    if kind is Versions.SAMPLE:
        single = {"version": rollout.version}
    elif kind in (Versions.MIN_MAX, Versions.BOUNDS):
        single = {"min version": rollout.min_version, "max version": rollout.max_version}
    if single:
        return {name: f"{name} is absent" for name, tag in single.items() if tag is None}
    if kind is Versions.CALL:
        return {} if rollout.call_versions else {"call versions": "call versions are absent"}
    if kind is Versions.SPAN:
        if any(span.version is not None for span in rollout.spans):
            return {}
        spans = f"{count(len(rollout.spans), 'span')} of version None"
        return {"spans": spans if rollout.spans else "spans are absent"}
    tags = rollout.token_versions
    if tags is None:
        return {"token versions": "token versions are absent"}
    sampled = [tag for part in shown_parts for tag in tags[part.start : part.end]]
    if any(tag is not None for tag in sampled):
        return {}
    observed = f"token versions are None for {count(len(sampled), 'sampled token')}"
    return {"token versions": observed if sampled else "token versions are empty"}


@request_check(
    "versions.published",
    promise="A tag names a version that was published, never a made-up one.",
    needs="a delivered sample with tags, and the weight updates of the run",
    exercised_by="tags",
    applies=naming,
)
def versions_published(view: RequestView, out: Collector) -> None:
    """Look up every tag of the sample among the published labels."""
    rollout = view.rollout
    if rollout is None:
        out.absent(missing_reason(view))
        return
    # Without published labels every tag would be unknown.
    if not view.history.labels:
        out.absent(UNPUBLISHED)
        return
    tags = tags_of(view, rollout)
    out.exercised("tags", len(tags))
    unpublished = [tag for tag in tags if not published(view.history, tag)]
    if not unpublished:
        return
    labels = sorted(view.history.labels, key=view.history.rank_of)  # type: ignore[arg-type]  # every label has a rank
    out.finding(
        f"The sample is tagged with {listing(version_name(tag) for tag in unpublished[:4])}, never"
        " published",
        kind="a tag that was never published",
        expected=f"one of the published labels: {tag_list(labels)}",
        observed=tag_list(unpublished),
        where=view.place(version=unpublished[0]),
        hint=(
            "A counter runs ahead of the updates, or unknown has a default: mark unknown"
            " versions as None."
        ),
    )


@request_check(
    "versions.sample-tag",
    promise="The version of a sample is one that sampled a token of it.",
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
    # One label cannot name several samplers, so any of them is right.
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
            "It was published after the tokens were sampled: the tag was read after the"
            " reply, not with it (AReaL #1569)."
        )
    return (
        "It was current before the tokens were sampled: a tag from the time of scheduling"
        " bounds staleness, but does not name the sampler. Take it from the reply, or declare"
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
    # verl's FullyAsyncLLMServerClient (up to 0.9.1) also counted calls that were aborted before
    # their first token.
    sampled = reply_samplers(view)
    label_sets = [part.accepted for part in sampled]
    shown_sets = [labels for labels in label_sets if labels is not None]
    in_sample = shown_sets[: len(parts)]
    ranks = order(
        view.history,
        [
            key(low),
            key(high),
            *(label for labels in shown_sets for label in labels if label is not None),
        ],
    )
    # Labels without an order (strings that were never published) have no smallest or greatest.
    if ranks is None:
        out.absent("the order of the versions is not known")
        return
    if not count_samplers(parts, out) or len(shown_sets) < len(label_sets):
        return
    lowest, highest = _lowest(in_sample, ranks), _highest(in_sample, ranks)
    # Tokens that a limit of the sample cut off may count or not.
    accepted_tags = {
        "min": {*lowest, *_lowest(shown_sets, ranks)},
        "max": {*highest, *_highest(shown_sets, ranks)},
    }
    wrong = [
        name for name, tag in (("min", low), ("max", high)) if key(tag) not in accepted_tags[name]
    ]
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


def _lowest(label_sets: Sequence[frozenset[Key]], ranks: dict[Key, int]) -> list[Key]:
    """Return the labels that can be the smallest if each set contributes one."""
    bound = min(max(ranks[label] for label in labels if label is not None) for labels in label_sets)
    return sorted(
        {
            label
            for labels in label_sets
            for label in labels
            if label is not None and ranks[label] <= bound
        },
        key=ranks.__getitem__,
    )


def _highest(label_sets: Sequence[frozenset[Key]], ranks: dict[Key, int]) -> list[Key]:
    """Return the labels that can be the greatest if each set contributes one."""
    bound = max(min(ranks[label] for label in labels if label is not None) for labels in label_sets)
    return sorted(
        {
            label
            for labels in label_sets
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
        attempt.call.call_id
        for attempt in view.segments
        if attempt.consumed is not None and not attempt.consumed.output.token_ids
    ]
    if key(tag) not in sampled and empty:
        return (
            f"No token was sampled by {version_name(tag)}; call {empty[0]} was aborted before its"
            " first one. Update the tags only when a reply has tokens, else samples look staler"
            " than they are (verl's FullyAsyncLLMServerClient, up to 0.9.1)."
        )
    zero = (
        " Or version 0 was skipped by `if version:`; write `if version is not None:` (verl's"
        " ToolAgentLoop)."
        if 0 in sampled and key(low)
        else ""
    )
    if key(low) == key(high):
        return (
            "The tag of one call is used for all: take the smallest and the greatest over all"
            " calls that returned tokens, also across turns." + zero
        )
    return (
        "Update both tags with every reply that returned tokens, whatever their order: versions"
        " decrease when a replica lags behind." + zero
    )


@request_check(
    "versions.bounds",
    promise=(
        "No token of a sample was sampled by a version older than its lower bound or newer"
        " than its upper bound."
    ),
    needs="a delivered sample, and the versions that sampled its tokens",
    exercised_by=("samples under one version", "samples across versions"),
    applies=only(Versions.BOUNDS),
)
def versions_bounds(view: RequestView, out: Collector) -> None:
    """Look for tokens with no possible version between ``min_version`` and ``max_version``."""
    both = judged(view, out)
    if both is None:
        return
    rollout, parts = both[0].rollout, both[1]
    low, high = rollout.min_version, rollout.max_version
    if low is None or high is None:
        out.absent("the samples do not carry both bounds")
        return
    candidates = [
        (part, frozenset(label for label in part.accepted or () if label is not None))
        for part in parts
    ]
    ranks = order(
        view.history,
        [key(low), key(high), *(label for _, labels in candidates for label in labels)],
    )
    if ranks is None:
        out.absent(
            "the order of the versions is not known: a bound was never published, and not all are"
            " numbers"
        )
        return
    # A token is outside the bounds only if every version that may have sampled it is.
    older = [
        part
        for part, labels in candidates
        if labels and max(ranks[label] for label in labels) < ranks[key(low)]
    ]
    above = [
        (part, labels)
        for part, labels in candidates
        if labels and min(ranks[label] for label in labels) > ranks[key(high)]
    ]
    if above and case_actions(view.header, "skew", "lag"):
        # The stack was not told of these weights, so that its counter cannot bound them.
        out.absent(SKEWED)
        return
    newer = [
        part
        for part, labels in above
        if any(view.history.is_known_to_stack(label) for label in labels)
    ]
    if above and not newer:
        # nor of a label that the case published, if the stack loaded these weights without one
        out.absent("the case itself published the labels of these weights (relabel)")
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
            "The counter was raised while the engines still sampled under the old weights,"
            " and a rollout that began then read it: raise the counter of the lower bound"
            " after the update."
            if older
            else (
                "The counter was raised when the engines already sampled under the new"
                " weights, and a rollout that ended by then did not see it: raise the counter"
                " of the upper bound before the update."
            )
        ),
    )


@request_check(
    "versions.call-tags",
    promise=(
        "A sample has one tag per engine call that returned tokens, in order, and each names a"
        " version that sampled tokens of that call."
    ),
    needs="a delivered sample, and the versions that sampled its tokens",
    exercised_by=("tags of calls", "samples across versions"),
    applies=only(Versions.CALL),
)
def versions_call_tags(view: RequestView, out: Collector) -> None:
    """Match the list of tags with the calls."""
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
            # Calls without tokens, with tokens given up, or of a broken stream may have a tag or
            # none.
            attempt.number not in accepted or attempt.partial is not None,
            accepted.get(attempt.number),
        )
        for attempt in view.segments
    ]
    if not _matches(tags, calls):
        _call_finding(view, tags, calls, parts, out)


def _by_call(parts: Iterable[Sampler]) -> dict[int, frozenset[Key] | None]:
    """Return what each call's tag may be (``None``: anything)."""
    out: dict[int, frozenset[Key] | None] = {}
    for part in parts:
        before = out.get(part.attempt, frozenset())
        any_tag = part.accepted is None or before is None
        out[part.attempt] = (
            None if any_tag else (before or frozenset()) | (part.accepted or frozenset())
        )
    return out


def _matches(
    tags: Sequence[Version], calls: Sequence[tuple[int, bool, frozenset[Key] | None]]
) -> bool:
    """Return whether the tags match the calls in order, with some optional ones left out."""
    positions = {0}
    for _, optional, labels in calls:
        reachable = {
            position + 1
            for position in positions
            if position < len(tags) and (labels is None or key(tags[position]) in labels)
        }
        positions = reachable | positions if optional else reachable
    return len(tags) in positions


def _call_finding(
    view: RequestView,
    tags: Sequence[Version],
    calls: Sequence[tuple[int, bool, frozenset[Key] | None]],
    parts: Sequence[Sampler],
    out: Collector,
) -> None:
    with_tokens = [tagged_call for tagged_call in calls if not tagged_call[1]]
    call: int | None = None
    for candidates in (with_tokens, calls):
        if len(candidates) == len(tags):
            wrong = next(
                (
                    i
                    for i, (_, _, labels) in enumerate(candidates)
                    if labels is not None and key(tags[i]) not in labels
                ),
                0,
            )
            call = call_id(view, candidates[wrong][0])
            title = (
                f"Call {call} is tagged with {version_name(tags[wrong])},"
                " which sampled none of its tokens"
            )
            kind = "a call's tag sampled none of its tokens"
            break
    else:
        title = (
            f"The sample has {count(len(tags), 'call version')} for"
            f" {count(len(with_tokens), 'call')} that returned tokens"
        )
        kind = "another number of tags than of calls"
    out.finding(
        title,
        kind=kind,
        expected=f"one tag per call with tokens: {sampled_by(parts)}",
        observed=tag_list(tags),
        where=view.place(call=call),
        hint=(
            "Each tag must come from its own reply; a call that was lost or returned no"
            " tokens must not shift the others."
        ),
    )
