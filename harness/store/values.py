"""Values: JSON scalars and free-form mappings, read strictly and written so that they come back the
same.

A float that JSON cannot spell is ``{"$float": "nan"}`` (``"inf"``, ``"-inf"``); a key that starts
with ``$`` is written with two. Text holds no lone surrogates: error texts sometimes do, and become
escapes when they are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np

from rollproof.errors import TraceError

__all__ = [
    "SCALARS",
    "Misfit",
    "key_of",
    "parse_json",
    "plain",
    "read_key",
    "read_plain",
    "read_scalar",
    "show",
    "write_scalar",
]

SCALARS = frozenset({bool, int, float, str, type(None)})
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Misfit(ValueError):
    """A value that does not fit where it stands; ``within`` tells where that is, from the inside
    out.
    """

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path

    def within(self, step: str) -> Misfit:
        """The same problem, seen from one level further out. ``step`` is a field's name, or
        ``[key]``.
        """
        joint = "." if self.path and not self.path.startswith("[") else ""
        return Misfit(self.problem, f"{step}{joint}{self.path}")

    def __str__(self) -> str:
        return f"{self.path} {self.problem}" if self.path else self.problem


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN literals, no key twice, no bottomless nesting. Raises ``TraceError``."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise TraceError("The JSON is nested too deeply to be a trace.") from None
    except ValueError as error:
        raise TraceError(f"This is not the JSON of a trace: {error}.") from None


def write_scalar(value: Any, allowed: frozenset[Any] = SCALARS) -> Any:
    """A scalar of one of the ``allowed`` types as JSON. Raises ``Misfit``."""
    kind = type(value)
    if kind in allowed and (
        (kind is float and value - value == 0.0) or kind is bool or value is None
    ):
        return value
    value = value.item() if isinstance(value, np.generic) else value
    kind = type(value)
    if isinstance(value, str) and str in allowed:
        return clean(str.__str__(value))
    if kind is int and int not in allowed and float in allowed:
        return float(_within_64_bits(value))
    if kind not in allowed:
        raise Misfit(f"must be {_names(allowed)}, not {show(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    return _within_64_bits(value)


def read_scalar(wire: Any, allowed: frozenset[Any] = SCALARS) -> Any:
    """What ``write_scalar`` wrote. A float may be spelt as a whole number where whole numbers are
    not allowed. Raises ``Misfit``.
    """
    kind = type(wire)
    if kind is dict and float in allowed:
        return _read_float(wire)
    if kind is int and int not in allowed and float in allowed:
        return float(_within_64_bits(wire))
    if kind not in allowed:
        raise Misfit(f"must be {_names(allowed)}, not {show(wire)}")
    if kind is float and not math.isfinite(wire):
        raise Misfit("is a number too large for a float")
    if kind is str and not wire.isascii():
        _refuse_surrogates(wire)
    return _within_64_bits(wire)


def plain(value: Any) -> Any:
    """A value of a free-form mapping (a case, a recipe) as JSON: enums become their values, tuples
    lists. Raises ``Misfit``.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {key_of(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return write_scalar(value)


def read_plain(wire: Any) -> Any:
    """What ``plain`` wrote. Raises ``Misfit``."""
    if isinstance(wire, dict):
        if wire.keys() == {"$float"}:
            return _read_float(wire)
        return {read_key(key): read_plain(item) for key, item in wire.items()}
    if isinstance(wire, list):
        return [read_plain(item) for item in wire]
    return read_scalar(wire)


@lru_cache(maxsize=1024, typed=True)
def key_of(key: Hashable) -> str:
    """A mapping's key as JSON."""
    text = clean(str(key))
    return f"${text}" if text.startswith("$") else text


def read_key(text: str, kind: type[Any] = str) -> Any:
    """What ``key_of`` wrote, as a ``str`` or an ``int``. Raises ``Misfit``."""
    if kind is int:
        if (
            len(text) > 20
            or not text.isascii()
            or not text.removeprefix("-").isdecimal()
            or str(int(text)) != text
        ):
            raise Misfit(f"has a key that is no whole number: {show(text)}")
        return int(text)
    if not text.isascii():
        _refuse_surrogates(text)
    if text.startswith("$") and not text.startswith("$$"):
        raise Misfit(f"has the reserved key {show(text)}")
    return text.removeprefix("$")


def clean(text: str) -> str:
    """Text without lone surrogates."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def show(value: object) -> str:
    """A value for an error's text: short, ASCII, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, Mapping | list | tuple | set):
        return f"a {type(value).__name__} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _within_64_bits(value: Any) -> Any:
    if type(value) is int and not -(2**63) <= value < 2**64:
        raise Misfit(f"must fit 64 bits, not be {show(value)}")
    return value


def _read_float(wire: dict[str, Any]) -> float:
    name = wire.get("$float") if len(wire) == 1 else None
    if not isinstance(name, str) or name not in _FLOATS:
        raise Misfit(
            f"must be a number, or one of {sorted(_FLOATS)} as an object with the key '$float', not"
            f" {show(wire)}"
        )
    return _FLOATS[name]


def _refuse_surrogates(text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise Misfit(f"holds a lone surrogate, which is no text: {show(text)}")


def _names(kinds: frozenset[Any]) -> str:
    return " or ".join(sorted("null" if kind is type(None) else kind.__name__ for kind in kinds))


def _pairs(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    items = list(pairs)
    out = dict(items)
    if len(out) != len(items):
        seen: set[str] = set()
        twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {show(twice)} occurs twice in one object")
    return out


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)
