"""Lanes: the tokens of several sequences drawn side by side, one sequence in each 128 bits of a
Python integer.

Each token depends on the one before it, so a sequence cannot be drawn at once; several can, and an
operation on a long integer costs hardly more than on a short one: a tenth of what numpy takes to
begin a pass over an array. Values have 64 bits or fewer, so that a product of two stays in its
lane; what a shift brings over from the lane above is masked away.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rollproof.fakes.coded.hashing import F1, F2, MASK, MIX, STEP

__all__ = ["draw_lanes"]

_WIDTH = 128
_LOW = 0xFFFFFFFF


def draw_lanes(
    key: int,
    states: Sequence[tuple[int, int]],
    count: int,
    *,
    vocab: int,
    eos_every: int | None,
    eos_id: int,
) -> list[tuple[list[int], tuple[int, int]]]:
    """The next ``count`` tokens of each sequence under the same ``key``, and its state after them,
    as ``CodedPolicy`` has them.
    """
    size, rest = len(states), vocab - 1
    ones, low, mask = _lanes(size)
    factor, shift = _divisor(rest)
    keys, step, above = ones * key, ones * STEP, ones * ((1 << 32) - eos_id)
    total = _packed([state[0] for state in states])
    place = _packed([state[1] * STEP & MASK for state in states])
    drawn = []
    for _ in range(count):
        z = (total + keys) & mask
        z = ((z ^ z >> 32) & mask) * F1 & mask
        z = ((z ^ z >> 29) & mask) * F2 & mask
        z ^= z >> 32
        token = z & low
        token -= (token * factor >> shift & low) * rest
        token += (token + above >> 32 & ones) if eos_id else ones
        if eos_every is not None:
            token = _ended(token, z >> 32 & low, eos_every, eos_id, ones)
        drawn.append(token)
        place += step
        z = (token + place) & mask
        z = ((z ^ z >> 31) & mask) * MIX & mask
        total += (z ^ z >> 33) & mask
    tokens = np.frombuffer(
        b"".join([token.to_bytes(size * 16, "little") for token in drawn]), "<u8"
    ).reshape(count, size, 2)
    totals = np.frombuffer((total & mask).to_bytes(size * 16, "little"), "<u8")[::2].tolist()
    ends = [(after, position + count) for after, (_, position) in zip(totals, states, strict=True)]
    return list(zip(tokens[:, :, 0].T.tolist(), ends, strict=True))


def _ended(token: int, high: int, every: int, eos_id: int, ones: int) -> int:
    """``token``, and in lanes whose ``high`` ``every`` divides, ``eos_id``."""
    factor, shift = _divisor(every)
    high -= (high * factor >> shift & ones * _LOW) * every
    goes_on = high + ones * _LOW >> 32 & ones
    return (token & goes_on * _LOW) + (ones - goes_on) * eos_id


@lru_cache(maxsize=512)
def _lanes(size: int) -> tuple[int, int, int]:
    """In each of ``size`` lanes a one, 32 ones, 64 ones."""
    ones = ((1 << _WIDTH * size) - 1) // ((1 << _WIDTH) - 1)
    return ones, ones * _LOW, ones * MASK


@lru_cache(maxsize=64)
def _divisor(number: int) -> tuple[int, int]:
    """By what to multiply any number below 2**32, and how far to shift the product, to have its
    quotient by ``number``.

    Granlund and Montgomery, Division by Invariant Integers using Multiplication (1994), theorem
    4.2.
    """
    shift = 32 + (number - 1).bit_length()
    return -(-(1 << shift) // number), shift


def _packed(numbers: list[int]) -> int:
    """One number of 64 bits a lane."""
    array = np.zeros((len(numbers), 2), dtype="<u8")
    array[:, 0] = numbers
    return int.from_bytes(array.tobytes(), "little")
