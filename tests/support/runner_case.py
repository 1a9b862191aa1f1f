"""One case that most tests of the runner run, and the end of its request."""

from __future__ import annotations

from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.events.rollout import Result
from rollproof.core.records import Request
from rollproof.core.trace import Trace

__all__ = ["CASE", "result_of"]

CASE = Case(
    flavour="vllm",
    requests=(
        Request(request_id="r0", prompt_ids=(11, 12), max_tokens=4, sampling={"top_p": 1.0}),
    ),
    actions=(Action(when=Trigger(request="r0", tokens=2), do=ActionKind.SYNC),),
    deadline=500.0,
)


def result_of(trace: Trace) -> Result:
    """How the first request ended."""
    return next(event for event in trace.events if isinstance(event, Result))
