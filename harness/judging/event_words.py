"""Events of a trace in words, for what a finding says of the time before it."""

from __future__ import annotations

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Abort,
    Fault,
    Observation,
    Pause,
    Reply,
    Resume,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.records import FinishReason, Version

__all__ = ["describe", "is_aborted", "named"]


def is_aborted(reply: Reply) -> bool:
    return reply.output.finish_reason is FinishReason.ABORT


def describe(event: Event) -> str:
    """Return an event in words; ``""`` for an aborted reply, which only its request can name."""
    if isinstance(event, Weights):
        return _describe_weights(event)
    if isinstance(event, Abort):
        wanted = "all calls" if event.wanted == "*" else event.wanted
        return f"abort of {wanted} on {event.server_id}"
    if isinstance(event, Pause):
        return f"pause of {event.server_id} ({event.mode})"
    if isinstance(event, Resume):
        return f"resume of {event.server_id}"
    if isinstance(event, Update):
        phase = "requested" if event.phase is UpdatePhase.ASKED else str(event.phase)
        return f"update to {named(event.version)} {phase}"
    if isinstance(event, Observation):
        tokens = len(event.token_ids)
        return f"{tokens} token{'' if tokens == 1 else 's'} of the environment"
    if isinstance(event, Fault):
        what = event.what.replace("-", " ")
        if event.call_id is not None:
            return f"{what} of call {event.call_id}"
        return f"{what} of {event.server_id}" if event.server_id is not None else what
    return ""


def _describe_weights(event: Weights) -> str:
    if not event.loaded:
        return f"label {event.label} published on {event.server_id}"
    label = "" if event.label in (None, event.version) else f" under the label {event.label}"
    equal = ", equal weights" if event.identity else ""
    return f"sync to {named(event.version)} on {event.server_id}{label}{equal}"


def named(version: Version) -> str:
    """``v3`` for the number 3; any other version as it is."""
    return f"v{version}" if isinstance(version, int) else str(version)
