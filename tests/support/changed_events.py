"""All small changes of a trace, and what the checks of a family make of each of them.

The changes know nothing of the checks: every value of every event, and every promise of the
contract, is made another one, in turn. So they reach the branches that nobody thought of when the
checks were written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any
from zlib import crc32

import numpy as np

from rollproof.core.events.base import Event
from rollproof.core.trace import Trace
from rollproof.errors import RollproofError
from rollproof.judging.checks import CheckResult, Finding, Verdict
from rollproof.judging.registry import Registry
from rollproof.verification.traces import judge
from tests.support.bug_findings import without_lines

__all__ = ["WORDS", "changes_of", "contracts_of", "outcomes"]

WORDS = "words of the findings"
CRASHED, _OPEN = "crashed", "open"
_NOT_CHANGED = frozenset({"index", "time", "request_id", "episode", "given"})
"""Fields that name an event, and the numbers of a layout call, from which the reference is made."""
_TERMS_LOST = frozenset({".engine None", ".replay None", ".correction None"})


def changes_of(trace: Trace) -> Iterator[tuple[str, int, tuple[Event, ...]]]:
    """Yield every change of one event: in words, the event's number, and what is in its place."""
    for i, event in enumerate(trace.events):
        name = f"{i} {event.kind}"
        yield f"{name} lost", i, ()
        yield f"{name} twice", i, (event, event)
        for words, changed in _changed(event):
            yield f"{name}{words}", i, (changed,)


def contracts_of(trace: Trace) -> Iterator[tuple[str, Trace]]:
    """Yield every change of the contract, in words: the same events under another promise."""
    header = trace.header
    for words, contract in _changed(header.contract):
        # most promises of several parts have no order, and a subject has the terms of its kind
        if words.endswith((" reversed", " with the last twice")) or words in _TERMS_LOST:
            continue
        engine = header.engine
        if engine is not None:
            # what a subject and its engine declare alike is one promise
            alike = {
                name: value
                for name in (entry.name for entry in fields(contract))
                if (value := getattr(contract, name)) != getattr(header.contract, name)
                and getattr(header.contract, name) == getattr(engine, name)
            }
            try:
                engine = replace(engine, **alike)
            except RollproofError:
                continue
        yield (
            f"contract{words}",
            replace(trace, header=replace(header, contract=contract, engine=engine)),
        )


def outcomes(
    trace: Trace, registry: Registry, most: int, every_contract: int = 0
) -> dict[str, list[str]]:
    """By change, what the verdicts on it are where they differ from those on ``trace``.

    ``WORDS`` has the words of the first finding of each kind. At most about ``most`` changes of
    events are judged, evenly chosen, and one of ``every_contract`` changes of the contract (none if
    it is 0).
    """
    clean = _verdicts(trace, registry)
    out = {"": [f"{name} {text}" for name, text in clean.items() if text != _OPEN]}
    events, changes = list(trace.events), list(changes_of(trace))
    # A prime number of steps, so that all kinds of changes have their turn.
    every = _prime_from(len(changes) // most)
    changed_traces = [
        (words, trace.with_events([*events[:i], *instead, *events[i + 1 :]]))
        for words, i, instead in changes[::every]
    ]
    if every_contract:
        # by name, so that a new promise alters no choice; begins elsewhere for each trace, so that
        # several traces have all promises changed
        changed_traces += [
            (words, changed)
            for words, changed in contracts_of(trace)
            if (crc32(words.encode()) + len(events)) % every_contract == 0
        ]
    texts: dict[tuple[str, str], str] = {}
    for words, changed_trace in changed_traces:
        results = judge(changed_trace, registry)
        texts_of = {result.id: _outcome(result) for result in results.results}
        # No process could have written such a record: a check may give up on it.
        if CRASHED in texts_of.values():
            continue
        out[words] = [f"{name} {text}" for name, text in texts_of.items() if text != clean[name]]
        for result in results.results:
            for finding in result.findings:
                texts.setdefault((result.id, finding.kind), _words(finding))
    out[WORDS] = [f"{name} {text}" for (name, _), text in texts.items()]
    return out


def _prime_from(number: int) -> int:
    while any(number % factor == 0 for factor in range(2, number)):
        number += 1
    return max(1, number)


def _verdicts(trace: Trace, registry: Registry) -> dict[str, str]:
    return {result.id: _outcome(result) for result in judge(trace, registry).results}


def _words(finding: Finding) -> str:
    parts = (finding.title, finding.expected, finding.observed, finding.hint)
    return " | ".join(without_lines(part) for part in parts)


def _outcome(result: CheckResult) -> str:
    """Return the verdict with what it rests on: kinds, the first place, counters, and a checksum of
    the words and places of all findings.
    """
    if result.reason.startswith("the check itself crashed"):
        return CRASHED
    if result.verdict is Verdict.NOT_APPLICABLE or "not exercised" in result.reason:
        return _OPEN
    counters = ", ".join(f"{times} {name}" for name, times in sorted(result.exercised.items()))
    if result.verdict is not Verdict.FAIL:
        return f"{result.verdict}: {counters or result.reason}"
    kinds = ", ".join(f"{times} {kind}" for kind, times in sorted(result.kinds.items()))
    place = _place(result.findings[0])
    # the words themselves are recorded once a kind: they would fill megabytes
    texts = "\n".join(f"{_words(finding)} | {_place(finding)}" for finding in result.findings)
    return (
        f"fail: {kinds} (first at {place or 'no place'}; {counters or 'nothing counted'};"
        f" words {crc32(texts.encode()):08x})"
    )


def _place(finding: Finding) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(finding.where.items()))


def _changed(record: Any) -> Iterator[tuple[str, Any]]:
    for entry in fields(record):
        if entry.name in _NOT_CHANGED:
            continue
        for words, value in _others(getattr(record, entry.name), str(entry.type)):
            try:
                yield f".{entry.name}{words}", replace(record, **{entry.name: value})
            except (RollproofError, ValueError, TypeError):
                continue  # the record itself refuses the value


def _others(value: Any, of: str = "") -> Iterator[tuple[str, Any]]:
    """Yield other values of the same type, ``of`` in words; also ``None`` where it allows that."""
    if "None" in of and value is not None:
        yield " None", None
    match value:
        case np.ndarray():
            yield from _other_arrays(value)
        case None | "" | ():
            if of.startswith(("str", "tuple[str")):
                yield " said", "words" if of.startswith("str") else ("words",)
            elif value is None and ("int" in of or "Version" in of) and "tuple" not in of:
                yield " given", 1
        case bool():
            yield f" {not value}", not value
        case Enum():
            members = list(type(value))
            other = members[(members.index(value) + 1) % len(members)]
            yield f" {other}", other
        case int() | float():
            yield " more", value + 1
            yield " less", value - 1
        case str():
            yield " other", f"{value}x"
        case tuple():
            yield from _other_tuples(value)
        case Mapping():
            yield from _other_mappings(value)
        case _ if is_dataclass(value):
            yield from _changed(value)


def _other_arrays(value: Any) -> Iterator[tuple[str, Any]]:
    if not value.ndim:
        yield " more", value + 1
        return
    if not len(value):
        return
    yield " without the first", value[1:]
    yield " without the last", value[:-1]
    yield " with the last twice", np.concatenate([value, value[-1:]])
    if not np.array_equal(value, np.roll(value, 1, axis=0)):
        yield " turned", np.roll(value, 1, axis=0)
        yield " turned back", np.roll(value, -1, axis=0)
    if value.ndim > 1:
        yield " without a column", value[:, 1:]
        yield " columns turned", np.roll(value, 1, axis=1)
        if value.shape[-1] > 1:
            repeated = value.copy()
            repeated[0, ..., -1] = repeated[0, ..., -2]
            yield " with a cell twice", repeated
    cells: tuple[float, ...] = (np.nan, 0.0, -3.0, 0.5)
    if value.dtype.kind != "f":
        cells = (0, 1, int(value.max()) + 1, -1)
    if value.dtype.kind in "iu":
        # compact ids may fill their type: nothing is above the largest one
        limits = np.iinfo(value.dtype)
        cells = tuple(cell for cell in cells if limits.min <= cell <= limits.max)
    for place in (0, len(value) - 1):
        for cell in cells:
            copy = value.copy()
            copy[place] = cell
            yield f" {cell} at {place}", copy


def _other_tuples(value: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    yield " without the first", value[1:]
    if len(value) > 1:
        yield " without the last", value[:-1]
        yield " reversed", value[::-1]
    yield " with the last twice", (*value, value[-1])
    for place in {0, len(value) - 1}:
        for words, other in _others(value[place]):
            yield f" {place}{words}", (*value[:place], other, *value[place + 1 :])


def _other_mappings(value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key in list(value)[:1] + list(value)[1:][-1:]:
        yield f" without {key}", {name: inner for name, inner in value.items() if name != key}
        for words, other in _others(value[key]):
            yield f" {key}{words}", {**value, key: other}
