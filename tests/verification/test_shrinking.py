"""Shrinking: a failing case becomes small, and stays failing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollproof.core.case import Action, ActionKind, Case, EngineOptions, Model, Trigger
from rollproof.core.records import Request
from rollproof.errors import CaseError
from rollproof.verification.shrinking import shrink


def _case() -> Case:
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=tuple(range(i, i + 9)), max_tokens=12)
        for i in range(4)
    )
    kinds = list(ActionKind)
    actions = tuple(
        Action(when=Trigger(request=f"r{i % 4}", tokens=i), do=kinds[i % 4]) for i in range(8)
    )
    return Case(
        flavour="vllm",
        requests=requests,
        actions=actions,
        servers=3,
        model=Model(num_layers=4, moe_layers=(1, 2), num_experts=64, top_k=8),
        engine=EngineOptions(prefix_cache=True, kv_tokens=40),
        arrivals=(0.0, 1.0, 2.0, 3.0),
    )


def test_only_what_matters_is_left() -> None:
    """A failure that needs one abort of one request shrinks to one request with one abort."""
    small = shrink(
        _case(), lambda case: any(action.do is ActionKind.ABORT for action in case.actions)
    )

    assert (1, 1, 1, 1, 1) == (
        len(small.requests),
        len(small.actions),
        len(small.requests[0].prompt_ids),
        small.requests[0].max_tokens,
        small.servers,
    )
    assert (Model(), EngineOptions()) == (small.model, small.engine)


def test_what_is_needed_is_kept() -> None:
    """A failure that needs two requests and a prefix cache keeps both."""
    small = shrink(_case(), lambda case: len(case.requests) >= 2 and case.engine.prefix_cache)

    assert (2, True, 0) == (len(small.requests), small.engine.prefix_cache, len(small.actions))


def test_cases_that_cannot_be_run_do_not_count_as_failing() -> None:
    """A simplification that the runner refuses is not taken."""

    def fails(case: Case) -> bool:
        if len(case.requests) < 4:
            raise CaseError("no")
        return True

    assert 4 == len(shrink(_case(), fails).requests)


def test_the_number_of_tries_is_bounded() -> None:
    """Shrinking runs at most as many cases as it was allowed."""
    runs = []
    shrink(_case(), lambda case: bool(runs.append(case)), tries=7)

    assert 7 == len(runs)


def test_requests_of_a_case_have_different_prompts() -> None:
    """Two requests of one prompt cannot be told apart and are refused, unless they are a group."""
    case = _case()
    twin = replace(case.requests[0], request_id="twin")

    with pytest.raises(CaseError, match="share a prompt"):
        replace(case, requests=(*case.requests, twin), arrivals=())
