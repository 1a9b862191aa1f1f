"""One call of a layout function, what it returned, and what one check says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from rollproof.core.events.layouts import Laid
from rollproof.core.records import IntArray
from rollproof.core.trace import Trace
from rollproof.fakes.trainers.reference_layouts import MegatronLike
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.layouts import Layout
from rollproof.layouts.layout_calls import Call
from rollproof.layouts.payloads import Coding
from rollproof.verification.layouts import record_layouts
from rollproof.verification.traces import judge

Arrays: TypeAlias = "tuple[IntArray, ...]"

LAYOUT = Layout(num_layers=4, num_experts=64, top_k=2, moe_layers=(1, 2, 3))
"""Four layers, of which the first is dense; packed, on one rank."""


def call(*lengths: int, layout: Layout = LAYOUT, numbers: bool = False, **fields: Any) -> Call:
    """A call for samples of ``lengths`` tokens; payloads are expert ids, or ``numbers``."""
    coding = Coding(
        samples=max(2, len(lengths)),
        positions=max(12, *lengths, *fields.get("held", ())),
        columns=layout.columns,
        experts=0 if numbers else layout.num_experts,
        top_k=layout.top_k,
    )
    return Call(layout=layout, coding=coding, **{"lengths": lengths, **fields})


def laid(
    function: str, made: Call, change: Callable[[Arrays], Arrays] | None = None, **fields: Any
) -> Laid:
    """The call of the reference, with its arrays changed, and other fields of the event."""
    event = record_layouts(MegatronLike, calls=[(function, made)]).events[0]
    assert isinstance(event, Laid)
    out = event.out if change is None else change(tuple(array.copy() for array in event.out))
    return replace(event, **{"out": out, **fields})


def verdict(check_id: str, *events: Laid) -> CheckResult:
    """What the check says of a trace of these calls."""
    trace = record_layouts(MegatronLike, calls=[])
    return judge(Trace(header=trace.header, events=events), default_registry().select([check_id]))[
        check_id
    ]


def told(check_id: str, event: Laid) -> tuple[str, str, str]:
    """Title, expected and observed of the only finding."""
    result = verdict(check_id, event)
    assert (Verdict.FAIL, 1) == (result.verdict, result.found), result
    finding = result.findings[0]
    assert finding.where["function"] == event.function
    return finding.title, finding.expected, finding.observed


def place(check_id: str, event: Laid) -> dict[str, Any]:
    """The place of the only finding."""
    return dict(verdict(check_id, event).findings[0].where)


def counted(check_id: str, *events: Laid) -> dict[str, int]:
    """How often the check was exercised by calls that it passes."""
    result = verdict(check_id, *events)
    assert (Verdict.PASS, "") == (result.verdict, result.reason), result.findings
    return dict(result.exercised)


def turned(by: int, array: int = 0) -> Callable[[Arrays], Arrays]:
    """Turn one of the returned arrays by some rows."""
    return lambda out: (*out[:array], np.roll(out[array], by, axis=0), *out[array + 1 :])


def with_row(row: int, ids: Any, array: int = 0) -> Callable[[Arrays], Arrays]:
    """Write ids into one row of a returned array."""

    def change(out: Arrays) -> Arrays:
        out[array][row] = ids
        return out

    return change


def with_array(number: int, value: Any) -> Callable[[Arrays], Arrays]:
    """Replace one of the returned arrays, or add it behind the last."""
    return lambda out: (*out[:number], np.asarray(value), *out[number + 1 :])
