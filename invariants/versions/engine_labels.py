"""Checks on the labels that engines show, and on weights without a label: unknown stays unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollproof.core.contract import Versions
from rollproof.core.records import Version
from rollproof.invariants._shared.phrases import call_id, count, ranges, share, verb, version_name
from rollproof.invariants.versions.samplers import (
    Key,
    Sampler,
    engines_show_versions,
    key,
    published,
    reply_samplers,
)
from rollproof.invariants.versions.tagged_samples import (
    aligned_samplers,
    naming,
    sampled_by,
    tag_list,
    tagged,
)
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.core.records import Rollout
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = [
    "versions_engine_tags",
    "versions_unknown_stays_unknown",
    "versions_unlabelled_update",
]


_NO_VERSIONS = "the engines show no version (their contract declares versions='none')"


def _shows_no_version(view: RequestView) -> bool:
    """Return whether the engines declare that they show no version."""
    return view.engine is not None and view.engine.versions is Versions.NONE


def _needs_unlabelled(view: RequestView, out: Collector) -> None:
    """Report whether a driven run can show weights without a label at all."""
    history = view.history
    if view.header is None or view.header.case is None or history.unlabelled():
        return
    if history.labels_unlabelled:
        out.inapplicable("the stack itself labels the weights of updates without a label")
    else:
        out.skipped("not exercised: no weights had been loaded without a label")


@request_check(
    "versions.engine-tags",
    promise=(
        "The version that an engine shows with a reply sampled tokens of that reply. The version"
        " of a span sampled every token of the span."
    ),
    needs="replies that show a version, and the versions that really sampled their tokens",
    exercised_by=("replies under one version", "replies across versions"),
)
def versions_engine_tags(view: RequestView, out: Collector) -> None:
    """Compare what the replies show with the truth; ``versions.unlabelled-update`` judges weights
    without a label.
    """
    if _shows_no_version(view):
        out.inapplicable(_NO_VERSIONS)
        return
    parts = reply_samplers(view)
    by_call: dict[int, list[Sampler]] = {}
    for part in parts:
        by_call.setdefault(part.attempt, []).append(part)
    for number, parts_of_call in by_call.items():
        # Weights without a label are unlabelled-update's to judge.
        if any(not part.labels for part in parts_of_call) or all(
            part.shown is None for part in parts_of_call
        ):
            continue
        attempt = view.attempts[number]
        reply = attempt.consumed
        if reply is None or reply.true_tokens is None:
            continue
        out.exercised(
            "replies across versions"
            if len({part.labels for part in parts_of_call}) > 1
            else "replies under one version"
        )
        wrong = [part for part in parts_of_call if part.misled]
        # One label for a call across versions is right if it names any of them.
        if not wrong or (
            not reply.output.spans
            # An engine that declares when it reads its one label (tag_read) is not held to more for
            # a call that an update overtook.
            and (
                len(wrong) < len(parts_of_call)
                or _read_as_declared(view, attempt, parts_of_call[0].shown)
            )
        ):
            continue
        tokens = sum(part.end - part.start for part in wrong)
        misplaced = all(
            view.history.was_misplaced(attempt.call.server_id, part.shown) for part in wrong
        )
        out.finding(
            f"The engine shows {version_name(wrong[0].shown)} for {count(tokens, 'token')} that it"
            " did not sample",
            kind=(
                "the engine shows a version that was published for other weights"
                if misplaced
                else "the engine shows a version for tokens that it did not sample"
            ),
            expected=sampled_by(parts_of_call),
            observed=(
                f"{sampled_by(wrong, shown=True)}, in the reply to call {attempt.call.call_id}"
            ),
            where=view.place(
                call=attempt.call.call_id,
                server=attempt.call.server_id,
                index=wrong[0].start,
                version=wrong[0].shown,
            ),
            hint=(
                "The update published its label while the server had other weights than it asked"
                " for: publish it with the load, when the calls in flight have drained or were"
                " aborted."
                if misplaced
                else "The label was read when the reply was made or when the call was admitted,"
                " and an update came in between: store the label with each token as it is"
                " sampled."
            ),
        )


def _read_as_declared(view: RequestView, attempt: Attempt, shown: Key) -> bool:
    """Return whether the engine declares when it reads its label, and served ``shown`` between
    admission and reply.
    """
    reply = attempt.consumed
    if view.engine is None or view.engine.tag_read is None or reply is None:
        return False
    first = (attempt.admit or attempt.call).index
    for update in reversed(view.history.updates):
        if update.server_id == attempt.call.server_id and update.index < reply.index:
            if key(update.label) == shown:
                return True
            if update.index < first:
                return False
    return False


@request_check(
    "versions.unlabelled-update",
    promise=(
        "Tokens of weights that were loaded without a label do not carry the label of other"
        " weights."
    ),
    needs="a weight update without a label, and the versions that really sampled the tokens",
    exercised_by="tokens of unlabelled weights",
    applies=tagged,
)
def versions_unlabelled_update(view: RequestView, out: Collector) -> None:
    """Check what engine and sample say about tokens of weights without a label."""
    _needs_unlabelled(view, out)
    both = aligned_samplers(view, out)
    if both is None:
        return
    rollout, parts = both[0].rollout, both[1]
    # If an engine that shows versions showed none, unknown-stays-unknown judges the sample.
    unshown = (
        [part for part in parts if part.unlabelled and part.shown is None]
        if engines_show_versions(view)
        else []
    )
    if not _tagged_parts(view, rollout, parts, unshown):
        out.exercised(
            "tokens of unlabelled weights", sum(part.end - part.start for part in unshown)
        )
    unlabelled_parts = [part for part in parts if part.unlabelled and part not in unshown]
    out.exercised(
        "tokens of unlabelled weights", sum(part.end - part.start for part in unlabelled_parts)
    )
    # versions.label-with-weights judges the label of an update that is shown for other weights.
    unlabelled_parts = [
        part
        for part in unlabelled_parts
        if not view.history.was_misplaced(view.attempts[part.attempt].call.server_id, part.shown)
    ]
    if not unlabelled_parts:
        return
    shown = [part for part in unlabelled_parts if part.shown is not None]
    tagged_parts = [(part, part.shown) for part in shown] or _tagged_parts(
        view, rollout, parts, unlabelled_parts
    )
    if not tagged_parts:
        return
    # verl's CheckpointEngineManager sets global_steps only when it is given.
    tokens = sum(part.end - part.start for part, _ in tagged_parts)
    first, tag = tagged_parts[0]
    out.finding(
        f"{count(tokens, 'token')} of weights that were loaded without a label"
        f" {verb(tokens, 'is', 'are')} tagged {version_name(tag)}",
        kind=(
            "the engine tags tokens of unlabelled weights"
            if shown
            else "the sample tags tokens of unlabelled weights"
        ),
        expected=(
            "no version: after an update without a label, the label of the served weights is"
            " unknown"
        ),
        observed=(
            f"{version_name(tag)} {'shown by the engine' if shown else 'in the sample'}, which"
            " names other weights, at response index"
            f" {ranges(i for part, _ in tagged_parts for i in range(part.start, part.end))}"
        ),
        where=view.place(index=first.start, call=call_id(view, first.attempt), version=tag),
        hint=(
            "update_weights() without global_steps leaves the old label on the new weights (verl's"
            " CheckpointEngineManager sets it only when it is given): pass the step, or clear the"
            " label."
        ),
    )


@request_check(
    "versions.unknown-stays-unknown",
    promise=(
        "If the engine showed no version, the sample marks it as unknown or names the true"
        " one; it does not guess."
    ),
    needs=(
        "tokens for which an engine that shows versions showed none, and the versions that really"
        " sampled them"
    ),
    exercised_by="tokens without a shown version",
    applies=naming,
)
def versions_unknown_stays_unknown(view: RequestView, out: Collector) -> None:
    """Compare the tags of such tokens with the truth."""
    if _shows_no_version(view):
        out.inapplicable(_NO_VERSIONS)
        return
    _needs_unlabelled(view, out)
    both = aligned_samplers(view, out)
    if both is None:
        return
    rollout, parts = both[0].rollout, both[1]
    unshown = (
        [part for part in parts if part.shown is None and part.labels is not None]
        if engines_show_versions(view)
        else []
    )
    # The parts of a stream that broke may have shown what its reply would have said.
    unshown = [part for part in unshown if view.attempts[part.attempt].partial is None]
    out.exercised("tokens without a shown version", sum(part.end - part.start for part in unshown))
    if not unshown:
        return
    wrong = [
        (part, tag)
        for part, tag in _tagged_parts(view, rollout, parts, unshown)
        if key(tag) not in (part.labels or ())
    ]
    if not wrong:
        return
    part, tag = wrong[0]
    tokens = sum(part.end - part.start for part, _ in wrong)
    out.finding(
        f"{share(tokens, parts[-1].end, 'token')} {verb(tokens, 'is', 'are')} tagged"
        f" {version_name(tag)}, although the engine showed no version for "
        + verb(tokens, "it", "them"),
        kind=(
            "tokens of unlabelled weights are tagged"
            if all(part.unlabelled for part, _ in wrong)
            else "tokens whose version the engine did not show are tagged wrongly"
        ),
        expected="no version, or the true one: " + sampled_by([part for part, _ in wrong]),
        observed=f"version {tag_list(dict.fromkeys(tag for _, tag in wrong))}",
        where=view.place(index=part.start, call=call_id(view, part.attempt), version=tag),
        hint=(
            "The weights were loaded without a label, and the stack still names older ones:"
            " update_weights() without global_steps leaves the old number in place (verl's"
            " servers). Pass the step, or tag the tokens as unknown."
            if all(part.unlabelled for part, _ in wrong)
            else (
                "An unknown version that is replaced by 0 or by the newest turns stale tokens"
                " into fresh ones; leave it None, or drop the sample."
            )
        ),
    )


def _tagged_parts(
    view: RequestView, rollout: Rollout, parts: Sequence[Sampler], chosen: Sequence[Sampler]
) -> list[tuple[Sampler, Version]]:
    """Return the published tags that the sample gives to the chosen parts, if they can be told from
    those of other parts.
    """
    out: list[tuple[Sampler, Version]] = []
    kind = view.contract.versions
    for part in chosen:
        tags: list[Version] = []
        if kind is Versions.TOKEN and rollout.token_versions is not None:
            tags = list(dict.fromkeys(rollout.token_versions[part.start : part.end]))
        elif kind is Versions.SPAN:
            tags = [
                span.version
                for span in rollout.spans
                if span.start < part.end and part.start < span.end
            ]
        # A tag of the entire sample belongs to these tokens only if there are no others.
        elif len(chosen) == len(parts) and kind is Versions.SAMPLE:
            tags = [rollout.version]
        elif len(chosen) == len(parts) and kind is Versions.MIN_MAX:
            tags = [rollout.min_version, rollout.max_version]
        elif len(chosen) == len(parts) and kind is Versions.CALL:
            tags = list(rollout.call_versions)
        out += [(part, tag) for tag in tags[:1] if tag is not None and published(view.history, tag)]
    return out
