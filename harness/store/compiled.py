"""Compiled: for each record a function with a few lines a field, made once, that turns it into a
JSON value.

As ``dataclasses`` makes ``__init__``. A served call is three events of twenty scalars: a loop over
their fields took as long as sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING
from enum import Enum
from typing import Any, TypeAlias

from rollproof.store.values import Misfit, show

__all__ = ["Encode", "FieldPlan", "encoder"]

Encode: TypeAlias = "Callable[[Any, Any], Any]"
"""Writes a value, with the ``Parts`` where its arrays and lists go. Raises ``Misfit``."""
FieldPlan: TypeAlias = "tuple[str, Encode, Collection[Any], Any]"
"""A field: its name, its ``Encode``, the types whose values mostly stand in the JSON as they are,
and its default or ``MISSING``.
"""

_AS_IT_IS: Mapping[Any, str] = {
    type(None): "item is None",
    bool: "kind is bool",
    int: (
        f"kind is int and {-(1 << 62)} < item < {1 << 62}"
    ),  # beyond, whether it fits 64 bits is looked at
    float: "kind is float and item - item == 0.0",
    str: "kind is str and item.isascii()",
}
"""By type: the test that a value of it stands in the JSON as it is."""
_FIELD = """
        item = value.{name}
        if {wanted}:
            kind = type(item)
            if {quick}:
                out[{name!r}] = item
            else:
                name = {name!r}
                out[name] = write_{name}(item, parts)
"""
_WHOLE = """
def encode(value, parts):
    if type(value) is not cls:
        raise Misfit(f"must be a {{cls.__name__}}, not {{show(value)}}")
    out, name = {{}}, ""
    try:
        {fields}
    except Misfit as misfit:
        raise misfit.within(name) from None
    return out
"""


def encoder(cls: type[Any], plan: list[FieldPlan]) -> Encode:
    """The function for records of ``cls``; a field that equals its default is left out."""
    names: dict[str, Any] = {"cls": cls, "Misfit": Misfit, "show": show}
    fields = []
    for name, write, quick, default in plan:
        names |= {f"write_{name}": write, f"default_{name}": default, f"type_{name}": type(default)}
        tests = [f"({test})" for kind, test in _AS_IT_IS.items() if kind in quick]
        fields.append(
            _FIELD.format(
                name=name, wanted=_wanted(name, default), quick=" or ".join(tests) or "False"
            )
        )
    exec(_WHOLE.format(fields="".join(fields).strip() or "pass"), names)  # noqa: S102 - of the names of our own records' fields
    made: Encode = names["encode"]
    return made


def _wanted(name: str, default: Any) -> str:
    """The test that a value differs from the default."""
    if default is MISSING:
        return "True"
    if default is None or isinstance(default, bool | Enum):
        return f"item is not default_{name}"
    return (
        f"item is not default_{name} and (type(item) is not type_{name} or item != default_{name})"
    )
