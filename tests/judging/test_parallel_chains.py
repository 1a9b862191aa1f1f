"""Candidates that are sampled at once and resumed by themselves are told apart by what each call
continues.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.core.records import FinishReason
from tests.support.scripted_rollouts import blamed
from tests.support.trace_script import TraceScript

CHAINS = {
    "stitch.tokens",
    "stitch.resume-prompt",
    "stitch.finish-reason",
    "stitch.logprobs-paired",
}


def _reply(script: TraceScript, call: int, tokens: tuple[int, ...], reason: str) -> None:
    values = {"logprobs": np.array([-0.5 - token / 100 - call for token in tokens])}
    script.reply(call, tokens, reason, output=values)


def _best_of_two(**sample: Any) -> TraceScript:
    """Two candidates: the first one is aborted after 3, the second one after 5; both go on."""
    script = TraceScript().weights(0).submit(max_tokens=2)
    first, second = script.call((1, 2)), script.call((1, 2), server="s1")
    _reply(script, first, (3,), "abort")
    _reply(script, second, (5,), "abort")
    second, first = script.call((1, 2, 5), max_tokens=1), script.call((1, 2, 3), max_tokens=1)
    _reply(script, first, (4,), "length")
    _reply(script, second, (6,), "stop")
    return script.result(**sample)


@pytest.mark.parametrize(
    ("response", "calls", "finish"), [((3, 4), (1, 4), "length"), ((5, 6), (2, 3), "stop")]
)
def test_either_candidate_may_be_the_sample(
    response: tuple[int, ...], calls: tuple[int, ...], finish: str
) -> None:
    """The calls of the other one are no part of it."""
    logprobs = np.array([-0.5 - t / 100 - call for t, call in zip(response, calls, strict=True)])
    sample = {"response": response, "logprobs": logprobs, "finish_reason": FinishReason(finish)}
    assert set() == CHAINS & blamed(_best_of_two(**sample))
    # the tokens of the one with the logprobs of the other
    swapped = {**sample, "logprobs": logprobs[::-1].copy()}
    assert {"stitch.logprobs-paired"} == CHAINS & blamed(_best_of_two(**swapped))


@pytest.mark.parametrize("response", [(3, 6), (5, 4), (3,), (7, 8)])
def test_a_sample_that_is_neither_is_found(response: tuple[int, ...]) -> None:
    """A mixture, a part, and tokens of nobody."""
    assert "stitch.tokens" in blamed(_best_of_two(response=response))


def test_equal_beginnings_leave_it_open() -> None:
    """Which of two chains with the same tokens a call continues does not show."""
    script = TraceScript().weights(0).submit(max_tokens=3)
    calls = [script.call((1, 2)), script.call((1, 2), server="s1")]
    for call in calls:
        _reply(script, call, (3,), "abort")
    calls = [script.call((1, 2, 3)), script.call((1, 2, 3), server="s1")]
    _reply(script, calls[0], (4,), "abort")
    _reply(script, calls[1], (5, 6), "length")
    _reply(script, script.call((1, 2, 3, 4)), (7,), "length")
    assert set() == CHAINS & blamed(script.result((3, 5, 6)))


def test_what_an_engine_ended_is_not_resumed() -> None:
    """Of two chains with the same tokens the aborted one goes on."""
    script = TraceScript().weights(0).submit(max_tokens=2)
    first, second = script.call((1, 2)), script.call((1, 2), server="s1")
    _reply(script, first, (3,), "stop")
    _reply(script, second, (3,), "abort")
    _reply(script, script.call((1, 2, 3), max_tokens=1), (4,), "length")
    finish = FinishReason.STOP
    assert set() == CHAINS & blamed(script.result((3,), finish_reason=finish))


def test_an_empty_abort_is_retried_in_its_chain() -> None:
    """It sends the prompt again when the other candidate has been delivered."""
    script = TraceScript().weights(0).submit(max_tokens=2)
    first, second = script.call((1, 2)), script.call((1, 2), server="s1")
    _reply(script, second, (), "abort")
    _reply(script, first, (3, 4), "length")
    _reply(script, script.call((1, 2)), (5, 6), "length")
    assert set() == CHAINS & blamed(script.result((3, 4)))


@pytest.mark.parametrize(
    ("call", "found"), [(3, set()), (2, set()), (9, {"stitch.logprobs-paired"})]
)
def test_equal_tokens_are_those_of_the_candidate_that_has_the_logprobs(
    call: int, found: set[str]
) -> None:
    """The first candidate is sampled again when the other one has ended, with the same token."""
    script = TraceScript().weights(0).submit(max_tokens=2)
    first, second = script.call((1, 2)), script.call((1, 2), server="s1")
    _reply(script, first, (), "abort")
    _reply(script, second, (3,), "stop")
    _reply(script, script.call((1, 2)), (3,), "stop")
    sample = {"logprobs": np.array([-0.53 - call]), "finish_reason": FinishReason.STOP}
    assert found == CHAINS & blamed(script.result((3,), **sample))


def test_a_sample_that_ended_is_not_the_candidate_that_was_aborted() -> None:
    """The loser begins with the same token, goes on from it and is aborted without another one."""
    script = TraceScript().weights(0).submit(max_tokens=3)
    first, second = script.call((1, 2)), script.call((1, 2), server="s1")
    script.abort("r0")
    script.reply(second, (3,), "stop")
    script.reply(first, (3,), "abort")
    script.reply(script.call((1, 2, 3)), (), "abort")
    found = blamed(script.result((3,), finish_reason=FinishReason.STOP))
    assert set() == found & {*CHAINS, "lifecycle.aborts-do-not-surface"}


def test_a_call_that_continues_neither_is_found() -> None:
    """It sends a token that neither has."""
    script = TraceScript().weights(0).submit(max_tokens=3)
    first, second = script.call((1, 2)), script.call((1, 2), server="s1")
    _reply(script, first, (3,), "abort")
    _reply(script, second, (5,), "abort")
    _reply(script, script.call((1, 2, 3, 9), max_tokens=1), (6,), "length")
    assert "stitch.resume-prompt" in blamed(script.result((3, 9, 6)))
