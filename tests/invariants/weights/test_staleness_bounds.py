"""``weights.staleness-bound``: which servers count for the newest weights."""

from __future__ import annotations

import numpy as np
import pytest

from rollproof.core.records import Span
from tests.support.trace_script import TraceScript, check, finds, passes, unknown

ID = "weights.staleness-bound"


def _stuck(what: str | None, server: str | None) -> TraceScript:
    """A sample of weights 0 that ends under weights 2, which s1 never got; ``what`` befell
    ``server``.
    """
    script = TraceScript(max_staleness=1)
    for name in ("s0", "s1"):
        script.weights(0, name)
    script.submit()
    script.reply(script.call((1, 2)), (3,), reason="abort")
    for version in (1, 2):
        script.weights(version, "s0")
    if what is not None:
        script.fault(what, server)
    script.reply(script.call((1, 2, 3)), (4, 5, 6), version=2)
    return script.result((3, 4, 5, 6))


def test_a_dead_server_holds_nothing_back() -> None:
    """The newest weights are those of the servers that are left."""
    finding = finds(ID, _stuck("death", "s1"))
    assert "0, 2 updates behind" in finding.observed


def test_a_server_that_lives_does() -> None:
    """No fault, another fault, or the death of nobody in particular."""
    for what, server in ((None, None), ("late", "s1"), ("death", None)):
        unknown(ID, _stuck(what, server), "not exercised")


@pytest.mark.parametrize(("by_harness", "found"), [(True, 0), (False, 1)])
def test_updates_that_the_stack_was_not_asked_for_do_not_age_a_sample(
    by_harness: bool, found: int
) -> None:
    """The harness loads two versions one after the other, and the stack cannot know of them."""
    script = TraceScript(max_staleness=1)
    script.weights(0).submit()
    script.reply(script.call((1, 2)), (3,), reason="abort")
    for version in (1, 2):
        script.weights(version, by_harness=by_harness)
    script.reply(script.call((1, 2, 3)), (4, 5, 6), version=2)
    assert found == check(ID, script.result((3, 4, 5, 6))).found


def test_updates_of_the_stack_age_tokens_of_weights_that_it_was_not_asked_for() -> None:
    """Two of them follow weights that the harness loaded."""
    script = TraceScript(max_staleness=1)
    script.weights(0).weights(1, by_harness=True).submit()
    script.reply(script.call((1, 2)), (3,), reason="abort", version=1)
    script.weights(2).weights(3)
    script.reply(script.call((1, 2, 3)), (4, 5, 6), version=3)
    assert "1, 2 updates behind" in finds(ID, script.result((3, 4, 5, 6))).observed


def test_weights_that_sampled_nothing_do_not_age_a_sample() -> None:
    """A stretch without tokens says which weights were there, not which sampled."""
    script = TraceScript(max_staleness=1)
    script.weights(0).submit()
    call = script.call((1, 2))
    script.weights(1)
    empty, all_tokens = Span(start=0, end=0, version=0), Span(start=0, end=2, version=1)
    script.reply(call, (3, 4), version=1, true_tokens=(empty, all_tokens))
    unknown(ID, script.result((3, 4)), "not exercised")


def _old_and_new(bound: int, truth: bool = True, **result: object) -> TraceScript:
    """One token of weights 0 and two of weights 2, delivered under weights 2."""
    script = TraceScript(max_staleness=bound)
    script.weights(0).submit()
    told = {} if truth else {"true_tokens": None}
    script.reply(script.call((1, 2)), (3,), reason="abort", version=0, **told)
    script.weights(1).weights(2)
    script.reply(script.call((1, 2, 3)), (4, 5), version=2, **told)
    return script.result(**{"response": (3, 4, 5), **result})  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("truth", [True, False])
def test_a_token_that_is_not_trained_on_does_not_age_a_sample(truth: bool) -> None:
    """Also if only the shown versions are known. A mask that does not reach a token trains on
    it.
    """
    for mask, found in (([0, 1, 1], 0), ([1, 1, 1], 1), ([1, 0, 0], 1), ([], 1), (None, 1)):
        array = None if mask is None else np.array(mask)
        assert found == check(ID, _old_and_new(1, truth, loss_mask=array)).found


def test_a_token_that_was_cut_off_does_not_age_a_sample() -> None:
    """The last call was served by a server with old weights, and none of its tokens is
    delivered.
    """
    for response, found in (((3, 4), 0), ((3, 4, 5), 1)):
        script = TraceScript(max_staleness=1)
        script.weights(0, "s1").weights(0).weights(1).weights(2).submit()
        script.reply(script.call((1, 2)), (3, 4), reason="abort", version=2)
        script.reply(script.call((1, 2, 3, 4), server="s1"), (5,), version=0)
        script.weights(1, "s1").weights(2, "s1")
        assert found == check(ID, script.result(response)).found


def test_a_sample_within_the_bound_is_counted() -> None:
    """Old tokens count, whether they are trained on or not; no sample counts nothing."""
    passes(ID, _old_and_new(2), samples_older_than_the_newest_weights=1)
    masked = _old_and_new(2, loss_mask=np.array([0, 1, 1]))
    passes(ID, masked, samples_older_than_the_newest_weights=1)
    unknown(ID, _old_and_new(2, response=None), "not exercised")
    unknown(ID, _old_and_new(1, response=None), "not exercised")
