"""Prefill calls: which calls are taken for the first half of a logical call, and which are not."""

from __future__ import annotations

import numpy as np
import pytest

from rollproof.core.records import FinishReason
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_builder import TraceBuilder, coded_rows, contract
from tests.support.trace_script import CASE, check, unknown

_LOST = "stitch.resume-prompt"
_PREFILL = ScriptedCall(tokens=(9,), reason="length", call={"max_tokens": 1})
_DECODE = ScriptedCall(tokens=(11, 12), reason="stop", restart=True)
_EMPTY = ScriptedCall(call={"max_tokens": 1})
_AGAIN = ScriptedCall(tokens=(9,), reason="length", call={"max_tokens": 1}, restart=True)


@pytest.mark.parametrize(
    "calls",
    [
        (_PREFILL, _DECODE),
        (_EMPTY, _PREFILL, _DECODE),
        (_PREFILL, _AGAIN, _DECODE),
        (ScriptedCall(tokens=(9,), reason="stop", call={"max_tokens": 1}), _DECODE),
        (
            ScriptedCall(tokens=(9,), lost=True, reason="length", call={"max_tokens": 1}),
            _AGAIN,
            _DECODE,
        ),
    ],
    ids=["pair", "empty before", "prefilled twice", "ends in prefill", "lost before"],
)
def test_a_call_of_one_token_before_a_larger_one_is_a_prefill(
    calls: tuple[ScriptedCall, ...],
) -> None:
    """What it sampled is no part of the sample."""
    assert set() == blamed(script_rollout(*calls))


@pytest.mark.parametrize(
    "calls",
    [
        (ScriptedCall(tokens=(9,), reason="length", call={"max_tokens": 2}), _DECODE),
        (ScriptedCall(tokens=(9, 10), reason="length", call={"max_tokens": 2}), _DECODE),
        (ScriptedCall(tokens=(9,)), _DECODE),
    ],
    ids=["two granted", "two sampled", "aborted"],
)
def test_other_tokens_that_are_thrown_away_are_found(calls: tuple[ScriptedCall, ...]) -> None:
    """Only a call that could sample one token is taken for a prefill."""
    assert _LOST in blamed(script_rollout(*calls))


def test_a_token_that_was_sampled_is_not_sampled_again_without_need() -> None:
    """A prefill call and a decode call of one token look like a token that was lost: no verdict,
    unless the request has a pair that shows the proxy.
    """
    last = ScriptedCall(tokens=(11,), reason="length", restart=True, call={"max_tokens": 1})
    unknown(_LOST, script_rollout(_PREFILL, last, budget=1), "does not show which answer")
    cut = ScriptedCall(tokens=(11,), restart=True, call={"max_tokens": 2})
    prompt = (1, 2, 11)
    again = ScriptedCall(
        tokens=(9,), reason="length", lost=True, call={"max_tokens": 1}, reply={"delivered": True}
    )
    end = ScriptedCall(tokens=(12,), reason="length", call={"max_tokens": 1, "prompt": prompt})
    assert set() == blamed(script_rollout(_PREFILL, cut, again, end, budget=2))


def _prefilled(prompt: tuple[int, ...]) -> TraceBuilder:
    """A sample whose row of position 0 is that of an internal prefill call under older weights."""
    script = TraceBuilder(contract(), case=dict(CASE))
    script.submit(prompt=(1, 2))
    first = script.call(prompt, request_id="", max_tokens=1, internal=True)
    older, newer = coded_rows(0, 2, 0), coded_rows(0, 2, 1)
    script.reply(first, (9,), output={"routes": older})
    second = script.call((1, 2))
    script.reply(second, (4,), reason="stop", version=1, output={"routes": newer})
    rows = np.concatenate([older[:1], newer[1:]])
    return script.result((4,), finish_reason=FinishReason.STOP, routes=rows)


def test_a_sample_may_hold_rows_of_an_internal_prefill() -> None:
    """A proxy declares its prefill calls to belong to no request, and takes their rows of the
    prompt; those of a call with another prompt are foreign.
    """
    assert not check("routes.content", _prefilled((1, 2))).findings
    assert check("routes.content", _prefilled((1, 7))).findings
