"""How far rounding may carry a correction away from its exact value.

No tolerance is fitted to what an implementation does. With u the unit roundoff of the type that a
subject computes in, and logprobs that its input type represents exactly:

- a log ratio, one subtraction, is off by at most u of its size; if the logprobs are first cast to
  a narrower type, by u of their sizes as well;
- a sum of n terms, in any order, adds at most n * u times the sum of their sizes (Higham, Accuracy
  and Stability of Numerical Algorithms, section 4.2);
- an exponential turns an absolute error e into a relative one of exp(e) - 1, and adds its own,
  which libm, SLEEF and CUDA keep below 2 units in the last place: 4 u;
- each further multiplication or division adds u.

``SAFETY`` doubles the result, for higher orders of u.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollproof.core.correction_terms import FloatType
from rollproof.core.records import FloatArray

__all__ = ["EXP_UNITS", "FEW", "ROUGH", "SAFETY", "FloatLimits", "as_type", "limits_of"]

SAFETY = 2.0
EXP_UNITS = 4.0
FEW = 16
"""Roundings of a result that are not counted one by one."""
ROUGH = 2.0**-5
"""Relative error beyond which no type of at least 8 significant bits explains a weight of one
token: such a weight follows another formula."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatLimits:
    """A type of floating-point numbers.

    unit: Unit roundoff: half the distance from 1 to the next larger number.
    largest: Largest finite number.
    smallest: Smallest positive number, subnormal ones included.
    """

    unit: float
    largest: float
    smallest: float


_LIMITS = {
    FloatType.FLOAT64: FloatLimits(unit=2.0**-53, largest=1.7976931348623157e308, smallest=5e-324),
    FloatType.FLOAT32: FloatLimits(
        unit=2.0**-24, largest=3.4028234663852886e38, smallest=2.0**-126
    ),
    # 7 bits are stored: the next number after 1 is 1 + 2**-7
    FloatType.BFLOAT16: FloatLimits(
        unit=2.0**-8, largest=3.3895313892515355e38, smallest=2.0**-126
    ),
    FloatType.FLOAT16: FloatLimits(unit=2.0**-11, largest=65504.0, smallest=2.0**-24),
}


def limits_of(kind: FloatType) -> FloatLimits:
    """Return the limits of a type. Subnormal numbers of 32 bits are left out: some devices flush
    them to zero.
    """
    return _LIMITS[kind]


def as_type(values: FloatArray, kind: FloatType) -> FloatArray:
    """Return the nearest numbers that ``kind`` represents, as float64."""
    if kind is FloatType.FLOAT64:
        return values
    if kind is FloatType.FLOAT16:
        return values.astype(np.float16).astype(np.float64)
    narrow = values.astype(np.float32)
    if kind is FloatType.FLOAT32:
        return narrow.astype(np.float64)
    # bfloat16 is the upper half of a float32, rounded to even; numpy has no such type
    bits = narrow.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    result = rounded.astype(np.uint32).view(np.float32).astype(np.float64)
    # the carry may turn a NaN into an infinity, or a zero
    return np.where(np.isnan(values), np.nan, result)
