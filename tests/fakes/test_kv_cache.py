"""KV of the fake engine: which weights took part in each position, and what calls share."""

from __future__ import annotations

import time

import pytest

from rollproof.core.records import Version
from rollproof.fakes.coded.policy import mixed_key
from rollproof.fakes.engine.kv_cache import (
    MIXED,
    KeySpan,
    Kv,
    PrefixCache,
    as_spans,
    clipped,
    key_of,
    label_of,
)
from tests.support.engine_driver import spans

A, B = frozenset({0}), frozenset({1})
AB = A | B


def test_forwards_over_equal_kv_are_pure() -> None:
    """Positions whose whole prefix was computed by the same weights carry those weights, in one
    span.
    """
    kv = Kv()
    assert [kv.forward(0, stop) for stop in (3, 4, 5)] == [0, 0, 0]
    assert kv.spans == [KeySpan(0, 5, 0, A)]


def test_forwards_over_older_kv_are_mixed_from_there_on() -> None:
    """After a change of weights every further position is mixed, under one key, which no pure
    version is.
    """
    kv = Kv()
    kv.forward(0, 3)
    keys = {kv.forward(1, stop) for stop in (4, 5, 6)}
    assert keys == {mixed_key(1, [0, 1])}
    assert kv.spans == [KeySpan(0, 3, 0, A), KeySpan(3, 6, keys.pop(), AB)]


def test_dropped_kv_is_computed_anew_and_pure() -> None:
    """What was freed does not linger: the recompute under new weights is pure."""
    kv = Kv()
    kv.forward(0, 3)
    kv.drop()
    assert (kv.forward(1, 4), kv.spans) == (1, [KeySpan(0, 4, 1, B)])


def test_adopted_kv_counts_as_computed_by_whoever_did() -> None:
    """A call that starts from cached KV of other weights computes mixed positions, also where the
    cached end is pure.
    """
    kv = Kv()
    kv.adopt([KeySpan(0, 2, 0, A), KeySpan(2, 4, 1, B)])
    assert kv.computed == 4
    assert kv.forward(1, 5) == mixed_key(1, [0, 1])


@pytest.mark.parametrize(
    ("version", "weights", "key"), [(1, frozenset(), 1), (1, B, 1), (1, A, mixed_key(1, [0, 1]))]
)
def test_key_of(version: int, weights: frozenset[int], key: Version) -> None:
    """A key is pure where no other weights took part."""
    assert key_of(version, weights) == key


def test_labels_of_the_ground_truth() -> None:
    """Pure keys are named by their version, all others mixed; adjacent equal names are one span."""
    parts = [
        KeySpan(0, 2, 0, A),
        KeySpan(2, 3, mixed_key(1, [0, 1]), AB),
        KeySpan(3, 5, mixed_key(2, [0, 1, 2]), AB),
    ]
    assert [label_of(part.key) for part in parts] == [0, MIXED, MIXED]
    assert as_spans(parts, 1, 5) == spans((1, 2, 0), (2, 5, MIXED))


def test_clipped_keeps_what_lies_inside() -> None:
    """Parts outside of the bounds vanish, parts across them are cut."""
    parts = [KeySpan(0, 2, 0, A), KeySpan(2, 6, 1, B), KeySpan(6, 9, 2, AB)]
    assert clipped(parts, 1, 4) == [KeySpan(1, 2, 0, A), KeySpan(2, 4, 1, B)]


def test_cache_finds_the_longest_prefix() -> None:
    """A look-up returns KV as long as tokens agree, at most as much as is asked for, joined into
    spans.
    """
    cache = PrefixCache()
    cache.store([1, 2, 3, 4], [KeySpan(0, 2, 0, A), KeySpan(2, 4, "mixed", AB)])
    assert cache.find([1, 2, 3, 9], 4) == [KeySpan(0, 2, 0, A), KeySpan(2, 3, "mixed", AB)]
    assert cache.find([1, 2, 3, 4], 1) == [KeySpan(0, 1, 0, A)]
    assert cache.find([2, 2], 2) == []


def test_cache_keeps_what_it_has() -> None:
    """KV that is offered again, under other weights, does not replace what is stored; what follows
    is added behind it.
    """
    cache = PrefixCache()
    cache.store([1, 2], [KeySpan(0, 2, 0, A)])
    cache.store([1, 2, 3], [KeySpan(0, 3, 1, B)])
    assert cache.find([1, 2, 3], 3) == [KeySpan(0, 2, 0, A), KeySpan(2, 3, 1, B)]


def test_cache_tells_equal_tokens_after_different_prefixes_apart() -> None:
    """A token is shared only where everything before it is equal."""
    cache = PrefixCache()
    cache.store([1, 7], [KeySpan(0, 2, 0, A)])
    cache.store([2, 7], [KeySpan(0, 2, 1, B)])
    assert cache.find([2, 7], 2) == [KeySpan(0, 2, 1, B)]


def test_a_full_cache_takes_hardly_longer_than_one_that_fills() -> None:
    """What makes room looks for the oldest at once, however many went before."""
    cache, taken = PrefixCache(capacity=1 << 15), []
    for first in range(0, 4 << 15, 1 << 15):
        begun = time.process_time()
        for sequence in range(first, first + (1 << 15), 64):
            cache.store([sequence] * 64, [KeySpan(0, 64, 0, A)])
        taken.append(time.process_time() - begun)

    assert max(taken[1:]) < 8 * taken[0]


def test_cache_is_bounded_and_never_wrong() -> None:
    """Beyond its capacity the oldest go; what is found afterwards is still what was stored for
    those tokens.
    """
    cache = PrefixCache(capacity=8)
    for first in range(40):
        cache.store([first, 1, 2], [KeySpan(0, 3, first, frozenset({first}))])
        assert len(cache) <= 8
        for earlier in range(first + 1):
            found = cache.find([earlier, 1, 2], 3)
            assert found in (
                [],
                [KeySpan(0, found[-1].stop if found else 0, earlier, frozenset({earlier}))],
            )
    assert cache.find([39, 1, 2], 3) == [KeySpan(0, 3, 39, frozenset({39}))]
    cache.clear()
    assert len(cache) == 0
