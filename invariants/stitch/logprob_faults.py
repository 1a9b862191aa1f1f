"""Logprob faults: puts into words why logprobs differ from those that the engine returned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollproof.invariants._shared.phrases import count

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = ["describe_wrong_logprobs"]

_MOST = 0.8
"""A cause explains a fault when it explains this share of the wrong values."""
_LOOK = 256
"""No more wrong values than this are looked at."""


def describe_wrong_logprobs(
    view: RequestView, want: Sequence[float], got: Sequence[float], wrong: Sequence[int]
) -> str:
    """The likeliest cause: rounding, a shift, one constant, one factor, another version, another
    request.
    """
    looked = list(wrong[:_LOOK])
    return (
        _rounded(want, got, looked)
        or _shifted(want, got, looked)
        or _constant(got, looked)
        or _scaled(want, got, looked)
        or _other_version(view, got, looked)
        or _other_request(view, got, looked)
        or "Tokens and logprobs must be appended together, segment by segment, and travel together through every later copy."
    )


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 + 1e-6 * abs(b)


def _explains(hits: int, looked: Sequence[int]) -> bool:
    return hits >= max(1, math.ceil(_MOST * len(looked)))


def _rounded(want: Sequence[float], got: Sequence[float], looked: Sequence[int]) -> str:
    off = max(abs(got[i] - want[i]) / max(abs(want[i]), 1e-30) for i in looked)
    if off > 2**-8:
        return ""
    kind = "bfloat16" if off > 2**-11 else "float16"
    return (
        f"They are rounded, as by a cast to {kind} (largest relative error {off:.1e}; slime #245):"
        " keep rollout logprobs in 32 bits."
    )


def _shifted(want: Sequence[float], got: Sequence[float], looked: Sequence[int]) -> str:
    for shift in (1, -1, 2, -2):
        inside = [i for i in looked if 0 <= i - shift < len(want)]
        hits = sum(_near(got[i], want[i - shift]) for i in inside)
        if len(inside) > 1 and hits >= math.ceil(_MOST * len(inside)):
            way = "late" if shift > 0 else "early"
            return (
                f"The values stand {count(abs(shift), 'token')} too {way} from response index"
                f" {looked[0]} on: one was dropped or doubled before it, or the shift between"
                " logits and labels was applied twice."
            )
    return ""


def _constant(got: Sequence[float], looked: Sequence[int]) -> str:
    value = got[looked[0]]
    if len(looked) > 1 and all(got[i] == value for i in looked):
        return f"All of them are {value:.6g}: a default in place of the engine's values."
    if value in (0.0, -9999.0):
        return f"{value:.6g} looks like a default in place of the engine's value."
    return ""


def _scaled(want: Sequence[float], got: Sequence[float], looked: Sequence[int]) -> str:
    if len(looked) < 3 or any(want[i] == 0 for i in looked):
        return ""
    factor = got[looked[0]] / want[looked[0]]
    if all(abs(got[i] / want[i] - factor) <= 1e-4 * abs(factor) for i in looked):
        return (
            f"They are the engine's values times {factor:.4g}: scaled by a temperature, or"
            " converted between logarithms, on the way."
        )
    return ""


def _other_version(view: RequestView, got: Sequence[float], looked: Sequence[int]) -> str:
    if view.oracle is None:
        return ""
    base = len(view.request.prompt_ids)
    ids = view.request.prompt_ids + view.stitched.response_ids
    for version in dict.fromkeys(
        update.version for update in view.history.updates[-16:] if update.loaded
    ):
        theirs = view.oracle.logprobs(version, ids, base).tolist()
        if _explains(sum(_near(got[i], theirs[i]) for i in looked), looked):
            return (
                f"They are what weights {version} would give, which did not sample these tokens:"
                " scored again after an update."
            )
    return ""


def _other_request(view: RequestView, got: Sequence[float], looked: Sequence[int]) -> str:
    for other in view.neighbours:
        theirs = other.stitched.logprob_list
        hits = sum(i < len(theirs) and _near(got[i], theirs[i]) for i in looked)
        if hits and _explains(hits, looked):
            return (
                f"They are the values of request {other.request.request_id}: the replies of two"
                " requests were mixed up."
            )
    return ""
