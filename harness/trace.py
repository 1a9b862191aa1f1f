"""Public events: what a trace is made of."""

from __future__ import annotations

from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Abort,
    Admit,
    Call,
    Chunk,
    Fault,
    Flush,
    Gauge,
    Observation,
    Pause,
    Reference,
    Reply,
    Result,
    Resume,
    Submit,
    Unrecorded,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.events.training import Batch, Score
from rollproof.core.events.weights import Adapter, AdapterChange, Checksums
from rollproof.core.trace import EVENT_KINDS, SCHEMA, Header, Recorder, Trace, TraceSink

__all__ = [
    "EVENT_KINDS",
    "SCHEMA",
    "Abort",
    "Adapter",
    "AdapterChange",
    "Admit",
    "Batch",
    "Call",
    "Checksums",
    "Chunk",
    "Event",
    "Fault",
    "Flush",
    "Gauge",
    "Header",
    "Observation",
    "Pause",
    "PauseMode",
    "Recorder",
    "Reference",
    "Reply",
    "Result",
    "Resume",
    "Score",
    "Submit",
    "Trace",
    "TraceSink",
    "Unrecorded",
    "Update",
    "UpdatePhase",
    "Weights",
]
