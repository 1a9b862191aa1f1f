"""What is excused in a GPU run is measured by the finding that a check of replay really makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollproof.checks import Finding
from rollproof.fakes.known_bugs.replay_passes import _StaysArmed
from rollproof.gpu_suites.excused import loss_apart
from rollproof.replay.judging import judge_replay

FINDING = Finding(
    check_id="replay.aftermath", title="t", expected="the loss of step 'again': 2.0", observed="2.0000002; 3 more values differ"
)


def test_losses_are_apart_relative_to_the_larger() -> None:
    """With the rest of the text behind them or not."""
    assert pytest.approx(1e-7, rel=1e-3) == loss_apart(FINDING)
    assert 0.5 == loss_apart(replace(FINDING, observed="1.0"))


@pytest.mark.parametrize(
    "expected", ["the gradient of gate of step 'again': norm 2", "the logprobs of r0 of step 'again': -1.0 for response token 2"]
)
def test_what_is_no_loss_is_never_within(expected: str) -> None:
    """It is not what was seen."""
    assert float("inf") == loss_apart(replace(FINDING, expected=expected))


def test_a_finding_of_the_check_itself_is_read() -> None:
    """The text is the check's own: where it changes, this fails, and nothing is excused."""
    (aftermath,) = [result for result in judge_replay(_StaysArmed).failed if result.id == "replay.aftermath"]
    apart = [loss_apart(finding) for finding in aftermath.findings]
    assert apart
    assert all(0 < one < float("inf") for one in apart)
