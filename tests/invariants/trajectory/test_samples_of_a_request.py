"""The checks of requests that deliver several samples, by traces of one conversation: prompt
(1, 2), turns (5, 6) and (8,), between which the environment says (7,).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.rollout import Result
from rollproof.core.records import FinishReason, Rollout
from rollproof.judging.checks import SEVERAL_SAMPLES
from tests.support.trace_script import TraceScript, finds, inapplicable, passes, unknown

FIRST = ((1, 2), (5, 6))
SECOND = ((1, 2, 5, 6, 7), (8,))
MERGED = ((1, 2), (5, 6, 7, 8), (1, 1, 0, 1))


def sample(
    prompt: Sequence[int],
    response: Sequence[int],
    mask: Sequence[int] | None = None,
    **fields: Any,
) -> Rollout:
    """A sample; without a mask every token is trained."""
    return Rollout(
        request_id="r0",
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        finish_reason=FinishReason.STOP,
        loss_mask=np.array([1] * len(response) if mask is None else mask),
        logprobs=np.zeros(len(response)),
        **fields,
    )


def conversation(*calls: tuple[Any, ...], **changes: Any) -> TraceScript:
    """The calls of a request, each a prompt, a reply and a finish reason (``stop``)."""
    fields = {"samples": "branch", "multi_turn": True, "loss_mask": True, **changes}
    script = TraceScript(**fields)
    script.weights(0).submit(turns=((7,),))
    for number, (prompt, reply, *reason) in enumerate(calls or (FIRST, SECOND)):
        if number == 1:
            script.observe(7)
        call = script.call(prompt)
        script.reply(call, reply, *(reason or ["stop"]))
    return script


def deliver(script: TraceScript, *samples: tuple[Any, ...]) -> TraceScript:
    """End the request with these samples."""
    rollouts = [sample(*arguments) for arguments in samples]
    script.add(
        Result(
            request_id="r0",
            rollout=rollouts[-1] if rollouts else None,
            earlier=tuple(rollouts[:-1]),
        )
    )
    return script


@pytest.mark.parametrize("samples", [(FIRST, SECOND), (MERGED,), (SECOND, FIRST)])
def test_steps_and_merged_turns_are_what_the_calls_read_and_sampled(samples: Any) -> None:
    """Turns may be samples of their own or merged, in any order."""
    passes(
        "trajectory.context",
        deliver(conversation(), *samples),
        trained_tokens_after_what_the_engine_read=3,
    )
    passes(
        "trajectory.sampled",
        deliver(conversation(), *samples),
        trained_tokens_that_an_engine_sampled=3,
    )
    passes("trajectory.complete", deliver(conversation(), *samples), sampled_replies=2)


def test_a_merge_that_forgets_an_observation_trains_after_other_tokens() -> None:
    """The engine read the answer (7,), and the sample does not have it."""
    trace = deliver(conversation(), ((1, 2), (5, 6, 8)))
    finding = finds("trajectory.context", trace)
    assert "Sample 0 trains 1 token after other tokens than the engine read" == finding.title
    assert "the prompt of call 2, 5 tokens: [1, 2, 5, 6, 7]" == finding.expected
    assert {"request": "r0", "index": 2, "position": 4, "call": 2} == dict(finding.where)
    passes("trajectory.sampled", trace)
    unknown("trajectory.complete", trace, "a sample is not what calls read and sampled")


def test_masked_tokens_after_another_history_are_no_fault() -> None:
    """Only what is trained has to stand after what the engine read."""
    passes("trajectory.context", deliver(conversation(), FIRST, SECOND, ((1, 9), (5, 6), (0, 0))))


def test_a_trained_answer_of_the_environment_was_not_sampled() -> None:
    """The loss mask of (7,) is 1."""
    finding = finds("trajectory.sampled", deliver(conversation(), ((1, 2), (5, 6, 7, 8))))
    assert "a sample trains tokens of the environment" == finding.kind
    assert "[7] from response index 2 on, which the environment said" == finding.observed
    assert {"request": "r0", "index": 2, "position": 4} == dict(finding.where)


def test_a_token_that_was_made_up_was_not_sampled() -> None:
    """Another tokenization of a reply has other tokens."""
    finding = finds("trajectory.sampled", deliver(conversation(), ((1, 2), (5, 9)), SECOND))
    assert "a sample trains tokens that no engine sampled for its request" == finding.kind
    assert {"request": "r0", "index": 1, "position": 3} == dict(finding.where)


def test_a_turn_trained_in_two_samples_is_found_unless_declared() -> None:
    """The merged sample trains the first turn, too."""
    finding = finds("trajectory.trained-once", deliver(conversation(), FIRST, MERGED))
    assert "2 sampled tokens of a request are trained more than once" == finding.title
    assert "samples 0 and 1 train the same tokens" == finding.observed
    inapplicable(
        "trajectory.trained-once",
        deliver(conversation(repeats_tokens=True), FIRST, MERGED),
        "the contract lets a token be trained in several samples",
    )
    passes("trajectory.trained-once", deliver(conversation(), FIRST, (*MERGED[:2], (0, 0, 0, 1))))


def test_two_calls_that_brought_the_same_tokens_are_two_samples() -> None:
    """Greedy calls of one prompt, best of two: each was sampled, and is trained, once."""
    calls = conversation(FIRST, FIRST)
    passes("trajectory.trained-once", deliver(calls, FIRST, FIRST))
    finds("trajectory.trained-once", deliver(conversation(FIRST, FIRST), FIRST, FIRST, FIRST))


def test_a_turn_in_no_sample_is_found_unless_drops_are_declared() -> None:
    """Only the last turn was delivered."""
    finding = finds("trajectory.complete", deliver(conversation(), SECOND))
    assert "1 reply of the engine is in no sample of the request" == finding.title
    assert "the 2 tokens of call 1 (to server s0) in a sample" == finding.expected
    inapplicable(
        "trajectory.complete",
        deliver(conversation(drops_samples=True), SECOND),
        "the contract lets what was sampled be in no sample",
    )


def test_one_of_two_candidates_in_no_sample_is_a_drop() -> None:
    """Best of two, of which one is delivered, has to be declared."""
    other = ((1, 2), (3, 4))
    finds("trajectory.complete", deliver(conversation(FIRST, other), FIRST))


@pytest.mark.parametrize(
    ("calls", "samples"),
    [
        # an aborted call that was made again, and one that went on after its first token
        ((((1, 2), (3,), "abort"), FIRST), (FIRST,)),
        ((((1, 2), (5, 3), "abort"), ((1, 2, 5), (6,))), (FIRST,)),
        # an abort that nothing follows
        ((FIRST, ((1, 2, 5, 6, 7), (3,), "abort")), (FIRST,)),
    ],
)
def test_what_was_sampled_again_is_not_missing(calls: Any, samples: Any) -> None:
    """Tokens that a stack threw away, and sampled again, need be in no sample."""
    passes("trajectory.complete", deliver(conversation(*calls), *samples))


def test_the_beginning_of_an_interrupted_turn_must_be_in_a_sample() -> None:
    """A sample of the last call alone loses what the turn began with."""
    calls = (((1, 2), (5,), "abort"), ((1, 2, 5), (6,)))
    finding = finds("trajectory.complete", deliver(conversation(*calls), ((1, 2, 5), (6,))))
    assert "the 1 token of call 1 (to server s0) in a sample" == finding.expected


def test_a_call_that_is_a_sample_of_its_own_is_no_turn() -> None:
    """An abort interrupted the turn (5, 6): it is one sample."""
    calls = (((1, 2), (5,), "abort"), ((1, 2, 5), (6,)))
    parts = (((1, 2), (5,)), ((1, 2, 5), (6,)))
    finding = finds("trajectory.turns", deliver(conversation(*calls, samples="turn"), *parts))
    assert "Sample 1 begins in the middle of a turn" == finding.title
    complete = deliver(conversation(*calls, samples="turn"), FIRST)
    passes("trajectory.turns", complete, samples_of_a_turn=1)
    inapplicable("trajectory.turns", deliver(conversation(*calls), *parts), "samples='branch'")


def test_merged_turns_are_more_than_one_turn() -> None:
    """The contract says that each turn is a sample."""
    finding = finds("trajectory.turns", deliver(conversation(samples="turn"), MERGED))
    assert "Sample 0 holds more than one turn" == finding.title
    assert {"request": "r0", "index": 2, "position": 4} == dict(finding.where)
    passes("trajectory.turns", deliver(conversation(samples="turn"), FIRST, SECOND))


def test_a_compacted_history_is_what_the_engine_read() -> None:
    """The second turn was sampled after (1, 2, 7): that is its sample's prompt."""
    calls = conversation(FIRST, ((1, 2, 7), (8,)))
    passes("trajectory.context", deliver(calls, FIRST, ((1, 2, 7), (8,))))
    calls = conversation(FIRST, ((1, 2, 7), (8,)))
    finding = finds("trajectory.context", deliver(calls, FIRST, SECOND))
    assert (
        "5 tokens before them: [1, 2, 5, 6, 7]; they differ from position 2 on" == finding.observed
    )


def test_tokens_of_another_request_were_not_sampled_for_this_one() -> None:
    """The samples of two requests were exchanged."""
    script = conversation()
    script.submit("r1", (1, 2))
    script.reply(script.call((1, 2), "r1"), (5, 9), "stop")
    trace = deliver(script, ((1, 2), (5, 9)))
    finding = finds("trajectory.sampled", trace)
    assert "a sample trains tokens of another request" == finding.kind
    assert "[9] from response index 1 on, which calls of request r1 sampled" == finding.observed


def test_every_sample_is_judged_by_the_other_checks() -> None:
    """A logprob is missing in the first of two samples."""
    script = conversation()
    short = sample(*FIRST)
    first = Rollout(
        request_id="r0",
        prompt_ids=short.prompt_ids,
        response_ids=short.response_ids,
        finish_reason=FinishReason.STOP,
        loss_mask=short.loss_mask,
        logprobs=np.zeros(1),
    )
    script.add(Result(request_id="r0", rollout=sample(*SECOND), earlier=(first,)))
    finds("stitch.logprobs-length", script)


def test_an_empty_reply_of_a_sibling_is_not_the_samples() -> None:
    """A second call of the prompt was aborted before its first token, and made again."""
    other = ((1, 2), (3, 4))
    script = conversation(FIRST, ((1, 2), (), "abort"), other)
    passes("stitch.tokens", deliver(script, FIRST, other))


def test_no_sample_is_unknown_and_one_sample_not_applicable() -> None:
    """Nothing was delivered; and a contract that declares one sample has none of these checks."""
    for check_id in ("context", "sampled", "trained-once", "complete"):
        trace = deliver(conversation())
        unknown(f"trajectory.{check_id}", trace, "no sample was delivered")
        trace = conversation(samples="request").result((5, 6, 7, 8))
        inapplicable(f"trajectory.{check_id}", trace, "samples='request'")
    inapplicable("trajectory.turns", conversation(samples="request"), "samples='request'")
    inapplicable("stitch.budget-total", deliver(conversation(), FIRST), SEVERAL_SAMPLES)
