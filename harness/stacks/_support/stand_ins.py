"""Stand-ins for modules that a framework imports and that nothing judged here needs.

Engines and trainers need a GPU, or gigabytes. Rollout code that talks to them over HTTP, and
conversions of samples, use nothing of them, but import them at their head.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

__all__ = ["stub_modules", "stub_packages"]


@contextmanager
def stub_modules(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Make each name import as the given module, until the context ends.

    Only these names are put into ``sys.modules`` and taken out again. Everything else that is
    imported meanwhile stays, so that it is executed once a process.
    """
    # Not ``mock.patch.dict(sys.modules, ...)``: on leaving, it takes out whatever was imported
    # meanwhile. The next import of a compiled package (torch) then initialises it again, which
    # ends the process with a segmentation fault or leaves two sets of its types.
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, earlier in before.items():
            if earlier is not None:
                sys.modules[name] = earlier
            else:
                sys.modules.pop(name, None)


@contextmanager
def stub_packages(
    packages: Collection[str],
    *,
    even_if_installed: bool = False,
    values: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[None]:
    """Make every missing module of ``packages`` import as one that has any attribute.

    Args:
        packages: Names of packages or modules, dotted or not.
        even_if_installed: Replace modules that are installed, too.
        values: Attributes with a fixed value, by module.

    The stubs stay in ``sys.modules`` when the context ends: frameworks import some of them again
    when they are called. For stubs that must not outlast an import there is ``stub_modules``.
    """
    finder = _StubFinder(packages, values or {})
    sys.meta_path.insert(0 if even_if_installed else len(sys.meta_path), finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _StubFinder:
    """Meta path finder and loader of stub modules."""

    def __init__(self, packages: Collection[str], values: Mapping[str, Mapping[str, Any]]) -> None:
        self._packages, self._values = frozenset(packages), values

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        """Return a spec for modules of the packages, None for others."""
        if not any(f"{name}.".startswith(f"{package}.") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # has the two methods of a loader that are called

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the stub."""
        return _StubModule(spec.name, self._values.get(spec.name, {}))

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


class _StubModule(ModuleType):
    """A module in which every name is a mock."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        super().__init__(name)
        # a package: modules are imported from it
        self.__path__ = []
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")
