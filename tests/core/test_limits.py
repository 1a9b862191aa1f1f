"""RolloutLimits: what a stack is configured with, in its contract and in requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollproof.core.contract import Contract
from rollproof.core.limits import RolloutLimits
from rollproof.core.records import Request
from rollproof.errors import ContractError
from tests.support.trace_builder import contract


def test_limits_survive_json() -> None:
    """A contract with limits comes back from its JSON form, and takes a mapping for them."""
    limits = RolloutLimits(response=8, length=20, turns=3, answer=4, answer_keeps="both")  # type: ignore[arg-type]
    made = contract(multi_turn=True, limits=limits, pad_id=3)

    assert made == Contract.from_dict(json.loads(json.dumps(made.to_dict())))
    assert limits == contract(multi_turn=True, limits=limits.to_dict()).limits


def test_a_contract_written_before_limits_existed_has_none() -> None:
    """The JSON form of an older contract, without the fields, is read as one without limits."""
    old = {
        name: value
        for name, value in contract().to_dict().items()
        if name not in ("limits", "pad_id")
    }

    assert contract() == Contract.from_dict(old)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"response": 0}, "response=0 must be a whole number of at least 1"),
        ({"length": 1}, "length=1 must be a whole number of at least 2"),
        ({"turns": True}, "turns=True must be a whole number of at least 1"),
        (
            {"answer_keeps": "left"},
            r"answer_keeps='left' is not valid; choose one of \['start', 'end', 'both'\]",
        ),
        ({"answers_cut_turns": True}, "answers_cut_turns=True needs turn_tokens"),
        ({"answers_cut_turns": 1}, "answers_cut_turns=1 must be a bool"),
        (
            {"turns": 2**63 - 1},
            (
                "turns=9223372036854775807 is more than any rollout reaches; the most is"
                " 2,147,483,647. Leave turns out if the stack has no such limit"
            ),
        ),
        ({"response": 10**5000}, "response=a whole number of 16610 bits is more than any rollout"),
    ],
)
def test_wrong_limits_are_refused(changes: dict[str, Any], problem: str) -> None:
    """A limit of no use is refused by name, alone and in a contract."""
    with pytest.raises(ContractError, match=problem):
        RolloutLimits(**changes)
    with pytest.raises(ContractError, match=f"limits: .*\n.*{problem}"):
        contract(limits=changes)


def test_what_is_no_limits_is_refused() -> None:
    """A number in place of limits, an unknown limit and a pad id that is no token are named."""
    with pytest.raises(ContractError, match="limits=8 must be a RolloutLimits or a mapping"):
        contract(limits=8)
    with pytest.raises(ContractError, match=r"Unknown limits \['max_tokens'\]; the limits are"):
        contract(limits={"max_tokens": 8})
    for pad_id, shown in ((-1, "-1"), (1 << 31, "2147483648"), (True, "True"), ("0", "'0'")):
        with pytest.raises(
            ContractError,
            match=f"pad_id={shown} must be a token id, or None: a whole number from 0 to 2,147",
        ):
            contract(pad_id=pad_id)
    assert (1 << 31) - 1 == contract(pad_id=(1 << 31) - 1).pad_id


@pytest.mark.parametrize("data", [None, 3, "turns", ["turns"]])
def test_only_a_mapping_is_read_as_limits(data: Any) -> None:
    """Anything else in a file is named, in our own words."""
    with pytest.raises(ContractError, match="Limits must be a mapping of their fields, not"):
        RolloutLimits.from_dict(data)


def test_limits_of_turns_need_turns() -> None:
    """A single-turn stack has no answers and no second turn; to limit it to one turn is true."""
    for limits, field in (
        ({"turns": 2}, "turns=2"),
        ({"answer": 4}, "answer=4"),
        ({"turn_tokens": 4, "answers_cut_turns": True}, "answers_cut_turns=True"),
    ):
        with pytest.raises(ContractError, match=f"limits.{field} contradicts multi_turn=False"):
            contract(limits=limits)
        assert contract(multi_turn=True, limits=limits).multi_turn

    assert RolloutLimits(turns=1) == contract(limits={"turns": 1}).limits
    # both are true of a stack with a short context: the response ends at the tighter one
    assert 3 == getattr(contract(limits={"response": 5, "length": 3}).limits, "total", None)


@pytest.mark.parametrize(
    ("keeps", "expected"), [("start", (1, 2, 3)), ("end", (3, 4, 5)), ("both", (1, 4, 5))]
)
def test_an_answer_is_cut_on_the_declared_side(keeps: str, expected: tuple[int, ...]) -> None:
    """An answer of more tokens than its limit loses those of the other side; a shorter one none."""
    limits = RolloutLimits(answer=3, answer_keeps=keeps)  # type: ignore[arg-type]

    assert expected == limits.cut_answer((1, 2, 3, 4, 5))
    assert (1, 2, 3) == limits.cut_answer((1, 2, 3))
    assert (1, 2, 3, 4) == RolloutLimits().cut_answer((1, 2, 3, 4))


def test_the_tighter_total_counts() -> None:
    """``total`` is the smaller of the lengths of a sample and of a call."""
    assert 12 == RolloutLimits(length=12, context=20).total
    assert 9 == RolloutLimits(length=12, context=9).total
    assert RolloutLimits(response=3).total is None


@pytest.mark.parametrize(
    ("bounds", "budget"),
    [
        ({}, None),
        ({"max_length": 10}, 6),
        ({"max_tokens": 7, "max_length": 10}, 6),
        ({"max_tokens": 5, "limit": 8, "max_length": 10}, 5),
        ({"limit": 3, "max_length": 10}, 3),
    ],
)
def test_a_budget_is_the_tightest_bound(bounds: dict[str, int], budget: int | None) -> None:
    """The budget of a request is what every stated limit allows after a prompt of four tokens."""
    assert budget == Request(request_id="r0", prompt_ids=(1, 2, 3, 4), **bounds).budget  # type: ignore[arg-type]
