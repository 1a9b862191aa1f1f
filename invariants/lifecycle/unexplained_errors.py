"""A check on errors: a request ends with one only after a fault."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollproof.core.error_text import error_kind
from rollproof.core.events.rollout import (
    Call,
    Fault,
    Reply,
    Result,
    Submit,
    Unrecorded,
)
from rollproof.core.records import EngineOutput, FinishReason
from rollproof.invariants._shared.event_check import (
    EventCheck,
    remember,
)
from rollproof.invariants._shared.phrases import count
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = ["lifecycle_no_error_without_fault"]

# Faults of the fleet concern every open request, faults of a call only that one.
_FLEET_FAULTS = frozenset({"death", "revive", "update-failure", "update-hung"})
_BALANCING = frozenset({"leave", "join"})


class LifecycleNoErrorWithoutFault(EventCheck):
    """A stack must accept every legal engine reply: an empty abort, a read-only array, no
    logprobs.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._open: dict[str, bool] = {}
        self._calls: dict[int, tuple[tuple[str, ...], str]] = {}
        self._down: set[str] = set()

    def on_submit(self, event: Submit, out: Collector) -> None:
        budget = event.request.budget
        self._open[event.request.request_id] = bool(self._down) or (
            # A caller that requests no tokens may get an error.
            budget is not None and budget <= 0
        )

    def on_call(self, event: Call, out: Collector) -> None:
        # any of the requests that the call may be for may fail with it
        owners = (event.request_id, *event.candidates)
        remember(self._calls, event.call_id, (owners, event.server_id))

    def on_reply(self, event: Reply, out: Collector) -> None:
        if not event.delivered:
            self._excuse(event.call_id)

    def on_unrecorded(self, event: Unrecorded, out: Collector) -> None:
        # what was not recorded may have been the fault
        if event.call_id is not None:
            self._excuse(event.call_id)
        if event.request_id in self._open:
            self._open[event.request_id] = True

    def on_fault(self, event: Fault, out: Collector) -> None:
        # a replica outside the balancer goes on with its calls: nothing that may fail
        if event.what in _BALANCING:
            return
        if event.server_id is not None:
            if event.what == "death":
                self._down.add(event.server_id)
            elif event.what == "revive":
                self._down.discard(event.server_id)
        # Only the request of that call may fail.
        if event.call_id is not None and event.what not in _FLEET_FAULTS:
            self._excuse(event.call_id)
        elif event.what in _FLEET_FAULTS or event.server_id is None:
            self._open = dict.fromkeys(self._open, True)
        else:
            for call_id, (_, server) in self._calls.items():
                if server == event.server_id:
                    self._excuse(call_id)

    def _excuse(self, call_id: int) -> None:
        for request_id in self._calls.get(call_id, ((), ""))[0]:
            if request_id in self._open:
                self._open[request_id] = True

    def on_result(self, event: Result, out: Collector) -> None:
        excused = self._open.pop(event.request_id, None)
        if excused is None:
            return
        view = self.context.open.get(event.request_id)
        attempts = view.attempts if view is not None else []
        for attempt in attempts:
            self._calls.pop(attempt.call.call_id, None)
        out.exercised("requests that ended")
        if event.error is None or event.hung or excused:
            return
        replies = [attempt.consumed.output for attempt in attempts if attempt.consumed]
        last = (
            f"its last reply had {count(len(replies[-1].token_ids), 'token')}, finish reason"
            f" {replies[-1].finish_reason}"
            if replies
            else "no reply came"
        )
        out.finding(
            "a request failed although nothing went wrong",
            kind=f"a request failed: {error_kind(event.error)}",
            expected="a rollout: no server died, no reply was lost, no update failed",
            observed=f"{event.error}; {last}",
            where={"request": event.request_id, "index": event.index},
            hint=_cause_of(event.error, replies[-1] if replies else None),
        )


def _cause_of(error: str, last: EngineOutput | None) -> str:
    """Return the known cause that the error and the last reply show, if they show one."""
    if _OF_FAKE.search(error):
        return (
            "Your client calls its servers in another form than the fake server's methods have: put"
            " a small class between them that translates arguments and replies"
            " (docs/how-to/adapter.md)."
        )
    if _is_own(error):
        last = None
    if last is not None and (
        (last.routes is not None and _ARRAY.search(error))
        # `out.logprobs or []`
        or (last.logprobs is not None and _TRUTH.search(error))
    ):
        return (
            "A legal engine reply made the stack raise: it takes routes or logprobs for a list or a"
            " tensor, and the engine returned a numpy array (verl #7158). If your engine returns"
            " lists, convert them where your adapter reads the reply: `out.logprobs.tolist()`."
        )
    if last is not None and last.finish_reason is FinishReason.ABORT and not last.token_ids:
        return (
            "The last reply is an abort without tokens, which is legal: an engine answers so for a"
            " call that it had not begun (verl #5936, vime #49)."
        )
    return "The error is the stack's own: its class and text say where it was raised."


def _is_own(error: str) -> bool:
    """Whether the class and the text of an error say that no value of a reply can have caused it:
    a misspelt name, a wrong call.
    """
    kind = error.partition(":")[0]
    if kind == "AttributeError":
        lacking = _LACKING.search(error)
        if lacking is None or lacking[1] not in _OF_REPLIES:
            return True
        return lacking[1] == "numpy.ndarray" and lacking[2] not in _OF_LISTS_AND_TENSORS
    return kind in _MISSPELT or (kind == "TypeError" and _WRONG_CALL.search(error) is not None)


_MISSPELT = frozenset(
    ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError")
)
_OF_FAKE = re.compile(
    r"(FakeEngine|RayHandle)(\.\w+\(\) (got|missing|takes)|' object has no attribute)"
)
_WRONG_CALL = re.compile(r"(keyword|positional) argument")
_LACKING = re.compile(r"'([\w.]+)' object has no attribute '(\w+)'")
_OF_REPLIES = frozenset(("numpy.ndarray", "NoneType", "list", "tuple"))
"""Types of the values in a reply."""
_OF_LISTS_AND_TENSORS = frozenset(
    (*dir(list), "clone", "cpu", "detach", "device", "dim", "is_cuda", "numel", "numpy", "to")
)
"""Attributes that a stack may expect of routes which an engine returns as an array."""
_TRUTH = re.compile(r"truth value of an (empty )?array", re.IGNORECASE)
_ARRAY = re.compile(r"ndarray|numpy|truth value of an array", re.IGNORECASE)


lifecycle_no_error_without_fault: Check = trace_check(
    "lifecycle.no-error-without-fault",
    promise="A request ends with an error only after a fault that concerned it.",
    needs="Result, Fault and Call events",
    exercised_by="requests that ended",
)(LifecycleNoErrorWithoutFault)
