"""Tell parallel chains of one request apart, of which one is the sample.

A stack may sample several candidates of a prompt at once, resume each of them by itself, and
deliver one (best of n). Each call then continues its own chain: it sends what that one has. The
chains that the sample was not made of become ``RequestView.set_aside``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from rollproof.core.records import FinishReason, Version, spread
from rollproof.judging.races import explains, fit_together, set_aside_losers, set_attempts
from rollproof.judging.sample_evidence import values_of

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["set_aside_chains"]

_Token: TypeAlias = "tuple[int, float, Version]"


class _Fit(NamedTuple):
    """How well a chain makes the sample, in the order in which it counts.

    exact: Whether the sample has all tokens that the chain brought, and no others.
    part: Whether the sample is the beginning of them.
    tokens: How many leading tokens agree.
    logprobs, rows, tags: Of how many tokens logprobs, route rows and version tags agree.
    finish: Whether the reasons of their ends agree.
    """

    exact: bool
    part: bool
    tokens: int
    logprobs: int
    rows: int
    tags: int
    finish: bool

    @property
    def content(self) -> tuple[bool, bool, int, int, int]:
        """All but version tags and finish reason."""
        return self[:5]


@dataclass(eq=False, slots=True)
class _Chain:
    """Calls of which each continues what those before it brought.

    calls: The calls, in order.
    """

    calls: list[Attempt]


class _OpenChains:
    """What the owners of chains know, event by event: each chain waits for its last call, then it
    may be continued.

    ``chains`` has all chains in order; they are found by their numbers there.
    """

    def __init__(self) -> None:
        self.chains: list[_Chain] = []
        self._known: dict[int, tuple[int, ...]] = {}
        self._open: dict[tuple[int, ...], list[int]] = {}
        # what comes: the event, the chain, the number of its call, and what is known from then on
        self._coming: list[tuple[int, int, int, tuple[int, ...]]] = []

    def begin(self, call: Attempt) -> None:
        """Add a chain that begins with a call."""
        self.chains.append(_Chain([]))
        self.continue_with(len(self.chains) - 1, call)

    def continue_with(self, number: int, call: Attempt) -> None:
        """Add a call to a chain, which waits for it from now on."""
        self._forget(number)
        self.chains[number].calls.append(call)
        sent, reply, first = call.call.prompt_ids, call.consumed, min(call.ends, default=None)
        if first is None:
            return
        if reply is None or reply.index > first:
            heappush(self._coming, (first, number, call.number, sent))
        if reply is not None:
            moment = max(first, reply.index)
            heappush(self._coming, (moment, number, call.number, sent + reply.output.token_ids))

    def knowing(self, sent: tuple[int, ...], moment: int) -> Iterator[int]:
        """Return the numbers of the chains whose owners know just ``sent`` at an event, in
        order.
        """
        while self._coming and self._coming[0][0] < moment:
            _, number, last, known = heappop(self._coming)
            if self.chains[number].calls[-1].number == last:
                self._forget(number)
                self._known[number] = known
                insort(self._open.setdefault(known, []), number)
        return iter(self._open.get(sent, ()))

    def _forget(self, number: int) -> None:
        known = self._known.pop(number, None)
        if known is not None:
            numbers = self._open[known]
            del numbers[bisect_left(numbers, number)]


def set_aside_chains(view: RequestView) -> None:
    """Reduce the calls of a request to one of several chains that ran at once, if the calls show
    whose each one is.
    """
    if not _begun_together(view) or view.observations:
        return
    chains, certain = _chains(view)
    answered = [c for c in chains if any(call.consumed is not None for call in c.calls)]
    if len(answered) < 2 or all(len(chain.calls) == 1 for chain in chains):
        return
    fits = {id(chain): _fit(view, chain) for chain in answered}
    best = max(answered, key=lambda chain: fits[id(chain)])
    # copies of each call make no chains of their own
    if _is_race(view, fits[id(best)]):
        return
    if not certain:
        view.undecided_race = True
        return
    if not fits[id(best)].exact and explains(view) and fit_together(view):
        return
    alike = [chain for chain in answered if fits[id(chain)].content == fits[id(best)].content]
    if fits[id(best)].exact and any(_outcome(chain) != _outcome(best) for chain in alike):
        view.undecided_race = True
        return
    own = {id(call) for call in best.calls}
    view.set_aside += [call for call in view.attempts if id(call) not in own]
    set_attempts(view, best.calls)


def _begun_together(view: RequestView) -> bool:
    """Return whether a call with the prompt was made while another one ran."""
    prompt = view.request.prompt_ids
    begun = [call for call in view.attempts if call.call.prompt_ids == prompt]
    return any(
        not any(end < later.call.index for end in earlier.ends)
        for earlier, later in pairwise(begun)
    )


def _is_race(view: RequestView, best: _Fit) -> bool:
    """Return whether the calls that lost no race (``rollproof.judging.races``) continue each other
    and make exactly the sample, no worse than the best of the chains.
    """
    before, aside, undecided = list(view.attempts), list(view.set_aside), view.undecided_race
    set_aside_losers(view)
    answer = (
        view.rollout is not None
        and view.stitched.response_ids == view.rollout.response_ids
        and fit_together(view)
        # equal tokens show nothing: a candidate may be sampled again when the other one has them
        and _fit(view, _Chain(view.attempts)) >= best
    )
    view.set_aside, view.undecided_race = aside, undecided
    set_attempts(view, before)
    return answer


def _chains(view: RequestView) -> tuple[list[_Chain], bool]:
    """Return the chains, and whether each call continues one of them alone.

    No chain is returned if a call continues none: then it is at fault, or a copy of another one.
    """
    running = _OpenChains()
    prompt = view.request.prompt_ids
    certain = True
    for attempt in view.attempts:
        sent, moment = attempt.call.prompt_ids, attempt.call.index
        first = next(running.knowing(sent, moment), None)
        if first is None:
            if sent != prompt:
                return [], False
            running.begin(attempt)
            continue
        # what an engine has ended is not resumed, if another chain with these tokens was aborted
        aborted = (
            number
            for number in running.knowing(sent, moment)
            if _finish(running.chains[number]) is FinishReason.ABORT
        )
        candidates = list(islice(aborted, 2)) or list(islice(running.knowing(sent, moment), 2))
        # chains without tokens are alike; of others the tokens may be equal and the values not
        certain = certain and (sent == prompt or len(candidates) == 1)
        running.continue_with(candidates[0], attempt)
    return running.chains, certain


def _fit(view: RequestView, chain: _Chain) -> _Fit:
    """Return how well a chain makes the sample."""
    response = () if view.rollout is None else view.rollout.response_ids
    tokens = tuple(token for token, _, _ in _tokens(chain))
    agree = next(
        (i for i, (a, b) in enumerate(zip(tokens, response, strict=False)) if a != b),
        min(len(tokens), len(response)),
    )
    values = [
        (len(reply.output.token_ids), *values_of(view, call, len(call.call.prompt_ids)))
        for call in chain.calls
        if (reply := call.consumed) is not None
    ]
    finish = None if view.rollout is None else view.rollout.finish_reason
    return _Fit(
        exact=view.rollout is not None and tokens == response,
        part=agree == len(response),
        tokens=agree,
        logprobs=sum(logprobs for _, logprobs, _, _ in values),
        rows=sum(rows for _, _, rows, _ in values),
        # by tokens: neither many calls nor few are the better explanation
        tags=sum(count * tags for count, _, _, tags in values),
        finish=_finish(chain) == finish,
    )


def _outcome(chain: _Chain) -> tuple[Sequence[_Token], FinishReason | None]:
    return list(_tokens(chain)), _finish(chain)


def _tokens(chain: _Chain) -> Iterator[_Token]:
    """Yield the tokens of a chain with their logprobs and labels."""
    for call in chain.calls:
        reply = call.consumed
        if reply is None:
            continue
        output, size = reply.output, len(reply.output.token_ids)
        logprobs = np.zeros(size) if output.logprobs is None else output.logprobs
        labels = spread(output.spans, size) if output.spans else [output.version] * size
        yield from zip(output.token_ids, logprobs.tolist(), labels, strict=False)


def _finish(chain: _Chain) -> FinishReason | None:
    reply = next((c.consumed for c in reversed(chain.calls) if c.consumed is not None), None)
    return None if reply is None else reply.output.finish_reason
