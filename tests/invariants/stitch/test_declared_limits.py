"""``stitch.limits-kept``: samples keep the limits that their stack declares."""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.case import Case, Model
from rollproof.core.limits import RolloutLimits
from rollproof.core.records import Request
from rollproof.core.subjects import SubjectFactory
from rollproof.fakes.clients.reference_clients import AsSampled, AsSampledTurns, ClientOptions
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.verification.runner import run_case
from rollproof.verification.traces import judge

_ID = "stitch.limits-kept"
_REQUEST = Request(request_id="r0", prompt_ids=(11, 12), max_tokens=12, turns=((21,), (22, 23)))


def _subject(limits: RolloutLimits | None, declared: dict[str, Any]) -> SubjectFactory:
    """Return a client that works under ``limits`` and declares others."""

    class Client(AsSampledTurns):
        options = ClientOptions(multi_turn=True, limits=RolloutLimits(**declared))

        @property
        def limits(self) -> RolloutLimits:
            return limits or RolloutLimits()

    return Client


def _result(factory: SubjectFactory) -> CheckResult:
    # every token of this model ends a turn
    case = Case(flavour="vllm", requests=(_REQUEST,), model=Model(eos_every=1))
    return judge(run_case(factory, case), default_registry())[_ID]


@pytest.mark.parametrize(
    ("declared", "title"),
    [
        ({"response": 5}, "There are 6 response tokens in the sample, 1 more than limits.response"),
        ({"length": 6}, "There are 8 tokens in the sample, 2 more than limits.length allows"),
        ({"turns": 2}, "There are 3 turns in the sample, 1 more than limits.turns allows"),
    ],
    ids=str,
)
def test_a_sample_beyond_a_limit_is_found(declared: dict[str, Any], title: str) -> None:
    """A limit that the stack declares and does not keep is named, with both numbers."""
    result = _result(_subject(None, declared))
    assert Verdict.FAIL == result.verdict
    assert result.findings[0].title.startswith(title)
    assert str(next(iter(declared.values()))) in result.findings[0].expected


def test_a_turn_beyond_its_limit_is_found() -> None:
    """The tokens of one turn are counted without those of the others."""
    factory = _subject(None, {"turn_tokens": 3})
    request = Request(request_id="r0", prompt_ids=(11, 12), max_tokens=5)
    trace = run_case(factory, Case(flavour="vllm", requests=(request,)))
    (finding,) = judge(trace, default_registry())[_ID].findings
    assert (
        "There are 5 sampled tokens in one turn, 2 more than limits.turn_tokens allows"
        == finding.title
    )


@pytest.mark.parametrize(
    "limits", [{"response": 6}, {"length": 8}, {"turns": 3}, {"turn_tokens": 1}], ids=str
)
def test_a_sample_at_its_limit_passes(limits: dict[str, Any]) -> None:
    """A limit may be reached."""
    assert Verdict.PASS == _result(_subject(RolloutLimits(**limits), limits)).verdict


@pytest.mark.parametrize("declared", [{}, {"answer": 2}, {"context": 9}], ids=str)
def test_other_limits_are_not_judged(declared: dict[str, Any]) -> None:
    """Without a limit of the sample itself there is nothing to compare."""
    result = _result(_subject(None, declared))
    assert Verdict.NOT_APPLICABLE == result.verdict
    assert "the contract declares no limit of a sample (limits)" == result.reason
    assert Verdict.NOT_APPLICABLE == _result(AsSampled).verdict
