"""The reference stitch: examples from the specification, and a second formulation that knows no fold.

The fold walks over events and keeps a growing sequence. The second formulation asks of each position by itself: among the
replies that count, the last one whose call had sent no more than this position owns it. Both are compared on random
histories with restarts, lost, late and duplicate replies, empty replies and turns; and mutants of the fold must differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollproof import stitching
from rollproof.contract import Provenance
from rollproof.records import EngineOutput, FinishReason, Span
from rollproof.row_pieces import RowPiece, cut_pieces, overlay
from rollproof.stitching import Stitched, stitch
from rollproof.trace import Call, Observation, Reply
from rollproof.view import Attempt

PROMPT: tuple[int, ...] = (1, 2, 3)


@dataclass
class History:
    """A request's calls and observations, made event by event."""

    attempts: list[Attempt] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    at: int = 0

    def tick(self) -> int:
        """The next index."""
        self.at += 1
        return self.at

    def call(self, sent: tuple[int, ...], limit: int | None = None) -> Attempt:
        """The stack calls an engine."""
        number = len(self.attempts)
        call = Call(index=self.tick(), call_id=number, request_id="r", server_id="s", prompt_ids=sent, max_tokens=limit)
        self.attempts.append(Attempt(number=number, call=call))
        return self.attempts[-1]

    def reply(self, attempt: Attempt, tokens: tuple[int, ...], reason: str = "abort", version: int = 0, **fields: Any) -> None:
        """The engine answers, with rows that name their attempt and position."""
        output: dict[str, Any] = {
            "token_ids": tokens,
            "logprobs": np.array([-float(attempt.number) - (i + 1) / 64 for i in range(len(tokens))]),
            "routes": rows_of(attempt.number, len(attempt.call.prompt_ids) + len(tokens) - 1),
            "finish_reason": FinishReason(reason),
            "version": version,
            **fields.pop("output", {}),
        }
        true = fields.pop("true_tokens", (Span(start=0, end=len(tokens), version=version),))
        attempt.replies.append(Reply(index=self.tick(), call_id=attempt.number, output=EngineOutput(**output), true_tokens=true, **fields))

    def observe(self, *tokens: int) -> None:
        """The environment speaks."""
        self.observations.append(Observation(index=self.tick(), request_id="r", token_ids=tokens))

    def stitch(self, provenance: Provenance = Provenance.AS_SAMPLED, **options: Any) -> Stitched:
        """The fold under test."""
        return stitch(PROMPT, self.attempts, self.observations, provenance, **options)


def rows_of(number: int, count: int) -> np.ndarray:
    """``(count, 1, 1)``: 1000 * attempt + position."""
    return (1000 * number + np.arange(count)).astype(np.int32).reshape(count, 1, 1)


def one(*parts: tuple[int, ...]) -> History:
    """A rollout resumed after each part."""
    history = History()
    known = PROMPT
    for part in parts:
        history.reply(history.call(known), part)
        known += part
    return history


class TestExamples:
    """What the specification says, case by case."""

    def test_segments_follow_each_other(self) -> None:
        """Tokens in order, each with its attempt, its logprob and its versions."""
        history = History()
        history.reply(history.call(PROMPT), (11, 12), version=4)
        history.reply(history.call((*PROMPT, 11, 12)), (13,), "stop", version=5)
        stitched = history.stitch()
        assert (11, 12, 13) == stitched.response_ids
        assert [(11, 0, 4, 4), (12, 0, 4, 4), (13, 1, 5, 5)] == [(t.id, t.attempt, t.shown, t.true) for t in stitched.tokens]
        assert [-1 / 64, -2 / 64, -1 - 1 / 64] == stitched.logprob_list == stitched.logprobs.tolist()
        assert (FinishReason.STOP, 1, None) == (stitched.finish_reason, stitched.last, stitched.broken)

    def test_the_boundary_row_comes_from_the_next_segment(self) -> None:
        """The last token of a segment was not forwarded by it."""
        history = one((11, 12), (13,))
        rows = history.stitch().rows
        assert rows is not None
        assert [0, 1, 2, 3, 1004] == rows[:, 0, 0].tolist()
        latest = history.stitch(Provenance.LATEST_PREFILL).rows
        assert latest is not None
        assert [1000, 1001, 1002, 1003, 1004] == latest[:, 0, 0].tolist()

    def test_an_empty_reply_changes_nothing(self) -> None:
        """First, in the middle or last: no token, no row, no version."""
        plain = one((11, 12), (13,)).stitch()
        for at in range(3):
            parts: list[tuple[int, ...]] = [(11, 12), (13,)]
            parts.insert(at, ())
            stitched = one(*parts).stitch()
            assert plain.response_ids == stitched.response_ids
            assert plain.rows is not None and stitched.rows is not None
            assert (plain.rows % 1000 == stitched.rows % 1000).all()
            assert {1, 2, 0} - {at} == {token.attempt for token in stitched.tokens}

    def test_a_lost_reply_counts_for_nothing(self) -> None:
        """The stack does not know what it sampled."""
        history = History()
        history.reply(history.call(PROMPT), (11,))
        history.reply(history.call((*PROMPT, 11)), (12,), delivered=False)
        history.reply(history.call((*PROMPT, 11)), (13,), "stop")
        assert (11, 13) == history.stitch().response_ids

    def test_the_second_delivery_of_a_reply_counts_for_nothing(self) -> None:
        """A duplicate is the same reply again."""
        history = one((11, 12))
        history.reply(history.attempts[0], (11, 12), duplicate=True)
        history.reply(history.call((*PROMPT, 11, 12)), (13,), "stop")
        assert (11, 12, 13) == history.stitch().response_ids

    def test_a_restart_forgets_what_came_after_it(self) -> None:
        """From the prompt nothing is left, not even rows; from the middle what had been sent."""
        history = one((11, 12, 13))
        history.reply(history.call(PROMPT), (21,), "stop")
        stitched = history.stitch()
        assert ((21,), [1000, 1001, 1002]) == (stitched.response_ids, stitched.rows[:, 0, 0].tolist())  # type: ignore[index]
        history = one((11, 12, 13))
        history.reply(history.call((*PROMPT, 11, 12)), (21,), "stop")
        stitched = history.stitch()
        assert (11, 12, 21) == stitched.response_ids
        # the row of token 12 had predicted token 13, which is gone; the second call computed it anew
        assert [0, 1, 2, 3, 1004] == stitched.rows[:, 0, 0].tolist()  # type: ignore[index]

    def test_a_call_that_was_given_up_does_not_overtake(self) -> None:
        """Its reply arrives behind that of its successor."""
        history = History()
        first, second = history.call(PROMPT), history.call(PROMPT)
        history.reply(second, (21,), "stop")
        history.reply(first, (11,), "stop")
        assert ((21,), 1) == (history.stitch().response_ids, history.stitch().last)

    def test_a_late_reply_is_replaced_by_its_successor(self) -> None:
        """It arrives while its successor is under way, which had sent nothing of it."""
        history = History()
        first, second = history.call(PROMPT), history.call(PROMPT)
        history.reply(first, (11, 12))
        history.reply(second, (21,), "stop")
        stitched = history.stitch()
        assert (21,) == stitched.response_ids
        assert [True, True] == [step.continues for step in stitched.steps]

    def test_turns(self) -> None:
        """Tokens of the environment stand between, sampled by nobody."""
        history = History()
        history.reply(history.call(PROMPT), (11,), "stop")
        history.observe(91, 92)
        history.reply(history.call((*PROMPT, 11, 91, 92)), (12,), "stop")
        stitched = history.stitch()
        assert [0, -1, -1, 1] == [token.attempt for token in stitched.tokens]
        assert [False, True, True, False] == [math.isnan(value) for value in stitched.logprob_list]
        assert [(0, False), (0, False)] == [(step.spent, step.ended) for step in stitched.steps]

    def test_turns_that_nobody_recorded_are_read_off_the_calls(self) -> None:
        """After a natural end, what a call adds is the environment's; after an abort, or where there are no turns, it is a fault."""
        for reason, turns, broken in (("stop", True, None), ("length", True, None), ("abort", True, 1), ("stop", False, 1)):
            history = History()
            history.reply(history.call(PROMPT), (11,), reason)
            history.reply(history.call((*PROMPT, 11, 91)), (12,), "stop")
            stitched = history.stitch(unrecorded_turns=turns)
            assert broken == stitched.broken
            assert ((11, 91, 12) if broken is None else (11,)) == stitched.response_ids
            assert (broken is None) == stitched.steps[1].turn

    def test_a_call_that_does_not_continue_breaks_the_fold(self) -> None:
        """Nothing behind it can be judged; what came before stands."""
        history = one((11, 12))
        history.reply(history.call((*PROMPT, 11, 99)), (13,))
        history.reply(history.call((*PROMPT, 11, 99, 13)), (14,), "stop")
        stitched = history.stitch()
        assert (1, (11, 12)) == (stitched.broken, stitched.response_ids)
        assert (5, 5, 4) == (stitched.steps[1].sent, stitched.steps[1].known, stitched.steps[1].agree)

    def test_a_wrong_call_without_a_reply_breaks_nothing(self) -> None:
        """Its step tells of it; no token came of it."""
        history = one((11,))
        history.call((*PROMPT, 99))
        history.reply(history.call((*PROMPT, 11)), (12,), "stop")
        stitched = history.stitch()
        assert ((11, 12), None) == (stitched.response_ids, stitched.broken)
        assert [True, False, True] == [step.continues for step in stitched.steps]

    def test_spans_divide_a_reply(self) -> None:
        """Shown and true versions change at places of their own; what no span covers is unknown."""
        history = History()
        shown = (Span(start=0, end=2, version="a"), Span(start=2, end=5, version="b"))
        true = (Span(start=0, end=3, version=0), Span(start=3, end=4, version=1))
        history.reply(history.call(PROMPT), (1, 2, 3, 4, 5), output={"spans": shown}, true_tokens=true)
        stretches = [(s.start, s.end, s.shown, s.true) for s in history.stitch().stretches]
        assert [(0, 2, "a", 0), (2, 3, "b", 0), (3, 4, "b", 1), (4, 5, "b", None)] == stretches
        history.attempts[0].replies[0] = replace(history.attempts[0].replies[0], true_tokens=None)
        assert [(0, 2, "a", None), (2, 5, "b", None)] == [(s.start, s.end, s.shown, s.true) for s in history.stitch().stretches]

    def test_logprobs_may_be_short_long_or_absent(self) -> None:
        """What the engine did not return is NaN; what is beyond its tokens is nobody's."""
        for values, want in ((None, [True, True]), (np.array([-1.0]), [False, True]), (np.array([-1.0, -2.0, -3.0]), [False, False])):
            history = History()
            history.reply(history.call(PROMPT), (11, 12), output={"logprobs": values})
            assert want == [math.isnan(value) for value in history.stitch().logprob_list]

    def test_what_a_turn_has_spent(self) -> None:
        """Counts from the environment's last word, and what a restart gives up does not count."""
        history = one((11, 12), (13,))
        history.reply(history.call((*PROMPT, 11, 12, 13)), (14,), "stop")
        history.observe(91)
        history.reply(history.call((*PROMPT, 11, 12, 13, 14, 91)), (21, 22))
        history.call((*PROMPT, 11, 12, 13, 14, 91, 21, 22))
        history.call((*PROMPT, 11, 12, 13, 14, 91, 21))
        history.call(PROMPT)
        assert [0, 2, 3, 0, 2, 1, 0] == [step.spent for step in history.stitch().steps]

    @pytest.mark.parametrize(("limit", "ended"), [(None, True), (3, True), (2, False)])
    def test_completed_ends_a_turn_unless_the_grant_is_used_up(self, limit: int | None, ended: bool) -> None:
        """It may be the end of a portion."""
        history = History()
        history.reply(history.call(PROMPT, limit), (11, 12), "completed")
        history.call((*PROMPT, 11, 12))
        assert ended == history.stitch().steps[1].ended


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
        logprobs.append(math.nan if reply is None or reply.output.logprobs is None else float(reply.output.logprobs[i]))
        spans = () if reply is None or reply.true_tokens is None else reply.true_tokens
        true.append(next((s.version for s in spans if s.start <= i < s.end), None))
    rows = {position: row for position in range(size) if (row := _row(counted, position, provenance)) is not None}
    return Owned(tuple(ids), tuple(attempts), tuple(logprobs), tuple(true), rows)


def _counted(history: History) -> list[tuple[int, int, Reply | None, tuple[int, ...]]]:
    """(attempt, length sent, reply, tokens) of what counts, in order of arrival; an observation stands behind what came before it."""
    arrivals: list[tuple[int, Any]] = [(item.index, item) for item in history.observations]
    arrivals += [(reply.index, attempt) for attempt in history.attempts for reply in [r for r in attempt.replies if r.delivered][:1]]
    out: list[tuple[int, int, Reply | None, tuple[int, ...]]] = []
    for _, item in sorted(arrivals, key=lambda pair: pair[0]):
        if isinstance(item, Observation):
            end = out[-1][1] + len(out[-1][3]) if out else len(PROMPT)
            out.append((-1, end, None, item.token_ids))
        elif item.number > max((number for number, *_ in out), default=-1):
            reply = next(r for r in item.replies if r.delivered)
            out.append((item.number, len(item.call.prompt_ids), reply, reply.output.token_ids))
    return out


def _row(counted: list[tuple[int, int, Reply | None, tuple[int, ...]]], position: int, provenance: Provenance) -> int | None:
    """The cell that stands at a position: of those who captured it and were not given up since, the first or the last."""
    found = []
    for i, (_, sent, reply, tokens) in enumerate(counted):
        if reply is None or not tokens or not position < sent + len(tokens) - 1:
            continue
        # a call that sent less than was known gave up the rows from the one that had predicted the first token given up
        given_up = any(
            later_sent < counted[i + k][1] + len(counted[i + k][3]) and position >= (0 if later_sent == len(PROMPT) else later_sent - 1)
            for k, (number, later_sent, *_) in enumerate(counted[i + 1 :])
            if number >= 0
        )
        if not given_up:
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
            sent = known[: draw.choice([len(PROMPT), max(turn_start, draw.randint(len(PROMPT), len(known)))])]
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
        true = (Span(start=0, end=cut, version=draw.randint(0, 2)), Span(start=cut, end=len(tokens), version=draw.randint(0, 2)))
        ended = draw.random() < 0.3
        history.reply(attempt, tokens, "stop" if ended else "abort", true_tokens=true)
        known = sent + tokens
        if len(sent) <= turn_start:
            turn_start = len(PROMPT)
        if draw.random() < 0.2:
            history.reply(attempt, tokens, duplicate=True)
        if waiting and draw.random() < 0.5:
            history.reply(waiting[0][0], waiting.pop(0)[1])  # given up: its successor has answered already
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
    cells = {} if rows is None else {i: int(rows[i, 0, 0]) for i in range(len(rows)) if source[i] >= 0}
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
        "empty": sum(not r.output.token_ids for h in histories for a in h.attempts for r in a.replies) > 20,
        "lost": sum(not r.delivered for h in histories for a in h.attempts for r in a.replies) > 20,
        "given up": sum(h.stitch().last != h.attempts[-1].number for h in histories) > 10,
    }


def _mutate_cut(fold: Any, length: int) -> None:
    fold.runs = stitching._cut_runs(fold.runs, length - fold.base)  # forgets to cut the rows


def _mutate_cut_rows(fold: Any, length: int) -> None:
    fold.pieces = cut_pieces(fold.pieces, length)  # keeps the row that predicted the discarded token
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
        return overlay(pieces, piece, keep=provenance is Provenance.AS_SAMPLED) if end > 0 else pieces

    return add_rows


_reply = stitching._Fold.reply


def _mutate_overtaking(fold: Any, number: int, call: Call, reply: Reply) -> bool:
    fold.last = None  # a reply that was given up counts after all
    return _reply(fold, number, call, reply)


def _mutate_environment(fold: Any, token_ids: tuple[int, ...]) -> None:
    fold.known += token_ids  # stands in the context, but not in the response


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
        ("Run.logprobs", property(lambda run: [-float(run.attempt) - (i + 1) / 64 for i in range(len(run.ids))])),
    ],
)
def test_mutants_of_the_fold_are_seen(monkeypatch: pytest.MonkeyPatch, target: str, mutant: Any) -> None:
    """Each small fault in the fold makes it differ from the second formulation on some of 300 histories."""
    owner, _, name = target.rpartition(".")
    monkeypatch.setattr(getattr(stitching, owner) if owner else stitching, name, mutant)
    assert any(differs(random_history(seed), provenance) for seed in range(300) for provenance in Provenance)


def test_the_mutants_are_the_only_difference() -> None:
    """Without a mutant the same histories show none."""
    assert not any(differs(random_history(seed), provenance) for seed in range(300) for provenance in Provenance)
