"""Outcomes: what a trainer's step came to, as an event may hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.error_text import describe_error
from rollproof.core.events.replay import Outcome, Step
from rollproof.core.records import FloatArray, Rollout
from rollproof.core.router_spy import InjectedFailure, sketch
from rollproof.errors import SubjectError

__all__ = ["changed_fields", "injected", "sound_outcome"]

_SKETCH = sketch(0.0).shape


def sound_outcome(outcome: Any, step: Step, label: str) -> Outcome:
    """The outcome with arrays of its own. Raises ``SubjectError`` for what is none."""
    if not isinstance(outcome, Outcome):
        raise SubjectError(
            f"{label}.run must return an Outcome (rollproof.core.events.replay), not"
            f" {type(outcome).__name__}."
        )
    try:
        return replace(
            outcome,
            index=-1,
            step=step.name,
            loss=None if outcome.loss is None else float(outcome.loss),
            logprobs=_logprobs(outcome.logprobs),
            gradients=_sketches(outcome.gradients, str),
            gates=_sketches(outcome.gates, int),
            recorded={str(name): np.array(array) for name, array in outcome.recorded.items()},
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise SubjectError(
            f"{label}.run returned an unusable Outcome for step {step.name!r}:"
            f" {describe_error(error)}."
        ) from error


def _logprobs(arrays: Mapping[Any, Any]) -> dict[str, FloatArray]:
    found = _floats(arrays, str)
    for name, array in found.items():
        if array.ndim != 1:
            raise ValueError(
                f"the logprobs of {name!r} have the shape {array.shape}, not (response tokens,)"
            )
    return found


def _sketches(arrays: Mapping[Any, Any], key: type[Any]) -> dict[Any, FloatArray]:
    found = _floats(arrays, key)
    for name, array in found.items():
        if array.shape != _SKETCH:
            raise ValueError(
                f"the gradient of {name!r} has the shape {array.shape}: tell"
                " rollproof.core.router_spy.sketch(gradient)"
            )
    return found


def _floats(arrays: Mapping[Any, Any], key: type[Any]) -> dict[Any, FloatArray]:
    return {key(name): np.array(array, dtype=np.float64) for name, array in arrays.items()}


def injected(error: BaseException | None) -> bool:
    """Whether the harness raised it: also where a trainer, or another process, wrapped it in an
    error of its own.
    """
    seen = 0
    while error is not None and seen < 16:
        if isinstance(error, InjectedFailure) or "rollproof raised this" in str(error):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def changed_fields(samples: tuple[Rollout, ...], given: tuple[Rollout, ...]) -> tuple[str, ...]:
    """What a step changed in the samples that it was given, by field and request."""
    return tuple(
        f"{name} of {sample.request_id}"
        for sample, now in zip(samples, given, strict=True)
        for name in ("routes", "loss_mask")
        if not _equal(getattr(sample, name), getattr(now, name))
    )


def _equal(one: Any, other: Any) -> bool:
    return other is None if one is None else other is not None and np.array_equal(one, other)
