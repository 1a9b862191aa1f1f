"""Decide which request a call belongs to whose recorded owner is a guess.

A call made in the task of a rollout need not serve its request: it may be a health check, or the
call of a dispatcher that serves several requests. The delivered samples show it. A call that no
sample needs is left out; one that another request's sample needs becomes a call of that request.
Only a trace of a driven run has every call, so that the others prove something.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollproof.core.records import FinishReason
from rollproof.judging.races import explains, fit_together, set_aside_losers, set_attempts

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["GuessedCalls"]


class GuessedCalls:
    """The calls of a driven run that belong to one of several requests, or to none."""

    def __init__(self) -> None:
        self._spare: list[Attempt] = []

    def add(self, attempt: Attempt) -> None:
        """Add a call that belongs to one of its candidates."""
        self._spare.append(attempt)

    def settle(self, view: RequestView, others: Sequence[RequestView]) -> list[Attempt]:
        """Give a request that has ended the calls that are its own, of those that may be, and set
        aside those that its sample was not made of.

        ``others`` are the requests that have not ended. Returns the calls that may still be those
        of others.
        """
        self._settle(view, others)
        set_aside_losers(view)
        _set_aside_lost(view)
        # without a sample nothing shows that the calls were its own
        doubtful = view.set_aside if _has_tokens(view) else view.every_call
        open_ids = {other.request.request_id for other in others}
        # copies, since calls are numbered by request
        freed = [
            replace(call) for call in doubtful if not open_ids.isdisjoint(call.call.candidates)
        ]
        self._spare += freed
        return freed

    def _settle(self, view: RequestView, others: Sequence[RequestView]) -> None:
        name = view.request.request_id
        self._leave_out(view)
        if _has_tokens(view):
            # nothing says which of several requests was refused, or aborted before its first token;
            # a call that was lost may explain others
            brought = [
                call
                for call in view.attempts
                if call.call.candidates in ((), (name,)) or not call.replies or _brought(call)
            ]
            if brought and len(brought) < len(view.attempts):
                self._spare += [call for call in view.attempts if call not in brought]
                set_attempts(view, brought)
        elsewhere = [call for call in self._spare if name in call.call.candidates]
        for other in others:
            elsewhere += [call for call in other.attempts if name in call.call.candidates]
        own = [call for call in view.attempts if call.call.candidates]
        if not _has_tokens(view):
            # and nothing shows whose calls are that a request without a sample may have made
            shared = [call for call in own if call.call.candidates != (name,)]
            view.unattributed_calls = bool(shared or elsewhere)
            return
        named = {candidate for call in own for candidate in call.call.candidates}
        starving = any(not twin.attempts and twin.request.request_id in named for twin in others)
        doubtful = starving or any(not call.call.request_id for call in elsewhere)
        if (not own and not elsewhere) or (view.attempts and not doubtful and explains(view)):
            return
        if not self._choose(view, [*own, *elsewhere], others) and (doubtful or not view.attempts):
            # What another request was given is certain; what is left over may be this one's.
            view.unattributed_calls = bool(elsewhere) or starving

    def _leave_out(self, view: RequestView) -> None:
        """Leave out guessed calls that the sample does not need."""
        prompt = view.request.prompt_ids
        strange = [
            call
            for call in view.attempts
            if call.call.candidates and call.call.prompt_ids[: len(prompt)] != prompt
        ]
        foreign = [
            call for call in view.attempts if call.call.candidates == (view.request.request_id,)
        ]
        for guessed in (strange, foreign):
            before = list(view.attempts)
            kept = [call for call in before if call not in guessed]
            if len(kept) == len(before):
                continue
            # without a sample, calls that fit each other are taken for its own
            if guessed is foreign and not _has_tokens(view) and fit_together(view):
                continue
            set_attempts(view, kept)
            if kept and explains(view):
                continue
            # a worker that serves several requests may have made the calls
            for chain in _chains(prompt, guessed):
                set_attempts(view, sorted([*kept, *chain], key=_moment))
                if explains(view):
                    break
            else:
                if any(_has_part(view, call) for call in guessed):
                    set_attempts(view, before)
                else:
                    set_attempts(view, kept)

    def _choose(
        self, view: RequestView, calls: Sequence[Attempt], others: Sequence[RequestView]
    ) -> bool:
        """Give a request the one of the sampled sequences that its sample shows; the calls of the
        others become spare. Return whether there is one.
        """
        before = list(view.attempts)
        certain = [call for call in before if not call.call.candidates]
        chains = _chains(view.request.prompt_ids, calls)
        # what is certain may be all, and what its own task called is nearer than other calls
        chains.sort(key=lambda chain: chain[0] not in before)
        for chain in [[], *chains] if _has_tokens(view) else []:
            needed = [
                call for call in chain if _arrived(call) or (call in before and _brought(call))
            ]
            set_attempts(view, sorted([*certain, *needed], key=_moment))
            if not explains(view):
                continue
            # a call that nothing has ended yet is shown to be nobody's
            chain = [call for call in chain if call.ends]
            # first to others: numbers are by request
            for other in others:
                if any(call in chain for call in other.attempts):
                    set_attempts(other, [call for call in other.attempts if call not in chain])
            unneeded = [call for call in before if call not in view.attempts]
            self._spare = [*(call for call in self._spare if call not in chain), *unneeded]
            set_attempts(view, list(view.attempts))
            return True
        set_attempts(view, before)
        return False


def _set_aside_lost(view: RequestView) -> None:
    """Set aside guessed calls whose replies were lost: they may explain what others were made for,
    and nothing more, since nothing shows whose they were.
    """
    name = view.request.request_id
    lost = [
        call
        for call in view.attempts
        if call.call.candidates not in ((), (name,))
        and not _arrived(call)
        and not _continues(view, call)
    ]
    if lost and _has_tokens(view):
        view.set_aside += lost
        set_attempts(view, [call for call in view.attempts if call not in lost])


def _brought(attempt: Attempt) -> bool:
    """Return whether a call brought tokens, which may have been lost."""
    return any(reply.output.token_ids for reply in attempt.replies)


def _arrived(attempt: Attempt) -> bool:
    """Return whether the tokens of a call reached the stack: nothing shows whose a lost one was."""
    return attempt.consumed is not None and bool(attempt.consumed.output.token_ids)


def _continues(view: RequestView, attempt: Attempt) -> bool:
    """Return whether a call sends tokens that others of its request brought."""
    sent = attempt.call.prompt_ids
    return len(sent) > len(view.request.prompt_ids) and view.total_ids[: len(sent)] == sent


def _has_tokens(view: RequestView) -> bool:
    return view.rollout is not None and bool(view.rollout.response_ids)


def _moment(attempt: Attempt) -> int:
    return attempt.call.index


def _has_part(view: RequestView, attempt: Attempt) -> bool:
    """Return whether the sample holds what a call sampled."""
    reply = attempt.consumed
    response = view.rollout.response_ids if view.rollout is not None else ()
    part = reply.output.token_ids if reply is not None else ()
    size = len(part)
    return size > 0 and any(
        response[start : start + size] == part for start in range(len(response) - size + 1)
    )


def _chains(prompt_ids: tuple[int, ...], attempts: Iterable[Attempt]) -> list[list[Attempt]]:
    """Return calls by the sequence that they continue.

    A call that begins with the prompt alone begins a sequence, or begins one again that has no
    token.
    """
    chains: list[list[Attempt]] = []
    start = len(prompt_ids)
    for attempt in sorted(attempts, key=_moment):
        sent = attempt.call.prompt_ids
        best, most = None, 0
        for chain in chains:
            shared = max((_shared(call, sent) for call in chain), default=0)
            if shared > most + start:
                best, most = chain, shared - start
        if best is None:
            best = next((chain for chain in chains if _may_begin_again(chain, attempt)), None)
        if best is None:
            chains.append([attempt])
        else:
            best.append(attempt)
    return chains


def _shared(attempt: Attempt, sent: tuple[int, ...]) -> int:
    """Return how many leading tokens of a later call's prompt a call sent or sampled."""
    reply = attempt.consumed
    known = (*attempt.call.prompt_ids, *(reply.output.token_ids if reply is not None else ()))
    return next(
        (count for count, (a, b) in enumerate(zip(known, sent, strict=False)) if a != b),
        min(len(known), len(sent)),
    )


def _may_begin_again(chain: Sequence[Attempt], attempt: Attempt) -> bool:
    """Return whether no call of a sequence brought tokens, and the last one had ended: a retry
    sends the same prompt; after an end by the engine, the environment may have added to it.
    """
    last = chain[-1]
    if not last.ends or min(last.ends) > attempt.call.index:
        return False
    if any(call.consumed is not None and call.consumed.output.token_ids for call in chain):
        return False
    reply = last.consumed
    aborted = reply is None or reply.output.finish_reason is FinishReason.ABORT
    return attempt.call.prompt_ids == last.call.prompt_ids or not aborted
