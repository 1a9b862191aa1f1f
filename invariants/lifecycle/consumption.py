"""Consumption: which replies a stack puts into a sample when they come twice, late, or after a
retry (family ``lifecycle``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollproof.core.events.rollout import Call, Reply
from rollproof.judging.checks import Collector, request_check
from rollproof.judging.request_view import Attempt, RequestView

__all__ = [
    "lifecycle_duplicate_consumed_once",
    "lifecycle_one_reply_per_retry",
]

_STRAY = frozenset({"late-reply", "duplicate-reply", "lost-reply"})


@dataclass(frozen=True, slots=True)
class _Point:
    """A place where the sequence shows what the stack took: its next call, or the sample that it
    hands over.

    ``known`` is what the call before had sent, ``added`` what follows it now, ``tail`` the
    environment's tokens among it, ``replies`` what was delivered in between.
    """

    known: tuple[int, ...]
    added: tuple[int, ...]
    tail: tuple[int, ...]
    replies: tuple[tuple[Attempt, Reply], ...]
    call: Call | None

    @property
    def explained(self) -> bool:
        """Whether one reply to a call with exactly the known prompt (or a cut of it) gives what was
        added.
        """
        for attempt, reply in self.replies:
            tokens = (*reply.output.token_ids, *self.tail)
            if attempt.call.prompt_ids == self.known and self.added == tokens[: len(self.added)]:
                return True
        return not self.added


def _points(view: RequestView) -> Iterator[_Point]:
    """The points of a request in order; those whose sequence does not continue the known one are
    left out.
    """
    steps: list[tuple[int, object]] = [(attempt.call.index, attempt) for attempt in view.attempts]
    steps += [
        (attempt.consumed.index, (attempt, attempt.consumed))
        for attempt in view.attempts
        if attempt.consumed is not None
    ]
    steps += [(item.index, item.token_ids) for item in view.observations]
    steps.sort(key=lambda step: step[0])
    known = view.request.prompt_ids
    replies: list[tuple[Attempt, Reply]] = []
    tail: tuple[int, ...] = ()
    for _, step in steps:
        if isinstance(step, Attempt):
            sent = step.call.prompt_ids
            if sent[: len(known)] == known and replies:
                yield _Point(known, sent[len(known) :], tail, tuple(replies), step.call)
            known, replies, tail = sent, [], ()
        elif isinstance(step, tuple) and step and isinstance(step[0], Attempt):
            replies.append((step[0], step[1]))
        else:
            tail = (*tail, *step)  # type: ignore[misc]
    if view.rollout is not None and replies:
        total = view.total_ids
        if total[: len(known)] == known:
            yield _Point(known, total[len(known) :], tail, tuple(replies), None)


@request_check(
    "lifecycle.duplicate-consumed-once",
    promise="A reply that is delivered twice enters the sample once.",
    needs="duplicate replies",
    exercised_by="duplicate replies",
)
def lifecycle_duplicate_consumed_once(view: RequestView, out: Collector) -> None:
    """The tokens of one call must not stand twice, one after the other, where one reply was due."""
    if not any(len(attempt.replies) > 1 for attempt in view.attempts):
        return
    out.exercised(
        "duplicate replies",
        sum(reply.duplicate for attempt in view.attempts for reply in attempt.replies),
    )
    for point in _points(view):
        for attempt, reply in point.replies:
            tokens = reply.output.token_ids
            if tokens and not point.explained and point.added == (*tokens, *tokens, *point.tail):
                out.finding(
                    "a duplicated reply was used twice",
                    expected=f"the {len(tokens)} tokens of call {attempt.call.call_id} once",
                    observed=f"they stand twice in {_place(point)}",
                    where=view.place(
                        call=attempt.call.call_id,
                        position=len(point.known) + len(tokens),
                        index=reply.index,
                    ),
                    hint=(
                        "A reply is only to be taken by the attempt that still waits for it: key it"
                        " by attempt, not by request."
                    ),
                )
                return


@request_check(
    "lifecycle.one-reply-per-retry",
    promise=(
        "Of a call and its retry one reply enters the sample, and no reply enters another request's"
        " sample."
    ),
    needs="replies that arrive after the call was retried, or late and stray ones of any request",
    exercised_by=("replies after a retry", "stray replies of other requests"),
)
def lifecycle_one_reply_per_retry(view: RequestView, out: Collector) -> None:
    """Takes each point that no single reply explains, and looks whether two replies, or a foreign
    one, do.
    """
    late = sum(_retried(view, attempt) for attempt in view.attempts)
    strays = _strays(view)
    out.exercised("replies after a retry", late)
    out.exercised("stray replies of other requests", len(strays))
    if not late and not strays:
        return
    for point in _points(view):
        if point.explained:
            continue
        pair = _pair(point)
        if pair is not None:
            out.finding(
                "the replies of a call and of its retry were both used",
                expected=(
                    f"the tokens of call {pair[0].call.call_id} or of call {pair[1].call.call_id},"
                    " which answer the same prompt"
                ),
                observed=f"both stand in {_place(point)}",
                where=view.place(call=pair[1].call.call_id, position=len(point.known)),
                hint=(
                    "A timed-out call was retried and its orphan completion kept (AReaL #1498):"
                    " drop what no attempt waits for."
                ),
            )
            return
        for owner, attempt, reply in strays:
            if point.added == (*reply.output.token_ids, *point.tail):
                out.finding(
                    "a late reply was used for another request",
                    expected=f"tokens that were sampled for request {view.request.request_id!r}",
                    observed=(
                        f"the tokens of call {attempt.call.call_id} of request {owner!r} in"
                        f" {_place(point)}"
                    ),
                    where=view.place(
                        call=attempt.call.call_id, position=len(point.known), index=reply.index
                    ),
                    hint=(
                        "Replies are matched by slot or by order of arrival; match them by the id"
                        " of the call."
                    ),
                )
                return


def _retried(view: RequestView, attempt: Attempt) -> bool:
    """Whether another call of the request was sent before this one's reply came, to a caller or to
    nobody.
    """
    later = view.attempts[attempt.number + 1 : attempt.number + 2]
    return bool(attempt.replies and later) and later[0].call.index < attempt.replies[0].index


def _strays(view: RequestView) -> list[tuple[str, Attempt, Reply]]:
    """Late, lost and duplicated replies with tokens of the neighbouring requests."""
    return [
        (other.request.request_id, attempt, reply)
        for other in view.neighbours
        for attempt in other.attempts
        if attempt.faults and any(fault.what in _STRAY for fault in attempt.faults)
        for reply in attempt.replies
        if reply.output.token_ids
    ]


def _pair(point: _Point) -> tuple[Attempt, Attempt] | None:
    for first, one in point.replies:
        for second, two in point.replies:
            if first is second or not one.output.token_ids or not two.output.token_ids:
                continue
            chained = second.call.prompt_ids == (*point.known, *one.output.token_ids)
            if not chained and point.added == (
                *one.output.token_ids,
                *two.output.token_ids,
                *point.tail,
            ):
                return first, second
    return None


def _place(point: _Point) -> str:
    return "the sample" if point.call is None else f"the prompt of call {point.call.call_id}"
