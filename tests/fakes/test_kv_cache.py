"""KV of the fake engine: which weights took part in each position, and which KV calls share."""

from __future__ import annotations

from collections import OrderedDict

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
    """Positions with a prefix computed by the same weights have those weights, in one span."""
    kv = Kv()
    assert [kv.forward(0, stop) for stop in (3, 4, 5)] == [0, 0, 0]
    assert kv.spans == [KeySpan(0, 5, 0, A)]


def test_forwards_over_older_kv_are_mixed_from_there_on() -> None:
    """After a change of weights all further positions are mixed, under one key of no pure
    version.
    """
    kv = Kv()
    kv.forward(0, 3)
    keys = {kv.forward(1, stop) for stop in (4, 5, 6)}
    assert keys == {mixed_key(1, [0, 1])}
    assert kv.spans == [KeySpan(0, 3, 0, A), KeySpan(3, 6, keys.pop(), AB)]


def test_dropped_kv_is_computed_again_and_pure() -> None:
    """Freed KV leaves no trace: the recompute under new weights is pure."""
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
    """Parts outside the bounds vanish, parts across them are cut."""
    parts = [KeySpan(0, 2, 0, A), KeySpan(2, 6, 1, B), KeySpan(6, 9, 2, AB)]
    assert clipped(parts, 1, 4) == [KeySpan(1, 2, 0, A), KeySpan(2, 4, 1, B)]


def test_cache_finds_the_longest_prefix() -> None:
    """A look-up returns KV as long as tokens agree, up to the limit, joined into spans."""
    cache = PrefixCache()
    cache.store([1, 2, 3, 4], [KeySpan(0, 2, 0, A), KeySpan(2, 4, "mixed", AB)])
    assert cache.find([1, 2, 3, 9], 4) == [KeySpan(0, 2, 0, A), KeySpan(2, 3, "mixed", AB)]
    assert cache.find([1, 2, 3, 4], 1) == [KeySpan(0, 1, 0, A)]
    assert cache.find([2, 2], 2) == []


def test_cache_keeps_what_it_has() -> None:
    """KV that is stored again, under other weights, does not replace the first; later positions are
    added.
    """
    cache = PrefixCache()
    cache.store([1, 2], [KeySpan(0, 2, 0, A)])
    cache.store([1, 2, 3], [KeySpan(0, 3, 1, B)])
    assert cache.find([1, 2, 3], 3) == [KeySpan(0, 2, 0, A), KeySpan(2, 3, 1, B)]


def test_cache_tells_equal_tokens_after_different_prefixes_apart() -> None:
    """A token is shared only if everything before it is equal."""
    cache = PrefixCache()
    cache.store([1, 7], [KeySpan(0, 2, 0, A)])
    cache.store([2, 7], [KeySpan(0, 2, 1, B)])
    assert cache.find([2, 7], 2) == [KeySpan(0, 2, 1, B)]


def test_a_full_cache_evicts_in_constant_time() -> None:
    """Entries are in an ``OrderedDict``: a plain dict searches its oldest entry past deleted
    ones.
    """
    cache = PrefixCache(capacity=4)
    cache.store([1, 2, 3, 4, 5, 6], [KeySpan(0, 6, 0, A)])

    assert isinstance(cache._entries, OrderedDict)
    assert 4 == len(cache)


def test_cache_is_bounded_and_never_wrong() -> None:
    """Beyond the capacity the oldest entries go; the others are still those that were stored."""
    cache = PrefixCache(capacity=8)
    for first in range(40):
        cache.store([first, 1, 2], [KeySpan(0, 3, first, frozenset({first}))])
        assert len(cache) <= 8
        for earlier in range(first + 1):
            kv = cache.find([earlier, 1, 2], 3)
            assert kv in (
                [],
                [KeySpan(0, kv[-1].stop if kv else 0, earlier, frozenset({earlier}))],
            )
    assert cache.find([39, 1, 2], 3) == [KeySpan(0, 3, 39, frozenset({39}))]
    cache.clear()
    assert len(cache) == 0
