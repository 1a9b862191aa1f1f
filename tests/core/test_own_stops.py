"""Stop sequences at which a stack cuts replies itself, as a contract declares them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollproof.core.contract import Contract
from rollproof.core.own_stops import OwnStops
from rollproof.errors import ContractError
from tests.support.trace_builder import contract

_CLOSED = (5, 6, 7)


@pytest.mark.parametrize(
    ("before", "tokens", "expected"),
    [
        ((), (1, 5, 6, 7, 2), (4, _CLOSED)),
        ((), (5, 6, 5, 6, 7, 5, 6, 7), (5, _CLOSED)),
        ((1, 5, 6), (7, 9), (1, _CLOSED)),
        ((5,), (6, 7), (2, _CLOSED)),
        # a sequence that ended before is not found again
        ((5, 6, 7), (8, 9), None),
        ((), (5, 6, 8, 7), None),
        ((), (4, 1, 5, 6, 7), (1, (4,))),
        ((), (), None),
    ],
)
def test_the_first_sequence_counts(
    before: tuple[int, ...], tokens: tuple[int, ...], expected: Any
) -> None:
    """Also one that begins in what was sampled before."""
    assert expected == OwnStops(sequences=(_CLOSED, (4,))).first_in(before, tokens)


def test_a_contract_takes_a_mapping_and_survives_json() -> None:
    """A token id stands for a sequence of one, and equal sequences count once."""
    declared = contract(own_stops={"sequences": [9, [5, 6, 7], (9,)], "kept": False})
    assert OwnStops(sequences=((9,), _CLOSED), kept=False) == declared.own_stops
    assert declared == Contract.from_dict(json.loads(json.dumps(declared.to_dict())))


def test_contracts_without_the_field_are_read() -> None:
    """Files that were written before it existed have stacks that cut nowhere."""
    data = contract().to_dict()
    del data["own_stops"]
    assert Contract.from_dict(data).own_stops is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sequences": ()}, "1 to 256 token ids"),
        ({"sequences": "</answer>"}, "1 to 256 token ids"),
        ({"sequences": ("</answer>",)}, "must be 1 to 64 token ids"),
        ({"sequences": ((),)}, "must be 1 to 64 token ids"),
        ({"sequences": ((5, -1),)}, "must be 1 to 64 token ids"),
        ({"sequences": ((True,),)}, "must be 1 to 64 token ids"),
        ({"sequences": ((5, 6), (6,))}, r"\[5, 6\], which ends with \[6\]"),
        ({"sequences": (5,), "kept": "no"}, "kept='no' must be a bool"),
        ({"sequences": (5,), "drop": True}, "its fields are"),
        ({"kept": True}, "its fields are"),
        (7, "an OwnStops or a mapping"),
    ],
)
def test_what_is_no_sequence_is_refused(fields: Any, problem: str) -> None:
    """A message names the field and what it may hold."""
    with pytest.raises(ContractError, match=problem):
        contract(own_stops=fields)
