"""The stacks with a bound on staleness keep it, and end, under updates that few schedules have."""

from __future__ import annotations

from typing import Any

from rollproof.core.case import Action, ActionKind, Case, EngineOptions, Model, Trigger
from rollproof.core.events.rollout import Call, Result
from rollproof.core.records import Request
from rollproof.core.trace import Trace
from rollproof.verification.runner import run_case
from rollproof.verification.traces import judge
from tests.odd_stacks.odd_updates import TooOldIsDropped, TooOldIsSampledAnew


def _ran(stack: Any, requests: dict[str, tuple[float, int]], *actions: Action) -> Trace:
    """Requests by id, each with its arrival and number of tokens."""
    return run_case(
        stack,
        Case(
            flavour="vllm",
            requests=tuple(
                Request(request_id=name, prompt_ids=(3 + number,), max_tokens=tokens)
                for number, (name, (_, tokens)) in enumerate(requests.items())
            ),
            arrivals=tuple(arrival for arrival, _ in requests.values()),
            actions=actions,
            model=Model(num_layers=4, moe_layers=(1, 2, 3), num_experts=16, top_k=2),
            engine=EngineOptions(pause_steps=2),
        ),
    )


def _act(do: ActionKind, request: str, tokens: int = 0, steps: int = 1) -> Action:
    return Action(when=Trigger(request=request, tokens=tokens), do=do, steps=steps)


def test_tokens_without_a_label_have_the_age_of_their_weights() -> None:
    """Weights that had a label are loaded again without it, and two updates follow."""
    trace = _ran(
        TooOldIsDropped,
        {"late": (17.0, 3), "early": (9.5, 1)},
        _act(ActionKind.SYNC_TWICE, "late"),
        _act(ActionKind.SYNC_UNLABELLED, "early"),
        _act(ActionKind.SYNC_IDENTITY, "early"),
    )
    assert () == judge(trace).failed
    samples = {event.request_id: event.rollout for event in trace if isinstance(event, Result)}
    assert samples["early"] is not None
    assert samples["late"] is None


def test_a_server_that_missed_updates_ends_the_tries() -> None:
    """It dies before they load, and is restarted with its old weights: any further sample would
    be as old.
    """
    trace = _ran(
        TooOldIsSampledAnew,
        {"r0": (0.0, 4)},
        _act(ActionKind.SYNC_TWICE, "r0", tokens=1),
        _act(ActionKind.KILL, "r0", tokens=1, steps=12),
    )
    assert () == judge(trace).failed
    assert [None] == [event.error for event in trace if isinstance(event, Result)]
    assert 30 > sum(isinstance(event, Call) for event in trace)
