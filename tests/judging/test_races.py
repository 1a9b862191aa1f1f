"""Which reply of several to one prompt a sample was made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.core.records import Span
from rollproof.judging.checks import Verdict
from tests.support.trace_builder import coded_rows
from tests.support.trace_script import TraceScript, check, finds, opened, passes, unknown


def _race(first: tuple[int, ...], second: tuple[int, ...], reason: str = "stop") -> TraceScript:
    """Two calls of one prompt overlap; the first is answered first, the second is aborted."""
    script = opened()
    one, other = script.call((1, 2)), script.call((1, 2), server="s1")
    return script.reply(one, first, reason=reason).reply(other, second, reason="abort")


def test_the_sample_shows_the_winner() -> None:
    """The reply that is not in the sample is no segment of it, and no resumed one."""
    for first, second in (((3, 4, 5), (3,)), ((3, 4, 5), ()), ((3, 4, 5), (6, 7))):
        script = _race(first, second).result((3, 4, 5))
        passes("stitch.tokens", script, **{"single-call_samples": 1})
        passes("stitch.resume-prompt", script)


def test_the_next_call_shows_the_winner() -> None:
    """The longer one of two aborted replies is continued, although it came first."""
    script = _race((3, 4, 5), (3,), reason="abort")
    call = script.call((1, 2, 3, 4, 5))
    script.reply(call, (6,), reason="stop").result((3, 4, 5, 6))
    passes("stitch.tokens", script, resumed_samples=1)
    passes("stitch.resume-prompt", script)


def test_a_sample_of_neither_reply_is_found() -> None:
    """Tokens that no reply brought are a fault, whoever won."""
    finds("stitch.tokens", _race((3, 4, 5), (6, 7)).result((3, 9, 5)))


def test_replies_that_differ_in_more_than_tokens_stay_undecided() -> None:
    """The same tokens of other weights: nothing shows which ones belong to the sample."""
    script = opened()
    one, other = script.call((1, 2)), script.call((1, 2), server="s1")
    script.reply(one, (3, 4), reason="stop", version=1)
    script.reply(other, (3, 4), reason="stop", version=2)
    unknown("stitch.tokens", script.result((3, 4)), "does not show which answer the stack used")


@pytest.mark.parametrize(
    "values",
    [
        {"logprobs": np.array([-2.5, -2.51])},
        {"routes": coded_rows(0, 3, 2)},
        {"token_versions": (2, 2)},
        {"spans": (Span(start=0, end=2, version=2),)},
        {"min_version": 2, "max_version": 2},
    ],
    ids=lambda values: next(iter(values)),
)
def test_values_of_the_sample_show_which_of_two_equal_replies_was_used(
    values: dict[str, Any],
) -> None:
    """The same tokens of two weights: the sample holds the second copy's logprobs, rows or tag."""
    tag = next((name.rstrip("s") for name in values if "version" in name or name == "spans"), "")
    tags = {"min_version": "min-max", "token_version": "token", "span": "span"}
    script = TraceScript(rows="T-1", versions=tags.get(tag, "none"))
    script.submit()
    one, other = script.call((1, 2)), script.call((1, 2), server="s1")
    script.reply(one, (3, 4), reason="stop", version=1, prompt_len=2)
    script.reply(other, (3, 4), reason="stop", version=2, prompt_len=2)
    passes("stitch.tokens", script.result((3, 4), **values))
    if "logprobs" in values:
        passes("stitch.logprobs-paired", script)


def test_the_same_prompt_again_shows_that_an_empty_reply_was_used() -> None:
    """The first answer of a race was an abort without tokens; the longer one came too late."""
    script = opened()
    one, other = script.call((1, 2)), script.call((1, 2), server="s1")
    script.reply(one, (), reason="abort").reply(other, (3,), reason="abort")
    script.reply(script.call((1, 2)), (3, 4), reason="stop").result((3, 4))
    passes("stitch.resume-prompt", script)


def test_a_late_reply_of_a_race_may_have_been_used() -> None:
    """Both replies came before the next call: the stack waits for all, whether the second call is
    a copy or a retry after the delay.
    """
    for retry in (False, True):
        script = opened()
        one = script.call((1, 2))
        other = 0 if retry else script.call((1, 2), server="s1")
        script.fault("late-reply", "s0", one)
        other = other or script.call((1, 2), server="s1")
        script.reply(other, (3,), reason="abort", version=1)
        script.reply(one, (3,), reason="abort", version=2)
        script.reply(script.call((1, 2, 3)), (4,), reason="stop").result((3, 4))
        unknown("stitch.tokens", script, "does not show which answer the stack used")


def test_an_aborted_reply_of_a_race_explains_a_drop() -> None:
    """Nothing was delivered, so the stack used the reply that it may drop."""
    for reasons, found in ((("stop", "abort"), False), (("stop", "stop"), True)):
        script = opened(partial_off="dropped", case={"partial": False})
        one, other = script.call((1, 2)), script.call((1, 2), server="s1")
        script.reply(one, (3, 4), reason=reasons[0]).reply(other, (5,), reason=reasons[1])
        (finds if found else passes)("lifecycle.drops-only-as-declared", script.result())


def test_a_speculative_call_of_a_dropped_request_is_set_aside() -> None:
    """Its next call, with what the environment really said, shows that it was thrown away."""
    for said, found in (((7, 7), False), ((9,), True)):
        script = TraceScript(partial_off="dropped", case={"partial": False})
        script.submit(turns=((7, 7),))
        script.reply(script.call((1, 2)), (3,), reason="stop")
        script.reply(script.call((1, 2, 3, 8)), (), reason="abort")
        script.observe(*said)
        script.reply(script.call((1, 2, 3, 7, 7)), (), reason="abort").result()
        assert found == bool(check("stitch.no-call-after-end", script).findings)


def test_an_answer_that_is_thrown_away_is_found() -> None:
    """Calls that do not overlap are no race: the second one should have continued the first."""
    script = opened()
    script.reply(script.call((1, 2)), (3, 4), reason="abort")
    script.reply(script.call((1, 2)), (3, 4, 5), reason="stop")
    finding = finds("stitch.resume-prompt", script.result((3, 4, 5)))
    assert "Call 2 throws away 2 of 2 tokens delivered before it" == finding.title


def _lost_copy(*, wait: bool) -> TraceScript:
    """Two calls of one prompt, or one after the other's answer; the second is lost with its server,
    and sent again twice, the first time to a dead server.
    """
    script = opened()
    one = script.call((1, 2))
    lost = None if wait else script.call((1, 2), server="s1")
    script.reply(one, (3,), reason="abort")
    lost = lost or script.call((1, 2), server="s1")
    script.fault("death", "s1")
    script.call((1, 2), server="s1")
    script.reply(script.call((1, 2)), (3, 4), reason="stop")
    return script


def test_the_retries_of_a_lost_copy_belong_to_its_race() -> None:
    """Whoever waits for both copies may use either, also when one was sent again after the other's
    answer. A call that was made after the answer throws it away.
    """
    either = _lost_copy(wait=False).result((3, 4))
    passes("stitch.resume-prompt", either)
    passes("lifecycle.survives-death", either)
    passes("stitch.tokens", either, **{"single-call_samples": 1})
    first = _lost_copy(wait=False)
    first.reply(first.call((1, 2, 3)), (5,), reason="stop").result((3, 5))
    passes("stitch.resume-prompt", first)
    passes("lifecycle.survives-death", first)
    for check_id in ("stitch.resume-prompt", "lifecycle.survives-death"):
        finds(check_id, _lost_copy(wait=True).result((3, 4)))


def test_a_lost_copy_excuses_one_retry() -> None:
    """The call that was sent again is answered; another call with its prompt throws that away."""
    script = opened()
    lost = script.call((1, 2), server="s1")
    script.fault("death", "s1")
    script.reply(script.call((1, 2)), (3,), reason="abort")
    script.reply(script.call((1, 2)), (3, 4), reason="stop")
    assert lost
    finds("stitch.resume-prompt", script.result((3, 4)))


def test_a_retry_of_a_lost_copy_may_stay_without_an_answer() -> None:
    """The reply of the other copy ended the request: the retries are no calls after its end."""
    script = opened()
    one = script.call((1, 2))
    script.call((1, 2), server="s1")
    script.reply(one, (3,), reason="stop").fault("death", "s1")
    script.call((1, 2), server="s1")
    script.result((3,))
    for check_id in ("stitch.no-call-after-end", "lifecycle.survives-death"):
        passes(check_id, script)


def test_a_copy_sent_in_the_instant_of_the_first_reply_is_set_aside() -> None:
    """A hedge that waits two seconds does not know of a reply that arrives in the second one. The
    reply that the sample holds is the first one's; else the call has thrown it away.
    """
    for response, found in (((3, 4), False), ((5, 6), True)):
        script = opened()
        script.reply(script.call((1, 2)), (3, 4), reason="stop")
        script._time -= 1
        script.reply(script.call((1, 2), server="s1"), (5, 6), reason="stop").result(response)
        assert found == bool(check("stitch.no-call-after-end", script).findings)


def test_a_copy_that_a_timer_sent_in_the_instant_of_a_reply_is_part_of_the_race() -> None:
    """Its sender did not know of the tokens that came in that instant, and may use either reply. A
    call that the reply led to throws them away.
    """
    for crossed, found in (((1,), False), ((), True)):
        script = opened()
        script.reply(script.call((1, 2)), (3, 4), reason="abort")
        script._time -= 1
        script.reply(script.call((1, 2), server="s1", crossed=crossed), (5, 6), reason="stop")
        assert found == bool(check("stitch.resume-prompt", script.result((5, 6))).findings)


def test_an_answer_of_the_environment_may_equal_a_reply() -> None:
    """The next call has the reply of one copy, and words that are the reply of the other."""
    script = TraceScript(multi_turn=True)
    script.submit(turns=((7,),))
    one, other = script.call((1, 2)), script.call((1, 2), server="s1")
    script.reply(one, (7,), reason="stop").reply(other, (7,), reason="stop")
    script.reply(script.call((1, 2, 7, 7)), (4,), reason="stop").result((7, 7, 4))
    passes("lifecycle.one-reply-per-retry", script)
    passes("stitch.environment-tokens", script)


ONE = {"samples under one version": 1}


def _cut_after_a_resume(resumed: tuple[int, ...], highest: int) -> TraceScript:
    """Two turns, the second one aborted; then a call of ``resumed`` is answered by newer weights.
    The limit cuts the sample within the aborted reply. Its max tag is ``highest``.
    """
    script = TraceScript(versions="min-max", multi_turn=True)
    script.weights(0).submit(max_tokens=3)
    script.reply(script.call((1, 2)), (3,), reason="stop").observe(7)
    script.reply(script.call((1, 2, 3, 7)), (4, 5), reason="abort")
    script.weights(1)
    script.reply(script.call(resumed), (6,), reason="stop", version=1)
    return script.result((3, 7, 4), min_version=0, max_version=highest)


def test_a_resume_beyond_a_cut_is_no_guess_at_the_environment() -> None:
    """It sends what the environment has said: tags may count its tokens, as those of every reply
    that a limit cuts off.
    """
    passes("versions.min-max", _cut_after_a_resume((1, 2, 3, 7, 4, 5), 1), **ONE)


def test_a_guess_at_the_environment_sets_no_tag() -> None:
    """Its words are not those of the environment, so the sample has nothing of its reply."""
    finding = finds("versions.min-max", _cut_after_a_resume((1, 2, 3, 9), 1))
    assert "The max version of the sample is not that of its tokens" == finding.title
    passes("versions.min-max", _cut_after_a_resume((1, 2, 3, 9), 0), **ONE)


def test_a_guess_is_not_a_call_after_the_end() -> None:
    """A task that a rollout started may call for another purpose when the rollout has ended."""
    script = opened()
    script.reply(script.call((1, 2)), (3,), reason="stop").result((3,))
    script.call((7,), candidates=("r0",))
    assert Verdict.PASS == check("lifecycle.no-call-after-end", script).verdict
