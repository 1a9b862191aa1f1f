"""Argument checks: refuse arguments of a wrong kind with an error that says what to write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollproof.core.case import Case
from rollproof.core.error_text import show
from rollproof.errors import UsageError
from rollproof.invariants import default_registry
from rollproof.judging.checks import Check
from rollproof.judging.registry import Registry

__all__ = [
    "as_cases",
    "as_checks",
    "as_expected",
    "as_flavours",
    "as_names",
    "as_path",
    "as_seed",
    "check_factory",
]


def as_names(value: Any, argument: str) -> tuple[str, ...]:
    """Return several names as a tuple.

    Raises ``UsageError`` for one string, whose letters would count as names, and for what holds
    anything but strings.
    """
    if isinstance(value, str):
        raise UsageError(f"{argument}={show(value)} is a string: write {argument}=[{show(value)}].")
    try:
        names = tuple(value)
    except TypeError:
        raise UsageError(f"{argument} must be a list of names, not {show(value)}.") from None
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise UsageError(f"{argument} must hold names, not {show(wrong[0])}.")
    return names


def as_flavours(value: Any) -> tuple[str, ...]:
    """Return names of engine flavours as a tuple; one string is one flavour.

    Raises ``UsageError`` for what holds anything but strings, and for no flavour at all.
    """
    names = (value,) if isinstance(value, str) else as_names(value, "flavours")
    if not names:
        raise UsageError(
            "flavours is empty, so nothing would be judged: omit it for all engine flavours"
            " that fit the contract."
        )
    return names


def as_seed(value: Any) -> int | None:
    """Return a seed; ``None`` means that of the profile.

    Raises ``UsageError`` for anything but an integer >= 0 that a trace can hold.
    """
    if value is not None and (
        not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63
    ):
        raise UsageError(
            f"seed={show(value)} must be an integer >= 0, such as 0 or 12345, below 2**63;"
            " a report names the seed that repeats its run."
        )
    return None if value is None else int(value)


def as_name(value: Any) -> str | None:
    """Return the name of a run; ``None`` means that of its subject.

    Raises ``UsageError`` for anything but text.
    """
    if value is not None and not isinstance(value, str):
        raise UsageError(f"name must be text, not {show(value)}.")
    return value or None


def as_recipe(value: Any) -> Mapping[str, Any] | None:
    """Return how a counterexample makes its subject again, or ``None``.

    Raises ``UsageError`` for anything but a mapping.
    """
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(
            f'recipe must be a mapping such as {{"subject": "module:Factory"}}, not {show(value)}.'
        )
    return value


def as_cases(value: Any) -> list[Case]:
    """Return cases as a list.

    Raises ``UsageError`` for an empty list, which would judge nothing, and for other elements.
    """
    cases = _listed(value, "cases must be a list of Case")
    if not cases:
        raise UsageError(
            "cases is empty, so nothing would be judged: omit it to run the profile's schedules."
        )
    for case in cases:
        if not isinstance(case, Case):
            raise UsageError(
                f"cases must be rollproof.Case objects, not {show(case)}; Case.from_dict reads the"
                " JSON form."
            )
    return cases


def as_checks(value: Any) -> list[Check]:
    """Return checks as a list. Raises ``UsageError`` for other elements, such as a check's id."""
    checks = _listed(value, "checks must be a list of Check")
    for check in checks:
        if not isinstance(check, Check):
            raise UsageError(
                f"checks must hold rollproof.Check, not {show(check)}; rollproof's own checks"
                " are chosen by id with `only`."
            )
    return checks


def as_path(value: Any, argument: str) -> Path:
    """Return text or a path as a ``Path``. Raises ``UsageError`` for anything else."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(text, str) or "\0" in text:
        raise UsageError(f"{argument} must be a path, such as 'out/trace.json', not {show(text)}.")
    return Path(text)


def _listed(value: Any, requirement: str) -> list[Any]:
    try:
        iterator = iter(value)
    except TypeError:
        raise UsageError(f"{requirement}, not {show(value)}.") from None
    # outside of the try: a TypeError that the user's generator raises is not about the argument
    return list(iterator)


def as_expected(value: Any, registry: Registry | None = None) -> dict[str, str]:
    """Return check id to reason.

    Raises ``UsageError`` for an id that no check has, and for a reason that is empty or no text.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(
            'expected must map ids of checks to reasons, such as {"routes.rows": "verl#6029"},'
            f" not be {show(value)}."
        )
    registry = default_registry() if registry is None else registry
    for check_id, reason in value.items():
        as_names([check_id], "expected")
        _ = registry[check_id]  # raises for an unknown id, with close matches
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(
                f"expected[{check_id!r}] must say why the check is known to fail, not be"
                f" {show(reason)}."
            )
    return dict(value)


def check_factory(value: Any, function: str) -> None:
    """Raise ``UsageError`` if ``value`` cannot be called."""
    if not callable(value):
        raise UsageError(
            f"{function} takes a factory, such as the subject's class, not {show(value)}: each case"
            " starts from a fresh subject."
        )
