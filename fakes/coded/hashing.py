"""Hashing: 64-bit hashes of every prefix of a sequence, and the mixing that values are drawn with.

The steps stand here for arrays. What draws one token at a time (``rollproof.fakes.coded.policy``)
does the same with the constants, on Python's integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.errors import UsageError

__all__ = [
    "F1",
    "F2",
    "MASK",
    "MIX",
    "N_STEP",
    "STEP",
    "Hashes",
    "finish",
    "hashes_of_many",
    "mixed",
    "prefix_hashes",
]

Hashes: TypeAlias = "npt.NDArray[np.uint64]"

MASK: int = (1 << 64) - 1
STEP: int = 0x9E3779B97F4A7C15
MIX: int = 0xD6E8FEB86659FD93
F1: int = 0xBF58476D1CE4E5B9
F2: int = 0x94D049BB133111EB
# the same for numpy, made once: making a numpy scalar costs as much as a pass over a short array
N_STEP: np.uint64 = np.uint64(STEP)
_N_MIX, _N_F1, _N_F2 = (np.uint64(number) for number in (MIX, F1, F2))
_N29, _N31, _N32, _N33 = (np.uint64(number) for number in (29, 31, 32, 33))
_MANY = 6
_SHORT = 64
"""Sequences of up to so many tokens are remembered."""


def prefix_hashes(ids: Sequence[int]) -> Hashes:
    """``(len(ids),)``: element i is the hash of ``ids[:i + 1]``."""
    return _short_hashes(tuple(ids)) if len(ids) <= _SHORT else _hashes(ids)


@lru_cache(maxsize=4096, typed=True)
def _short_hashes(ids: tuple[int, ...]) -> Hashes:
    """The same, read-only: a sequence is asked for by its logprobs and its routes, again when it is
    judged, and in many small cases.
    """
    hashes = _hashes(ids)
    hashes.setflags(write=False)
    return hashes


def hashes_of_many(sequences: Sequence[Sequence[int]]) -> list[Hashes]:
    """``prefix_hashes`` of each, in one pass: from some sequences on, sooner than one after the
    other.
    """
    if len(sequences) < _MANY:
        return [prefix_hashes(ids) for ids in sequences]
    lengths = np.array([len(ids) for ids in sequences])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    positions = np.arange(1, ends[-1] + 1, dtype=np.uint64) - np.repeat(
        starts.astype(np.uint64), lengths
    )
    sums = np.zeros(ends[-1] + 1, dtype=np.uint64)
    np.cumsum(
        mixed(_numbers(list(chain.from_iterable(sequences))) + positions * N_STEP), out=sums[1:]
    )
    hashes = sums[1:] - np.repeat(sums[starts], lengths)
    return [hashes[low:high] for low, high in zip(starts.tolist(), ends.tolist(), strict=True)]


def _numbers(ids: Sequence[int]) -> Hashes:
    try:
        return np.array(ids, dtype=np.int64).view(np.uint64)
    except (OverflowError, ValueError, TypeError) as error:
        raise UsageError(f"Token ids must be integers of 64 bits: {error}.") from error


def _hashes(ids: Sequence[int]) -> Hashes:
    z = _numbers(ids)
    return np.cumsum(
        mixed(z + np.arange(1, len(ids) + 1, dtype=np.uint64) * N_STEP), dtype=np.uint64
    )


def mixed(z: Hashes) -> Hashes:
    """What a token at its place adds to the prefix hash; in place."""
    z ^= z >> _N31
    z *= _N_MIX
    z ^= z >> _N33
    return z


def finish(z: Hashes) -> Hashes:
    """Mix in place, so that every bit of the result depends on every bit of ``z``; returns ``z``."""
    z ^= z >> _N32
    z *= _N_F1
    z ^= z >> _N29
    z *= _N_F2
    z ^= z >> _N32
    return z
