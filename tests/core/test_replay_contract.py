"""Replay terms are complete, or refused with every problem at once; a contract holds them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollproof.core.contract import Contract, LayerAxis, Rows
from rollproof.core.replay_contract import (
    Defect,
    FreeRows,
    Installs,
    Recompute,
    ReplayMode,
    ReplayTerms,
)
from rollproof.core.trainer_contract import terms_of, trainer_contract
from rollproof.errors import ContractError
from tests.support.trace_builder import contract


def declared(**changes: Any) -> Contract:
    """A small trainer's contract."""
    sizes = {"num_layers": 3, "moe_layers": (1, 2), "num_experts": 8, "top_k": 2}
    return trainer_contract(
        **{**sizes, "mode": "R3", "free_rows": "native", "vocab": 96, **changes}
    )


def test_plain_strings_become_enum_members() -> None:
    """The strings of the documentation are accepted in place of enum members, in lists too."""
    made = declared(
        recompute=("none", "full"),
        installs="per-call",
        tolerates=("short",),
        layer_axis="moe",
        rows="captured-prefix",
    )

    terms = terms_of(made)
    assert (ReplayMode.R3, FreeRows.NATIVE, Installs.PER_CALL) == (
        terms.mode,
        terms.free_rows,
        terms.installs,
    )
    assert ((Recompute.NONE, Recompute.FULL), (Defect.SHORT,)) == (terms.recompute, terms.tolerates)
    assert (LayerAxis.MOE, Rows.CAPTURED_PREFIX) == (made.layer_axis, made.rows)


def test_json_round_trip() -> None:
    """A contract with terms survives its JSON form."""
    made = declared(
        models=("critic",),
        mtp=True,
        unsupported=("fused",),
        tolerance=0.01,
        parallel="tp2",
        recompute=("full",),
    )

    assert made == Contract.from_dict(json.loads(json.dumps(made.to_dict())))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mode": "R4"}, r"mode='R4' is not valid; choose one of \['R2', 'R3'\]"),
        (
            {"recompute": ("some",)},
            r"recompute=\('some',\) is not valid; choose some of \['none', 'selective', 'full'\]",
        ),
        ({"recompute": 3}, "recompute=3 is not valid"),
        ({"vocab": 1}, "vocab=1 must be a whole number >= 2"),
        ({"microbatches": 0}, "microbatches=0 must be a whole number >= 1"),
        ({"models": ("policy",)}, "'policy' is the one that is trained"),
        ({"models": "critic"}, "models='critic' must be a tuple of names"),
        ({"tolerance": 1.5}, "tolerance=1.5 must be a number from 0"),
        ({"mode": "R2"}, "records=True must be declared"),
        ({"mode": "R2", "vocab": 0}, "vocab=0 must be a whole number >= 2.\n  - mode='R2'"),
        ({"replays": True}, "The replay terms are incomplete: .*'replays'"),
    ],
)
def test_problems_are_named(changes: dict[str, Any], problem: str) -> None:
    """What is missing, ill-typed or contradictory is refused with the term and the valid values."""
    with pytest.raises(ContractError, match=problem):
        declared(**changes)


def test_terms_and_their_fields_exclude_each_other() -> None:
    """A contract is not made of terms and fields that may contradict them."""
    terms = ReplayTerms(mode=ReplayMode.R3, free_rows=FreeRows.NATIVE, vocab=96)
    with pytest.raises(
        ContractError,
        match=r"Give the terms or their fields, not both: \['free_rows', 'mode', 'vocab'\]",
    ):
        declared(terms=terms)


def test_unknown_terms_of_a_file_are_refused() -> None:
    """A file of a newer or misspelt form is told apart."""
    with pytest.raises(ContractError, match=r"Unknown replay terms \['modes'\]"):
        ReplayTerms.from_dict({"modes": "R3"})
    with pytest.raises(ContractError, match=r"Required: mode, free_rows, vocab"):
        ReplayTerms.from_dict({"mode": "R3"})


def test_a_contract_without_terms_is_no_trainers() -> None:
    """Asking a rollout contract for replay terms says how to make one."""
    with pytest.raises(
        ContractError, match=r"make it with rollproof\.replay.contract.trainer_contract"
    ):
        terms_of(contract())
