"""Cases of one short request on one server, what they come to, and what their traces show."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Reply
from rollproof.core.records import Request
from rollproof.core.trace import Recorder, Trace
from rollproof.fakes.clients.reference_clients import AsSampled
from rollproof.fakes.engine.fleet import Fleet
from rollproof.verification.runner import run_case

__all__ = ["R0", "R1", "act", "case", "fleet_of", "lengths", "ran", "seen"]

_E = TypeVar("_E", bound=Event)
R0 = Request(request_id="r0", prompt_ids=(11, 12), max_tokens=4)
R1 = Request(request_id="r1", prompt_ids=(11, 13), max_tokens=4)


def act(
    do: ActionKind,
    tokens: int = 2,
    *,
    request: str = "r0",
    queued: bool = False,
    race: bool = False,
    **more: Any,
) -> Action:
    """An action of request r0 at ``tokens``."""
    return Action(
        when=Trigger(request=request, tokens=tokens, queued=queued, race=race), do=do, **more
    )


def case(*actions: Action, **changes: Any) -> Case:
    """One request of four tokens on one vLLM server."""
    return Case(**{"flavour": "vllm", "requests": (R0,), "actions": actions, **changes})


def ran(*actions: Action, **changes: Any) -> Trace:
    """The trace of such a case under the client that resumes."""
    return run_case(AsSampled, case(*actions, **changes))


def fleet_of(*actions: Action, **changes: Any) -> Fleet:
    """The fleet of such a case."""
    return Fleet(case(*actions, **changes), Recorder(asyncio.get_running_loop().time))


def seen(events: Trace | Fleet, kind: type[_E]) -> list[_E]:
    """Events of one kind."""
    return [
        event
        for event in (events if isinstance(events, Trace) else events.recorder.events)
        if isinstance(event, kind)
    ]


def lengths(trace: Trace) -> list[int]:
    """Tokens of each reply."""
    return [len(reply.output.token_ids) for reply in seen(trace, Reply)]
