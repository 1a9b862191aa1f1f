"""Inputs that damage sound ones: bytes, and JSON values one leaf or branch at a time.

An input is a function of a seed and its number alone, so that one that failed is made again from
these two, and with some of its changes left out to find those that matter.
"""

from __future__ import annotations

import copy
import marshal
from collections.abc import Callable
from random import Random
from typing import Any

__all__ = ["Changes", "Inputs", "damaged_bytes", "damaged_json", "one_of", "text", "word"]

_INTERESTING: tuple[Any, ...] = (
    *(0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.5, 1e300, 1e-300, float("inf")),
    *("", "a", "\x00", "\x1b[31m", "é", "\u2028", "a" * 300, "inf", "NaN", "../x"),
    *("vllm", "sglang", "T-1", "client", "abort", "none", "routes", "r0", "s0"),
)
"""Values that a file may have in a place, likely ones among them."""
_DEEP: tuple[Any, ...] = ([[]] * 2, [[[[[[[[]]]]]]]], {"a": {"b": {}}})
_ACTIONS = ("flip", "flip", "set", "cut", "drop", "repeat", "insert")
_WORDS = (b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff")


class Changes:
    """The random choices of one input, and its changes, of which some may be left out.

    Attributes:
        random: every choice comes from it.
        count: changes so far, those left out included.
    """

    def __init__(self, seed: str, left_out: frozenset[int] = frozenset()) -> None:
        self.random = Random(seed)
        self.count = 0
        self._left_out = left_out

    def made(self) -> bool:
        """Count a change whose choices are drawn; return whether it is to be made."""
        self.count += 1
        return self.count - 1 not in self._left_out


Inputs = Callable[[Changes], Any]
"""Makes an input out of choices."""


def text(random: Random, longest: int) -> str:
    """Return a text of at most ``longest`` characters, of all that Unicode has but surrogates."""
    return "".join(_character(random) for _ in range(random.randint(0, longest)))


def _character(random: Random) -> str:
    kind = random.randrange(4)
    if kind < 2:
        return chr(random.randrange(0x20, 0x7F))
    code = random.randrange(0x100 if kind == 2 else 0x110000)
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)


def word(random: Random) -> str:
    """Return a text that may be an argument of a command line."""
    if random.randrange(4):
        return text(random, 12).replace("\0", "")
    return random.choice(["a" * 300, "-", "--", ""])


def _leaf(random: Random) -> Any:
    kind = random.randrange(6)
    if kind == 0:
        return None
    if kind == 1:
        return random.random() < 0.5
    if kind == 2:
        return random.randint(-3, 300)
    if kind == 3:
        return text(random, 8)
    return random.choice(_INTERESTING)


def _value(random: Random, depth: int = 2) -> Any:
    kind = random.randrange(6) if depth else 0
    if kind < 4:
        return _leaf(random)
    size = random.randrange(4)
    if kind == 4:
        return [_value(random, depth - 1) for _ in range(size)]
    return {text(random, 5): _value(random, depth - 1) for _ in range(size)}


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


def one_of(first: Inputs, *others: Inputs) -> Inputs:
    """Inputs of one of these kinds, each as often as the others."""
    kinds = (first, *others)
    return lambda changes: changes.random.choice(kinds)(changes)


def damaged_json(sound: Any) -> Inputs:
    """Copies of a sound value with one to three places replaced, removed, repeated or renamed."""
    # found once, and copied by marshal: a trace has thousands of places
    places, stored = _places(sound), marshal.dumps(sound)

    def damaged(changes: Changes) -> Any:
        if not places:
            return _value(changes.random)
        value = marshal.loads(stored)  # noqa: S302 - of our own
        for _ in range(changes.random.randint(1, 3)):
            _change_place(value, changes.random.choice(places), changes)
        return value

    return damaged


def _change_place(value: Any, place: tuple[Any, ...], changes: Changes) -> None:
    """Change what is at a place, unless an earlier change removed that."""
    random = changes.random
    action = random.choice(["replace", "replace", "remove", "repeat", "rename"])
    new = copy.deepcopy(random.choice(_DEEP)) if random.randrange(8) == 0 else _value(random)
    name = text(random, 6)
    if not changes.made():
        return
    *above, key = place
    parent = value
    try:
        for step in above:
            parent = parent[step]
        parent[key]
    except (LookupError, TypeError):
        return
    if not isinstance(parent, dict | list):
        return  # a text by now
    if action == "replace":
        parent[key] = new
    elif action == "remove":
        del parent[key]
    elif isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    else:
        parent[name] = copy.deepcopy(parent[key])
        if action == "rename" and name != key:
            del parent[key]


def damaged_bytes(sound: bytes) -> Inputs:
    """Copies of sound bytes with one to four places changed, cut out, repeated or overwritten."""

    def damaged(changes: Changes) -> bytes:
        data = bytearray(sound)
        for _ in range(changes.random.randint(1, 4)):
            _change_bytes(data, changes)
        return bytes(data)

    return damaged


def _change_bytes(data: bytearray, changes: Changes) -> None:
    random = changes.random
    place, length = random.randint(0, max(0, len(data) - 1)), random.randint(1, 40)
    action, bit, new = random.choice(_ACTIONS), random.randrange(8), random.choice(_WORDS)
    some = random.randbytes(random.randint(0, 12))
    if not changes.made():
        return
    if action == "flip" and data:
        data[place] ^= 1 << bit
    elif action == "set":
        data[place : place + 4] = new
    elif action == "cut":
        del data[place:]
    elif action == "drop":
        del data[place : place + length]
    elif action == "repeat":
        data[place:place] = data[place : place + length]
    elif action == "insert":
        data[place:place] = some
