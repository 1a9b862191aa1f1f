"""Short traces about servers, updates and faults, told event by event, and what one check says of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Abort, Admit, Call, Fault, Gauge, Observation
from rollproof.core.oracle import Oracle
from rollproof.core.trace import Trace
from rollproof.invariants import default_registry, lifecycle, weights
from rollproof.judging.checks import CheckResult, Finding, Verdict
from rollproof.judging.registry import Registry
from rollproof.verification.traces import judge
from tests.support.trace_builder import TraceBuilder, contract

FREEZING = (PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE)
"""Pauses that keep running calls where they are."""
REGISTRY = Registry([*weights.CHECKS, *lifecycle.CHECKS])
CASE: Mapping[str, Any] = {
    "partial": True,
    "clear_cache": True,
    "pause_mode": "abort",
    "actions": (),
    "engine": {"step": 1.0},
}


class TraceScript(TraceBuilder):
    """A trace of a driven run: its header has a case, changed by ``case``; the contract has no
    routes, changed by ``changes``.
    """

    def __init__(
        self,
        *,
        case: Mapping[str, Any] | None = None,
        driven: bool = True,
        header: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        fields = {"case": {**CASE, **(case or {})} if driven else None, **(header or {})}
        super().__init__(contract(**{"rows": "none", **changes}), **fields)

    def send(
        self,
        prompt: tuple[int, ...] = (1, 2),
        request_id: str = "r0",
        max_tokens: int | None = 4,
        server: str = "s0",
    ) -> int:
        """A call that is not admitted yet; returns its id."""
        self._calls += 1
        self.add(
            Call(
                call_id=self._calls,
                request_id=request_id,
                server_id=server,
                prompt_ids=prompt,
                max_tokens=max_tokens,
            )
        )
        return self._calls

    def admit(self, call_id: int, server: str = "s0") -> TraceScript:
        """A call leaves the queue."""
        self.add(Admit(call_id=call_id, server_id=server))
        return self

    def fault(
        self, what: str, server: str | None = None, call_id: int | None = None, detail: str = ""
    ) -> TraceScript:
        """Harm is done."""
        self.add(Fault(what=what, server_id=server, call_id=call_id, detail=detail))
        return self

    def abort(
        self, *call_ids: int, wanted: str = "*", server: str = "s0", injected: bool = False
    ) -> TraceScript:
        """An abort that hits ``call_ids``."""
        self.add(Abort(server_id=server, wanted=wanted, call_ids=call_ids, injected=injected))
        return self

    def observe(self, *tokens: int, request_id: str = "r0") -> TraceScript:
        """The environment speaks."""
        self.add(Observation(request_id=request_id, token_ids=tokens))
        return self

    def gauges(
        self, start: float = 0, end: float | None = 0, name: str = "in flight"
    ) -> TraceScript:
        """A counter at the start and at the end."""
        self.add(Gauge(name=name, value=start, phase="start"))
        if end is not None:
            self.add(Gauge(name=name, value=end, phase="end"))
        return self


def opened(**story: Any) -> TraceScript:
    """Request r0, open; ``story`` is what a ``TraceScript`` takes."""
    script = TraceScript(**story)
    script.submit()
    return script


def check(check_id: str, trace: Trace | TraceBuilder, oracle: Oracle | None = None) -> CheckResult:
    """What one check says of a trace."""
    return judge(
        trace.trace() if isinstance(trace, TraceBuilder) else trace,
        default_registry().select([check_id]),
        oracle,
    )[check_id]


def passes(check_id: str, trace: Trace | TraceBuilder, **counters: int) -> None:
    """Assert that the check passes, and that it was exercised as often as ``counters`` say (``_``
    for a blank).
    """
    result = check(check_id, trace)
    assert (Verdict.PASS, "") == (result.verdict, result.reason), result.findings
    if counters:
        assert {name.replace("_", " "): count for name, count in counters.items()} == dict(
            result.exercised
        )


def unknown(check_id: str, trace: Trace | TraceBuilder, reason: str) -> None:
    """Assert that the check cannot tell, and why."""
    result = check(check_id, trace)
    assert Verdict.UNKNOWN == result.verdict, result.findings
    assert reason in result.reason


def inapplicable(check_id: str, trace: Trace | TraceBuilder, reason: str) -> None:
    """Assert that the check says that it cannot be exercised in the trace, and why."""
    result = check(check_id, trace)
    assert Verdict.NOT_APPLICABLE == result.verdict, result.findings
    assert reason in result.reason


def finds(check_id: str, trace: Trace | TraceBuilder, count: int = 1) -> Finding:
    """Assert that the check fails with ``count`` findings; returns the first."""
    result = check(check_id, trace)
    assert (Verdict.FAIL, count) == (result.verdict, result.found), result
    return result.findings[0]
