"""The reference stitch: what a resumed rollout must be, as a fold over what the engines delivered.

Written from the specification, not from any stack. Each delivered reply continues the sequence that its call sent; a
call that sends less than is known restarts from there; tokens of the environment stand between. Rows follow the
declared provenance, with the boundary-row rule: a reply's row at the position of its last token is never a capture
(that token was not forwarded), so the row of a segment's last token comes from the next segment. A reply without tokens
adds nothing, no rows either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollproof.contract import Provenance
from rollproof.records import FinishReason, IntArray, LogprobArray, Version, spread
from rollproof.row_pieces import RowPiece, cut_pieces, join_pieces, overlay

if TYPE_CHECKING:
    from rollproof.trace import Observation, Reply
    from rollproof.view import Attempt

__all__ = ["Run", "Stitched", "Token", "stitch"]


@dataclass(frozen=True, slots=True)
class Token:
    """One response token and where it comes from.

    ``attempt`` is the index of the attempt that sampled it, -1 for a token of the environment; ``shown`` the version
    that the engine showed for it, ``true`` the version that really sampled it (``None``: unknown).
    """

    id: int
    attempt: int
    logprob: float
    shown: Version
    true: Version


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive response tokens of one source: ``attempt`` and its ``reply``, or -1 and ``None`` for the environment.

    ``ids`` are the first of the reply's tokens (all, unless a later call restarted before their end); the first one
    stands at response index ``start``.
    """

    start: int
    ids: tuple[int, ...]
    attempt: int
    reply: Reply | None

    def tokens(self) -> list[Token]:
        """The tokens with what the reply says about each."""
        if self.reply is None:
            return [Token(i, -1, np.nan, None, None) for i in self.ids]
        output, count = self.reply.output, len(self.ids)
        shown = spread(output.spans, count) if output.spans else [output.version] * count
        true = spread(self.reply.true_tokens, count) if self.reply.true_tokens is not None else [None] * count
        logprobs = np.full(count, np.nan)
        if output.logprobs is not None:
            logprobs[: len(output.logprobs)] = output.logprobs[:count]
        return [
            Token(token, self.attempt, float(logprob), a, b) for token, logprob, a, b in zip(self.ids, logprobs, shown, true, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Stitched:
    """What the rollout must be.

    ``runs`` are the response's tokens by source, ``pieces`` the rows by absolute position (disjoint, ascending; what no
    piece covers was never captured). ``broken`` names the attempt whose prompt did not continue the sequence; the fold
    stops there, and nothing after it can be judged.
    """

    prompt_ids: tuple[int, ...]
    runs: tuple[Run, ...]
    finish_reason: FinishReason | None
    pieces: tuple[RowPiece, ...]
    broken: int | None = None

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """The response, token by token."""
        return tuple(token for run in self.runs for token in run.tokens())

    @cached_property
    def response_ids(self) -> tuple[int, ...]:
        """The ids of the response."""
        return tuple(token for run in self.runs for token in run.ids)

    @property
    def logprobs(self) -> LogprobArray:
        """``(response,)`` float64; NaN where no engine gave one."""
        return np.array([token.logprob for token in self.tokens], dtype=np.float64)

    @property
    def rows(self) -> IntArray | None:
        """``(n, layers, top_k)`` over absolute positions from 0, a copy; ``None`` where nothing was captured."""
        return join_pieces(self.pieces)[0]

    @property
    def row_source(self) -> npt.NDArray[np.int64]:
        """``(n,)``: the attempt that each row comes from; -1 where it was never captured."""
        return join_pieces(self.pieces)[1]


def stitch(
    prompt_ids: tuple[int, ...], attempts: Sequence[Attempt], observations: Sequence[Observation], provenance: Provenance
) -> Stitched:
    """Fold the delivered replies of one request, in order of delivery, into the rollout that they make."""
    known = prompt_ids
    runs: list[Run] = []
    pieces: tuple[RowPiece, ...] = ()
    finish: FinishReason | None = None
    broken: int | None = None
    events: list[tuple[int, Attempt | Observation]] = [(item.index, item) for item in observations]
    events += [(attempt.consumed.index, attempt) for attempt in attempts if attempt.consumed is not None]
    events.sort(key=lambda pair: pair[0])
    for _, item in events:
        if not hasattr(item, "consumed"):
            runs.append(Run(len(known) - len(prompt_ids), item.token_ids, -1, None))
            known += item.token_ids
            continue
        reply, sent = item.consumed, item.call.prompt_ids
        assert reply is not None
        if len(sent) < len(prompt_ids) or sent != known[: len(sent)]:
            broken = item.number
            break
        if len(sent) < len(known):
            # the row before the first discarded token predicted it, so this call computes it anew; one that starts over keeps none
            pieces = cut_pieces(pieces, len(sent) - 1 if len(sent) > len(prompt_ids) else 0)
            runs = _cut_runs(runs, len(sent) - len(prompt_ids))
        runs.append(Run(len(sent) - len(prompt_ids), reply.output.token_ids, item.number, reply))
        known = sent + reply.output.token_ids
        finish = reply.output.finish_reason
        pieces = _add_rows(pieces, item.number, reply, len(sent), provenance)
    return Stitched(prompt_ids=prompt_ids, runs=tuple(runs), finish_reason=finish, pieces=pieces, broken=broken)


def _cut_runs(runs: list[Run], stop: int) -> list[Run]:
    """The tokens below response index ``stop``."""
    return [
        run if run.start + len(run.ids) <= stop else Run(run.start, run.ids[: stop - run.start], run.attempt, run.reply)
        for run in runs
        if run.start < stop
    ]


def _add_rows(pieces: tuple[RowPiece, ...], number: int, reply: Reply, sent: int, provenance: Provenance) -> tuple[RowPiece, ...]:
    """Rows after this reply: as sampled, what is captured stays; latest prefill, the new capture replaces it."""
    new, start = reply.output.routes, reply.output.routes_start
    if new is None or not reply.output.token_ids or (pieces and new.shape[1:] != pieces[0].rows.shape[1:]):
        return pieces
    end = min(start + len(new), sent + len(reply.output.token_ids) - 1)
    if end <= start:
        return pieces
    return overlay(pieces, RowPiece(start, number, new[: end - start]), keep=provenance is Provenance.AS_SAMPLED)
