"""Strategies that damage sound inputs: bytes, and JSON values one leaf or branch at a time."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

__all__ = ["LEAVES", "damaged_bytes", "damaged_json", "words"]

LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.5, 1e300, 1e-300]),
    st.integers(-3, 300),
    st.sampled_from(["", "a", "\x00", "\x1b[31m", "é", "\u2028", "a" * 300, "inf", "NaN", "../x"]),
    st.sampled_from(["vllm", "sglang", "T-1", "client", "abort", "none", "routes", "r0", "s0"]),
    st.text(max_size=8),
)
"""Values of every type that a file can have in a place, likely ones among them."""
_VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
_DEEP = st.sampled_from([[[]] * 2, [[[[[[[[]]]]]]]], {"a": {"b": {}}}])
words: st.SearchStrategy[str] = st.text(max_size=12) | st.sampled_from(["a" * 300, "-", "--", ""])


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in ``value`` but itself."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [
        place for key, inner in items for place in ((*path, key), *_places(inner, (*path, key)))
    ]


def damaged_json(sound: Any) -> st.SearchStrategy[Any]:
    """Copies of a sound value with one to three places replaced, removed, repeated or renamed."""
    # found once: a trace has thousands
    return _damaged_json(json.dumps(sound), _places(sound))


@st.composite
def _damaged_json(draw: st.DrawFn, sound: str, places: list[tuple[Any, ...]]) -> Any:
    value = json.loads(sound)
    if not places:
        return draw(_VALUES)
    for _ in range(draw(st.integers(1, 3))):
        *above, key = places[draw(st.integers(0, len(places) - 1))]
        parent = value
        try:
            for step in above:
                parent = parent[step]
            parent[key]
        except (LookupError, TypeError):
            continue  # an earlier change removed it
        if not isinstance(parent, dict | list):
            continue  # or replaced what it was in, such as by a text
        action = draw(st.sampled_from(["replace", "replace", "remove", "repeat", "rename"]))
        if action == "replace":
            # a copy, since a later change may be within it
            parent[key] = copy.deepcopy(draw(_VALUES | _DEEP))
        elif action == "remove":
            del parent[key]
        elif isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            name = draw(st.text(max_size=6))
            parent[name] = copy.deepcopy(parent[key])
            if action == "rename" and name != key:
                del parent[key]
    return value


@st.composite
def damaged_bytes(draw: st.DrawFn, sound: bytes) -> bytes:
    """A copy of sound bytes with one to four places changed, cut out, repeated or overwritten."""
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(1, 40))
        action = draw(st.sampled_from(["flip", "flip", "set", "cut", "drop", "repeat", "insert"]))
        if action == "flip" and data:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif action == "set":
            data[place : place + 4] = draw(
                st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"])
            )
        elif action == "cut":
            del data[place:]
        elif action == "drop":
            del data[place : place + length]
        elif action == "repeat":
            data[place:place] = data[place : place + length]
        elif action == "insert":
            data[place:place] = draw(st.binary(max_size=12))
    return bytes(data)
