"""Importing the modules and classes of a release."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollproof.errors import StackError

if TYPE_CHECKING:
    from rollproof.stacks.releases import Release

__all__ = ["imported", "missing_dependency", "undecorated_class", "upstream"]


def upstream(release: Release, version: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Import modules and classes of the installed ``version`` of a stack.

    Args:
        release: The stack.
        version: Its installed version, for the error.
        names: ``package.module`` or ``package.module:Name`` by the key to return it under. They
            are imported in this order.

    Raises:
        StackError: One of them cannot be imported; the text has the command to run.
    """
    try:
        return {key: imported(path) for key, path in names.items()}
    except ImportError as error:
        raise missing_dependency(release, version, error) from error


def imported(path: str) -> Any:
    """Return the module ``package.module``, or ``Name`` of ``package.module:Name``.

    Raises:
        ImportError: The module or the name does not exist.
    """
    name, _, attribute = path.partition(":")
    module = importlib.import_module(name)
    if not attribute:
        return module
    if not hasattr(module, attribute):
        raise ImportError(f"{name} has no {attribute}", name=name)
    return getattr(module, attribute)


def missing_dependency(release: Release, version: str, error: ImportError) -> StackError:
    """Return the error for a stack that is installed while something that it imports is not."""
    module = error.name or ""
    package = module.partition(".")[0]
    installed = f"{release.stack} {version} is {release.installed}"
    # of a checkout no installation mends a module that is missing
    if release.repository is not None and package == release.module.partition(".")[0]:
        return StackError(
            f"{installed}, but incomplete: its module {module} is missing or lacks a name: {error}."
        )
    # a missing module of the framework itself is no missing package
    own = package in (release.stack.replace("-", "_"), release.distribution)
    if isinstance(error, ModuleNotFoundError) and module and not own:
        return StackError(
            f"{installed}, but the package {module!r} that it needs is missing. Run:\n "
            f" {release.install(version)}"
        )
    failed = f"{installed}, but importing it fails: {error}."
    # Other packages do not help if the framework itself has moved a name.
    if release.repository is None and version not in release.versions:
        known = ", ".join(release.versions)
        return StackError(
            f"{failed} The adapters know {known}, and drive it as {release.line_of(version)}."
            f" Run:\n  {release.install()}"
        )
    return StackError(f"{failed} Run:\n  {release.install(version)}")


def undecorated_class(actor: Any) -> Any:
    """Return the class that ``ray.remote`` has wrapped; any other class unchanged."""
    return getattr(getattr(actor, "__ray_metadata__", None), "modified_class", actor)
