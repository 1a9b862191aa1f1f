"""The reference stitch against a second formulation that is no fold.

The fold walks over events and grows a sequence. The second formulation decides for each position by
itself: among the replies that count, the last one with a call that had sent at most this position
owns it. Both are compared on random histories with restarts, lost, late and duplicate replies,
empty replies and turns; and mutants of the fold must differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollproof.core.contract import Provenance
from rollproof.core.events.rollout import Observation, Reply
from rollproof.core.records import Span
from rollproof.judging import stitching
from rollproof.judging.attempt import Attempt
from rollproof.judging.route_slices import RowPiece, cut_pieces, overlay
from tests.support.call_histories import PROMPT, History


@dataclass(frozen=True)
class Owned:
    """What the second formulation says."""

    ids: tuple[int, ...]
    attempts: tuple[int, ...]
    logprobs: tuple[float, ...]
    true: tuple[Any, ...]
    rows: dict[int, int]


def by_position(history: History, provenance: Provenance) -> Owned:
    """Response and rows, position by position: who owns each. No sequence is built up."""
    counted = _counted(history)
    size = counted[-1][1] + len(counted[-1][3]) if counted else len(PROMPT)
    ids, attempts, logprobs, true = [], [], [], []
    for position in range(len(PROMPT), size):
        number, start, reply, tokens = [entry for entry in counted if entry[1] <= position][-1]
        i = position - start
        ids.append(tokens[i])
        attempts.append(number)
        logprobs.append(
            math.nan
            if reply is None or reply.output.logprobs is None
            else float(reply.output.logprobs[i])
        )
        spans = () if reply is None or reply.true_tokens is None else reply.true_tokens
        true.append(next((s.version for s in spans if s.start <= i < s.end), None))
    rows = {
        position: row
        for position in range(size)
        if (row := _row(counted, position, provenance)) is not None
    }
    return Owned(tuple(ids), tuple(attempts), tuple(logprobs), tuple(true), rows)


def _counted(history: History) -> list[tuple[int, int, Reply | None, tuple[int, ...]]]:
    """(attempt, length sent, reply, tokens) of what counts, in order of arrival; an observation
    comes after what came before it.
    """
    arrivals: list[tuple[int, Any]] = [(item.index, item) for item in history.observations]
    arrivals += [
        (reply.index, attempt)
        for attempt in history.attempts
        for reply in [r for r in attempt.replies if r.delivered][:1]
    ]
    out: list[tuple[int, int, Reply | None, tuple[int, ...]]] = []
    for _, item in sorted(arrivals, key=lambda pair: pair[0]):
        if isinstance(item, Observation):
            end = out[-1][1] + len(out[-1][3]) if out else len(PROMPT)
            out.append((-1, end, None, item.token_ids))
        elif item.number > max((number for number, *_ in out), default=-1):
            reply = next(r for r in item.replies if r.delivered)
            out.append((item.number, len(item.call.prompt_ids), reply, reply.output.token_ids))
    return out


def _row(
    counted: list[tuple[int, int, Reply | None, tuple[int, ...]]],
    position: int,
    provenance: Provenance,
) -> int | None:
    """The cell at a position: of those who captured it and were not given up since, the first or
    the last.
    """
    found = []
    for i, (_, sent, reply, tokens) in enumerate(counted):
        if reply is None or not tokens or not position < sent + len(tokens) - 1:
            continue
        # a call that sent less than was known gave up the rows from the one that had predicted the
        # first token given up
        abandoned = any(
            later_sent < counted[i + k][1] + len(counted[i + k][3])
            and position >= (0 if later_sent == len(PROMPT) else later_sent - 1)
            for k, (number, later_sent, *_) in enumerate(counted[i + 1 :])
            if number >= 0
        )
        if not abandoned:
            found.append(int(reply.output.routes[position, 0, 0]))  # type: ignore[index]
    if not found:
        return None
    return found[0] if provenance is Provenance.AS_SAMPLED else found[-1]


def random_history(seed: int) -> History:
    """Up to six calls: aborts, losses, restarts, late and duplicate replies, empty ones, turns."""
    draw = random.Random(seed)
    history, known, fresh = History(), PROMPT, iter(range(100, 10_000))
    turn_start = len(PROMPT)
    waiting: list[tuple[Attempt, tuple[int, ...]]] = []
    for _ in range(draw.randint(1, 6)):
        sent = known
        if draw.random() < 0.2:
            sent = known[
                : draw.choice([len(PROMPT), max(turn_start, draw.randint(len(PROMPT), len(known)))])
            ]
        attempt = history.call(sent)
        tokens = tuple(next(fresh) for _ in range(draw.choice([0, 1, 1, 2, 3])))
        fate = draw.random()
        if fate < 0.15:
            history.reply(attempt, tokens, delivered=False)
            continue
        if fate < 0.25:
            waiting.append((attempt, tokens))
            continue
        cut = draw.randint(0, len(tokens))
        true = (
            Span(start=0, end=cut, version=draw.randint(0, 2)),
            Span(start=cut, end=len(tokens), version=draw.randint(0, 2)),
        )
        ended = draw.random() < 0.3
        history.reply(attempt, tokens, "stop" if ended else "abort", true_tokens=true)
        known = sent + tokens
        if len(sent) <= turn_start:
            turn_start = len(PROMPT)
        if draw.random() < 0.2:
            history.reply(attempt, tokens, duplicate=True)
        if waiting and draw.random() < 0.5:
            history.reply(
                waiting[0][0], waiting.pop(0)[1]
            )  # given up: its successor has answered already
        if ended:
            words = tuple(next(fresh) for _ in range(draw.randint(1, 2)))
            history.observe(*words)
            known += words
            turn_start = len(known)
    return history


def differs(history: History, provenance: Provenance) -> bool:
    """Whether the fold and the second formulation disagree."""
    want, got = by_position(history, provenance), history.stitch(provenance)
    rows, source = got.rows, got.row_source
    cells = (
        {} if rows is None else {i: int(rows[i, 0, 0]) for i in range(len(rows)) if source[i] >= 0}
    )
    return not (
        want.ids == got.response_ids
        and want.attempts == tuple(token.attempt for token in got.tokens)
        and np.array_equal(want.logprobs, got.logprobs, equal_nan=True)
        and want.true == tuple(token.true for token in got.tokens)
        and want.rows == cells
        and all(cell // 1000 == source[i] for i, cell in cells.items())
    )


@pytest.mark.parametrize("provenance", list(Provenance))
@given(seed=st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_the_fold_agrees_with_the_second_formulation(provenance: Provenance, seed: int) -> None:
    """On histories with every kind of interruption."""
    assert not differs(random_history(seed), provenance)


def test_the_histories_are_varied() -> None:
    """Each kind of interruption occurs among those that the mutants are tried on."""
    histories = [random_history(seed) for seed in range(300)]
    steps = [step for history in histories for step in history.stitch().steps]
    assert {
        "restarts": True,
        "turns": True,
        "empty": True,
        "lost": True,
        "given up": True,
    } == {
        "restarts": sum(step.restarts for step in steps) > 20,
        "turns": sum(len(history.observations) > 1 for history in histories) > 20,
        "empty": (
            sum(not r.output.token_ids for h in histories for a in h.attempts for r in a.replies)
            > 20
        ),
        "lost": sum(not r.delivered for h in histories for a in h.attempts for r in a.replies) > 20,
        "given up": sum(h.stitch().last != h.attempts[-1].number for h in histories) > 10,
    }


def _mutate_cut(fold: Any, length: int) -> None:
    fold.runs = stitching._cut_runs(fold.runs, length - fold.base)  # forgets to cut the rows


def _mutate_cut_rows(fold: Any, length: int) -> None:
    fold.pieces = cut_pieces(
        fold.pieces, length
    )  # keeps the row that predicted the discarded token
    fold.runs = stitching._cut_runs(fold.runs, length - fold.base)


def _mutate_no_cut(fold: Any, length: int) -> None:
    del fold, length


def _mutate_rows(boundary: int, empty: bool) -> Callable[..., Any]:
    def add_rows(pieces: Any, number: int, reply: Reply, sent: int, provenance: Provenance) -> Any:
        new = reply.output.routes
        if new is None or (not reply.output.token_ids and not empty):
            return pieces
        end = min(len(new), sent + len(reply.output.token_ids) - boundary)
        piece = RowPiece(0, number, new[:end])
        return (
            overlay(pieces, piece, keep=provenance is Provenance.AS_SAMPLED) if end > 0 else pieces
        )

    return add_rows


_reply = stitching._Fold.reply


def _mutate_overtaking(fold: Any, attempt: Attempt, reply: Reply) -> bool:
    fold.last = None  # a reply that was given up counts after all
    return _reply(fold, attempt, reply)


def _mutate_environment(fold: Any, token_ids: tuple[int, ...]) -> None:
    fold.sequence += token_ids  # stands in the context, but not in the response


@pytest.mark.parametrize(
    ("target", "mutant"),
    [
        ("_Fold._cut", _mutate_no_cut),
        ("_Fold._cut", _mutate_cut),
        ("_Fold._cut", _mutate_cut_rows),
        ("_cut_runs", lambda runs, stop: [run for run in runs if run.start < stop]),
        ("_cut_runs", lambda runs, stop: runs),
        ("_add_rows", _mutate_rows(boundary=2, empty=False)),
        ("_add_rows", _mutate_rows(boundary=1, empty=True)),
        ("_Fold.environment", _mutate_environment),
        ("_Fold.reply", _mutate_overtaking),
        ("_ends", lambda spans, count: [(count, spans[0].version if spans else None)]),
        (
            "Run.logprobs",
            property(lambda run: [-float(run.attempt) - (i + 1) / 64 for i in range(len(run.ids))]),
        ),
    ],
)
def test_mutants_of_the_fold_are_seen(
    monkeypatch: pytest.MonkeyPatch, target: str, mutant: Any
) -> None:
    """Each small fault in the fold makes it differ from the second formulation on some of 300
    histories.
    """
    owner, _, name = target.rpartition(".")
    monkeypatch.setattr(getattr(stitching, owner) if owner else stitching, name, mutant)
    assert any(
        differs(random_history(seed), provenance)
        for seed in range(300)
        for provenance in Provenance
    )


def test_the_mutants_are_the_only_difference() -> None:
    """Without a mutant the same histories show none."""
    assert not any(
        differs(random_history(seed), provenance)
        for seed in range(300)
        for provenance in Provenance
    )
