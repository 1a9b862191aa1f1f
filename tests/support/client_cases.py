"""One request under a reference manager, what is done to it, and what it hands over."""

from __future__ import annotations

from functools import partial
from typing import Any

from rollproof.core.case import Action, ActionKind, Case, Model, Trigger
from rollproof.core.events.rollout import Result
from rollproof.core.records import Request, Rollout
from rollproof.core.trace import Trace
from rollproof.verification.runner import run_case

MODEL = Model(num_layers=4, moe_layers=(1, 2, 3), num_experts=64, top_k=4)
R0 = Request(request_id="r0", prompt_ids=(11, 12, 13), max_tokens=6, sampling={"temperature": 1.0})


def act(do: ActionKind, tokens: int, **more: Any) -> Action:
    """An action of request r0 at ``tokens``."""
    when = {name: more.pop(name) for name in ("queued", "race") if name in more}
    return Action(when=Trigger(request="r0", tokens=tokens, **when), do=do, **more)


ABORT, SYNC = partial(act, ActionKind.ABORT), partial(act, ActionKind.SYNC)


def ran(factory: Any, *actions: Action, request: Request = R0, **changes: Any) -> Trace:
    """The trace of one request under ``factory``, on vLLM unless said otherwise."""
    return run_case(
        factory,
        Case(
            **{
                "flavour": "vllm",
                "requests": (request,),
                "actions": actions,
                "model": MODEL,
                **changes,
            }
        ),
    )


def rollout_of(trace: Trace) -> Rollout | None:
    """What was handed over; an error fails the test."""
    results = [event for event in trace if isinstance(event, Result)]
    assert [result.error for result in results] == [None]
    return results[0].rollout


def delivered(trace: Trace) -> Rollout:
    """The sample that was handed over."""
    rollout = rollout_of(trace)
    assert rollout is not None
    return rollout
