"""The causes that a diagnosis may name, and the input of its rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from rollproof.gap.buckets import Bucket
from rollproof.gap.diagnosis.arrival import Arrival
from rollproof.gap.diagnosis.evidence import Evidence
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["ROUNDING", "Cause", "CauseName", "Rule", "Scene", "confidence_beyond", "times_text"]

ROUNDING = 1e-5
"""What float32 does to a logprob, in nats: a mean |d| below it needs no explanation."""
# Confidence from which a cause that is always wrong fails the report
_SURE = 0.7


class CauseName(StrEnum):
    """Every kind of cause, by its name in reports."""

    NUMERICS = "numerics only"
    NOT_FINITE = "not finite"
    OFF_BY_ONE = "off by one"
    TOKEN_SHIFT = "routes shifted by a token"
    LAYER_SHIFT = "routes shifted by a layer"
    DENSE_SHIFT = "routes shifted by dense layers"
    POLLUTED = "polluted capture"
    STUCK = "stale engine weights"
    WRONG_VERSION = "wrong version scored"
    PARTLY = "partly arrived weights"
    NO_END_LOGPROB = "end token without a logprob"
    PACKING = "packed sequences see each other"
    UNRELATED = "unrelated weights"
    PART_UNRELATED = "a part is unrelated"
    TRUNCATED = "truncated support (top-p or top-k)"
    TEMPERATURE = "temperature or logprob mode"
    BOUNDARY = "resume boundary"
    REPLICA = "stale replica"
    GROUP = "one group differs"
    STALENESS = "staleness"
    UNEXPLAINED = "unexplained"

    @property
    def always_wrong(self) -> bool:
        """Whether it is wrong at any size.

        Others may be intended: a user who samples with top-p, or scores older tokens under newer
        weights, may know it.
        """
        return self in _ALWAYS_WRONG


_ALWAYS_WRONG = frozenset(
    {
        CauseName.NOT_FINITE,
        CauseName.OFF_BY_ONE,
        CauseName.TOKEN_SHIFT,
        CauseName.LAYER_SHIFT,
        CauseName.DENSE_SHIFT,
        CauseName.POLLUTED,
        CauseName.STUCK,
        CauseName.WRONG_VERSION,
        CauseName.PARTLY,
        CauseName.NO_END_LOGPROB,
        CauseName.PACKING,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A likely kind of cause.

    Attributes:
        name: the kind.
        confidence: how far the sign is beyond what numerics give, 0.5 to 1.
        because: the sign, in words.
        advice: what to do.
    """

    name: CauseName
    confidence: float
    because: str
    advice: str = ""

    @property
    def harmless(self) -> bool:
        """Whether nothing needs to be done about it."""
        return self.name is CauseName.NUMERICS

    @property
    def fault(self) -> bool:
        """Whether it is surely wrong at any size: the report fails even within its limits."""
        return self.name.always_wrong and self.confidence >= _SURE

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "class": str(self.name),
            "confidence": round(self.confidence, 3),
            "because": self.because,
            "advice": self.advice,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scene:
    """The input of a rule.

    Attributes:
        pairs: the tokens.
        signs: the evidence that was measured on them.
        buckets: their buckets.
        arrivals: the shares of the weight update that arrived.
    """

    pairs: TokenPairs
    signs: Evidence
    buckets: Mapping[str, tuple[Bucket, ...]]
    arrivals: tuple[Arrival, ...] = ()


Rule: TypeAlias = "Callable[[Scene], Cause | None]"


def times_text(ratio: float) -> str:
    """Return a ratio with two digits, as ``0.42``, ``43`` or ``1,500``: never as ``1.5e+03``."""
    rounded = float(f"{ratio:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def confidence_beyond(value: float, bound: float) -> float:
    """Return a confidence: 0.5 at the bound, towards 1 beyond it."""
    if bound <= 0 or not math.isfinite(value):
        return 0.5
    return float(min(0.99, max(0.5, 1 - 0.5 * bound / value)))
