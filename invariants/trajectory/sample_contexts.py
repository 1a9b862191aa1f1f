"""Checks on what stands before the trained tokens of a sample: what the engine read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Samples
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.delivery import missing_reason
from rollproof.invariants._shared.phrases import count, window
from rollproof.judging.checks import Collector, Scope, request_check
from rollproof.judging.sample_rows import CallTokens, SampleRows, read_rows, replies_of

if TYPE_CHECKING:
    from rollproof.core.contract import Contract
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.sample_rows import SampleRow

__all__ = ["one_sample", "trajectory_context", "trajectory_sampled", "trajectory_turns"]

_MOST = 8
"""Samples of a request that are reported, each of them by what a search through its calls finds."""
ONE_SAMPLE = "the contract declares one sample for each request (samples='request')"


def one_sample(contract: Contract) -> str | None:
    """Return why nothing can be said of several samples, or ``None``."""
    return None if contract.delivers_several else ONE_SAMPLE


def _no_turns(contract: Contract) -> str | None:
    if contract.samples is Samples.BRANCH:
        return "a sample may hold more or less than a turn (samples='branch')"
    return one_sample(contract)


@request_check(
    "trajectory.context",
    promise=(
        "Each trained token of a sample stands after exactly the tokens that the engine read when"
        " it sampled it."
    ),
    needs="a request that may deliver several samples, its engine calls and their prompts",
    exercised_by="trained tokens after what the engine read",
    applies=one_sample,
    scope=Scope.REQUEST,
)
def trajectory_context(view: RequestView, out: Collector) -> None:
    """Look for sampled tokens in a sample whose earlier tokens no call sent."""
    rows = _read(view, out)
    if rows is None:
        return
    for row in rows.rows:
        out.exercised("trained tokens after what the engine read", int(row.explained.sum()))
    for row, start, end, source in _faults(view, rows):
        if not isinstance(source, CallTokens):
            continue
        sent = source.attempt.call.prompt_ids
        total = (*row.rollout.prompt_ids, *row.rollout.response_ids)
        place = len(row.rollout.prompt_ids) + start
        differs = next(
            (i for i, (a, b) in enumerate(zip(sent, total[:place], strict=False)) if a != b),
            min(len(sent), place),
        )
        out.finding(
            f"Sample {row.number} trains {count(end - start, 'token')} after other tokens than the"
            " engine read",
            kind="a sample trains tokens after other tokens than the engine read",
            expected=(
                f"the prompt of call {source.attempt.call.call_id}, {count(len(sent), 'token')}:"
                f" {window(sent, differs)}"
            ),
            observed=(
                f"{count(place, 'token')} before them: {window(total[:place], differs)}; they"
                f" differ from position {differs} on"
            ),
            where=view.place(index=start, position=place, call=source.attempt.call.call_id),
            hint=(
                "Turns were merged without an observation, or after the history was rewritten"
                " (compaction, dropped thinking, another tokenization): begin a new sample where"
                " the next prompt does not begin with all tokens before it (SkyRL #1277, verl"
                " #6854)."
            ),
        )


@request_check(
    "trajectory.sampled",
    promise="The samples of a request train only tokens that an engine sampled for it.",
    needs="a request that may deliver several samples, and all of its engine calls",
    exercised_by="trained tokens that an engine sampled",
    applies=one_sample,
    scope=Scope.REQUEST,
)
def trajectory_sampled(view: RequestView, out: Collector) -> None:
    """Look for trained tokens that are in no reply."""
    rows = _read(view, out)
    if rows is None:
        return
    for row in rows.rows:
        out.exercised("trained tokens that an engine sampled", int(row.explained.sum()))
    for row, start, end, source in _faults(view, rows):
        if isinstance(source, CallTokens):
            continue
        tokens = row.rollout.response_ids[start:end]
        said = any(tokens == words.token_ids[: len(tokens)] for words in view.observations)
        whose = ", which the environment said" if said else ""
        if source:
            whose = f", which calls of request {source} sampled"
        out.finding(
            f"Sample {row.number} trains {count(end - start, 'token')} that no engine sampled for"
            " its request",
            kind=(
                "a sample trains tokens of another request"
                if source
                else "a sample trains tokens of the environment"
                if said
                else "a sample trains tokens that no engine sampled for its request"
            ),
            expected="loss mask 1 only where a reply to a call of the request brought the token",
            observed=f"{window(tokens)} from response index {start} on{whose}",
            where=view.place(index=start, position=len(row.rollout.prompt_ids) + start),
            hint=(
                "Mask what the environment said, a template added or another tokenization made;"
                " and deliver each sample with the request that it was sampled for."
            ),
        )


@request_check(
    "trajectory.turns",
    promise=(
        "With samples='turn' each sample is one complete turn: it begins where the turn's first"
        " call did, and holds no tokens of the environment."
    ),
    needs="a request whose turns are samples of their own, and its engine calls",
    exercised_by="samples of a turn",
    applies=_no_turns,
    scope=Scope.REQUEST,
)
def trajectory_turns(view: RequestView, out: Collector) -> None:
    """Look for samples that begin within a turn, and for those with more than one."""
    rows = _read(view, out)
    if rows is None or not rows.as_seen:
        return
    # a turn goes on if the next call sends exactly what there is
    goes_on = {
        int(reply.prefixes[-1]): reply
        for reply in rows.replies
        if len(reply.ids) and _finish(reply) is not FinishReason.STOP
    }
    for row in rows.rows:
        out.exercised("samples of a turn", int(row.explained.any()))
        begin = len(row.rollout.prompt_ids)
        before = goes_on.get(int(row.prefixes[begin]))
        explained = np.flatnonzero(row.explained)
        if before is not None and len(explained):
            _report_fragment(view, row, before, out)
        elif len(explained) and not row.explained[: explained[-1]].all():
            inside = np.flatnonzero(~row.explained[: explained[-1]])
            out.finding(
                f"Sample {row.number} holds more than one turn",
                kind="a sample holds more than one turn",
                expected="the tokens of one turn (samples='turn')",
                observed=(
                    f"{count(len(inside), 'token')} that no engine sampled, from response index"
                    f" {int(inside[0])} on, and sampled ones after them"
                ),
                where=view.place(index=int(inside[0]), position=begin + int(inside[0])),
                hint="If turns are merged on purpose, declare samples='branch'.",
            )


def _report_fragment(view: RequestView, row: SampleRow, before: CallTokens, out: Collector) -> None:
    call = before.attempt.call.call_id
    out.finding(
        f"Sample {row.number} begins in the middle of a turn",
        kind="a sample begins in the middle of a turn",
        expected=f"all tokens of the turn that call {call} began or went on with",
        observed=(
            f"a prompt of {count(len(row.rollout.prompt_ids), 'token')} that ends with the"
            f" {count(len(before.ids), 'token')} that call {call} had sampled"
        ),
        where=view.place(index=0, position=len(row.rollout.prompt_ids), call=call),
        hint=(
            "A turn that an abort interrupted became two samples, one for each call: a step is a"
            " turn of the model, however many calls it took."
        ),
    )


def _finish(reply: CallTokens) -> FinishReason | None:
    return next(
        (
            answer.output.finish_reason
            for answer in reply.attempt.replies
            if len(answer.output.token_ids) == len(reply.ids)
        ),
        None,
    )


def _read(view: RequestView, out: Collector) -> SampleRows | None:
    """Return the samples of a request, or report why there are none."""
    if view.rollout is not None:
        return read_rows(view)
    out.absent(missing_reason(view))
    return None


def _faults(
    view: RequestView, rows: SampleRows
) -> Iterator[tuple[SampleRow, int, int, CallTokens | str]]:
    """Yield the first samples with tokens that no call explains.

    With each: its first such tokens in a row, as response indexes, and the reply of this request
    that they begin with, or the name of the request whose calls explain them; ``""`` for neither.
    """
    faulty = (row for row in rows.rows if row.unexplained.any())
    for row in islice(faulty, _MOST):
        start, end = _first_run(row)
        yield row, start, end, _other_request(view, row) or _source(rows, row, start, end) or ""


def _other_request(view: RequestView, row: SampleRow) -> str:
    """Return the request whose calls sampled all trained tokens of a sample; ``""`` for none."""
    for other in view.neighbours:
        same = SampleRows(replies_of(other.attempts), [row.rollout])
        if same.as_seen:
            return other.request.request_id
    return ""


def _first_run(row: SampleRow) -> tuple[int, int]:
    places = np.flatnonzero(row.unexplained)
    gaps = np.flatnonzero(np.diff(places) > 1)
    return int(places[0]), int(places[gaps[0]] if len(gaps) else places[-1]) + 1


def _source(rows: SampleRows, row: SampleRow, start: int, end: int) -> CallTokens | None:
    """Return the reply with which the tokens ``start`` to ``end`` of a response begin, if they are
    replies, one after the other, under other prompts.
    """
    tokens = np.array(row.rollout.response_ids[start:end], dtype=np.int64)
    for reply in rows.replies:
        # the beginning of the first reply may be lost
        for offset in np.flatnonzero(reply.ids == tokens[0]).tolist():
            size = min(len(reply.ids) - offset, len(tokens))
            same = np.array_equal(reply.ids[offset : offset + size], tokens[:size])
            if same and _are_replies(rows, tokens[size:]):
                return reply
    return None


def _are_replies(rows: SampleRows, tokens: npt.NDArray[np.int64]) -> bool:
    """Return whether tokens are replies, one after the other, the last of them perhaps cut."""
    while len(tokens):
        sizes = [
            size
            for reply in rows.replies
            if (size := min(len(reply.ids), len(tokens)))
            and np.array_equal(reply.ids[:size], tokens[:size])
        ]
        if not sizes:
            return False
        tokens = tokens[max(sizes) :]
    return True
