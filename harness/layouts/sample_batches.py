"""Batches: how samples are dealt out to data-parallel ranks and microbatches, and put back in
order.

Whatever the division (contiguous, strided, balanced by length, dynamic, filtered), a sample's
tokens and its routes move together: a permutation or a filter that reaches one list of fields and
not the other detaches routes (SkyRL#1908, verl#6089).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from rollproof.errors import LayoutError

__all__ = ["balanced", "contiguous", "dynamic", "restored", "strided"]

_T = TypeVar("_T")


def contiguous(count: int, parts: int) -> list[list[int]]:
    """Sample indexes of each part, in order; the first parts are longer by one where they do not
    divide.
    """
    share, more = divmod(count, parts)
    starts = [i * share + min(i, more) for i in range(parts + 1)]
    return [list(range(start, stop)) for start, stop in pairwise(starts)]


def strided(count: int, parts: int) -> list[list[int]]:
    """Sample i goes to part ``i % parts``."""
    return [list(range(part, count, parts)) for part in range(parts)]


def balanced(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Longest sample first, each to the part with the fewest tokens so far; a part's samples keep
    their order.
    """
    out: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        min(out, key=lambda part: (sum(lengths[j] for j in part), len(part))).append(i)
    return [sorted(part) for part in out]


def dynamic(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Microbatches of at most ``most`` tokens each, filled in order. Raises ``LayoutError`` for a
    sample that is longer.
    """
    out: list[list[int]] = []
    room = 0
    for i, length in enumerate(lengths):
        if length > most:
            raise LayoutError(f"Sample {i} has {length} tokens, above the {most} of a microbatch.")
        if length > room or not out:
            out.append([])
            room = most
        out[-1].append(i)
        room -= length
    return out


def restored(parts: Sequence[Sequence[_T]], indexes: Sequence[Sequence[int]]) -> list[_T]:
    """What ``parts`` hold, back in the order of the samples. Raises ``LayoutError`` where a sample
    is missing or there twice.
    """
    order = [i for part in indexes for i in part]
    values = [value for part in parts for value in part]
    if sorted(order) != list(range(len(values))):
        raise LayoutError(
            f"{len(values)} values cannot be put back by the indexes {order}: each sample must be"
            " named once."
        )
    return [value for _, value in sorted(zip(order, values, strict=True), key=lambda pair: pair[0])]
