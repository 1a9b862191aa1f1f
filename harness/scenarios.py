"""Scenarios: what a trace exercised, counted for the report.

A green report says little if no abort ever landed mid-decode; the table of these counts says which situations were met.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollproof.records import FinishReason, Version
from rollproof.trace import Abort, Admit, Call, Event, Fault, Observation, Pause, Reply, Result, Resume, Submit, Weights

__all__ = ["Scenarios"]

_FAULTS = {
    "lost-reply": "lost replies",
    "late-reply": "late replies",
    "duplicate-reply": "duplicate replies",
    "reject": "rejected calls",
    "death": "server deaths",
    "revive": "server revivals",
    "update-failure": "failed weight updates",
}


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    budget: int | None
    calls: int = 0
    got: int = 0
    versions: list[Version] = field(default_factory=list)
    aborted: bool = False
    turns: int = 0


@dataclass(slots=True)
class _Sent:
    """A call that was not answered."""

    request: str
    server: str
    max_tokens: int | None
    admits: int = 0


class Scenarios:
    """Counts the situations of one trace, or of several that are fed one after another (``end`` between them).

    Memory holds the open requests and calls. ``counts`` has only names that occurred.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._end_of_trace()
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Submit: self._submit,
            Call: self._call,
            Admit: self._admit,
            Reply: self._reply,
            Abort: self._abort,
            Pause: self._pause,
            Resume: self._resume,
            Weights: self._weights,
            Observation: self._observation,
            Fault: self._fault,
            Result: self._result,
        }

    def _end_of_trace(self) -> None:
        self._open: dict[str, _Open] = {}
        self._sent: dict[int, _Sent] = {}
        self._busy: dict[str, int] = {}
        self._versions: dict[str, Version] = {}
        self._out_of_step = False

    def event(self, event: Event) -> None:
        """Take one event."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def end(self) -> None:
        """The trace has ended; the next event belongs to another run."""
        self._end_of_trace()

    @property
    def counts(self) -> dict[str, int]:
        """How often each situation occurred, by name, sorted by name."""
        return dict(sorted(self._counts.items()))

    def _add(self, name: str, times: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + times

    def _submit(self, event: Submit) -> None:
        self._add("requests")
        if self._open:
            self._add("requests in parallel")
        self._open[event.request.request_id] = _Open(event.request.budget)

    def _call(self, event: Call) -> None:
        self._sent[event.call_id] = _Sent(event.request_id, event.server_id, event.max_tokens)
        request = self._open.get(event.request_id)
        if request is not None:
            request.calls += 1
            if request.aborted:
                self._add("resumes")
                request.aborted = False

    def _admit(self, event: Admit) -> None:
        call = self._sent.get(event.call_id)
        if call is None:
            return
        call.admits += 1
        if call.admits > 1:
            self._add("preemptions")
        else:
            self._busy[call.server] = self._busy.get(call.server, 0) + 1

    def _reply(self, event: Reply) -> None:
        call = self._sent.pop(event.call_id, None)
        if call is None:
            return
        if call.admits:
            self._busy[call.server] -= 1
        output = event.output
        tokens = len(output.token_ids)
        self._add("tokens sampled", tokens)
        if not tokens:
            self._add("zero-token segments")
        if output.cached_tokens:
            self._add("prefix-cache hits")
        if output.routes is not None:
            self._add("route rows", len(output.routes))
        reason = output.finish_reason
        if reason is FinishReason.ABORT:
            self._add(_abort_name(call, tokens))
        elif reason is FinishReason.STOP:
            self._add(
                "ends by EOS before the budget" if call.max_tokens is None or tokens < call.max_tokens else "ends by EOS on the budget"
            )
        elif call.max_tokens is not None and tokens >= call.max_tokens:
            self._add("budgets exhausted")
        request = self._open.get(call.request)
        if request is None or not event.delivered or event.duplicate:
            return
        request.got += tokens
        request.aborted = reason is FinishReason.ABORT
        before = len(request.versions)
        for span in event.true_tokens if event.true_tokens is not None else output.spans:
            if span.end > span.start and span.version is not None and span.version not in request.versions:
                request.versions.append(span.version)
        if before and len(request.versions) > before:
            self._add("resumes across a weight version")

    def _abort(self, event: Abort) -> None:
        self._add("aborts asked for" if event.call_ids else "aborts of nothing in flight")

    def _pause(self, event: Pause) -> None:
        self._add(f"pauses, mode {event.mode}")

    def _resume(self, event: Resume) -> None:
        self._add("resumes of a server")

    def _weights(self, event: Weights) -> None:
        if not event.loaded:
            self._add("labels published without weights")
            return
        if not self._open:
            self._add("weight updates while idle")
        elif self._busy.get(event.server_id):
            self._add("weight updates while calls ran")
        else:
            self._add("weight updates between calls")
        if event.identity:
            self._add("identity updates")
        if event.label is None:
            self._add("weight updates without a label")
        self._versions[event.server_id] = event.version

    def _observation(self, event: Observation) -> None:
        request = self._open.get(event.request_id)
        if request is not None:
            request.turns += 1

    def _fault(self, event: Fault) -> None:
        self._add(_FAULTS.get(event.what, event.what))

    def _result(self, event: Result) -> None:
        request = self._open.pop(event.request_id, None)
        if request is None:
            return
        if event.hung:
            self._add("requests that hung")
        elif event.error is not None:
            self._add("requests that ended with an error")
        elif event.rollout is None:
            self._add("requests dropped")
        if request.turns:
            self._add("multi-turn rollouts")
        if len(request.versions) > 2:
            self._add("rollouts across two or more updates")


def _abort_name(call: _Sent, tokens: int) -> str:
    if not call.admits:
        return "aborts while queued"
    if not tokens:
        return "aborts before the first token"
    if call.max_tokens is not None and tokens >= call.max_tokens:
        return "aborts on the last token"
    return "aborts mid-decode"
