"""Cases: what a counterexample from elsewhere may hold, refused before anything runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.records import Request
from rollproof.errors import CaseError

_CASE = Case(
    flavour="vllm",
    requests=(
        Request(
            request_id="r0",
            prompt_ids=(1,),
            max_tokens=2,
            sampling={"temperature": 0.7},
            turns=((5, 6),),
        ),
    ),
    actions=(Action(when=Trigger(request="r0", tokens=1), do=ActionKind.ABORT),),
    deadline=500,
)


def test_the_json_form_is_read_back() -> None:
    """Whole numbers may stand for virtual seconds."""
    assert _CASE == Case.from_dict(_CASE.to_dict())


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("flavour",), ["vllm"], "flavour must be str, not a list of 1"),
        (("partial",), "no", "partial must be bool, not 'no'"),
        (("seed",), 2**70, "seed must fit 64 bits"),
        (("model", "eos_every"), "x", "model.eos_every must be int or null, not 'x'"),
        (
            ("requests", 0, "sampling"),
            [1],
            r"requests\[0\]\.sampling must be a mapping, not a list of 1",
        ),
        (("requests", 0, "turns"), [["x"]], r"requests\[0\]\.turns\[0\]\[0\] must be int, not 'x'"),
        (("actions", 0, "steps"), 1e308, r"actions\[0\]\.steps must be int"),
        (("actions", 0, "when", "tokens"), "1", r"actions\[0\]\.when\.tokens must be int, not '1'"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(place: tuple[Any, ...], value: Any, message: str) -> None:
    """The error names the field of the file: a run would crash on it as if by a rollproof bug."""
    data = copy.deepcopy(_CASE.to_dict())
    holder: Any = data
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value

    with pytest.raises(CaseError, match=f"This is not a case: {message}"):
        Case.from_dict(data)
