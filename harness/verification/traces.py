"""Judge traces with the shipped checks and the oracle that the trace's header describes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache

from rollproof.core.events.base import Event
from rollproof.core.oracle import Oracle
from rollproof.core.trace import Header, Trace
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.invariants import default_registry
from rollproof.judging.judge import Judge, Judgement, Tally
from rollproof.judging.registry import Registry

__all__ = ["judge", "judge_events", "oracle_of"]


def judge(
    trace: Trace, registry: Registry | None = None, oracle: Oracle | None = None
) -> Judgement:
    """Judge one trace in memory.

    Args:
        trace: The trace.
        registry: The checks; by default all that rollproof ships.
        oracle: What the policy must return; by default the one that the trace's header describes.
    """
    tally = Tally(registry if registry is not None else default_registry())
    judge_events(trace.header, trace.events, tally, oracle)
    return tally.judgement()


def judge_events(
    header: Header, events: Iterable[Event], tally: Tally, oracle: Oracle | None = None
) -> None:
    """Judge a stream of events under ``header`` and add the outcome to ``tally``.

    ``oracle`` defaults to the one that ``header`` describes.
    """
    judge_of_trace = Judge(header, tally, oracle if oracle is not None else oracle_of(header))
    for event in events:
        judge_of_trace.feed(event)
    judge_of_trace.finish()


def oracle_of(header: Header) -> Oracle | None:
    """Return the coded policy that a header describes, or ``None`` if the trace is not coded.

    Raises:
        CaseError: The header describes a policy that cannot exist.
    """
    if header.coding is None:
        return None
    try:
        # as text: True and 1 are one key otherwise, and a policy takes one of them alone
        return _policy_of(json.dumps(header.coding, sort_keys=True))
    except TypeError:
        # A trace is untrusted input. What JSON cannot spell is refused by the policy itself, which
        # names the field.
        return CodedPolicy.from_dict(header.coding)


# Thousands of traces share a policy. Building and validating it once saves a tenth of the time
# that judging a small trace takes.
@lru_cache(maxsize=64)
def _policy_of(coding: str) -> Oracle:
    return CodedPolicy.from_dict(json.loads(coding))
