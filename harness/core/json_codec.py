"""Convert records to JSON values and back: their dataclass fields say how, ``msgspec`` checks.

Both forms of a trace file and ``rollproof.core.case`` use it. A field that equals its default is
left out, and a missing field takes its default: records can gain fields without a new schema, and
changing a default is changing the schema. A float that JSON cannot spell is ``{"$float": "nan"}``
(``"inf"``, ``"-inf"``), and a key of a mapping that starts with ``$`` is written with two.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from rollproof.core.error_text import show
from rollproof.errors import TraceError

__all__ = [
    "DTYPES",
    "AnyArray",
    "Misfit",
    "UnknownFieldError",
    "from_json",
    "misfit_of",
    "parse_json",
    "to_json",
]

AnyArray: TypeAlias = "npt.NDArray[Any]"
_T = TypeVar("_T")

DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
"""The element types that a trace can hold, by name, as they are stored. There is no ``object``."""
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# what an Arrow column, msgspec and numpy can hold
_INTEGER_RANGE = range(-(2**63), 2**64)
_ONLY_INTEGERS = frozenset({int})
_KINDS: Mapping[Any, str] = {
    # a mask is declared as an integer array, and may be boolean
    np.integer: "iub",
    np.floating: "f",
    np.number: "iuf",
    np.generic: "iufb",
    Any: "iufb",
}
"""Kinds of dtype that an abstract element type of an annotation allows."""


class Misfit(ValueError):
    """A value does not fit the field it belongs to; the text ends with the path of the field."""


class UnknownFieldError(Misfit):
    """A record has fields that this version does not know."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly: no NaN literals, no duplicate keys, no bottomless nesting.

    Raises:
        TraceError: The text is anything else.
    """
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise TraceError("The JSON is nested too deeply to be a trace.") from None
    except ValueError as error:
        raise TraceError(f"This is not the JSON of a trace: {error}.") from None


def to_json(value: Any, *, sparse: bool = True) -> Any:
    """Return a record as JSON values, in which arrays remain and tuples are lists.

    Args:
        value: A record, or a value of a free-form mapping.
        sparse: Leave out fields that equal their default.

    A value that JSON cannot spell stays as it is: ``from_json`` refuses it, and names its path.
    """
    # the types of most values come first: writing a trace is mostly this
    kind = type(value)
    if kind is int or kind is bool or value is None:
        return value
    if kind is str:
        return value if value.isascii() else _without_surrogates(value)
    if kind is float:
        # infinity minus itself is NaN, which equals nothing
        return value if value - value == 0.0 else {"$float": repr(value)}
    if kind is tuple or kind is list:
        if _ONLY_INTEGERS.issuperset(map(type, value)):
            return list(value)
        return [to_json(item, sparse=sparse) for item in value]
    # before mappings: asking an abstract class takes as long as writing a small record
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(kind):
        return _fields_of(value, sparse=sparse)
    if isinstance(value, np.ndarray):
        return value
    if kind is dict or isinstance(value, Mapping):
        return {_escaped(key): to_json(item, sparse=sparse) for key, item in value.items()}
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, str):
        return _without_surrogates(str.__str__(value))
    # msgspec checks a subclass as its number, but does not write it
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return to_json(float.__float__(value))
    return value


def from_json(
    cls: type[_T],
    value: Any,
    arrays: Callable[[Any], AnyArray] | None = None,
    integers: Callable[[Any], Any] | None = None,
) -> _T:
    """Build a record from JSON values, of which none is trusted.

    Args:
        cls: The dataclass.
        value: What ``to_json`` returned, or what anybody else wrote.
        arrays: Gives the array that a JSON value stands for, or raises ``TraceError``. Without it
            only arrays are taken.
        integers: Gives the list of integers that ``{"$integers": ...}`` refers to, likewise.

    Raises:
        Misfit: A value does not fit its field (``UnknownFieldError``: there is no such field).
    """

    def read(hint: Any, stored: Any) -> AnyArray:
        if isinstance(stored, _ArrayReference):
            stored = stored.value
        if isinstance(stored, np.ndarray):
            array = stored
        elif arrays is None:
            raise ValueError(f"must be a numpy array, not {show(stored)}")
        else:
            array = arrays(stored)
        allowed = _dtypes_of(hint)
        if array.dtype.name not in allowed:
            raise ValueError(f"must be an array of {' or '.join(allowed)}, not of {array.dtype}")
        return array

    revived: Any = None
    try:
        revived = _revived(value, integers)
        if not isinstance(revived, dict):
            raise Misfit(
                f"it must be an object with the fields of {cls.__name__}, not {show(value)}"
            )
        _refuse_unknown(revived, cls, "")
        # str_keys: JSON has no other keys, and some mappings have integers
        return msgspec.convert(revived, cls, dec_hook=read, str_keys=True)
    except msgspec.ValidationError as error:
        raise Misfit(_explained(str(error), cls, revived)) from error.__cause__
    except RecursionError:
        raise Misfit("it is nested too deeply") from None


_JSON_NAMES = {list: "array", dict: "object", type(None): "null"}


def _explained(text: str, cls: type[Any], value: Any) -> str:
    """Reword a message of msgspec: the path first, with the key of a mapping, then the refused
    value and the values that an enum has.
    """
    message, _, path = text.partition(" - at `")
    of_key = path.startswith("key` in")
    path = path.removeprefix("key` in `").removeprefix("$").removesuffix("`")
    # "Expected `int`, got `str` - at `$.requests[0].max_tokens`", as of msgspec 0.19 to 0.22; any
    # other wording is passed on as it is
    expected = re.fullmatch(r"Expected `(.*)`, got `(.*)`", message)
    values: tuple[str, ...] = ()
    # Any: mypy takes a class for unhashable
    record: Any = cls
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if index == "..." and expected is not None:
            for key, item in value.items():
                if expected[2].endswith(_JSON_NAMES.get(type(item), type(item).__name__)):
                    value, path = item, path.replace("...", key, 1)
                    break
        elif index == "...":
            break
        else:
            value = value[name or int(index)]
        if name and record is not None:
            field = _plan(record)[name]
            record, values = field.record, field.values
    path = path.removeprefix(".")
    # what is wrong with an array comes from whoever read it
    if isinstance(value, _Instead) and not (isinstance(value, _ArrayReference) and not expected):
        return f"{path} {type(value).__name__}"
    if of_key:
        return f"{path} has a key that is no {expected[1] if expected else 'JSON key'}"
    if message.startswith("Object missing"):
        return f"{path or cls.__name__} lacks the field {message.partition('`')[2].rstrip('`')!r}"
    if message.startswith("Invalid enum value"):
        return f"{path} must be one of {list(values)}, not {show(value)}"
    if expected is not None:
        names = {"array": "a list or tuple", "object": "a mapping"}
        if record is not None:
            names["object"] = f"an object with the fields of {record.__name__}"
        kinds = " or ".join(names.get(kind, kind) for kind in expected[1].split(" | "))
        return f"{path} must be {kinds}, not {show(value)}"
    if not path:
        return message
    return f"{path} {message}" if message.startswith("must") else f"{path}: {message}"


def misfit_of(record: Any) -> str | None:
    """Return why a record (or an event) cannot be stored, with the field; ``None`` if it can."""
    try:
        from_json(type(record), to_json(record))
    except Misfit as misfit:
        return str(misfit)
    except RecursionError:
        return "it is nested too deeply"
    return None


@dataclass(frozen=True, slots=True)
class _Field:
    """What writing and checking a record needs to know of a field."""

    name: str
    default: Any
    record: type[Any] | None
    """The dataclass that the field holds one or several of."""
    free: bool
    """Whether any JSON may be in it."""
    keys: type[Any] | None
    """The type of its keys, of a mapping that is not free-form."""
    tuples: bool
    """Whether it holds tuples."""
    values: tuple[str, ...]
    """The values of the enum that it holds."""


# resolving the annotations of a record takes much longer than writing it
@cache
def _plan(cls: type[Any]) -> Mapping[str, _Field]:
    hints = get_type_hints(cls)
    plan = {}
    for field in fields(cls):
        named = list(_types_in(hints[field.name]))
        plan[field.name] = _Field(
            name=field.name,
            default=field.default if field.default_factory is MISSING else field.default_factory(),
            record=next(
                (kind for kind in named if isinstance(kind, type) and is_dataclass(kind)), None
            ),
            free=Any in named,
            keys=next(
                (
                    get_args(hint)[0]
                    for hint in named
                    if get_origin(hint) in (dict, Mapping) and Any not in named
                ),
                None,
            ),
            tuples=any(get_origin(hint) is tuple for hint in named),
            values=tuple(
                member.value
                for kind in named
                if isinstance(kind, type) and issubclass(kind, Enum)
                for member in kind
            ),
        )
    return plan


@cache
def _defaults(cls: Any) -> tuple[tuple[str, Any, type[Any] | None, _Field], ...]:
    """Return name, default, type of the default and plan of each field of a class.

    An array as a default has no type here: it has no single truth value to compare by.
    """
    return tuple(
        (
            name,
            field.default,
            None if isinstance(field.default, np.ndarray) else type(field.default),
            field,
        )
        for name, field in _plan(cls).items()
    )


def _types_in(hint: Any) -> Iterator[Any]:
    """Yield the types that a hint is made of, without those that describe an array."""
    if get_origin(_unaliased(hint)) is np.ndarray:
        return
    yield hint
    for part in get_args(hint):
        yield from _types_in(part)


def _fields_of(record: Any, *, sparse: bool) -> dict[str, Any]:
    fields_by_name: dict[str, Any] = {}
    cls: Any = type(record)
    for name, default, kind_of_default, field in _defaults(cls):
        value = getattr(record, name)
        # most fields have their default, and a trace has thousands of events
        if sparse and value is default:
            continue
        kind = type(value)
        # 1 equals True
        if sparse and kind is kind_of_default and value == default:
            continue
        # what needs no change: a call for each of these would double the time of a small event
        if kind is int or value is None or (kind is str and value.isascii()):
            fields_by_name[name] = value
            continue
        # what reading would turn into something else would not come back as it was
        if kind is list and field.tuples:
            value = _Instead.of(f"must be a tuple, not {show(value)}")
        elif (
            field.keys is not None
            and isinstance(value, Mapping)
            and any(type(key) is not field.keys for key in value)
        ):
            value = _Instead.of(f"must be a mapping with keys of {field.keys.__name__}")
        fields_by_name[name] = to_json(value, sparse=sparse)
    return fields_by_name


def _revived(value: Any, integers: Callable[[Any], Any] | None) -> Any:
    """Return JSON values with floats, keys and integers put back; what is not allowed becomes an
    ``_Instead``, which msgspec refuses wherever it is.
    """
    kind = type(value)
    if kind is int:
        return (
            value
            if value in _INTEGER_RANGE
            else _Instead.of(f"must fit 64 bits, not be {show(value)}")
        )
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is list:
        # token ids: a look at each would take most of the time of reading
        if _ONLY_INTEGERS.issuperset(map(type, value)) and (
            not value or (min(value) in _INTEGER_RANGE and max(value) in _INTEGER_RANGE)
        ):
            return value
        return [_revived(item, integers) for item in value]
    if kind is dict:
        return _revived_object(value, integers)
    if kind is float and not math.isfinite(value):
        return _Instead.of("is a number too large for a float")
    return value


def _revived_object(value: dict[str, Any], integers: Callable[[Any], Any] | None) -> Any:
    if len(value) == 1:
        # an object of ours for what JSON cannot spell; those of users have "$$" in front
        ((key, item),) = value.items()
        if key == "$float" and isinstance(item, str) and item in _FLOATS:
            return _FLOATS[item]
        if key == "$integers" and integers is not None:
            return integers(value)
        if key == "$array":
            return _ArrayReference.to(value)
    out = {}
    for key, item in value.items():
        if key == "$float":
            return _Instead.of(f"must be a number, or one of {list(_FLOATS)} under '$float'")
        if key.startswith("$") and not key.startswith("$$"):
            return _Instead.of(f"has the reserved key {show(key)}")
        out[_text(key.removeprefix("$"))] = _revived(item, integers)
    return out


def _text(text: str) -> Any:
    return (
        _Instead.of(f"holds a lone surrogate, which is not valid text: {show(text)}")
        if _SURROGATE.search(text)
        else text
    )


class _Instead:
    """Stands for a value that no field may hold, so that msgspec refuses it and says its path. The
    name of its class is what is wrong with it.
    """

    @staticmethod
    def of(problem: str) -> Any:
        return type(problem, (_Instead,), {})()

    def __repr__(self) -> str:
        return f"a value that {type(self).__name__}"


class _ArrayReference(_Instead):
    """Stands for ``{"$array": ...}``, which only the field of an array may hold."""

    value: Any

    @staticmethod
    def to(value: Any) -> Any:
        reference = _ARRAY_REFERENCE()
        reference.value = value
        return reference


# its name is what msgspec's refusal says
_ARRAY_REFERENCE = type("has the reserved key '$array'", (_ArrayReference,), {})


def _refuse_unknown(value: Any, cls: Any, path: str) -> None:
    """Raise for a field that ``cls`` does not have, which msgspec would ignore in a dataclass, and
    for what is no JSON in a free-form mapping, which it would let through.
    """
    if isinstance(value, list):
        for i, item in enumerate(value):
            _refuse_unknown(item, cls, f"{path}[{i}]")
        return
    if not isinstance(value, dict):
        return
    plan = _plan(cls)
    unknown = value.keys() - plan.keys()
    if unknown:
        names = [show(name) for name in sorted(map(str, unknown))][:9]
        place = f"at {path.removeprefix('.')}" if path else "here"
        raise UnknownFieldError(
            f"{cls.__name__} has the fields {names} {place}, which this rollproof does not know; it"
            f" knows {sorted(plan)}"
        )
    for name, item in value.items():
        field = plan[name]
        if field.record is not None:
            _refuse_unknown(item, field.record, f"{path}.{name}")
        elif field.free:
            _refuse_foreign(item, f"{path}.{name}")


def _refuse_foreign(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_foreign(key, f"key of {path}")
            _refuse_foreign(item, f"{path}[{show(key)}]")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _refuse_foreign(item, f"{path}[{i}]")
    elif not isinstance(value, str | int | float | None):
        problem = f"must be a JSON value, not {show(value)}"
        if isinstance(value, _Instead):
            problem = type(value).__name__
        raise Misfit(f"{path.removeprefix('.')} {problem}")


@cache
def _dtypes_of(hint: Any) -> tuple[str, ...]:
    """Names of the element types that an array annotation allows."""
    element = (get_args(get_args(_unaliased(hint))[1]) or (Any,))[0]
    element = get_origin(element) or element
    return tuple(
        name
        for name, dtype in DTYPES.items()
        if (dtype.kind in _KINDS[element] if element in _KINDS else dtype == element)
    )


def _unaliased(hint: Any) -> Any:
    """Return what an alias stands for."""
    origin = get_origin(hint)
    if hasattr(origin, "__value__"):
        # From numpy 2.5 on, NDArray is the alias of a `type` statement if Python has one (3.12).
        return origin.__value__[get_args(hint)]
    return hint


def _escaped(key: Any) -> str:
    text = _without_surrogates(key if isinstance(key, str) else str(key))
    return f"${text}" if text.startswith("$") else text


def _without_surrogates(text: str) -> str:
    # the text of an error may hold undecodable bytes of a file name
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _distinct(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    items = list(pairs)
    out = dict(items)
    if len(out) != len(items):
        seen: set[str] = set()
        for key, _ in items:
            if key in seen:
                raise ValueError(f"the key {show(key)} occurs twice in one object")
            seen.add(key)
    return out


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_SURROGATE = re.compile("[\ud800-\udfff]")
# msgspec's and orjson's parsers let the last of two equal keys win
_DECODER = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_refuse_constant)
