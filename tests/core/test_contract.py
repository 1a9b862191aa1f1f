"""Contracts: complete or refused, with every problem named at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollproof.core.contract import Contract, Filler, LayerAxis, MaskedTokens, Provenance, Rows
from rollproof.errors import ContractError
from tests.support.trace_builder import contract


def test_plain_strings_become_enum_members() -> None:
    """The strings of the documentation are accepted in place of enum members."""
    made = contract(rows="T-1", provenance="latest-prefill")

    assert Rows.FORWARDED is made.rows
    assert Provenance.LATEST_PREFILL is made.provenance


def test_json_round_trip() -> None:
    """A contract survives its JSON form."""
    made = contract(
        moe_layers=(1, 2), rows="T", final_row="arange", max_staleness=2, partial_off="dropped"
    )

    assert made == Contract.from_dict(json.loads(json.dumps(made.to_dict())))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"rows": "T-2"},
            r"rows='T-2' is not valid; choose one of \['T', 'T-1', 'captured-prefix', 'none'\]",
        ),
        ({"top_k": None}, "top_k must be declared when the subject returns routes"),
        ({"top_k": 9}, "top_k=9 exceeds num_experts=8"),
        ({"top_k": 2.0}, "top_k=2.0 must be a whole number >= 1"),
        ({"top_k": True}, "top_k=True must be a whole number >= 1"),
        ({"moe_layers": (2, 1)}, "must be ascending, distinct layer indexes below num_layers=3"),
        ({"moe_layers": (0, 3)}, "must be ascending, distinct layer indexes below num_layers=3"),
        ({"moe_layers": ()}, "at least one"),
        ({"rows": "T"}, "final_row must be declared"),
        ({"rows": "T", "final_row": "none"}, "rows='T' needs a final_row filler"),
        ({"final_row": "zeros"}, "final_row=zeros contradicts rows=T-1"),
        ({"dtype": "float32"}, r"dtype \['float32'\] is not an integer type"),
        ({"max_staleness": -1}, "max_staleness=-1 must be a whole number >= 0"),
        ({"abort_surfaces": "no"}, "abort_surfaces must be a bool, not 'no'"),
        ({"resume": None}, "resume must be declared"),
    ],
)
def test_problems_are_named(changes: dict[str, Any], problem: str) -> None:
    """Missing, ill-typed and contradictory values are refused with the field and the valid ones."""
    with pytest.raises(ContractError, match=problem):
        contract(**changes)


def test_a_filler_that_no_value_of_the_type_can_be_is_refused() -> None:
    """-1 does not exist in an unsigned type; where a signed one may be chosen, or the type is
    merely narrow, samples decide.
    """
    for name in ("filler", "final_row"):
        with pytest.raises(
            ContractError,
            match=(
                rf"{name}='minus-one' contradicts dtype='uint8\|uint16': no unsigned type holds -1"
            ),
        ):
            contract(
                **{"rows": "T", "final_row": "arange", "dtype": "uint8|uint16", name: "minus-one"}
            )

    assert ("uint8", "int16") == contract(filler="minus-one", dtype="uint8|int16").dtypes
    assert 300 == contract(dtype="uint8", num_experts=300).num_experts


def test_routes_fields_without_routes_contradict() -> None:
    """A contract without rows may not declare route fields, so none is checked by accident."""
    with pytest.raises(ContractError, match="rows='none' contradicts the declared"):
        contract(rows="none", top_k=2)


def test_all_problems_come_at_once() -> None:
    """A user fixes a contract in one edit, not in ten."""
    with pytest.raises(ContractError) as caught:
        contract(rows="x", resume="y", kv_policy="z")

    assert 3 == str(caught.value).count("is not valid")


@pytest.mark.parametrize("data", [{}, {"rows": "T-1"}, {"rows": "none", "colour": 1}])
def test_from_dict_refuses_other_data(data: dict[str, Any]) -> None:
    """Missing and unknown keys are refused in our own words."""
    with pytest.raises(ContractError):
        Contract.from_dict(data)


@pytest.mark.parametrize("data", [None, 3, "rows", ["rows"]])
def test_only_a_mapping_is_read_as_a_contract(data: Any) -> None:
    """Anything else in a file is named, in our own words."""
    with pytest.raises(ContractError, match="A contract must be a mapping of its fields, not"):
        Contract.from_dict(data)


def test_keys_of_a_file_may_be_anything() -> None:
    """Unknown keys that cannot be ordered are named all the same."""
    with pytest.raises(ContractError, match=r"Unknown contract fields \['1', 'None', 'colour'\]"):
        Contract.from_dict({"colour": 1, 1: 2, None: 3})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "changes",
    [
        {"filler": "none"},
        {"filler": "none", "missing_logprobs": "nan", "logprobs": "none"},
        {"rows": "none"},
        {"rows": "none", "missing_logprobs": "masked", "logprobs": "none"},
    ],
    ids=str,
)
def test_gaps_need_something_in_their_place(changes: dict[str, Any]) -> None:
    """A stack that takes replies with gaps says what a sample holds there, of logprobs or rows."""
    with pytest.raises(
        ContractError, match="reply_gaps=True contradicts the rest: nothing says what a sample"
    ):
        contract(reply_gaps=True, **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"filler": "none", "missing_logprobs": "nan"}, (True, False)),
        ({"filler": "zeros"}, (False, True)),
        ({"filler": "none", "rows": "captured-prefix"}, (False, True)),
        ({"rows": "none", "missing_logprobs": "masked"}, (True, False)),
        ({"filler": "arange", "missing_logprobs": "nan"}, (True, True)),
    ],
    ids=str,
)
def test_the_declared_parts_may_be_absent(
    changes: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    """Only what the contract gives something for may be absent, and only with ``reply_gaps``."""
    made = contract(reply_gaps=True, **changes)
    assert expected == (made.may_lack_logprobs, made.may_lack_routes)
    without = contract(**changes)
    assert (False, False) == (without.may_lack_logprobs, without.may_lack_routes)


def test_columns_of_the_layer_axis() -> None:
    """Under ``all`` a column is a layer, under ``moe`` the n-th MoE layer."""
    dense_first = contract(num_layers=4, moe_layers=(1, 3))
    compressed = contract(num_layers=4, moe_layers=(1, 3), layer_axis="moe")

    assert (4, (1, 3), 3) == (
        dense_first.route_layers,
        dense_first.moe_columns,
        dense_first.layer_of_column(3),
    )
    assert (2, (0, 1), 3) == (
        compressed.route_layers,
        compressed.moe_columns,
        compressed.layer_of_column(1),
    )
    assert LayerAxis.MOE is compressed.layer_axis


def test_no_routes_have_no_layers() -> None:
    """Asking for the layer axis of routes that do not exist is an error, not a zero."""
    with pytest.raises(ContractError, match="no layer axis"):
        contract(rows="none").route_layers  # noqa: B018 - the property raises

    assert Filler.NONE == "none"


def test_masked_tokens_are_names() -> None:
    """Plain names are accepted, and survive the way through JSON."""
    declared = contract(loss_mask=True, masked=("end", MaskedTokens.TRUNCATED))

    assert (MaskedTokens.END, MaskedTokens.TRUNCATED) == declared.masked
    assert declared == Contract.from_dict(json.loads(json.dumps(declared.to_dict())))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss_mask": True, "masked": ("overlong",)}, r"masked=\('overlong',\) must be a tuple"),
        ({"loss_mask": True, "masked": "truncated"}, "masked='truncated' must be a tuple"),
        ({"loss_mask": True, "masked": 1}, "masked=1 must be a tuple"),
        ({"masked": ("end",)}, "masked contradicts loss_mask=False"),
        ({"answer_template": True}, "answer_template contradicts multi_turn=False"),
        ({"samples": "turn"}, "samples='turn' contradicts multi_turn=False: a rollout is one turn"),
        ({"drops_samples": True}, "drops_samples=True contradicts samples='request'"),
        ({"repeats_tokens": True}, "repeats_tokens=True contradicts samples='request'"),
        ({"samples": "tree"}, "samples='tree' is not valid; choose one of"),
        ({"answer_template": 1}, "answer_template must be a bool or None, not 1"),
    ],
)
def test_terms_of_masks_and_turns_are_checked(fields: dict[str, Any], words: str) -> None:
    """A name that does not exist, and a term of what the subject does not do."""
    with pytest.raises(ContractError, match=words):
        contract(**fields)
