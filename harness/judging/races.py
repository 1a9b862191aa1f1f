"""Decide which calls of a request made its sample, where calls raced.

A stack may send one prompt twice and use one of the replies (hedging, a retry while the first call
still runs), or call before the environment has answered and throw that call away. A copy that is
lost may be sent again, also after the other one was answered. The next call or the delivered sample
shows which reply was used. The others are no part of the sample: they become
``RequestView.set_aside``, so that no check takes them for segments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.records import EngineOutput, FinishReason
from rollproof.judging.partial_replies import assign_partial_replies
from rollproof.judging.sample_evidence import values_of

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["explains", "fit_together", "set_aside_losers", "set_attempts"]

_PROMPT = ("lost-reply", "duplicate-reply")
"""Faults of a reply that do not delay it: another call was then made without waiting for it."""
_TURN_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.COMPLETED)


class _Outcome(Enum):
    """What is known of a race.

    CERTAIN: which reply was used, or that it makes no difference.
    OPEN: nothing, but a retry after a fault explains its calls.
    UNDECIDED: nothing.
    """

    CERTAIN = auto()
    OPEN = auto()
    UNDECIDED = auto()


@dataclass(frozen=True, slots=True)
class _Shown:
    """What shows which reply of a race was used: the next call's prompt, or the sample.

    ids: The tokens.
    moment: The index of its event.
    finish: The finish reason of the sample.
    final: Whether it is the sample.
    """

    ids: tuple[int, ...]
    moment: int
    finish: FinishReason | None
    final: bool


def set_aside_losers(view: RequestView) -> None:
    """Move the calls that lost a race from the attempts of a request to ``set_aside``."""
    kept, undecided = _kept(view)
    view.undecided_race = view.undecided_race or undecided
    staying = {id(call) for call in kept}
    losers = [attempt for attempt in view.attempts if id(attempt) not in staying]
    if losers:
        view.set_aside += losers
        set_attempts(view, kept)
    _set_aside_unaware(view)
    _set_aside_speculation(view)


def explains(view: RequestView) -> bool:
    """Return whether the calls of a request, but for those that lost a race, make its sample, which
    may be cut, or end with tokens that are masked out.
    """
    before = list(view.attempts)
    kept, _ = _kept(view)
    if len(kept) == len(before):
        return _explains(view)
    set_attempts(view, kept)
    answer = _explains(view)
    set_attempts(view, before)
    return answer


def fit_together(view: RequestView) -> bool:
    """Return whether each call of a request continues what was known."""
    return all(step.continues or step.turn for step in view.stitched.steps)


def set_attempts(view: RequestView, attempts: Sequence[Attempt]) -> None:
    """Give a view these attempts, numbered anew."""
    view.attempts[:] = attempts
    for number, attempt in enumerate(view.attempts):
        attempt.number = number
        # it was read off the call that followed, which may be another one now
        attempt.partial = None
    view.settle()
    assign_partial_replies(view)


def _explains(view: RequestView) -> bool:
    rollout, reference = view.rollout, view.stitched
    if rollout is None or reference.broken is not None:
        return False
    sampled, response = reference.response_ids, rollout.response_ids
    common = min(len(sampled), len(response))
    if sampled[:common] != response[:common] or (response and not common):
        return False
    mask = rollout.loss_mask
    return len(response) == common or (
        mask is not None and len(mask) == len(response) and not mask[common:].any()
    )


def _kept(view: RequestView) -> tuple[list[Attempt], bool]:
    """Return the calls that lost no race, and whether a race was left undecided."""
    losers: set[int] = set()
    undecided = False
    races = list(_races(view.attempts))
    if not races and not any(call.stopped_by_stack for call in view.attempts):
        # so it is of most requests
        return list(view.attempts), False
    sequence = _Sequence(view.attempts)
    for race in races:
        winner, outcome = _winner(view, race, sequence)
        if outcome is _Outcome.CERTAIN and winner is not None:
            answered = _first_answer(race)
            losers.update(
                id(call)
                for call in race
                if call is not winner
                and (call.consumed or _same_instant(winner, call) or _belated(call, answered))
            )
        elif outcome is _Outcome.UNDECIDED or not _is_retry(race):
            undecided = True
    kept = [call for call in view.attempts if id(call) not in losers]
    remaining = _Sequence(kept)
    return [call for call in kept if not _given_up(call, remaining)], undecided


class _Sequence:
    """The calls of a request in order, to find the next ones without reading all of them.

    One request may have thousands of calls: a client that polls a paused engine, say.
    """

    def __init__(self, calls: Sequence[Attempt]) -> None:
        calls = self._calls = sorted(calls, key=_called)
        self._moments = [call.call.index for call in calls]
        # by place: that of the next call with another prompt
        self._changes = [len(calls)] * len(calls)
        for place in range(len(calls) - 2, -1, -1):
            same = calls[place].call.prompt_ids == calls[place + 1].call.prompt_ids
            self._changes[place] = self._changes[place + 1] if same else place + 1

    def after(self, moment: int) -> Attempt | None:
        """Return the first call after an event."""
        place = bisect_right(self._moments, moment)
        return self._calls[place] if place < len(self._calls) else None

    def other_prompts(self, moment: int, prompt: tuple[int, ...]) -> Iterator[Attempt]:
        """Yield calls after an event that send another prompt: the first of each row of equal
        ones.
        """
        place = bisect_right(self._moments, moment)
        while place < len(self._calls):
            call = self._calls[place]
            if call.call.prompt_ids != prompt:
                yield call
            place = self._changes[place]

    def same_prompt(self, moment: int, prompt: tuple[int, ...]) -> Iterator[Attempt]:
        """Yield the calls after an event that send ``prompt``."""
        place = bisect_right(self._moments, moment)
        while place < len(self._calls):
            call = self._calls[place]
            if call.call.prompt_ids == prompt:
                yield call
                place += 1
            else:
                place = self._changes[place]


def _given_up(call: Attempt, calls: _Sequence) -> bool:
    """Return whether the stack itself aborted a call and then sent its prompt again."""
    reply = call.consumed
    if reply is None or not call.stopped_by_stack or not reply.output.token_ids:
        return False
    # an engine returns what it had when it was aborted. A stack that then sends the old prompt
    # has dropped these tokens: the call made no part of the sample
    later = calls.after(reply.index)
    return later is not None and later.call.prompt_ids == call.call.prompt_ids


def _races(attempts: Sequence[Attempt]) -> Iterable[list[Attempt]]:
    """Return the calls that sent the same prompt and overlapped, with the retries of lost ones."""
    alike: dict[tuple[int, ...], list[Attempt]] = {}
    for attempt in attempts:
        alike.setdefault(attempt.call.prompt_ids, []).append(attempt)
    for calls in alike.values():
        race: list[Attempt] = []
        # the lost calls that no later call has retried
        lost: list[Attempt] = []
        for call in calls:
            retried = next((other for other in lost if not _awaited(other, call)), None)
            if retried is not None:
                lost.remove(retried)
            # the latest calls are the likeliest to run still
            elif not any(
                _awaited(other, call) or _same_instant(other, call) for other in reversed(race)
            ):
                if _is_race(race):
                    yield race
                race, lost = [], []
            race.append(call)
            if call.consumed is None and not _is_awaited_for_ever(call):
                lost.append(call)
        if _is_race(race):
            yield race


def _is_race(calls: Sequence[Attempt]) -> bool:
    if len(calls) < 2:
        return False
    replied = [call for call in calls if call.replies]
    answered = _first_answer(replied)
    return len(replied) > 1 or any(_belated(call, answered) for call in calls)


def _first_answer(race: Sequence[Attempt]) -> int | None:
    """Return the event of the first reply of a race that was received."""
    return min((call.consumed.index for call in race if call.consumed is not None), default=None)


def _belated(call: Attempt, answered: int | None) -> bool:
    """Return whether a call was lost that was made when its race had been answered."""
    return call.consumed is None and answered is not None and answered < call.call.index


def _same_instant(earlier: Attempt, later: Attempt) -> bool:
    """Return whether a call was made in the instant in which the reply to another one came, by
    somebody who did not know of the reply: a timer made it, or it was given up for the reply.
    """
    reply = earlier.consumed
    return (
        reply is not None
        and reply.index < later.call.index
        and reply.time == later.call.time
        and (
            earlier.call.call_id in later.call.crossed
            or later.stopped_by_stack
            or later.consumed is None
        )
    )


def _awaited(call: Attempt, later: Attempt) -> bool:
    """Return whether the stack may still have waited for a call when it made a later one."""
    moment = later.call.index
    if call.replies:
        lost = any(fault.what == "lost-reply" for fault in call.faults)
        # when a client learns that a reply was lost is its own matter
        return (lost and call.consumed is None) or moment < call.replies[0].index
    if call.died == call.call.index:
        # a dead server refuses a call after it was made
        return later.call.time == call.call.time
    return all(moment < end for end in call.ends)


def _is_awaited_for_ever(call: Attempt) -> bool:
    """Return whether a call is awaited at any later moment (``_awaited``)."""
    if call.replies:
        return any(fault.what == "lost-reply" for fault in call.faults)
    return not call.ends


def _winner(
    view: RequestView, race: Sequence[Attempt], calls: _Sequence
) -> tuple[Attempt | None, _Outcome]:
    """Return the call whose reply was used, and what that is based on."""
    received = [call for call in race if call.consumed is not None]
    if len(received) < 2:
        return next(iter(received), None), _Outcome.CERTAIN
    shown = _shown(view, race, calls)
    if shown is None:
        # neither a call nor a sample came of it: an abort is why a sample was dropped, and else no
        # reply matters more than the first
        best = min(received, key=lambda call: (not _is_aborted(call), _moment(call)))
        return best, _Outcome.OPEN if _is_retry(race) else _Outcome.CERTAIN
    start = len(race[0].call.prompt_ids)
    fits = {id(call): _fit(call, shown, start) for call in received}
    values = {id(call): values_of(view, call, start) for call in received}
    # tokens first, then values, then habits: at temperature 0 replies to one prompt have the same
    # tokens, and only what came with them tells which one was used
    best = max(
        received,
        key=lambda call: (*fits[id(call)], *values[id(call)], *_likely(call, shown, start)),
    )
    full, _ = fits[id(best)]
    if not full:
        # After a fault a client may have dropped the other reply as well, and called again.
        dropped = not shown.final and any(call.faults for call in race)
        return best, _Outcome.OPEN if dropped else _Outcome.CERTAIN
    both = next(
        (c for c in received if c is not best and _follows(view, c, best, shown, start)), None
    )
    if both is not None:
        # lifecycle.one-reply-per-retry judges replies to a call and its retry that were both used
        earlier, later = sorted((best, both), key=_called)
        overtaken = later.call.index > earlier.replies[0].index
        return best, _Outcome.CERTAIN if overtaken else _Outcome.OPEN
    is_open = any(
        fits[id(call)] == fits[id(best)]
        and values[id(call)] == values[id(best)]
        and not _alike(call, best)
        for call in received
        if call is not best
    )
    return best, _Outcome.UNDECIDED if is_open else _Outcome.CERTAIN


def _shown(view: RequestView, race: Sequence[Attempt], calls: _Sequence) -> _Shown | None:
    prompt = race[0].call.prompt_ids
    moments = [call.consumed.index for call in race if call.consumed is not None]
    shown = next(
        (
            call
            for call in calls.other_prompts(min(moments), prompt)
            if call.call.prompt_ids[: len(prompt)] == prompt
        ),
        None,
    )
    # The same prompt after the race shows that a reply without tokens was used.
    if any(call.consumed and not call.consumed.output.token_ids for call in race):
        own = {id(call) for call in race}
        again = next(
            (call for call in calls.same_prompt(max(moments), prompt) if id(call) not in own), None
        )
        if again is not None and (shown is None or again.call.index < shown.call.index):
            shown = again
    if shown is not None:
        return _Shown(shown.call.prompt_ids, shown.call.index, None, final=False)
    rollout, result = view.rollout, view.result
    if rollout is None or result is None:
        return None
    return _Shown(view.total_ids, result.index, rollout.finish_reason, final=True)


def _is_aborted(call: Attempt) -> bool:
    reply = call.consumed
    return reply is not None and reply.output.finish_reason is FinishReason.ABORT


def _fit(call: Attempt, shown: _Shown, start: int) -> tuple[bool, int]:
    """Return whether what is shown continues with the entire reply of a call, and with how many
    tokens of it.
    """
    reply = call.consumed
    assert reply is not None
    if reply.index > shown.moment:
        return False, -1
    sampled, after = reply.output.token_ids, shown.ids[start:]
    same = next(
        (i for i, (a, b) in enumerate(zip(sampled, after, strict=False)) if a != b),
        min(len(sampled), len(after)),
    )
    if shown.final and after and not sampled:
        return False, 0
    # a sample may be cut at its budget
    return same == len(sampled) or (shown.final and same == len(after) > 0), same


def _follows(view: RequestView, other: Attempt, best: Attempt, shown: _Shown, start: int) -> bool:
    """Return whether the entire reply of another call follows that of the best one, and the
    environment says something else.
    """
    first, second = best.consumed, other.consumed
    assert first is not None
    assert second is not None
    begin = start + len(first.output.token_ids)
    tokens = second.output.token_ids
    if not tokens or shown.ids[begin : begin + len(tokens)] != tokens:
        return False
    return first.output.finish_reason not in _TURN_ENDS or not view.is_answer(tokens)


def _likely(call: Attempt, shown: _Shown, start: int) -> tuple[bool, bool, int]:
    """Return what speaks for a reply beside its tokens: how it ended, that the stack did not stop
    it, and that it came early.
    """
    reply = call.consumed
    assert reply is not None
    finish = reply.output.finish_reason
    if shown.final:
        fitting = finish == shown.finish
    else:
        resumed = len(shown.ids) == start + len(reply.output.token_ids)
        fitting = (finish is FinishReason.ABORT) == resumed
    return fitting, not call.stopped_by_stack, -reply.index


def _alike(one: Attempt, other: Attempt) -> bool:
    """Return whether it makes no difference which of two replies was used."""
    a, b = one.consumed, other.consumed
    assert a is not None
    assert b is not None
    if not a.output.token_ids and not b.output.token_ids:
        return a.output.finish_reason is b.output.finish_reason
    return _equal(a.output, b.output)


def _is_retry(calls: Sequence[Attempt]) -> bool:
    """Return whether each call but the first was made when a fault had delayed an earlier one."""
    first, *others = sorted(calls, key=_called)
    delayed = _delayed_at(first)
    for call in others:
        if delayed is None or delayed >= call.call.index:
            return False
        own = _delayed_at(call)
        delayed = delayed if own is None else min(delayed, own)
    return True


def _delayed_at(call: Attempt) -> int | None:
    """Return the event of the first fault that delayed a call."""
    return min((fault.index for fault in call.faults if fault.what not in _PROMPT), default=None)


def _equal(a: EngineOutput, b: EngineOutput) -> bool:
    return (
        a.token_ids == b.token_ids
        and a.version == b.version
        and a.spans == b.spans
        and _same_array(a.logprobs, b.logprobs)
        and _same_array(a.routes, b.routes)
    )


def _same_array(a: object, b: object) -> bool:
    if a is None or b is None:
        return a is b
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


def _called(call: Attempt) -> int:
    return call.call.index


def _moment(call: Attempt) -> int:
    assert call.consumed is not None
    return call.consumed.index


def _set_aside_unaware(view: RequestView) -> None:
    """Set aside second copies that were sent in the instant of the first one's reply, if the sample
    needs only the first: whoever sent them did not know of it.
    """
    before = list(view.attempts)
    if len(before) < 2:
        return
    answered: set[tuple[float, tuple[int, ...]]] = set()
    copies: list[Attempt] = []
    for call in before:
        sent, reply = call.call.prompt_ids, call.consumed
        if answered and (call.call.time, sent) in answered:
            copies.append(call)
        if reply is not None and reply.output.token_ids:
            answered.add((reply.time, sent))
    if not copies:
        return
    copied = {id(call) for call in copies}
    set_attempts(view, [call for call in before if id(call) not in copied])
    if _explains(view):
        view.set_aside += copies
    else:
        set_attempts(view, before)


def _set_aside_speculation(view: RequestView) -> None:
    """Set aside calls that were made before the environment had answered, if the others make the
    sample without them, or continue each other if there is no sample.
    """
    if not view.attempts or not (view.request.turns or view.observations):
        return
    before = list(view.attempts)
    delivered = view.rollout is not None
    shown = view.total_ids if delivered else before[-1].call.prompt_ids
    guesses = [
        call
        for call in before
        if shown[: len(call.call.prompt_ids)] != call.call.prompt_ids
        and not call.past_stop
        and _after_turn(view, call)
    ]
    if not guesses:
        return
    guessed = {id(call) for call in guesses}
    kept = [call for call in before if id(call) not in guessed]
    set_attempts(view, kept)
    if kept and (_explains(view) if delivered else fit_together(view)):
        view.set_aside += guesses
    else:
        set_attempts(view, before)


def _after_turn(view: RequestView, call: Attempt) -> bool:
    """Return whether a call sends a turn that an engine had ended, and then something that the
    environment had not said.
    """
    sent = call.call.prompt_ids
    for other in view.attempts:
        reply = other.consumed
        if reply is None or reply.index > call.call.index:
            continue
        known = other.call.prompt_ids + reply.output.token_ids
        if (
            reply.output.finish_reason in _TURN_ENDS
            and sent[: len(known)] == known != sent
            and not _said(view, sent[len(known) :], reply.index, call.call.index)
        ):
            return True
    return False


def _said(view: RequestView, added: tuple[int, ...], first: int, last: int) -> bool:
    """Return whether ``added`` begins with what the environment said between two events.

    A call that resumes such a turn sends more than a sample has whose limit cut it.
    """
    return any(
        said.token_ids
        and first < said.index < last
        and added[: len(said.token_ids)] == said.token_ids
        for said in view.observations
    )
