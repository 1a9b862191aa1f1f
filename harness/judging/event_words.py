"""Events of a trace in words, for what a finding says of the time before it."""

from __future__ import annotations

from collections.abc import Sequence

from rollproof.core.error_text import one_line
from rollproof.core.events.base import Event
from rollproof.core.events.corrections import Corrected
from rollproof.core.events.layouts import Laid
from rollproof.core.events.replay import Outcome, Step
from rollproof.core.events.rollout import (
    Abort,
    Admit,
    Call,
    Fault,
    Flush,
    Gauge,
    Observation,
    Pause,
    Reply,
    Result,
    Resume,
    Submit,
    Unrecorded,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.events.training import Batch
from rollproof.core.events.weights import Adapter, AdapterChange, Checksums
from rollproof.core.records import FinishReason, Span, Version, spread

__all__ = [
    "describe",
    "describe_reply",
    "describe_result",
    "describe_submit",
    "described",
    "is_aborted",
    "named",
    "sampled_under",
    "tokens",
]

_LONGEST = 160
"""Characters of a text of the stack's own: a story has one line an event."""
_LONGEST_HANDLE = 40


def tokens(count: int) -> str:
    """Return ``1 token``, ``2 tokens``."""
    return _counted(count, "token")


def named(version: Version) -> str:
    """Return ``v3`` for the number 3; any other version as it is."""
    return f"v{version}" if isinstance(version, int) else str(version)


def is_aborted(reply: Reply) -> bool:
    """Return whether the engine was stopped before it came to an end of its own."""
    return reply.output.finish_reason is FinishReason.ABORT


def describe(event: Event) -> str:
    """Return an event that concerns a server or the environment in words.

    ``""`` for any other event.
    """
    if isinstance(event, Weights):
        return _describe_weights(event)
    if isinstance(event, Adapter):
        return _describe_adapter(event)
    if isinstance(event, Abort):
        return f"abort of {_describe_aborted(event)} on {event.server_id}"
    if isinstance(event, Pause):
        return f"pause of {event.server_id} ({event.mode})"
    if isinstance(event, Resume):
        return f"resume of {event.server_id}"
    if isinstance(event, Flush):
        return f"prefix cache of {event.server_id} dropped"
    if isinstance(event, Update):
        phase = "requested" if event.phase is UpdatePhase.ASKED else str(event.phase)
        return f"update to {named(event.version)} {phase}"
    if isinstance(event, Observation):
        return f"{tokens(len(event.token_ids))} of the environment"
    if isinstance(event, Fault):
        what = event.what.replace("-", " ")
        if event.call_id is not None:
            return f"{what} of call {event.call_id}"
        return f"{what} of {event.server_id}" if event.server_id is not None else what
    return ""


def _describe_aborted(event: Abort) -> str:
    """Return which calls an abort was for. A handle says something to its caller only if it met
    no call, or several: a caller that gives none never sees the one that the engine made up.
    """
    if event.wanted == "*":
        return "all calls"
    if len(event.call_ids) == 1:
        return f"call {event.call_ids[0]}"
    handle = _shortened(event.wanted, _LONGEST_HANDLE)
    if not event.call_ids:
        return handle
    return f"{handle} (calls {', '.join(map(str, event.call_ids))})"


def described(event: Event) -> str:
    """Return any event in words; its kind if there are none for it."""
    if isinstance(event, Submit):
        return describe_submit(event)
    if isinstance(event, Call):
        adapter = "" if event.adapter is None else f" by adapter {_shortened(event.adapter)}"
        sent = tokens(len(event.prompt_ids))
        return f"call {event.call_id} on {event.server_id} with {sent}{adapter}"
    if isinstance(event, Admit):
        return f"call {event.call_id} admitted on {event.server_id}"
    if isinstance(event, Reply):
        return f"call {event.call_id} {describe_reply(event)}"
    if isinstance(event, Result):
        return f"{event.request_id} {describe_result(event)}"
    if isinstance(event, Unrecorded):
        return f"{_counted(event.count, 'event')} not recorded: {_shortened(event.reason)}"
    if isinstance(event, Gauge):
        return f"{event.name} = {event.value:g} at the {event.phase} of the run"
    if isinstance(event, Checksums):
        owner = event.server_id or "the trainer"
        return f"{owner} told {_counted(len(event.digests), 'checksum')}"
    return describe(event) or _describe_training(event) or str(event.kind)


def _describe_training(event: Event) -> str:
    if isinstance(event, Step):
        samples = _counted(len(event.samples), "sample")
        return f"step {event.name} ({event.action}, {event.purpose}) with {samples}"
    if isinstance(event, Outcome):
        if event.error is not None:
            return f"step {event.step} raised {_shortened(event.error)}"
        return f"step {event.step} {'skipped' if event.skipped else 'done'}"
    if isinstance(event, Batch):
        samples = _counted(len(event.samples), "sample")
        if event.refused is not None:
            return f"batch {event.name} of {samples} refused: {_shortened(event.refused)}"
        return f"batch {event.name} of {samples} became {_counted(len(event.rows), 'row')}"
    if isinstance(event, Laid):
        error = event.refused or event.misfit
        return f"{event.function} {'returned' if error is None else f'failed: {_shortened(error)}'}"
    if isinstance(event, Corrected):
        error = event.refused or event.misfit
        outcome = "corrected" if error is None else f"failed: {_shortened(error)}"
        return f"batch {event.name!r} {outcome}"
    return ""


def describe_submit(event: Submit) -> str:
    """Return ``r0 submitted: 2 prompt tokens, at most 5 new``."""
    request = event.request
    prompt = _counted(len(request.prompt_ids), "prompt token")
    budget = "" if request.budget is None else f", at most {request.budget:,} new"
    group = "" if request.group is None else f", of group {request.group}"
    return f"{request.request_id} submitted: {prompt}{budget}{group}"


def describe_reply(reply: Reply) -> str:
    """Return ``sampled 3 tokens, 4 route rows, aborted``."""
    output = reply.output
    parts = [f"sampled {tokens(len(output.token_ids))}"]
    if output.routes is not None:
        parts.append(_counted(len(output.routes), "route row"))
    parts.append("aborted" if is_aborted(reply) else f"ended by {output.finish_reason}")
    if reply.duplicate:
        parts.append("answered again")
    if not reply.delivered:
        parts.append("not received")
    return ", ".join(parts)


def sampled_under(reply: Reply) -> str:
    """Return the weights of a reply: ``v0``, ``v0, v1 from token 2``, or, if only the engine's tag
    is known, ``tagged 0``; ``""`` if nothing is.
    """
    output, count = reply.output, len(reply.output.token_ids)
    if reply.true_tokens is not None:
        return _turns(reply.true_tokens, count)
    if output.spans:
        text = _turns(output.spans, count)
        return f"tagged {text}" if text else ""
    return "" if output.version is None else f"tagged {output.version}"


def _turns(spans: Sequence[Span], count: int) -> str:
    """Return each version, and the token from which on it is that one."""
    versions = spread(spans, count)
    places = [i for i in range(count) if i == 0 or versions[i] != versions[i - 1]]
    names = [(i, "unknown" if versions[i] is None else named(versions[i])) for i in places[:4]]
    more = ", ..." if len(places) > len(names) else ""
    return ", ".join(name if i == 0 else f"{name} from token {i}" for i, name in names) + more


def describe_result(event: Result) -> str:
    """Return how a request ended: ``delivered: 5 tokens, 9 route rows, ended by length``."""
    rollout = event.rollout
    if rollout is not None:
        parts = [tokens(len(rollout.response_ids))]
        if rollout.routes is not None:
            parts.append(_counted(len(rollout.routes), "route row"))
        if rollout.finish_reason is not None:
            parts.append(f"ended by {rollout.finish_reason}")
        if event.earlier:
            return f"delivered {len(event.samples):,} samples, the last of {', '.join(parts)}"
        return f"delivered: {', '.join(parts)}"
    if event.error is None:
        return "dropped: neither a sample nor an error"
    return f"{'hung' if event.hung else 'failed'}: {_shortened(event.error)}"


def _describe_weights(event: Weights) -> str:
    if not event.loaded:
        return f"label {event.label} published on {event.server_id}"
    label = "" if event.label in (None, event.version) else f" under the label {event.label}"
    equal = ", equal weights" if event.identity else ""
    if event.adapter is not None:
        adapter = _shortened(event.adapter)
        what = "load" if event.version is None else f"version {event.version}"
        return f"{what} of adapter {adapter} on {event.server_id}{label}{equal}"
    if event.version is None:
        # a recorder at the wire sees that weights are loaded, and not which
        return f"load of weights on {event.server_id}{label}{equal}"
    delta = "" if event.delta_of is None else f" by a delta from {named(event.delta_of)}"
    return f"sync to {named(event.version)} on {event.server_id}{label}{equal}{delta}"


def _describe_adapter(event: Adapter) -> str:
    adapter = f"adapter {_shortened(event.name)}"
    if event.change is AdapterChange.IGNORED:
        return f"load of {adapter} ignored by {event.server_id}, which has it"
    return f"{adapter} {event.change} on {event.server_id}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _shortened(text: str, longest: int = _LONGEST) -> str:
    text = one_line(text)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
