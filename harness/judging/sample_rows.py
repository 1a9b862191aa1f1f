"""Find the calls that the several samples of one request were made of.

A call shows what the engine read (its prompt) and sampled (its replies). A token of a sample is
*explained* by a call if the sample holds exactly the call's prompt, then the reply up to this
token. Nothing that a stack says of its tree of turns is needed for that: forks, compacted
histories, sub-agents and best of n are all the same.

Prefixes are compared by fingerprints of 64 bits, so that the time is linear in the tokens of calls
and samples, whatever the number of turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rollproof.core.records import Rollout
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["CallTokens", "SampleRow", "SampleRows", "are_among", "read_rows", "replies_of"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_Bools: TypeAlias = npt.NDArray[np.bool_]
_Fingerprints: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class CallTokens:
    """One reply to a call, sampled right after the call's prompt.

    attempt: The call.
    start: The length of its prompt.
    ids: ``(tokens,)`` of the reply.
    prefixes: ``(tokens + 1,)``: fingerprints of the prompt with the first 0, 1, ... tokens.
    """

    attempt: Attempt
    start: int
    ids: _Ints
    prefixes: _Fingerprints


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """One sample of a request.

    number: Its index among the samples of the request.
    rollout: The sample.
    prefixes: ``(total + 1,)``: fingerprints of its first 0, 1, ... tokens.
    explained: ``(response,)``: whether a call explains the token.
    trained: ``(response,)``: whether the loss counts it. A mask of another length says nothing:
        then what is explained counts.
    calls: The replies that the sample holds tokens of in its response, by their place.
    earlier: Calls whose prompt the sample begins with, and that sampled none of its response.
    """

    number: int
    rollout: Rollout
    prefixes: _Fingerprints
    explained: _Bools
    trained: _Bools
    calls: tuple[CallTokens, ...]
    earlier: tuple[CallTokens, ...]

    @property
    def unexplained(self) -> _Bools:
        """``(response,)``: trained tokens that no call sampled after the tokens before them."""
        return self.trained & ~self.explained

    @property
    def keys(self) -> _Fingerprints:
        """``(response,)``: fingerprints of each token with everything before it."""
        return self.prefixes[len(self.rollout.prompt_ids) + 1 :]


class SampleRows:
    """The samples and the replies of a request.

    replies: Every reply, delivered or not: a stack may have received a part of it.
    rows: The samples, in the stack's order.
    """

    def __init__(self, replies: Sequence[CallTokens], samples: Iterable[Rollout]) -> None:
        self.replies: tuple[CallTokens, ...] = tuple(replies)
        self._by_prompt: dict[int, list[CallTokens]] = {}
        for reply in self.replies:
            self._by_prompt.setdefault(int(reply.prefixes[0]), []).append(reply)
        self._prompts = np.sort(np.fromiter(self._by_prompt, np.uint64, len(self._by_prompt)))
        self.rows: tuple[SampleRow, ...] = tuple(
            self._row(number, sample) for number, sample in enumerate(samples)
        )

    def after(self, prefix: np.uint64) -> Sequence[CallTokens]:
        """Return the replies to calls whose prompt has this fingerprint."""
        return self._by_prompt.get(int(prefix), ())

    def sent(self, prefixes: _Fingerprints) -> list[int]:
        """Return the places in ``prefixes`` of those that a call sent as its prompt."""
        found: list[int] = np.flatnonzero(are_among(prefixes, self._prompts)).tolist()
        return found

    @cached_property
    def as_seen(self) -> bool:
        """Whether every trained token of every sample is explained."""
        return not any(row.unexplained.any() for row in self.rows)

    def _row(self, number: int, sample: Rollout) -> SampleRow:
        ids = np.array((*sample.prompt_ids, *sample.response_ids), dtype=np.int64)
        begin, prefixes = len(sample.prompt_ids), _prefixes(ids)
        explained = np.zeros(len(ids), dtype=np.bool_)
        calls: list[CallTokens] = []
        earlier: list[CallTokens] = []
        for place in self.sent(prefixes):
            for reply in self._by_prompt[int(prefixes[place])]:
                matched = _matched(reply.ids, ids, place)
                if place < begin and place + matched <= begin:
                    earlier.append(reply)
                elif matched or not len(reply.ids):
                    explained[place : place + matched] = True
                    calls.append(reply)
        response = explained[begin:]
        mask = sample.loss_mask
        trained = np.ones_like(response) if mask is None else np.asarray(mask) != 0
        if len(trained) != len(response):
            trained = response
        return SampleRow(number, sample, prefixes, response, trained, tuple(calls), tuple(earlier))


def read_rows(view: RequestView) -> SampleRows:
    """Return the samples of a request that delivered several, computed once."""
    rows = view.memo.get("sample rows")
    if not isinstance(rows, SampleRows):
        samples = view.result.samples if view.result is not None else ()
        rows = view.memo["sample rows"] = SampleRows(replies_of(view.attempts), samples)
    return rows


def are_among(fingerprints: _Fingerprints, ascending: _Fingerprints) -> _Bools:
    """Return which fingerprints are in a sorted array, without sorting it again (``np.isin``)."""
    if not len(ascending):
        return np.zeros(len(fingerprints), dtype=np.bool_)
    places = np.searchsorted(ascending, fingerprints)
    nearest: _Fingerprints = ascending[np.minimum(places, len(ascending) - 1)]
    return np.equal(nearest, fingerprints)


def replies_of(attempts: Iterable[Attempt]) -> list[CallTokens]:
    """Return every reply to the calls, delivered or not."""
    return [reply for attempt in attempts for reply in _replies(attempt)]


def _replies(attempt: Attempt) -> list[CallTokens]:
    prompt = np.array(attempt.call.prompt_ids, dtype=np.int64)
    start, begin = len(prompt), _prefixes(prompt)[-1]
    # a call without a reply may have sampled or not: its prompt is on the way of a sample all the
    # same
    outputs = [reply.output.token_ids for reply in attempt.replies] or [()]
    replies = []
    for tokens in dict.fromkeys(outputs):
        ids = np.array(tokens, dtype=np.int64)
        replies.append(CallTokens(attempt, start, ids, begin + _prefixes(ids, start)))
    return replies


def _prefixes(ids: _Ints, start: int = 0) -> _Fingerprints:
    """Return fingerprints of the first 0, 1, ... tokens, of which ``start`` others come before.

    They are sums, modulo 2**64, over a hash of each token and its position (the finaliser of
    splitmix64), so that one of a prompt and one of what follows add up.
    """
    out = np.zeros(len(ids) + 1, dtype=np.uint64)
    positions = np.arange(start, start + len(ids), dtype=np.uint64)
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += (positions + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    np.cumsum(mixed, out=out[1:])
    return out


def _matched(reply: _Ints, ids: _Ints, place: int) -> int:
    """Return how many leading tokens of a reply a sample holds at ``place``."""
    size = min(len(reply), len(ids) - place)
    differing = np.flatnonzero(reply[:size] != ids[place : place + size])
    return int(differing[0]) if len(differing) else size
