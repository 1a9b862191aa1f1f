"""The reference stitch: what a resumed rollout must be, as a fold over what the engines delivered.

Written from the specification, not from any stack. Each delivered reply continues the sequence that its call sent; a
call that sends less than is known restarts from there; tokens of the environment stand between. Rows follow the
declared provenance, with the boundary-row rule: a reply's row at the position of its last token is never a capture
(that token was not forwarded), so the row of a segment's last token comes from the next segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollproof.contract import Provenance
from rollproof.records import FinishReason, IntArray, LogprobArray, Version, spread

if TYPE_CHECKING:
    from rollproof.trace import Observation, Reply
    from rollproof.view import Attempt

__all__ = ["Stitched", "Token", "stitch"]


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


@dataclass(frozen=True, slots=True)
class Stitched:
    """What the rollout must be.

    ``rows`` is ``(n, layers, top_k)`` over absolute positions from 0, ``row_source`` ``(n,)`` the attempt that each
    row comes from (-1: never captured). ``broken`` names the attempt whose prompt did not continue the sequence; the
    fold stops there, and nothing after it can be judged.
    """

    prompt_ids: tuple[int, ...]
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None
    rows: IntArray | None
    row_source: npt.NDArray[np.int64]
    broken: int | None = None

    @property
    def response_ids(self) -> tuple[int, ...]:
        """The ids of the response."""
        return tuple(token.id for token in self.tokens)

    @property
    def logprobs(self) -> LogprobArray:
        """``(response,)`` float64; NaN where no engine gave one."""
        return np.array([token.logprob for token in self.tokens], dtype=np.float64)


def stitch(
    prompt_ids: tuple[int, ...], attempts: Sequence[Attempt], observations: Sequence[Observation], provenance: Provenance
) -> Stitched:
    """Fold the delivered replies of one request, in order of delivery, into the rollout that they make."""
    tokens: list[Token] = []
    rows: IntArray | None = None
    source = np.zeros(0, dtype=np.int64)
    finish: FinishReason | None = None
    broken: int | None = None
    events: list[tuple[int, Attempt | Observation]] = [(item.index, item) for item in observations]
    events += [(attempt.consumed.index, attempt) for attempt in attempts if attempt.consumed is not None]
    events.sort(key=lambda pair: pair[0])
    for _, item in events:
        if not hasattr(item, "consumed"):
            tokens += [Token(i, -1, np.nan, None, None) for i in item.token_ids]
            continue
        reply = item.consumed
        assert reply is not None
        known = [*prompt_ids, *(token.id for token in tokens)]
        sent = list(item.call.prompt_ids)
        if len(sent) < len(prompt_ids) or sent != known[: len(sent)]:
            broken = item.number
            break
        del tokens[len(sent) - len(prompt_ids) :]
        tokens += _sampled(item.number, reply)
        finish = reply.output.finish_reason
        rows, source = _add_rows(rows, source, item, reply, len(sent), provenance)
    return Stitched(prompt_ids=prompt_ids, tokens=tuple(tokens), finish_reason=finish, rows=rows, row_source=source, broken=broken)


def _sampled(number: int, reply: Reply) -> list[Token]:
    output = reply.output
    count = len(output.token_ids)
    shown = spread(output.spans, count) if output.spans else [output.version] * count
    true = spread(reply.true_tokens, count) if reply.true_tokens is not None else [None] * count
    logprobs = np.full(count, np.nan)
    if output.logprobs is not None:
        logprobs[: len(output.logprobs)] = output.logprobs[:count]
    return [
        Token(token, number, float(logprob), a, b) for token, logprob, a, b in zip(output.token_ids, logprobs, shown, true, strict=True)
    ]


def _add_rows(
    rows: IntArray | None, source: npt.NDArray[np.int64], attempt: Attempt, reply: Reply, sent: int, provenance: Provenance
) -> tuple[IntArray | None, npt.NDArray[np.int64]]:
    """Rows after this reply: as sampled, what is captured stays; latest prefill, the new capture replaces it."""
    source = source[:sent] if len(source) > sent else source
    new = reply.output.routes
    if new is None or not len(new):
        return rows, source
    start = reply.output.routes_start
    end = min(start + len(new), sent + len(reply.output.token_ids) - 1)
    if end <= start:
        return rows, source
    size = max(end, len(source))
    if rows is None:
        rows = np.zeros((size, *new.shape[1:]), dtype=new.dtype)
    if rows.shape[1:] != new.shape[1:]:
        return rows, source
    grown = np.zeros((size, *new.shape[1:]), dtype=np.promote_types(rows.dtype, new.dtype))
    grown[: len(source)] = rows[: len(source)]
    owner = np.full(size, -1, dtype=np.int64)
    owner[: len(source)] = source
    at = np.arange(start, end)
    if provenance is Provenance.AS_SAMPLED:
        at = at[owner[at] < 0]
    grown[at] = new[at - start]
    owner[at] = attempt.number
    return grown, owner
