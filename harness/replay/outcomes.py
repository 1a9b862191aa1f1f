"""Check and convert the outcome of a trainer's step for the trace."""

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
    """Return the outcome with copied arrays. Raises ``SubjectError`` for an unusable one."""
    if not isinstance(outcome, Outcome):
        raise SubjectError(
            f"{label}.run must return an Outcome (rollproof.replay.events), not"
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
    logprobs = _floats(arrays, str)
    for name, array in logprobs.items():
        if array.ndim != 1:
            raise ValueError(
                f"the logprobs of {name!r} have the shape {array.shape}, not (response tokens,)"
            )
    return logprobs


def _sketches(arrays: Mapping[Any, Any], key: type[Any]) -> dict[Any, FloatArray]:
    sketches = _floats(arrays, key)
    for name, array in sketches.items():
        if array.shape != _SKETCH:
            raise ValueError(
                f"the gradient of {name!r} has the shape {array.shape}: report"
                " rollproof.replay.spy.sketch(gradient)"
            )
    return sketches


def _floats(arrays: Mapping[Any, Any], key: type[Any]) -> dict[Any, FloatArray]:
    # copies, because a trainer may reuse its buffers in the next step
    return {key(name): np.array(array, dtype=np.float64) for name, array in arrays.items()}


def injected(error: BaseException | None) -> bool:
    """Whether the harness raised the error, or a cause of it."""
    # a trainer, or another process, may have wrapped it in an error of its own
    # bounded: `raise a from b` can make a circle of causes
    seen = 0
    while error is not None and seen < 16:
        if isinstance(error, InjectedFailure) or "rollproof raised this" in str(error):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def changed_fields(samples: tuple[Rollout, ...], passed: tuple[Rollout, ...]) -> tuple[str, ...]:
    """Return what a step changed in the samples that were passed to it, by field and request."""
    return tuple(
        f"{name} of {sample.request_id}"
        for sample, now in zip(samples, passed, strict=True)
        for name in ("routes", "loss_mask")
        if not _equal(getattr(sample, name), getattr(now, name))
    )


def _equal(before: Any, after: Any) -> bool:
    if before is None or after is None:
        return before is after
    return np.array_equal(before, after)
