"""Describes why logprobs differ from those that the engine returned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollproof.invariants._shared.phrases import count

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = ["ABSOLUTE", "RELATIVE", "close", "describe_wrong_logprobs"]

RELATIVE, ABSOLUTE = 1e-6, 1e-6
"""The difference of two logprobs up to which they are the same number."""
_MIN_SHARE = 0.8
"""The share of the wrong values that a cause must explain."""
_MAX_EXAMINED = 256
"""The number of wrong values that are examined at most."""


def describe_wrong_logprobs(
    view: RequestView, expected: Sequence[float], actual: Sequence[float], wrong: Sequence[int]
) -> str:
    """Return the likeliest cause: rounding, a shift, a constant, a factor, another version or
    another request.
    """
    examined = list(wrong[:_MAX_EXAMINED])
    return (
        # the oracle scores a sample anew for each version: causes that the values show come first
        _rounded(expected, actual, examined)
        or _shifted(expected, actual, examined)
        or _zeros_replaced(expected, examined)
        or _constant(actual, examined)
        or _tempered(view, expected, actual, examined)
        or _scaled(expected, actual, examined)
        or _other_version(view, actual, examined)
        or _other_request(view, actual, examined)
        or (
            "Append tokens and logprobs together, segment by segment, and keep them together"
            " in every later copy."
        )
    )


def close(a: float, b: float) -> bool:
    """Return whether two logprobs are the same number, at most rounded to 32 bits."""
    return abs(a - b) <= ABSOLUTE + RELATIVE * abs(b)


def _explains(matches: int, examined: Sequence[int]) -> bool:
    return matches >= math.ceil(_MIN_SHARE * len(examined))


def _rounded(expected: Sequence[float], actual: Sequence[float], examined: Sequence[int]) -> str:
    error = max(abs(actual[i] - expected[i]) / max(abs(expected[i]), 1e-30) for i in examined)
    # bfloat16 has 8 bits of precision and float16 has 11: larger errors are no rounding.
    if error > 2**-8:
        return ""
    dtype = "bfloat16" if error > 2**-11 else "float16"
    return (
        f"They are rounded, as by a cast to {dtype} (largest relative error {error:.1e}; slime"
        " #245): keep rollout logprobs in 32 bits."
    )


def _shifted(expected: Sequence[float], actual: Sequence[float], examined: Sequence[int]) -> str:
    # One is the label shift, two is the label shift applied twice.
    for shift in (1, -1, 2, -2):
        inside = [i for i in examined if 0 <= i - shift < len(expected)]
        matches = sum(close(actual[i], expected[i - shift]) for i in inside)
        if len(inside) > 1 and matches >= math.ceil(_MIN_SHARE * len(inside)):
            direction = "late" if shift > 0 else "early"
            return (
                f"The values are {count(abs(shift), 'token')} too {direction} from response"
                f" index {examined[0]} on: one was dropped or doubled before it, or the shift"
                " between logits and labels was applied twice."
            )
    return ""


def _constant(actual: Sequence[float], examined: Sequence[int]) -> str:
    value = actual[examined[0]]
    if len(examined) > 1 and all(actual[i] == value for i in examined):
        return f"All of them are {value:.6g}: a default in place of the engine's values."
    if value in (0.0, -9999.0):
        return f"{value:.6g} looks like a default in place of the engine's value."
    return ""


def _zeros_replaced(expected: Sequence[float], examined: Sequence[int]) -> str:
    if any(expected[i] != 0 for i in examined):
        return ""
    return (
        "All of them are exactly 0 in the engine's reply, the logprob of a certain token: a"
        " condition such as `value or default` takes that for a missing one."
    )


def _tempered(
    view: RequestView, expected: Sequence[float], actual: Sequence[float], examined: Sequence[int]
) -> str:
    """Return that the values were divided or multiplied by the temperature of the request."""
    temperature = view.request.sampling.get("temperature")
    # greedy sampling (0) has no quotient, and 1 changes no value
    if not isinstance(temperature, float) or temperature in (0.0, 1.0):
        return ""
    for factor, done in ((1 / temperature, "divided"), (temperature, "multiplied")):
        if all(
            expected[i] != 0 and abs(actual[i] / expected[i] - factor) <= 1e-4 * factor
            for i in examined
        ):
            return (
                f"They are the engine's values {done} by the request's temperature"
                f" {temperature:g}. That scales logits, not logprobs; the contract says what the"
                f" engine returns (logprobs={str(view.contract.logprobs)!r})."
            )
    return ""


def _scaled(expected: Sequence[float], actual: Sequence[float], examined: Sequence[int]) -> str:
    if len(examined) < 3 or any(expected[i] == 0 for i in examined):
        return ""
    factor = actual[examined[0]] / expected[examined[0]]
    if all(abs(actual[i] / expected[i] - factor) <= 1e-4 * abs(factor) for i in examined):
        return (
            f"They are the engine's values times {factor:.4g}: scaled by a temperature, or"
            " converted between logarithms, between engine and sample."
        )
    return ""


def _other_version(view: RequestView, actual: Sequence[float], examined: Sequence[int]) -> str:
    if view.oracle is None:
        return ""
    base = len(view.request.prompt_ids)
    ids = view.request.prompt_ids + view.stitched.response_ids
    for version in dict.fromkeys(
        # A sample is at most a few updates old; scoring under every version of a long run would be
        # slow.
        update.version
        for update in view.history.updates[-16:]
        if update.loaded
    ):
        candidate = view.oracle.logprobs(version, ids, base).tolist()
        if _explains(sum(close(actual[i], candidate[i]) for i in examined), examined):
            return (
                f"They are what weights {version} would give, which did not sample these tokens:"
                " scored again after an update."
            )
    return ""


def _other_request(view: RequestView, actual: Sequence[float], examined: Sequence[int]) -> str:
    for other in view.neighbours:
        candidate = other.stitched.logprob_list
        matches = sum(i < len(candidate) and close(actual[i], candidate[i]) for i in examined)
        if _explains(matches, examined):
            return (
                f"They are the values of request {other.request.request_id}: the replies of two"
                " requests were mixed up."
            )
    return ""
