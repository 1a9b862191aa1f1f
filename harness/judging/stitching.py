"""The reference stitch: the rollout that the engines' delivered replies make.

It is written from the specification, not from any stack. A call shows what the stack knows: it must
send the prompt and everything that was delivered before. A delivered reply continues the sequence
that its call sent; a call that sends less than is known restarts from there; tokens of the
environment lie between turns. Rows follow the declared provenance, with the boundary-row rule: a
reply's row at the position of its last token is never a capture (that token was not forwarded), so
the row of a segment's last token comes from the next segment. A reply without tokens adds nothing,
no rows either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Provenance
from rollproof.core.records import FinishReason, IntArray, LogprobArray, Span, Version, spread
from rollproof.judging.route_slices import RowPiece, cut_pieces, join_pieces, overlay

if TYPE_CHECKING:
    from rollproof.core.events.rollout import Call, Observation, Reply
    from rollproof.judging.attempt import Attempt

__all__ = ["Answer", "Run", "Step", "Stitched", "Stretch", "Token", "stitch"]

# An abort is no end of a turn: tokens after it come from the environment only if the trace says so.
_TURN_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.COMPLETED)


@dataclass(frozen=True, slots=True)
class Token:
    """One response token and its source.

    id: The token id.
    attempt: The index of the attempt that sampled it, -1 for a token of the environment.
    logprob: The logprob that the engine returned.
    shown: The version that the engine showed for it.
    true: The version that really sampled it (``None``: unknown).
    """

    id: int
    attempt: int
    logprob: float
    shown: Version
    true: Version


@dataclass(frozen=True, slots=True)
class Stretch:
    """Response tokens ``start`` (inclusive) to ``end`` (exclusive) of one attempt with the same
    versions, as in ``Token``.
    """

    start: int
    end: int
    attempt: int
    shown: Version
    true: Version


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive response tokens of one source.

    start: The response index of the first token.
    ids: The first tokens of the reply: all, unless a later call restarted before their end.
    attempt: The index of the attempt, -1 for the environment.
    reply: The reply, ``None`` for the environment.
    """

    start: int
    ids: tuple[int, ...]
    attempt: int
    reply: Reply | None

    @property
    def end(self) -> int:
        """The response index after the last token."""
        return self.start + len(self.ids)

    @property
    def logprobs(self) -> list[float]:
        """The logprob that the engine returned with each token, NaN if it returned none."""
        count = len(self.ids)
        logprobs = None if self.reply is None else self.reply.output.logprobs
        out: list[float] = [] if logprobs is None else logprobs[:count].tolist()
        return out + [np.nan] * (count - len(out))

    def stretches(self) -> list[Stretch]:
        """Return the tokens by version: none for an empty run, one stretch for the environment."""
        count = len(self.ids)
        if not count or self.reply is None:
            return [Stretch(self.start, self.end, -1, None, None)] if count else []
        output, sampled = self.reply.output, self.reply.true_tokens
        shown = _ends(output.spans, count) if output.spans else [(count, output.version)]
        true = [(count, None)] if sampled is None else _ends(sampled, count)
        if len(shown) == 1 and len(true) == 1:
            return [Stretch(self.start, self.end, self.attempt, shown[0][1], true[0][1])]
        out = []
        i = j = offset = 0
        while offset < count:
            end = min(shown[i][0], true[j][0])
            out.append(
                Stretch(
                    self.start + offset, self.start + end, self.attempt, shown[i][1], true[j][1]
                )
            )
            i += end == shown[i][0]
            j += end == true[j][0]
            offset = end
        return out


@dataclass(frozen=True, slots=True)
class Step:
    """How one call continued the sequence that was known when it was made, in tokens of prompt +
    response.

    attempt: The index of the attempt.
    sent: The number of tokens that the call sent.
    delivered: The number of tokens of the prompt and of everything delivered before.
    agree: How many leading tokens of the two are equal.
    spent: The number of tokens sampled in the current turn among those that the call continues.
    ended: Whether the turn had ended naturally (``stop``), so that only the environment could
        follow.
    turn: Whether the call itself brought tokens of the environment.
    """

    attempt: int
    sent: int
    delivered: int
    agree: int
    spent: int
    ended: bool = False
    turn: bool = False

    @property
    def continues(self) -> bool:
        """Whether the call sent exactly what was known."""
        return self.agree == self.sent == self.delivered

    @property
    def restarts(self) -> bool:
        """Whether the call sent a part of what was known, from the start."""
        return self.agree == self.sent < self.delivered

    @property
    def after_end(self) -> bool:
        """Whether the call continues a turn that had ended, with or without tokens of its own."""
        return self.ended and self.agree in (self.sent, self.delivered)


@dataclass(frozen=True, slots=True)
class Answer:
    """Consecutive tokens of the environment, and the end of the turn that they answer.

    start: The response index of the first token.
    ids: The tokens.
    attempt: The attempt with the last reply before them, ``None`` if there was none.
    finish: The finish reason of that reply.
    recorded: Whether an ``Observation`` says so; otherwise a call brought them.
    """

    start: int
    ids: tuple[int, ...]
    attempt: int | None
    finish: FinishReason | None
    recorded: bool

    @property
    def end(self) -> int:
        """The response index after the last token."""
        return self.start + len(self.ids)


@dataclass(frozen=True, eq=False)
class Stitched:
    """What the rollout must be.

    prompt_ids: The prompt.
    runs: The tokens of the response by source.
    finish_reason: The finish reason of the last reply.
    pieces: The rows by absolute position, disjoint and ascending; what no piece covers was never
        captured.
    broken: The attempt with a prompt that did not continue the sequence. Nothing after it can be
        judged.
    steps: How each call continued.
    last: The attempt with the last reply.
    answers: The environment's tokens, by the turn that they answer.
    ended: Whether the last turn ended naturally (``stop``) and nothing was added since.
    """

    prompt_ids: tuple[int, ...]
    runs: tuple[Run, ...]
    finish_reason: FinishReason | None
    pieces: tuple[RowPiece, ...]
    broken: int | None = None
    steps: tuple[Step, ...] = ()
    last: int | None = None
    answers: tuple[Answer, ...] = ()
    ended: bool = False

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The response by source and version."""
        return tuple(stretch for run in self.runs for stretch in run.stretches())

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """The response, token by token."""
        ids, logprobs = self.response_ids, self.logprob_list
        return tuple(
            Token(ids[i], s.attempt, logprobs[i], s.shown, s.true)
            for s in self.stretches
            for i in range(s.start, s.end)
        )

    @cached_property
    def response_ids(self) -> tuple[int, ...]:
        """The token ids of the response."""
        return tuple(chain.from_iterable(run.ids for run in self.runs))

    @cached_property
    def logprob_list(self) -> list[float]:
        """The logprob of each response token, NaN if no engine returned one."""
        return [value for run in self.runs for value in run.logprobs]

    @cached_property
    def logprobs(self) -> LogprobArray:
        """``(response,)`` float64, NaN if no engine returned one."""
        return np.array(self.logprob_list, dtype=np.float64)

    @property
    def rows(self) -> IntArray | None:
        """``(n, layers, top_k)`` over absolute positions from 0, a copy; ``None`` if nothing was
        captured.
        """
        return join_pieces(self.pieces)[0]

    @property
    def row_source(self) -> npt.NDArray[np.int64]:
        """``(n,)``: the attempt that each row comes from, -1 if it was never captured."""
        return join_pieces(self.pieces)[1]


def stitch(
    prompt_ids: tuple[int, ...],
    attempts: Sequence[Attempt],
    observations: Sequence[Observation],
    provenance: Provenance,
    *,
    unrecorded_turns: bool = True,
    turns: Sequence[tuple[int, ...]] = (),
) -> Stitched:
    """Fold the delivered replies of one request, in order of delivery, into the rollout that they
    make.

    Args:
        prompt_ids: The prompt.
        attempts: The engine calls with their replies.
        observations: The recorded tokens of the environment.
        provenance: Which of two captures of a row counts.
        unrecorded_turns: Whether tokens that a call adds after a natural end may be the
            environment's, if no observation was recorded.
        turns: What the environment will say, if that is known. Tokens that a call adds after an
            abort are the environment's if they hold its next words: the stack took the turn for
            ended.
    """
    events: list[tuple[int, int, Any]] = [(item.index, 1, item) for item in observations]
    for attempt in attempts:
        events.append((attempt.call.index, 0, attempt))
        reply = attempt.consumed
        if reply is not None:
            events.append((reply.index, 2, attempt))
    # At the same index a call comes before an observation, and both before a reply.
    events.sort(key=_moment)
    implicit = unrecorded_turns and not observations
    fold = _Fold(prompt_ids, provenance, implicit, turns)
    for _, kind, item in events:
        if kind == 0:
            fold.call(item.number, item.call)
        elif kind == 1:
            fold.environment(item.token_ids)
        elif not fold.reply(item, item.consumed):
            break
    return Stitched(
        prompt_ids=prompt_ids,
        runs=tuple(fold.runs),
        finish_reason=fold.finish,
        pieces=fold.pieces,
        broken=fold.broken,
        steps=tuple(fold.steps),
        last=fold.last,
        answers=tuple(fold.answers),
        ended=fold.ended,
    )


def _moment(event: tuple[int, int, Any]) -> tuple[int, int]:
    return event[0], event[1]


class _Fold:
    """The sequence as far as it is known, and its source."""

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        provenance: Provenance,
        implicit_turns: bool,
        turns: Sequence[tuple[int, ...]],
    ) -> None:
        self.sequence = prompt_ids
        self.base = len(prompt_ids)
        self.runs: list[Run] = []
        self.pieces: tuple[RowPiece, ...] = ()
        self.steps: list[Step] = []
        self.answers: list[Answer] = []
        self.finish: FinishReason | None = None
        self.last: int | None = None
        self.broken: int | None = None
        self._provenance = provenance
        self._implicit = implicit_turns
        self._turns = turns
        self.ended = False
        self._turn_start = self.base

    def call(self, number: int, call: Call) -> None:
        """Compare what the call sends with what is known."""
        sent, delivered = call.prompt_ids, len(self.sequence)
        agree = _common_prefix(sent, self.sequence)
        # Stacks that render tool output themselves record no Observation: what a call adds after a
        # natural end is the environment's turn.
        added = self._implicit and agree == delivered < len(sent)
        turn = added and (self.finish in _TURN_ENDS or self._next_words_in(sent[delivered:]))
        ended = self.ended and not turn
        if turn:
            self.environment(sent[delivered:], recorded=False)
            delivered = agree = len(sent)
        usable = agree if agree == len(sent) else delivered
        self.steps.append(
            Step(
                number, len(sent), delivered, agree, max(0, usable - self._turn_start), ended, turn
            )
        )

    def _next_words_in(self, token_ids: tuple[int, ...]) -> bool:
        """Return whether ``token_ids`` hold what the environment says next."""
        words = self._turns[len(self.answers)] if len(self.answers) < len(self._turns) else ()
        return bool(words) and any(
            token_ids[i : i + len(words)] == words for i in range(len(token_ids) - len(words) + 1)
        )

    def environment(self, token_ids: tuple[int, ...], *, recorded: bool = True) -> None:
        """Append tokens of the environment; they begin a turn."""
        start = len(self.sequence) - self.base
        before = self.answers[-1] if self.answers else None
        # A stack may record an answer in pieces, such as a separator and the words.
        if before is not None and before.end == start and before.attempt == self.last:
            self.answers[-1] = replace(before, ids=before.ids + token_ids)
        else:
            self.answers.append(Answer(start, token_ids, self.last, self.finish, recorded))
        self.runs.append(Run(len(self.sequence) - self.base, token_ids, -1, None))
        self.sequence += token_ids
        self._turn_start = len(self.sequence)
        self.ended = False

    def reply(self, attempt: Attempt, reply: Reply) -> bool:
        """Append a reply.

        Returns:
            False if its call did not continue the sequence, so that nothing more can be judged.
        """
        number, call = attempt.number, attempt.call
        # Calls overlap in time: a reply that arrives after the reply of a later call is the outcome
        # of a call that the stack had given up, and counts for nothing.
        if self.last is not None and number < self.last:
            return True
        sent, output = call.prompt_ids, reply.output
        # Every later comparison would start from a wrong prefix, so the fold stops here.
        # stitch.resume-prompt reports the call.
        if len(sent) < self.base or sent != self.sequence[: len(sent)]:
            self.broken = number
            return False
        if len(sent) < len(self.sequence):
            self._cut(len(sent))
        self.runs.append(Run(len(sent) - self.base, output.token_ids, number, reply))
        self.sequence = sent + output.token_ids
        self.pieces = _add_rows(self.pieces, number, reply, len(sent), self._provenance)
        if attempt.cut is not None and attempt.cut.reaches_back:
            self._cut(len(self.sequence) - attempt.cut.reaches_back)
            self.sequence = self.sequence[: -attempt.cut.reaches_back]
        self.finish, self.last = output.finish_reason, number
        full = call.max_tokens is not None and len(output.token_ids) >= call.max_tokens
        # "completed" with the grant used up may be the end of a portion: some stacks grant their
        # budget in portions.
        self.ended = self.finish is FinishReason.STOP or (
            self.finish is FinishReason.COMPLETED and not full
        )
        return True

    def _cut(self, length: int) -> None:
        """Drop everything after the first ``length`` tokens: the stack restarted from there."""
        # The row before the first discarded token predicted it, so this call computes it again. A
        # call that starts over keeps none.
        self.pieces = cut_pieces(self.pieces, length - 1 if length > self.base else 0)
        self.runs = _cut_runs(self.runs, length - self.base)
        self.answers = [
            (
                answer
                if answer.end <= length - self.base
                else replace(answer, ids=answer.ids[: length - self.base - answer.start])
            )
            for answer in self.answers
            if answer.start < length - self.base
        ]
        turns = [run.end for run in self.runs if run.attempt < 0]
        self._turn_start = self.base + (turns[-1] if turns else 0)


def _common_prefix(sent: tuple[int, ...], sequence: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    size = min(len(sent), len(sequence))
    a, b = sent[:size], sequence[:size]
    # Tuples compare at the speed of C: tokens are looked at one by one only where the two differ.
    if a == b:
        return size
    low, high = 0, size
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _ends(spans: Sequence[Span], count: int) -> list[tuple[int, Version]]:
    """Return the versions of ``count`` tokens as ``(end, version)``, ends ascending up to
    ``count``.
    """
    if len(spans) == 1 and spans[0].start <= 0 and spans[0].end >= count:
        return [(count, spans[0].version)]
    versions = spread(spans, count)
    return [
        (i, versions[i - 1])
        for i in range(1, count + 1)
        if i == count or versions[i] != versions[i - 1]
    ]


def _cut_runs(runs: list[Run], stop: int) -> list[Run]:
    """Return the tokens below response index ``stop``."""
    return [
        (
            run
            if run.end <= stop
            else Run(run.start, run.ids[: stop - run.start], run.attempt, run.reply)
        )
        for run in runs
        if run.start < stop
    ]


def _add_rows(
    pieces: tuple[RowPiece, ...], number: int, reply: Reply, sent: int, provenance: Provenance
) -> tuple[RowPiece, ...]:
    """Return the rows after this reply.

    As sampled, captured rows stay; with latest prefill, the new capture replaces them.
    """
    new, start = reply.output.routes, reply.output.routes_start
    if (
        new is None
        or not reply.output.token_ids
        or (pieces and new.shape[1:] != pieces[0].rows.shape[1:])
    ):
        return pieces
    # A reply's row at its last token is no capture: that token was not forwarded yet.
    end = min(start + len(new), sent + len(reply.output.token_ids) - 1)
    # An offset beyond the rows comes from a hostile or broken trace: skip it, routes.rows reports
    # the count.
    if start < 0 or end <= start:
        return pieces
    return overlay(
        pieces,
        RowPiece(start, number, new[: end - start]),
        keep=provenance is Provenance.AS_SAMPLED,
    )
