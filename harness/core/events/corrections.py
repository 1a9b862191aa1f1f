"""The event of a trace about corrections: a batch that a subject corrected, and the outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from rollproof.core.events.base import Event
from rollproof.core.records import FloatArray, IntArray

__all__ = ["Corrected", "Purpose"]


class Purpose(StrEnum):
    """The situation that a batch was made for; each check reads those that it can judge."""

    FORMULA = "formula"
    """One sequence, all of it trained, with moderate ratios."""
    DIRECTION = "direction"
    """One token, whose three logprobs are far apart."""
    BOUNDS = "bounds"
    """One sequence whose ratios are on both sides of the bounds."""
    REJECTION = "rejection"
    """Sequences of equal length, with statistics on both sides of the bounds."""
    ROWS = "rows"
    """Sequences of equal length, all trained, each with another ratio."""
    PADDING = "padding"
    """Sequences of unequal length; masked places hold other logprobs."""
    NORMALISATION = "normalisation"
    """Sequences and groups of unequal length."""
    METRICS = "metrics"
    """Sequences of unequal length, with masked places."""
    EMPTY_ROWS = "empty rows"
    """Sequences without a trained token among others."""
    EMPTY_BATCH = "empty batch"
    """No token is trained at all."""
    IDENTITY = "identity"
    """All logprobs are equal."""
    EXTREME = "extreme"
    """Ratios that overflow, and logprobs of 0."""
    STALE = "stale"
    """Tokens of several versions."""
    MISSING = "missing"
    """Trained tokens without a rollout logprob."""
    LOSS = "loss"
    """Sequences of unequal length, some of whose tokens are rejected."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corrected(Event):
    """A subject corrected a batch.

    Arrays are ``(sequences, tokens)`` unless said otherwise; logprobs are those that the subject
    got, which its ``dtype`` represents exactly.

    Attributes:
        name: The name of the case.
        purpose: The situation that it was made for.
        rollout, old, current: The logprobs.
        mask: The trained tokens.
        advantages: The advantages.
        groups: The group of each sequence, ``(sequences,)``.
        versions: The version of each token.
        current_version: The current version.
        weights: The weights returned, one per token; ``None`` if there are none.
        kept: The mask after rejection, one number per token; ``None`` if none was returned.
        metrics: The numbers returned.
        loss: The loss returned.
        weights_gradient: Derivatives of the sum of advantage times weight, by name of the logprobs.
        loss_gradient: The derivative of the loss to the current logprobs.
        refused: The error (class and text) if it raised.
        misfit: Why the result is not what a correction returns.
        changed: Names of the inputs that it changed.
    """

    kind: ClassVar[str] = "corrected"
    name: str
    purpose: Purpose
    rollout: FloatArray
    old: FloatArray
    current: FloatArray
    mask: IntArray
    advantages: FloatArray
    groups: IntArray
    versions: IntArray
    current_version: int = 0
    weights: FloatArray | None = None
    kept: FloatArray | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None
    weights_gradient: Mapping[str, FloatArray] | None = None
    loss_gradient: FloatArray | None = None
    refused: str | None = None
    misfit: str | None = None
    changed: tuple[str, ...] = ()
