"""Set aside what a stack sampled and threw away to keep its bound on staleness.

A sample that is older than ``max_staleness`` allows may not be delivered. A stack drops it, or
samples its prompt again; then the calls until there are no part of the sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rollproof.judging.races import set_attempts

if TYPE_CHECKING:
    from rollproof.core.records import Version
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["is_too_old", "set_aside_stale"]


def set_aside_stale(view: RequestView) -> None:
    """Move the calls before the last start from the prompt to ``set_aside``, if what they had
    sampled was too old by then.
    """
    if view.contract.max_staleness is None:
        return
    prompt = view.request.prompt_ids
    begin = 0
    for number, attempt in enumerate(view.attempts):
        moment = attempt.call.index
        if (
            attempt.call.prompt_ids == prompt
            and _is_over(view.attempts[begin:number], moment)
            and is_too_old(view, view.attempts[begin:number], moment)
        ):
            begin = number
    if begin:
        start = view.attempts[begin].call.index
        view.observations[:] = [said for said in view.observations if said.index > start]
        view.set_aside += view.attempts[:begin]
        set_attempts(view, view.attempts[begin:])


def is_too_old(view: RequestView, attempts: Iterable[Attempt], moment: int) -> bool:
    """Return whether a token that calls brought before the event ``moment`` is older than the
    contract allows by any count: a stack may count updates or the numbers of labels, equal weights
    under a new label as new ones, and from the request for an update or from its end.
    """
    bound = view.contract.max_staleness
    named = view.history.named_before(moment)
    if bound is None or not named:
        return False
    numbers = [label for _, label in named if isinstance(label, int)]
    first = {version: place for place, (version, _) in reversed(list(enumerate(named)))}
    for attempt in attempts:
        if attempt.consumed is None or attempt.consumed.index >= moment:
            continue
        for version in _sampled_by(attempt):
            place = first.get(version)
            if place is None:
                continue
            label = named[place][1]
            updates = len(named) - 1 - place
            steps = max(numbers) - label if isinstance(label, int) else 0
            if max(updates, steps) > bound:
                return True
    return False


def _is_over(attempts: list[Attempt], moment: int) -> bool:
    """Return whether no call is on its way any more: a copy of a call is no new beginning."""
    return bool(attempts) and all(any(end < moment for end in call.ends) for call in attempts)


def _sampled_by(attempt: Attempt) -> Iterator[Version]:
    reply = attempt.consumed
    if reply is None or not reply.output.token_ids:
        return
    if reply.true_tokens is not None:
        yield from (span.version for span in reply.true_tokens)
    elif reply.output.spans:
        yield from (span.version for span in reply.output.spans)
    else:
        yield reply.output.version
