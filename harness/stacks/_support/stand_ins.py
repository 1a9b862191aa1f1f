"""Absent: stand-ins for packages that a framework's modules import at their head without their
being needed for what is driven here.

Engines and trainers need a GPU, or gigabytes; rollout code that talks to them over HTTP, and
conversions of samples, use nothing of them.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

__all__ = ["stood_in"]


@contextmanager
def stood_in(
    packages: Collection[str],
    *,
    instead: bool = False,
    values: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[None]:
    """Within, modules of ``packages`` (dotted or not) that are not there import as stand-ins that
    have whatever is asked of them.

    ``instead``: also where they are there. ``values`` are what a module's own names hold, by
    module. Nothing is taken out of ``sys.modules`` behind it: a framework imports some of them
    again when it is called. Stand-ins that must not outlast an import are put in by
    ``rollproof.stacks._support.importing.standing_in``.
    """
    finder = _Absent(packages, values or {})
    sys.meta_path.insert(0 if instead else len(sys.meta_path), finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Absent:
    """Finds a stand-in for every module of the packages."""

    def __init__(self, packages: Collection[str], values: Mapping[str, Mapping[str, Any]]) -> None:
        self._packages, self._values = frozenset(packages), values

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        """A spec for modules of the packages only."""
        if not any(f"{name}.".startswith(f"{package}.") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # as much of a loader as is asked for

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module that has whatever is asked for."""
        return _Anything(spec.name, self._values.get(spec.name, {}))

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _Anything(ModuleType):
    """A module every name of which is a stand-in."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__ = []  # as a package has it
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")
