"""64-bit hashes of every prefix of a sequence, and the mixing that coded values are drawn with.

The functions here work on arrays. ``rollproof.fakes.coded.policy`` repeats the same steps on
Python integers for the one token that an engine samples at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.errors import UsageError

__all__ = ["F1", "F2", "MASK", "MIX", "N_STEP", "STEP", "Hashes", "finish", "prefix_hashes"]

Hashes: TypeAlias = "npt.NDArray[np.uint64]"

MASK: int = (1 << 64) - 1
STEP: int = 0x9E3779B97F4A7C15
MIX: int = 0xD6E8FEB86659FD93
F1: int = 0xBF58476D1CE4E5B9
F2: int = 0x94D049BB133111EB
# numpy scalars of the same, made once: making one costs as much as a pass over a short array
N_STEP: np.uint64 = np.uint64(STEP)
_N_MIX, _N_F1, _N_F2 = (np.uint64(number) for number in (MIX, F1, F2))
_N29, _N31, _N32, _N33 = (np.uint64(number) for number in (29, 31, 32, 33))
_SHORT = 64
"""Hashes of sequences of up to this many tokens are cached."""


def prefix_hashes(ids: Sequence[int]) -> Hashes:
    """Return ``(len(ids),)``: element i is the hash of ``ids[:i + 1]``."""
    return _cached_hashes(tuple(ids)) if len(ids) <= _SHORT else _hashes(ids)


# The engine hashes a sequence for its logprobs and again for its routes, the checks hash it when
# they judge it, and small cases share their prompts.
@lru_cache(maxsize=4096, typed=True)
def _cached_hashes(ids: tuple[int, ...]) -> Hashes:
    hashes = _hashes(ids)
    hashes.setflags(write=False)
    return hashes


def _hashes(ids: Sequence[int]) -> Hashes:
    try:
        tokens = np.array(ids, dtype=np.int64).view(np.uint64)
    except (OverflowError, ValueError, TypeError) as error:
        raise UsageError(f"Token ids must be integers of 64 bits: {error}.") from error
    positions = np.arange(1, len(ids) + 1, dtype=np.uint64)
    return np.cumsum(_mix(tokens + positions * N_STEP), dtype=np.uint64)


def _mix(z: Hashes) -> Hashes:
    """Mix tokens with their positions, in place: what each adds to the prefix hash."""
    z ^= z >> _N31
    z *= _N_MIX
    z ^= z >> _N33
    return z


def finish(z: Hashes) -> Hashes:
    """Mix in place, so that every bit of the result depends on every bit of ``z``; return ``z``."""
    z ^= z >> _N32
    z *= _N_F1
    z ^= z >> _N29
    z *= _N_F2
    z ^= z >> _N32
    return z
