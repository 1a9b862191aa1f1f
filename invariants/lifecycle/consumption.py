"""Checks on which replies a stack puts into a sample when they come twice, late, or after a
retry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from rollproof.core.events.rollout import Call, Reply
from rollproof.judging.attempt import Attempt
from rollproof.judging.checks import Collector, request_check
from rollproof.judging.request_view import RequestView

__all__ = [
    "lifecycle_duplicate_consumed_once",
    "lifecycle_one_reply_per_retry",
]

# Replies that may be matched to the wrong request: AReaL #1498 kept orphan completions.
_LATE_FAULTS = frozenset({"late-reply", "duplicate-reply", "lost-reply"})


@dataclass(frozen=True, slots=True)
class _Junction:
    """A point at which the sequence shows what the stack used: its next call, or the delivered
    sample.

    sent: What the previous call had sent.
    added: What follows it now.
    tail: The environment's tokens at the end of ``added``.
    replies: What was delivered in between.
    call: The next call, ``None`` for the sample.
    """

    sent: tuple[int, ...]
    added: tuple[int, ...]
    tail: tuple[int, ...]
    replies: tuple[tuple[Attempt, Reply], ...]
    call: Call | None

    @property
    def explained(self) -> bool:
        """Whether one reply to a call with exactly the known prompt (or a prefix of it) gives what
        was added.
        """
        for attempt, reply in self.replies:
            tokens = (*reply.output.token_ids, *self.tail)
            # A stack may cut a reply, so a prefix is explained as well.
            if attempt.call.prompt_ids == self.sent and self.added == tokens[: len(self.added)]:
                return True
        return not self.added


def _junctions(view: RequestView) -> Iterator[_Junction]:
    """Return the junctions of a request in order, without those that do not continue the known
    sequence.
    """
    # a reply that lost a race may have been used all the same
    calls = view.every_call
    steps: list[tuple[int, object]] = [(attempt.call.index, attempt) for attempt in calls]
    steps += [
        (attempt.consumed.index, (attempt, attempt.consumed))
        for attempt in calls
        if attempt.consumed is not None
    ]
    steps += [(item.index, item.token_ids) for item in view.observations]
    steps.sort(key=lambda step: step[0])
    before = view.request.prompt_ids
    replies: list[tuple[Attempt, Reply]] = []
    tail: tuple[int, ...] = ()
    for _, step in steps:
        if isinstance(step, Attempt):
            sent = step.call.prompt_ids
            if sent == before:
                # the same call again, whose earlier reply may still be the one that is used
                continue
            if sent[: len(before)] == before and replies:
                yield _Junction(before, sent[len(before) :], tail, tuple(replies), step.call)
            before, replies, tail = sent, [], ()
        elif isinstance(step, tuple) and step and isinstance(step[0], Attempt):
            replies.append((step[0], step[1]))
        else:
            tail = (*tail, *step)  # type: ignore[misc]
    if view.rollout is not None and replies:
        total = view.total_ids
        # A sample whose prompt differs is stitch.prompt's to judge.
        if total[: len(before)] == before:
            yield _Junction(before, total[len(before) :], tail, tuple(replies), None)


@request_check(
    "lifecycle.duplicate-consumed-once",
    promise="A reply that is delivered twice enters the sample once.",
    needs="duplicate replies",
    exercised_by="duplicate replies",
)
def lifecycle_duplicate_consumed_once(view: RequestView, out: Collector) -> None:
    """Look for the tokens of one call twice in a row where one reply was due."""
    if not any(len(attempt.replies) > 1 for attempt in view.every_call):
        return
    out.exercised(
        "duplicate replies",
        sum(reply.duplicate for attempt in view.every_call for reply in attempt.replies),
    )
    for junction in _junctions(view):
        for attempt, reply in junction.replies:
            tokens = reply.output.token_ids
            if (
                tokens
                # a policy may repeat itself: then one reply explains both, and nothing is wrong
                and not junction.explained
                and junction.added == (*tokens, *tokens, *junction.tail)
            ):
                out.finding(
                    "a duplicated reply was used twice",
                    expected=f"the {len(tokens)} tokens of call {attempt.call.call_id} once",
                    observed=f"they are twice in {_location(junction)}",
                    where=view.place(
                        call=attempt.call.call_id,
                        position=len(junction.sent) + len(tokens),
                        index=reply.index,
                    ),
                    hint=(
                        "Only the attempt that still waits for a reply may use it: key"
                        " replies by attempt, not by request."
                    ),
                )
                return


@request_check(
    "lifecycle.one-reply-per-retry",
    promise=(
        "Only one reply to a call and its retry enters the sample, and no reply enters"
        " another request's sample."
    ),
    needs="replies that arrive after the call was retried, or late ones of any request",
    exercised_by=("replies after a retry", "replies of other requests"),
)
def lifecycle_one_reply_per_retry(view: RequestView, out: Collector) -> None:
    """Check whether two replies, or one of another request, explain what a single reply does
    not.
    """
    retried = sum(_retried(*pair) for pair in pairwise(view.every_call))
    late_replies = _late_replies(view)
    out.exercised("replies after a retry", retried)
    out.exercised("replies of other requests", len(late_replies))
    if not retried and not late_replies:
        return
    for junction in _junctions(view):
        if junction.explained:
            continue
        pair = _pair(view, junction)
        if pair is not None:
            out.finding(
                "the replies of a call and of its retry were both used",
                expected=(
                    f"the tokens of call {pair[0].call.call_id} or of call {pair[1].call.call_id},"
                    " which answer the same prompt"
                ),
                observed=f"both are in {_location(junction)}",
                where=view.place(call=pair[1].call.call_id, position=len(junction.sent)),
                hint=(
                    "A timed-out call was retried and its orphan completion was kept (AReaL"
                    " #1498): drop replies that no attempt waits for."
                ),
            )
            return
        for owner, attempt, reply in late_replies:
            if junction.added == (*reply.output.token_ids, *junction.tail):
                out.finding(
                    "a late reply was used for another request",
                    expected=f"tokens that were sampled for request {view.request.request_id!r}",
                    observed=(
                        f"the tokens of call {attempt.call.call_id} of request {owner!r} in"
                        f" {_location(junction)}"
                    ),
                    where=view.place(
                        call=attempt.call.call_id, position=len(junction.sent), index=reply.index
                    ),
                    hint=(
                        "Replies are matched by slot or by order of arrival; match them by the id"
                        " of the call."
                    ),
                )
                return


def _retried(attempt: Attempt, later: Attempt) -> bool:
    """Return whether the next call of a request was sent before a call's reply came."""
    return bool(attempt.replies) and later.call.index < attempt.replies[0].index


def _late_replies(view: RequestView) -> list[tuple[str, Attempt, Reply]]:
    """Return late, lost and duplicated replies with tokens of the neighbouring requests."""
    return [
        (other.request.request_id, attempt, reply)
        for other in view.neighbours
        for attempt in other.every_call
        if attempt.faults and any(fault.what in _LATE_FAULTS for fault in attempt.faults)
        for reply in attempt.replies
        if reply.output.token_ids
    ]


def _pair(view: RequestView, junction: _Junction) -> tuple[Attempt, Attempt] | None:
    for first, first_reply in junction.replies:
        for second, second_reply in junction.replies:
            if (
                first is second
                or not first_reply.output.token_ids
                or not second_reply.output.token_ids
            ):
                continue
            # the environment may say what the second reply holds, by chance
            if view.is_answer(second_reply.output.token_ids):
                continue
            # A call that continues the first reply is a resume, and then both replies belong into
            # the sample.
            chained = second.call.prompt_ids == (*junction.sent, *first_reply.output.token_ids)
            if not chained and junction.added == (
                *first_reply.output.token_ids,
                *second_reply.output.token_ids,
                *junction.tail,
            ):
                return first, second
    return None


def _location(junction: _Junction) -> str:
    return "the sample" if junction.call is None else f"the prompt of call {junction.call.call_id}"
