"""Samples of one turn: the prompt of a sample is the conversation before it, or it is wrong."""

from __future__ import annotations

import pytest

from rollproof.core.records import Rollout
from rollproof.judging.turn_samples import TURN_SAMPLES
from tests.support.scripted_rollouts import (
    ScriptedCall,
    blamed,
    sample_of,
    script_rollout,
    with_sample,
)
from tests.support.trace_script import inapplicable

_FIRST = ScriptedCall(tokens=(11, 12), reason="stop")
_CUT = ScriptedCall(tokens=(13,), observed=(51,))
_REST = ScriptedCall(tokens=(14,), reason="stop")
_CONTEXT = (1, 2, 11, 12, 51)


def _of_turn(prompt: tuple[int, ...], response: tuple[int, ...], *, recorded: bool) -> object:
    """Return a conversation of two turns, of which the second is handed over."""
    story = script_rollout(
        _FIRST,
        _CUT,
        _REST,
        request={"turns": ((51,),)},
        recorded=recorded,
        loss_mask=True,
        multi_turn=True,
    ).trace()
    whole = sample_of(story)
    count = len(response)
    assert whole.logprobs is not None
    assert whole.loss_mask is not None
    sample = Rollout(
        request_id=whole.request_id,
        prompt_ids=prompt,
        response_ids=response,
        finish_reason=whole.finish_reason,
        logprobs=whole.logprobs[-count:],
        loss_mask=whole.loss_mask[-count:],
        min_version=0,
        max_version=0,
    )
    return with_sample(story, sample)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_turn_is_judged_after_its_context(recorded: bool) -> None:
    """The turn is judged with its resume, and the answers are nowhere to be judged."""
    story = _of_turn(_CONTEXT, (13, 14), recorded=recorded)
    assert set() == blamed(story)  # type: ignore[arg-type]
    inapplicable("stitch.mask-environment", story, TURN_SAMPLES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        ((1, 2, 11, 12, 52), (13, 14), "stitch.prompt"),
        ((1, 2, 11, 51), (13, 14), "stitch.prompt"),
        ((*_CONTEXT, 13), (14,), "stitch.prompt"),
        ((1, 2, 11, 12), (13, 14), "stitch.prompt"),
        (_CONTEXT, (14, 14), "stitch.tokens"),
        (_CONTEXT, (13,), "stitch.tokens"),
    ],
    ids=["respelt", "token lost", "inside a turn", "answer lost", "other token", "cut"],
)
def test_another_context_or_turn_is_found(
    prompt: tuple[int, ...], response: tuple[int, ...], expected: str
) -> None:
    """A prompt that is not exactly what the first call of a turn sent is a wrong prompt."""
    assert expected in blamed(_of_turn(prompt, response, recorded=False))  # type: ignore[arg-type]
