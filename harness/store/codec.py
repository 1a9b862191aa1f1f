"""Wire form: records as plain JSON values, derived from their dataclass fields, with strict
reading.

Both trace forms use it. Each says through ``Parts`` where arrays and lists of integers go: aside in
columns, or inline. A field that equals its default is left out, and one that is missing takes its
default: so records can gain fields without a new schema, and changing a default is changing the
schema. Nothing read is trusted: every value is checked against the type of its field, and what does
not fit raises ``TraceError`` with the path of the place.
"""

from __future__ import annotations

import types
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

import numpy as np

from rollproof.core import records
from rollproof.core.events.base import Event
from rollproof.core.trace import EVENT_KINDS, SCHEMA, Header
from rollproof.errors import RollproofError, TraceError, TraceVersionError
from rollproof.store.arrays import DTYPES, AnyArray, name_of
from rollproof.store.compiled import Encode, encoder
from rollproof.store.values import (
    SCALARS,
    Misfit,
    key_of,
    plain,
    read_key,
    read_plain,
    read_scalar,
    show,
    write_scalar,
)

__all__ = [
    "Parts",
    "decode_event",
    "decode_header",
    "encode_event",
    "encode_fields",
    "encode_header",
    "misfit_of",
    "newer_schema",
]


class Parts(Protocol):
    """Where a form keeps arrays and lists of integers: each ``put`` returns what stands for it in
    the JSON value.
    """

    def put_array(self, array: AnyArray) -> Any:
        """Take an array of one of ``DTYPES``; its bytes are copied."""
        ...

    def put_integers(self, values: Sequence[int]) -> Any:
        """Take integers of 64 bits."""
        ...

    def array(self, wire: Any) -> AnyArray:
        """Give an array back. Raises ``TraceError``."""
        ...

    def integers(self, wire: Any) -> tuple[int, ...] | None:
        """Give integers back; ``None`` where ``wire`` is a list to be read item by item. Raises
        ``TraceError``.
        """
        ...


def encode_event(event: Event, parts: Parts) -> dict[str, Any]:
    """``{"kind": ..., field: ...}``. Raises ``TraceError`` for a kind or a value that no trace can
    hold.
    """
    return {"kind": event.kind, **encode_fields(event, parts)}


def encode_fields(event: Event, parts: Parts) -> dict[str, Any]:
    """The same without the kind."""
    kind: Any = type(event)
    known: Any = EVENT_KINDS.get(event.kind)
    if known is not kind:
        raise TraceError(
            f"{kind.__name__} is not a kind of event that a trace holds; those are"
            f" {sorted(EVENT_KINDS)}."
        )
    try:
        wire: dict[str, Any] = _codec(kind).encode(event, parts)
    except (Misfit, RecursionError) as error:
        raise _unstorable(f"{event.kind} event", error) from error
    return wire


def decode_event(wire: Any, parts: Parts) -> Event:
    """What ``encode_event`` wrote. Raises ``TraceError``, or ``TraceVersionError`` for a kind or a
    field that is not known.
    """
    if not isinstance(wire, dict) or not isinstance(wire.get("kind"), str):
        raise TraceError(f"An event must be an object with a kind, not {show(wire)}.")
    kind = wire.pop("kind")
    if kind not in EVENT_KINDS:
        raise TraceVersionError(
            f"The trace holds an event of kind {show(kind)}, which this rollproof does not know; it"
            f" knows {sorted(EVENT_KINDS)}. A newer rollproof wrote it: upgrade to read it."
        )
    event: Event = _read(EVENT_KINDS[kind], wire, parts, f"{kind} event")
    return event


def misfit_of(record: Any) -> str | None:
    """Why a record (or an event) cannot be stored: the path of a field and what it must be;
    ``None`` where it can.
    """
    try:
        _codec(type(record)).encode(record, _NOWHERE)  # type: ignore[arg-type]  # a class is hashable
    except Misfit as misfit:
        return str(misfit)
    except RecursionError:
        return "it is nested too deeply"
    return None


def encode_header(header: Header, parts: Parts) -> dict[str, Any]:
    """The header as a JSON value. Raises ``TraceError`` for values that no trace can hold."""
    try:
        return {**_codec(Header).encode(header, parts), "schema": header.schema}
    except (Misfit, RecursionError) as error:
        raise _unstorable("header", error) from error


def decode_header(wire: Any, parts: Parts) -> Header:
    """What ``encode_header`` wrote. Raises ``TraceError``, or ``TraceVersionError`` where the trace
    is of a newer schema.
    """
    if isinstance(wire, dict) and type(wire.get("schema")) is int and wire["schema"] > SCHEMA:
        raise TraceVersionError(newer_schema(wire["schema"], wire.get("made_by")))
    header: Header = _read(Header, wire, parts, "header")
    return header


def newer_schema(schema: object, made_by: object = None) -> str:
    """The text for a trace of a schema that this version does not know."""
    by = f" by {show(made_by)}" if made_by else ""
    return (
        f"This trace was written{by} in schema {show(schema)}; this rollproof reads schemas up to"
        f" {SCHEMA}. Upgrade rollproof (`pip install -U rollproof`) to read it."
    )


class _Nowhere:
    """The ``Parts`` of a record that is only looked at."""

    def put_array(self, array: AnyArray) -> Any:
        """Nothing."""

    def put_integers(self, values: Sequence[int]) -> Any:
        """Nothing."""

    def array(self, wire: Any) -> AnyArray:
        """Nothing is read."""
        raise NotImplementedError("this side of the codec only writes")

    def integers(self, wire: Any) -> tuple[int, ...] | None:
        """Nothing is read."""
        raise NotImplementedError("this side of the codec only writes")


_NOWHERE = _Nowhere()


@dataclass(frozen=True, slots=True)
class _Codec:
    """How values of one type are written and read. Both raise ``Misfit``.

    ``quick`` are types whose values nearly always stand in the JSON as they are: ASCII text,
    integers that are not huge, finite floats.
    """

    encode: Encode
    decode: Callable[[Any, Parts], Any]
    quick: frozenset[Any] = frozenset()


def _unstorable(what: str, error: Exception) -> TraceError:
    return TraceError(
        f"The {what} cannot be stored:"
        f" {'it is nested too deeply' if isinstance(error, RecursionError) else error}."
    )


def _read(cls: Any, wire: Any, parts: Parts, what: str) -> Any:
    try:
        return _codec(cls).decode(wire, parts)
    except Misfit as misfit:
        raise TraceError(f"The {what} cannot be read: {misfit}.") from misfit
    except RecursionError:
        raise TraceError(f"The {what} cannot be read: it is nested too deeply.") from None


@cache
def _codec(hint: Hashable) -> _Codec:
    """The codec of a type hint. Raises ``TypeError`` for one that no trace can hold: a fault of the
    record, not of a trace.
    """
    if hint is Any:
        return _Codec(lambda value, _: plain(value), lambda wire, _: read_plain(wire))
    alias: Any = get_origin(hint)
    if hasattr(
        alias, "__value__"
    ):  # numpy 2.5 makes NDArray a type statement's alias where Python has one
        return _codec(alias.__value__[get_args(hint)])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if hint in SCALARS:
        return _scalar(frozenset({hint}))
    if isinstance(hint, type) and is_dataclass(hint):
        return _record(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is np.ndarray:
        return _array(args[1])
    if origin is tuple:
        return _tuple(args[0]) if args[1:] == (Ellipsis,) else _fixed(args)
    if origin in _MAPPINGS:
        return _mapping(*args)
    raise TypeError(f"A trace cannot hold a field of type {hint!r}.")


_MAPPINGS = (Mapping, dict)


def _record(cls: type[Any]) -> _Codec:
    hints = get_type_hints(cls, localns=_aliases())
    specs = [(field.name, _codec(hints[field.name]), _default(field)) for field in fields(cls)]
    known = [name for name, _, _ in specs]
    encode = encoder(
        cls, [(name, codec.encode, codec.quick, default) for name, codec, default in specs]
    )

    def decode(wire: Any, parts: Parts) -> Any:
        if not isinstance(wire, dict):
            raise Misfit(f"must be an object with the fields of {cls.__name__}, not {show(wire)}")
        values = {}
        for name, codec, default in specs:
            if name in wire:
                values[name] = _step(codec.decode, wire[name], parts, name)
            elif default is MISSING:
                raise Misfit(f"{cls.__name__} lacks {name!r}")
        strange = wire.keys() - set(known)
        if strange:
            raise TraceVersionError(
                f"{cls.__name__} has the fields {[show(name) for name in sorted(strange)][:9]}"
                f" here, which this rollproof does not know; it knows {sorted(known)}. A newer"
                " rollproof wrote them (upgrade to read it), or they are misspelt."
            )
        try:
            return cls(**values)
        except RollproofError as error:
            raise Misfit(f"{cls.__name__} refuses its values: {error}") from error

    return _Codec(encode, decode)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def _aliases() -> dict[str, Any]:
    """The type aliases of ``rollproof.core.records``, which are strings there, as types."""
    names = {
        name: value
        for name, value in vars(records).items()
        if name in records.__all__ and isinstance(value, str)
    }
    return {name: eval(value, dict(vars(records))) for name, value in names.items()}  # noqa: S307 - annotations of our own module


def _step(do: Callable[[Any, Parts], Any], item: Any, parts: Parts, step: str) -> Any:
    try:
        return do(item, parts)
    except Misfit as misfit:
        raise misfit.within(step) from None


def _scalar(allowed: frozenset[Any]) -> _Codec:
    return _Codec(
        lambda value, _: write_scalar(value, allowed),
        lambda wire, _: read_scalar(wire, allowed),
        allowed,
    )


def _enum(cls: type[Enum]) -> _Codec:
    members: dict[Any, Enum] = {member.value: member for member in cls}

    def encode(value: Any, _: Parts) -> Any:
        if type(value) is cls:
            return value._value_  # as ``value``, without the property
        if value not in members.values():
            raise Misfit(f"must be one of {list(members)}, not {show(value)}")
        return cls(value).value

    def decode(wire: Any, _: Parts) -> Any:
        if type(wire) is not str or wire not in members:
            raise Misfit(f"must be one of {list(members)}, not {show(wire)}")
        return members[wire]

    return _Codec(encode, decode)


def _union(args: tuple[Any, ...]) -> _Codec:
    if SCALARS.issuperset(args):
        return _scalar(frozenset(args))
    rest = [arg for arg in args if arg is not type(None)]
    if len(rest) != 1 or len(args) != 2:
        raise TypeError(f"A trace cannot tell apart the members of the union {args!r}.")
    inner = _codec(rest[0])
    return _Codec(
        lambda value, parts: None if value is None else inner.encode(value, parts),
        lambda wire, parts: None if wire is None else inner.decode(wire, parts),
    )


_KINDS: Mapping[Any, str] = {
    np.integer: "iub",
    np.floating: "f",
    np.number: "iuf",
    np.generic: "iufb",
    Any: "iufb",
}
"""Kinds of dtype under an abstract element type. A mask is declared as an integer array, and may be
boolean.
"""


def _array(dtype: Any) -> _Codec:
    wanted = (get_args(dtype) or (Any,))[0]
    wanted = get_origin(wanted) or wanted
    fitting = [
        name
        for name, known in DTYPES.items()
        if (known.kind in _KINDS[wanted] if wanted in _KINDS else known == wanted)
    ]

    def check(array: AnyArray) -> AnyArray:
        if name_of(array.dtype) not in fitting:
            raise Misfit(f"must be an array of {' or '.join(fitting)}, not of {array.dtype.name}")
        return array

    def encode(value: Any, parts: Parts) -> Any:
        if not isinstance(value, np.ndarray):
            raise Misfit(f"must be a numpy array, not {show(value)}")
        return parts.put_array(check(value))

    return _Codec(encode, lambda wire, parts: check(parts.array(wire)))


_INTEGERS = frozenset({int})


def _tuple(item: Any) -> _Codec:
    inner = _codec(item)
    write, integers = inner.encode, item is int or int in get_args(item)

    def encode(value: Any, parts: Parts) -> Any:
        if not isinstance(value, tuple):
            raise Misfit(f"must be a tuple, not {show(value)}")
        if integers and value and _INTEGERS.issuperset(map(type, value)):
            try:
                return parts.put_integers(array("q", value))
            except OverflowError:
                pass
        try:
            return [write(one, parts) for one in value]
        except Misfit:
            return [
                _step(inner.encode, one, parts, f"[{i}]") for i, one in enumerate(value)
            ]  # which says where

    def decode(wire: Any, parts: Parts) -> Any:
        found = parts.integers(wire) if integers else None
        if found is not None:
            return found
        if not isinstance(wire, list):
            raise Misfit(f"must be a list, not {show(wire)}")
        return tuple([_step(inner.decode, one, parts, f"[{i}]") for i, one in enumerate(wire)])

    return _Codec(encode, decode)


def _fixed(args: tuple[Any, ...]) -> _Codec:
    inner = [_codec(arg) for arg in args]

    def each(
        values: Any, kind: type[Any], steps: list[Callable[[Any, Parts], Any]], parts: Parts
    ) -> list[Any]:
        if not isinstance(values, kind) or len(values) != len(steps):
            raise Misfit(f"must be {len(steps)} values, not {show(values)}")
        return [
            _step(step, one, parts, f"[{i}]")
            for i, (step, one) in enumerate(zip(steps, values, strict=True))
        ]

    return _Codec(
        lambda value, parts: each(value, tuple, [codec.encode for codec in inner], parts),
        lambda wire, parts: tuple(each(wire, list, [codec.decode for codec in inner], parts)),
    )


def _mapping(key: Any, item: Any) -> _Codec:
    if key not in (str, int):
        raise TypeError(f"A trace cannot hold a mapping whose keys are {key!r}.")
    inner = _codec(item)

    def encode(value: Any, parts: Parts) -> Any:
        if type(value) is dict and not value:
            return {}
        plainly = type(value) is dict and set(map(type, value)) == {key}
        if not plainly and (
            not isinstance(value, Mapping)
            or not all(isinstance(one, key) and type(one) is not bool for one in value)
        ):
            raise Misfit(f"must be a mapping with keys of {key.__name__}, not {show(value)}")
        try:
            return {key_of(one): inner.encode(held, parts) for one, held in value.items()}
        except Misfit:
            return {
                key_of(one): _step(inner.encode, held, parts, f"[{one}]")
                for one, held in value.items()
            }

    def decode(wire: Any, parts: Parts) -> Any:
        if not isinstance(wire, dict):
            raise Misfit(f"must be an object, not {show(wire)}")
        return {
            read_key(one, key): _step(inner.decode, held, parts, f"[{show(one)}]")
            for one, held in wire.items()
        }

    return _Codec(encode, decode)
