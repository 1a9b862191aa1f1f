"""Drawn cases: repeatable from a seed, well-formed, varied, and shrunk to what matters."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from itertools import islice

import pytest
from hypothesis import find, given, settings

from rollproof.core.case import ActionKind, Case, Model
from rollproof.core.contract import Adapters, Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.json_codec import to_json
from rollproof.core.limits import RolloutLimits
from rollproof.errors import UsageError
from rollproof.verification.schedules import Limits, random_cases, scope_families
from rollproof.verification.schedules.strategies import cases, models
from tests.verification.schedules.test_exhaustive import contract

CLIENT = contract()


def digest(seed: int, count: int, **changes: object) -> str:
    drawn = random_cases(seed, count, flavour="vllm", contract=CLIENT, **changes)  # type: ignore[arg-type]
    # without fields that have their default: a case stays the same when a field is added
    values = [to_json(case) for case in drawn]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def prompts_are_prefix_free(case: Case) -> bool:
    prompts = {request.prompt_ids for request in case.requests}
    return not any(a != b and a == b[: len(a)] for a in prompts for b in prompts)


def test_a_seed_names_the_same_cases_for_ever() -> None:
    """The first cases of a seed are pinned: a report's seed repeats its run on another Python and
    another day.
    """
    assert digest(0, 50) == "5ffa80044bbb6a42"


def test_case_i_does_not_depend_on_how_many_are_drawn() -> None:
    """The first cases of a longer run are those of a shorter one, and another seed gives others."""
    few = list(random_cases(7, 5, flavour="vllm", contract=CLIENT))
    many = list(random_cases(7, 20, flavour="vllm", contract=CLIENT))
    assert few == many[:5]
    assert digest(7, 5) != digest(8, 5)


def test_random_cases_cover_what_they_promise() -> None:
    """1,000 cases reach every kind of action that the contract allows, every number of servers, the
    borders of the model sizes, and every option.
    """
    drawn = list(random_cases(0, 1000, flavour="vllm", contract=contract(partial_off="dropped")))
    kinds = Counter(action.do for case in drawn for action in case.actions)
    gaps = {ActionKind.DROP_ROUTES, ActionKind.DROP_LOGPROBS}
    # An abort by handle differs from one of a call in groups that share handles, which corner
    # cases have; the kinds of adapters take the place of others.
    never = {ActionKind.ABORT_HANDLE, ActionKind.SYNC_MERGED, ActionKind.EVICT_ADAPTERS}
    assert set(ActionKind) - gaps - never == set(kinds)
    assert {0, 17} == {case.first_version for case in drawn}
    assert {True, False} == {case.model.wide_logprobs for case in drawn}
    assert {1, 2, 3, 4, 5, 6} == {case.engine.transfer_steps for case in drawn}
    assert {0, 1, 2, 3} == {case.engine.pause_steps for case in drawn}
    assert {True, False} == {case.engine.empty_text for case in drawn}
    assert any(
        case.model.eos_id in request.prompt_ids for case in drawn for request in case.requests
    )
    assert {1, 2, 3, 4} == {case.servers for case in drawn}
    assert {PauseMode.ABORT, PauseMode.WAIT} == {case.pause_mode for case in drawn}
    experts = {case.model.num_experts for case in drawn}
    assert {2, 256, 1024} <= experts and any(257 <= number <= 1023 for number in experts)
    assert {1, 16} <= {case.model.top_k for case in drawn}
    assert any(case.model.moe_layers[0] > 0 for case in drawn)
    assert (
        {True, False}
        == {case.engine.prefix_cache for case in drawn}
        == {case.partial for case in drawn}
    )
    assert any(case.engine.prefill_chunk for case in drawn) and any(
        case.engine.kv_tokens for case in drawn
    )
    assert any(request.group for case in drawn for request in case.requests)
    assert all(prompts_are_prefix_free(case) for case in drawn)


def test_swarm_leaves_kinds_out() -> None:
    """Of the cases with five actions or more, most use only a part of the kinds: a subset is drawn
    first.
    """
    drawn = [
        case
        for case in random_cases(0, 1000, flavour="vllm", contract=CLIENT)
        if len(case.actions) >= 5
    ]
    repeated = sum(len({a.do for a in case.actions}) < len(case.actions) for case in drawn)
    assert len(drawn) > 300
    assert repeated / len(drawn) > 0.6


def test_choices_can_be_fixed() -> None:
    """kinds, model, modes and limits bound what is drawn."""
    model = Model(num_layers=2, moe_layers=(1,), num_experts=4, top_k=1)
    drawn = list(
        random_cases(
            3,
            200,
            flavour="vllm",
            contract=contract(multi_turn=True),
            kinds=(ActionKind.ABORT,),
            model=model,
            modes=(PauseMode.WAIT,),
            limits=Limits(requests=2, response=3, servers=1, actions=1, turns=2),
        )
    )
    assert {ActionKind.ABORT} == {a.do for case in drawn for a in case.actions}
    assert {4} == {case.model.num_experts for case in drawn}
    assert {PauseMode.WAIT} == {case.pause_mode for case in drawn}
    assert {1, 2} == {len(case.requests) for case in drawn}
    assert {0, 1, 2} == {len(request.turns) for case in drawn for request in case.requests}
    assert {1, 2, 3} == {request.budget for case in drawn for request in case.requests}


@pytest.mark.parametrize("length", [2, 3, 6])
def test_cases_are_within_the_declared_limits(length: int) -> None:
    """Whoever draws or enumerates them: each prompt leaves room for a token, and requests still
    differ in their prompts.
    """
    declared = contract(limits=RolloutLimits(response=4, length=length))
    drawn = [
        *random_cases(3, 100, flavour="vllm", contract=declared),
        *(case for _, cases in scope_families("vllm", declared) for case in islice(cases, 20)),
    ]
    assert {length} == {request.max_length for case in drawn for request in case.requests}
    assert {4} == {
        max(request.limit or 0 for case in drawn for request in case.requests),
    }
    assert length - 1 == max(len(request.prompt_ids) for case in drawn for request in case.requests)
    assert max(len(case.requests) for case in drawn) > 1


def test_turns_are_drawn_for_multi_turn_contracts_alone() -> None:
    """A stack that does not drive turns is not asked to, whatever the limits; one that does mostly
    gets a model that ends its own.
    """
    limits = Limits(turns=3)
    assert not any(
        r.turns
        for case in random_cases(1, 100, flavour="vllm", contract=CLIENT, limits=limits)
        for r in case.requests
    )
    drawn = list(random_cases(1, 100, flavour="vllm", contract=contract(multi_turn=True)))
    talkative = [case for case in drawn if any(request.turns for request in case.requests)]
    assert len(talkative) > 60
    assert sum(case.model.eos_every is not None for case in talkative) > 0.6 * len(talkative)


def test_rollproof_brings_no_weights_to_a_stack_of_adapters() -> None:
    """It does not know by what names the stack calls them: merges and evictions take their place,
    and a stack whose base model is fixed gets no merges.
    """
    own = {ActionKind.SKEW, ActionKind.LAG, ActionKind.RELABEL}
    merge, evict = ActionKind.SYNC_MERGED, ActionKind.EVICT_ADAPTERS
    for adapters, absent, present in [
        (None, {merge, evict}, own),
        (Adapters.MOVING_BASE, own, {merge, evict}),
        (Adapters.FROZEN_BASE, {*own, merge}, {evict}),
    ]:
        declared = contract(adapters=adapters)
        kinds = {
            action.do
            for case in random_cases(5, 200, flavour="vllm", contract=declared)
            for action in case.actions
        }
        assert (set(), present) == (kinds & absent, kinds & present)


@settings(max_examples=60, deadline=None)
@given(cases(flavour="sglang", contract=CLIENT))
def test_hypothesis_draws_cases_that_survive_json(case: Case) -> None:
    """Every case is well-formed, its prompts tell requests apart, its KV fits one request, and JSON
    gives it back.
    """
    assert prompts_are_prefix_free(case)
    assert case == Case.from_dict(json.loads(json.dumps(case.to_dict())))
    longest = max(len(request.prompt_ids) + (request.budget or 0) for request in case.requests)
    assert case.engine.kv_tokens is None or case.engine.kv_tokens > longest


@settings(max_examples=60, deadline=None)
@given(models())
def test_hypothesis_draws_models_that_a_contract_accepts(model: Model) -> None:
    """Every model describes a contract: MoE layers within the depth, no more experts a token than
    there are.
    """
    Contract(
        rows="T-1",  # type: ignore[arg-type]
        resume="client",  # type: ignore[arg-type]
        versions="none",  # type: ignore[arg-type]
        logprobs="raw",  # type: ignore[arg-type]
        abort_surfaces=False,
        kv_policy="keep",  # type: ignore[arg-type]
        layer_axis="all",  # type: ignore[arg-type]
        num_layers=model.num_layers,
        moe_layers=model.moe_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        filler="none",  # type: ignore[arg-type]
        dtype="int32",
        provenance="as-sampled",  # type: ignore[arg-type]
    )


def test_hypothesis_shrinks_to_the_actions_that_matter() -> None:
    """Looking for a case with two aborts ends at one request, one server and two actions."""
    smallest = find(
        cases(flavour="vllm", contract=CLIENT),
        lambda case: sum(a.do is ActionKind.ABORT for a in case.actions) >= 2,
        settings=settings(max_examples=500, deadline=None, database=None),
        random=random.Random(0),
    )
    assert (len(smallest.requests), smallest.servers, len(smallest.actions)) == (1, 1, 2)
    assert (smallest.requests[0].prompt_ids, smallest.requests[0].budget) == ((2,), 1)


def test_limits_that_describe_no_case_are_refused() -> None:
    """A limit below its least value is refused by name."""
    with pytest.raises(UsageError, match="requests=0 must be at least 1"):
        Limits(requests=0)
