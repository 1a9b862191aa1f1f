"""The story of a finding: what happened to a request, or on a server, event by event, in words.

It is made when a check reports the finding, of what the judge knows then: which calls are those of
the request, and which event it is looking at. Nothing is judged again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Step
from rollproof.core.events.rollout import Call, Reply
from rollproof.judging.attempt import Attempt
from rollproof.judging.event_words import (
    describe,
    describe_reply,
    describe_result,
    described,
    sampled_under,
    tokens,
)
from rollproof.judging.request_view import RequestView

__all__ = ["END", "Mark", "Moment", "moment_of", "request_story", "server_story", "shortened_story"]

END = -1
"""The index of the moment after the last event."""
_LONGEST = 600
"""Characters of a moment."""
_FIRST, _LAST = 8, 56
"""Moments of a long story that are kept: its beginning, and its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One line of a story.

    index: The index of its event in the trace; -1 if it is no event (the end of the trace, or
        events that are left out).
    time: The time of the event, in seconds of the trace's clock.
    text: What happened.
    broke: Whether the promise was broken at this event, as far as the check says.
    since: The index of the engine call, if the moment is a call with its reply; otherwise -1.
    call: The id of the engine call, ``None`` if it is about none.
    server: The server on which it happened; ``""`` if it is about none.
    step: The step of a trainer that it is about; ``""`` if it is about none.
    """

    index: int
    time: float
    text: str
    broke: bool = False
    since: int = END
    call: int | None = None
    server: str = ""
    step: str = ""


def moment_of(event: Event, *, broke: bool = False) -> Moment:
    """Return any event as a moment."""
    return Moment(
        index=event.index,
        time=event.time,
        text=described(event),
        broke=broke,
        call=getattr(event, "call_id", None),
        server=getattr(event, "server_id", None) or "",
        step=event.name if isinstance(event, Step) else getattr(event, "step", ""),
    )


def request_story(view: RequestView, others: Iterable[Event], mark: Mark) -> tuple[Moment, ...]:
    """Return the story of a request, with what happened to its servers meanwhile."""
    return shortened_story(mark.put(_moments(view, others)))


def server_story(remembered: Iterable[Event | Moment], mark: Mark) -> tuple[Moment, ...]:
    """Return what happened on the servers, or to the steps of a trainer."""
    moments = (item if isinstance(item, Moment) else moment_of(item) for item in remembered)
    return shortened_story(mark.put(moments))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Which event of a story broke the promise.

    now: The event that the judge is looking at; ``None`` at the end of the trace.
    index: The index of the event that the check names as the place.
    call: The call that it names.
    step: The step of a trainer that it names.
    """

    now: Event | None
    index: int | None = None
    call: int | None = None
    step: str = ""

    def put(self, moments: Iterable[Moment]) -> list[Moment]:
        """Return the moments, of which one is marked.

        Marked is what the check names: an event, the last one of a call, or of a step. If the story
        has none of these, it is the event that the judge is looking at.
        """
        story = list(moments)
        named = self._named(story)
        if named is not None:
            story[named] = replace(story[named], broke=True)
            # what comes after a step is other steps
            story = story[: named + 1] if self.step else story
            return [*story, _end(story)] if self.now is None and not self.step else story
        if self.now is None:
            return [*story, replace(_end(story), broke=True)]
        at_now = [moment.index == self.now.index for moment in story]
        if any(at_now):
            return [
                replace(moment, broke=True) if is_now else moment
                for moment, is_now in zip(story, at_now, strict=True)
            ]
        return [*story, moment_of(self.now, broke=True)]

    def _named(self, story: Sequence[Moment]) -> int | None:
        """Return the place of the moment that the check names; ``None`` if there is none."""
        for place, moment in reversed(list(enumerate(story))):
            if self.index is not None and moment.index >= 0:
                if self.index in (moment.index, moment.since):
                    return place
            elif (self.step and moment.step == self.step) or (
                self.call is not None and moment.call == self.call
            ):
                return place
        return None


def shortened_story(
    moments: Sequence[Moment], first: int = _FIRST, last: int = _LAST
) -> tuple[Moment, ...]:
    """Return the beginning and the end of a long story, with a moment that counts what is left
    out; a moment that broke the promise is never left out.
    """
    broken = [place for place, moment in enumerate(moments) if moment.broke]
    kept = {*range(first), *range(len(moments) - last, len(moments)), *broken}
    out: list[Moment] = []
    left = 0
    for place, moment in enumerate(moments):
        if place not in kept:
            left += 1
            continue
        if left:
            out.append(_left_out(moment, left))
            left = 0
        out.append(moment if len(moment.text) <= _LONGEST else _cut(moment))
    return tuple(out)


def _cut(moment: Moment) -> Moment:
    # a hostile name must not fill a report
    return replace(moment, text=f"{moment.text[:_LONGEST]}...")


def _left_out(following: Moment, count: int) -> Moment:
    text = f"... {count:,} more event{'' if count == 1 else 's'}"
    return Moment(index=END, time=following.time, text=text)


def _end(moments: Sequence[Moment]) -> Moment:
    time = moments[-1].time if moments else 0.0
    return Moment(index=END, time=time, text="the trace ends")


def _moments(view: RequestView, others: Iterable[Event]) -> Iterator[Moment]:
    """Yield what happened to a request in order; a call and its reply are one moment if nothing
    lies between.
    """
    ordered: list[tuple[Event, Attempt | None]] = [
        (event, None) for event in (view.submit, *others, *view.observations, *view.results)
    ]
    ordered += [
        (event, attempt)
        for attempt in view.every_call
        for event in (attempt.call, *attempt.replies, *attempt.faults)
    ]
    ordered.sort(key=lambda item: item[0].index)
    notes = _notes(view)
    results = {id(result) for result in view.results}
    begun: Call | None = None
    for place, (event, attempt) in enumerate(ordered):
        if attempt is not None and isinstance(event, Call):
            following = ordered[place + 1][0] if place + 1 < len(ordered) else None
            if isinstance(following, Reply) and following.call_id == event.call_id:
                begun = event
            else:
                text = f"call {event.call_id} on {event.server_id} got {_sent(event)}"
                yield _of_call(event, event, text)
        elif attempt is not None and isinstance(event, Reply):
            where = "" if begun is None else f" on {attempt.call.server_id}"
            weights = sampled_under(event)
            under = f" ({weights})" if weights else ""
            got = "" if begun is None else f" got {_sent(attempt.call)},"
            note = notes.get(event.index, "")
            text = f"call {event.call_id}{where}{under}{got} {describe_reply(event)}{note}"
            since = END if begun is None else begun.index
            yield replace(_of_call(event, attempt.call, text), since=since)
            begun = None
        elif event is view.submit:
            yield moment_of(event)
        elif id(event) in results:
            yield replace(moment_of(event), text=_result_text(view, event))
        elif describe(event):
            yield moment_of(event)


def _sent(call: Call) -> str:
    return tokens(len(call.prompt_ids))


def _notes(view: RequestView) -> dict[int, str]:
    """Return by the index of a reply which segment of the sample it is, if it is one."""
    notes = {}
    for number, attempt in enumerate(view.segments):
        reply = attempt.consumed
        if reply is not None:
            notes[reply.index] = f": segment {number}"
    for attempt in view.set_aside:
        notes.update({reply.index: ", not used" for reply in attempt.replies})
    return notes


def _of_call(event: Event, call: Call, text: str) -> Moment:
    return Moment(
        index=event.index, time=event.time, text=text, call=call.call_id, server=call.server_id
    )


def _result_text(view: RequestView, event: Event) -> str:
    for result in view.results:
        if result is event:
            again = " again" if result is not view.results[0] else ""
            return f"{result.request_id}{again} {describe_result(result)}"
    return described(event)
