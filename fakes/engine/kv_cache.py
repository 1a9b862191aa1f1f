"""KV cache of fake engines: which weights computed each position, and which KV calls share.

A forward under weights v over KV that only v computed gives values of v. Over KV of other weights
it gives values of no single version; they are coded under ``mixed_key`` of v and the weights that
took part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from rollproof.core.records import Span, Version
from rollproof.fakes.coded.policy import mixed_key
from rollproof.fakes.engine.adapters import AlteredKey

__all__ = [
    "ALTERED",
    "MIXED",
    "KeySpan",
    "Kv",
    "PrefixCache",
    "Root",
    "as_spans",
    "clipped",
    "key_of",
    "label_of",
    "root_of",
]

MIXED = "mixed"
"""The label of mixed values in the ground truth of a trace."""
ALTERED = "altered"
"""The label of values that the weights of no version give."""


class KeySpan(NamedTuple):
    """Positions ``start`` to ``stop``, computed under ``key``; ``weights`` took part."""

    start: int
    stop: int
    key: Version
    weights: frozenset[Version]


def key_of(version: Version, weights: frozenset[Version]) -> Version:
    """Return the key of a forward under ``version`` over a prefix of ``weights``.

    It is the same for every later position of a mixed sequence, so that a mixed stretch is one
    span.
    """
    if weights <= {version}:
        return version
    return mixed_key(version, sorted(weights | {version}, key=_order))


def _order(version: Version) -> tuple[bool, int, str]:
    number = isinstance(version, int)
    return not number, version if isinstance(version, int) else 0, str(version)


def label_of(key: Version) -> Version:
    """Return the version of a key in the ground truth of a trace; ``"mixed"`` for mixed weights,
    and ``"altered"`` for weights of no version.
    """
    if isinstance(key, int):
        return key
    return ALTERED if isinstance(key, AlteredKey) else MIXED


def clipped(spans: Sequence[KeySpan], start: int, stop: int) -> list[KeySpan]:
    """Return the parts of ``spans`` within ``start`` to ``stop``."""
    if len(spans) == 1:
        low, high, _, _ = spans[0]
        if start <= low < high <= stop:
            return [spans[0]]
    out = []
    for span in spans:
        low, high = max(span.start, start), min(span.stop, stop)
        if low < high:
            out.append(KeySpan(low, high, span.key, span.weights))
    return out


def as_spans(spans: Sequence[KeySpan], start: int, stop: int) -> tuple[Span, ...]:
    """Return ground-truth spans over ``start`` to ``stop``, adjacent equal labels joined."""
    parts = clipped(spans, start, stop)
    if len(parts) == 1:
        return (Span(start=parts[0].start, end=parts[0].stop, version=label_of(parts[0].key)),)
    out: list[Span] = []
    for part in parts:
        version = label_of(part.key)
        if out and out[-1].version == version and out[-1].end == part.start:
            out[-1] = Span(start=out[-1].start, end=part.stop, version=version)
        else:
            out.append(Span(start=part.start, end=part.stop, version=version))
    return tuple(out)


@dataclass(slots=True)
class Kv:
    """The KV of one call: positions 0 to ``computed``, as spans of the keys that computed them."""

    spans: list[KeySpan] = field(default_factory=list)
    computed: int = 0
    weights: frozenset[Version] = frozenset()

    def forward(self, version: Version, stop: int) -> Version:
        """Compute positions up to ``stop`` under ``version``; return the key of those forwards."""
        key = key_of(version, self.weights)
        # extend the last span: most calls have one span all their life
        if self.spans and self.spans[-1].key == key:
            last = self.spans[-1]
            self.spans[-1] = KeySpan(last.start, stop, key, last.weights)
        elif stop > self.computed:
            self.weights |= {version}
            self.spans.append(KeySpan(self.computed, stop, key, self.weights))
        self.computed = stop
        return key

    def adopt(self, spans: list[KeySpan]) -> None:
        """Start from KV that another call computed."""
        self.spans = list(spans)
        self.computed = spans[-1].stop if spans else 0
        self.weights = frozenset().union(*(span.weights for span in spans))

    def drop(self) -> None:
        """Free everything."""
        self.spans, self.computed, self.weights = [], 0, frozenset()


class Root(NamedTuple):
    """What calls must have in common to share prefixes.

    ``adapter`` is what an engine takes for the identity of the adapter; ``None`` for the base
    model.
    """

    cache_salt: Hashable = None
    extra_key: Hashable = None
    adapter: Hashable = None


def root_of(sampling: Mapping[str, Any], adapter: Hashable = None) -> Root:
    """Return the root of a call's prefixes in the cache.

    Calls share prefixes only if their ``cache_salt`` (vLLM, SGLang) and ``extra_key`` (SGLang) are
    equal, and what their engine takes for the identity of their adapter.
    """
    return Root(sampling.get("cache_salt"), sampling.get("extra_key"), adapter)


_Entry: TypeAlias = "tuple[int, Version, frozenset[Version]]"


class PrefixCache:
    """KV that calls of one server share: a tree of tokens below each ``root``.

    A position that is stored stays as it is, as in engines. ``capacity`` bounds the positions; the
    oldest are evicted first.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[tuple[Hashable, int], _Entry] = OrderedDict()
        self._nodes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Sequence[int], limit: int, root: Hashable = None) -> list[KeySpan]:
        """Return the KV of the longest cached prefix of ``ids``, at most ``limit`` positions."""
        spans: list[KeySpan] = []
        node = root
        for position in range(limit):
            entry = self._entries.get((node, ids[position]))
            if entry is None:
                break
            node, key, weights = entry
            if spans and spans[-1].key == key and spans[-1].weights == weights:
                spans[-1] = KeySpan(spans[-1].start, position + 1, key, weights)
            else:
                spans.append(KeySpan(position, position + 1, key, weights))
        return spans

    def store(self, ids: Sequence[int], spans: Sequence[KeySpan], root: Hashable = None) -> None:
        """Store the KV of a call over ``ids``; positions already cached stay as they are."""
        # a node is identified by its predecessor and its token, as in the block hashes of vLLM
        node = root
        for span in spans:
            for position in range(span.start, span.stop):
                edge = (node, ids[position])
                entry = self._entries.get(edge)
                if entry is None:
                    self._nodes += 1
                    entry = self._entries[edge] = (self._nodes, span.key, span.weights)
                node = entry[0]
        while len(self._entries) > self._capacity:
            # a plain dict would search its first entry past all deleted ones
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
