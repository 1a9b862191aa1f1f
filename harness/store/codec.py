"""Events and headers as JSON values, for both forms of a trace file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rollproof.core.case import Case
from rollproof.core.error_text import show
from rollproof.core.events.base import Event
from rollproof.core.json_codec import AnyArray, Misfit, UnknownFieldError, from_json, to_json
from rollproof.core.trace import EVENT_KINDS, SCHEMA, Header
from rollproof.errors import CaseError, TraceError, TraceVersionError

__all__ = ["decode_event", "decode_header", "encode_event", "encode_header", "newer_schema"]

_T = TypeVar("_T")


def encode_event(event: Event, *, trusted: bool = False) -> dict[str, Any]:
    """Return ``{"kind": ..., field: ...}``, in which arrays remain.

    Args:
        event: The event.
        trusted: Whether rollproof itself made it, so that its fields need no check.

    Raises:
        TraceError: no trace can hold an event of this kind, or one of its values.
    """
    if EVENT_KINDS.get(event.kind) is not type(event):
        raise TraceError(
            f"{type(event).__name__} is not a kind of event that a trace holds; those are"
            f" {sorted(EVENT_KINDS)}."
        )
    if trusted:
        fields: dict[str, Any] = to_json(event)
    else:
        fields = _encode(event, f"{event.kind} event")
    return {"kind": event.kind, **fields}


def encode_header(header: Header) -> dict[str, Any]:
    """Return the header as JSON values. Raises ``TraceError`` as ``encode_event``."""
    return {**_encode(header, "header"), "schema": header.schema}


def decode_event(
    value: Any,
    arrays: Callable[[Any], AnyArray],
    integers: Callable[[Any], Any] | None = None,
) -> Event:
    """Read what ``encode_event`` wrote.

    Args:
        value: JSON values, not trusted.
        arrays: Gives the array that stands for a value.
        integers: Gives the integers that ``{"$integers": ...}`` refers to, if anything does.

    Raises:
        TraceVersionError: the kind or a field is not known.
        TraceError: anything else does not fit.
    """
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise TraceError(f"An event must be an object with a kind, not {show(value)}.")
    kind = value["kind"]
    if kind not in EVENT_KINDS:
        raise TraceVersionError(
            f"The trace holds an event of kind {show(kind)}, which this rollproof does not know; it"
            f" knows {sorted(EVENT_KINDS)}. A newer rollproof wrote it: upgrade to read it."
        )
    stored = {name: item for name, item in value.items() if name != "kind"}
    return _decode(EVENT_KINDS[kind], stored, f"{kind} event", arrays, integers)


def decode_header(
    value: Any,
    arrays: Callable[[Any], AnyArray],
    integers: Callable[[Any], Any] | None = None,
) -> Header:
    """Read what ``encode_header`` wrote. Raises as ``decode_event``, and ``TraceVersionError`` for
    a newer schema.
    """
    # first: fields that only a newer schema has would be refused as perhaps misspelt
    if isinstance(value, dict) and type(value.get("schema")) is int and value["schema"] > SCHEMA:
        raise TraceVersionError(newer_schema(value["schema"], value.get("made_by")))
    header = _decode(Header, value, "header", arrays, integers)
    _check_case(header.case)
    return header


def _check_case(case: Mapping[str, Any] | None) -> None:
    """Raise ``TraceError`` if a field of the case has a wrong type: checks compare some of them.

    Whether the case can be run is a question for whoever runs it.
    """
    # a case of a trainer has other fields, and code of users may write what it likes
    if case is None or "requests" not in case:
        return
    try:
        from_json(Case, to_json(case))
    except Misfit as misfit:
        if not isinstance(misfit.__cause__, CaseError):
            raise TraceError(f"The header cannot be read: case.{misfit}.") from misfit


def newer_schema(schema: object, made_by: object = None) -> str:
    """Return the text for a trace of a schema that this version does not know."""
    by = f" by {show(made_by)}" if made_by else ""
    return (
        f"This trace was written{by} in schema {show(schema)}; this rollproof reads schemas up to"
        f" {SCHEMA}. Upgrade rollproof (`pip install -U rollproof`) to read it."
    )


def _encode(record: Event | Header, name: str) -> dict[str, Any]:
    try:
        value: dict[str, Any] = to_json(record)
        # a record that cannot be read back must not get into a file
        from_json(type(record), value)
    except Misfit as misfit:
        raise TraceError(f"The {name} cannot be stored: {misfit}.") from misfit
    except RecursionError:
        raise TraceError(f"The {name} cannot be stored: it is nested too deeply.") from None
    return value


def _decode(
    cls: type[_T],
    value: Any,
    name: str,
    arrays: Callable[[Any], AnyArray],
    integers: Callable[[Any], Any] | None,
) -> _T:
    try:
        return from_json(cls, value, arrays, integers)
    except UnknownFieldError as error:
        raise TraceVersionError(
            f"{error}. A newer rollproof wrote them (upgrade to read it), or they are misspelt."
        ) from error
    except Misfit as misfit:
        raise TraceError(f"The {name} cannot be read: {misfit}.") from misfit
