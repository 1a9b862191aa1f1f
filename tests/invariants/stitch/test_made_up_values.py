"""Which words logprobs that no engine returned get, and which values change nothing."""

from __future__ import annotations

import numpy as np

from tests.support.scripted_rollouts import ScriptedCall, script_rollout
from tests.support.trace_script import check, finds


def _missing(*values: float) -> str:
    """What the finding shows for made-up values of so many tokens."""
    parts = (
        ScriptedCall(tokens=(11,)),
        ScriptedCall(tokens=tuple(range(21, 21 + len(values))), logprobs=False, reason="stop"),
    )
    sample = {"logprobs": np.array([-0.25, *values])}
    return finds("stitch.logprobs-missing", script_rollout(*parts, sample=sample)).observed


def test_three_made_up_values_are_shown_and_no_more() -> None:
    """The smallest of all different ones."""
    assert _missing(-1.5, -1.5).startswith("-1.5 at response index 1-2")
    assert _missing(-1.5, -2.5, -3.5).startswith("-3.5, -2.5 and -1.5 at response index 1-3")
    assert _missing(-1.5, -2.5, -3.5, -4.5).startswith("-4.5, -3.5 and -2.5 at response index 1-4")


def test_a_certain_token_among_wrong_ones_has_no_scale() -> None:
    """An engine's own 0.0 is no factor of anything, and the check goes on."""
    values = np.array([0.0, -1.0, -2.0, -3.0])
    story = script_rollout(
        ScriptedCall(tokens=(11, 12, 13, 14), reason="stop", output={"logprobs": values}),
        sample={"logprobs": np.array([-0.5, -2.0, -4.5, -6.5])},
    )
    finding = finds("stitch.logprobs-paired", story)
    assert "the engine's values times" not in finding.hint
    scaled = script_rollout(
        ScriptedCall(tokens=(11, 12, 13), reason="stop", output={"logprobs": values[1:]}),
        sample={"logprobs": values[1:] * 2},
    )
    assert "the engine's values times 2" in finds("stitch.logprobs-paired", scaled).hint


def test_values_that_change_nothing_may_be_left_out() -> None:
    """Each has its own neutral value; any other must reach the calls."""
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": False,
    }
    other = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 1,
        "min_p": 1.0,
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "ignore_eos": True,
    }
    for name, value in neutral.items():
        for given, found in ((value, False), (other[name], True)):
            story = script_rollout(
                ScriptedCall(tokens=(11,), reason="stop", call={"sampling": {"seed": 1}}),
                request={"sampling": {name: given}},
                sampling="forwarded",
            )
            if found:
                assert name in finds("stitch.sampling-forwarded", story).title
            else:
                assert () == check("stitch.sampling-forwarded", story).findings
