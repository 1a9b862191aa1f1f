"""Replies that a stack cuts at stop sequences of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.trace_script import TraceScript, check, finds, passes

_STOP = (5, 6)
_CHECKS = (
    "stitch.resume-prompt",
    "stitch.no-call-after-end",
    "stitch.finish-reason",
    "stitch.finish-length",
    "stitch.logprobs-length",
    "stitch.logprobs-paired",
    "lifecycle.aborts-do-not-surface",
)


def _script(**stops: Any) -> TraceScript:
    script = TraceScript(
        rows="none",
        logprobs="raw",
        multi_turn=True,
        loss_mask=True,
        own_stops={"sequences": (_STOP, 9), **stops},
    )
    script.submit(max_tokens=8, turns=((7, 7), (8, 8)))
    return script


def _clean(script: Any) -> None:
    passes("stitch.tokens", script)
    assert {} == {
        name: check(name, script).findings for name in _CHECKS if check(name, script).findings
    }


def _logprobs(*counts: int) -> Any:
    """The logprobs of ``TraceScript``'s replies of these lengths; of answers, if negative."""
    parts = [
        [-0.5 - 0.01 * i for i in range(count)] if count > 0 else [np.nan] * -count
        for count in counts
    ]
    return np.array([value for part in parts for value in part])


def test_a_cut_turn_is_answered() -> None:
    """The rest of the reply is dropped; the next turn begins behind the stop."""
    script = _script()
    script.reply(script.call((1, 2), max_tokens=8), (3, 5, 6, 4, 4), reason="length")
    script.observe(7, 7)
    script.reply(script.call((1, 2, 3, 5, 6, 7, 7), max_tokens=3), (9, 4, 4), reason="length")
    script.result(
        (3, 5, 6, 7, 7, 9),
        finish_reason="stop",
        logprobs=_logprobs(3, -2, 1),
        loss_mask=np.array([1, 1, 1, 0, 0, 1]),
    )
    _clean(script)


@pytest.mark.parametrize("kept", [True, False])
def test_a_stop_may_begin_before_an_abort(kept: bool) -> None:
    """It is looked for in the turn, not in each reply; what began it is dropped, too."""
    script = _script(kept=kept)
    script.reply(script.call((1, 2), max_tokens=8), (3, 5), reason="abort")
    script.reply(script.call((1, 2, 3, 5), max_tokens=6), (6, 4), reason="length")
    response = (3, 5, 6) if kept else (3,)
    script.result(
        response,
        finish_reason="stop",
        logprobs=_logprobs(2, 1)[: len(response)],
        loss_mask=np.ones(len(response)),
    )
    _clean(script)


@pytest.mark.parametrize("kept", [True, False])
def test_a_turn_may_be_resumed_after_a_stop_and_cut_when_it_is_complete(kept: bool) -> None:
    """The layer that resumes need not know where the layer above it cuts."""
    script = _script(kept=kept)
    script.reply(script.call((1, 2), max_tokens=8), (3, 5, 6, 4), reason="abort")
    script.reply(script.call((1, 2, 3, 5, 6, 4), max_tokens=4), (2,), reason="abort")
    script.reply(script.call((1, 2, 3, 5, 6, 4, 2), max_tokens=3), (9, 2, 2), reason="length")
    response = (3, 5, 6) if kept else (3,)
    script.observe(7, 7)
    script.reply(script.call((1, 2, *response, 7, 7), max_tokens=2), (4,), reason="stop")
    script.result(
        (*response, 7, 7, 4),
        finish_reason="stop",
        logprobs=np.array([*_logprobs(3)[: len(response)], np.nan, np.nan, -0.5]),
        loss_mask=np.array([*[1] * len(response), 0, 0, 1]),
    )
    _clean(script)


def test_a_resume_without_the_rest_is_a_call_after_the_end() -> None:
    """Only the whole turn may go on; one that was cut has ended."""
    script = _script()
    script.reply(script.call((1, 2), max_tokens=8), (3, 5, 6, 4), reason="abort")
    script.reply(script.call((1, 2, 3, 5, 6), max_tokens=5), (2,), reason="stop")
    script.result((3, 5, 6, 2), finish_reason="stop", logprobs=_logprobs(3, 1))
    finds("stitch.no-call-after-end", script)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stop_that_ends_the_reply_may_be_either(reason: str) -> None:
    """With the last token of the budget, both the stop and the budget end the turn."""
    script = _script()
    script.reply(script.call((1, 2), max_tokens=8), (3, 4, 4, 4, 4, 4, 5, 6), reason="length")
    script.result(
        (3, 4, 4, 4, 4, 4, 5, 6),
        finish_reason=reason,
        logprobs=_logprobs(8),
        loss_mask=np.ones(8),
    )
    _clean(script)


@pytest.mark.parametrize(
    ("kept", "response", "kind"),
    [
        (True, (3, 5, 6, 4), "a response goes on after a stop sequence"),
        (True, (3,), "a stop sequence is missing"),
        (False, (3, 5, 6), "a stop sequence is in the sample"),
        (False, (3, 5, 6, 4), "a response goes on after a stop sequence"),
        # the cut is elsewhere: other words fit
        (True, (3, 5), "sampled tokens are missing"),
        (True, (4, 5, 6), "tokens that the engines did not sample"),
    ],
)
def test_a_wrong_cut_is_named(kept: bool, response: tuple[int, ...], kind: str) -> None:
    """By what is there that should not be, or is missing."""
    script = _script(kept=kept)
    script.reply(script.call((1, 2), max_tokens=8), (3, 5, 6, 4, 4), reason="length")
    assert kind == finds("stitch.tokens", script.result(response, finish_reason="stop")).kind


def test_an_undeclared_cut_is_found_and_the_hint_names_the_field() -> None:
    """A stack that declares nothing cuts nowhere."""
    script = TraceScript(rows="none")
    script.submit(max_tokens=8)
    script.reply(script.call((1, 2), max_tokens=8), (3, 5, 6, 4, 4), reason="length")
    finding = finds("stitch.tokens", script.result((3, 5, 6), finish_reason="stop"))
    assert "declare the stop sequences at which it cuts (own_stops)" in finding.hint
