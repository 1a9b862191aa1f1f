"""Released RL frameworks whose own, unmodified classes are judged on fake servers.

A stack has several parts, each a subject of its own (``client``, ``tool-agent-loop``, ...). Loading
a stack imports the framework, which may take half a minute and gigabytes: one process a stack.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollproof.core.case import Case
from rollproof.core.error_text import describe_error_with_place
from rollproof.core.subjects import SubjectFactory
from rollproof.errors import RollproofError, StackError, UsageError
from rollproof.stacks.releases import (
    STACKS,
    Found,
    Release,
    changed_files,
    changed_in_place,
    checked_out,
    editable_folder,
    imported_from,
    installed_version,
    requirements_file,
    with_changes,
)

__all__ = [
    "STACKS",
    "Found",
    "Release",
    "Stack",
    "StackPart",
    "installed_version",
    "load_stack",
    "parse_spec",
    "release_of",
    "requirements_file",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A loaded framework.

    Fields:
        name: Its name in ``STACKS``.
        version: The version that is installed or checked out.
        parts: Factory of subjects by the name of each judged part. A factory may carry
            ``flavours`` (the engine flavours that the part speaks) and ``cases(profile, seed)``
            (schedules that fit it better than the profile's own).
        batches: Factory of batch subjects by the name of each conversion into training batches.
        corrections: Factory of correction subjects by the name of each configuration of the
            framework's own correction for off-policy rollouts.
        found: Which version, and how it is driven; ``load_stack`` sets it.
    """

    name: str
    version: str
    parts: Mapping[str, SubjectFactory]
    batches: Mapping[str, SubjectFactory] = field(default_factory=dict)
    corrections: Mapping[str, SubjectFactory] = field(default_factory=dict)
    found: Found | None = None

    @property
    def title(self) -> str:
        """``verl 0.9.1``, with a note if the adapters do not know the version."""
        if self.found is None or self.found.tested:
            return f"{self.name} {self.version}"
        return f"{self.name} {self.version} (untested, driven as {self.found.line})"

    def subjects(self, only: Iterable[str] = ()) -> Mapping[str, SubjectFactory]:
        """The parts, or those named in ``only``.

        Raises:
            UsageError: The stack does not have one of these parts.
        """
        chosen = tuple(only)
        unknown = sorted(set(chosen) - set(self.parts))
        if unknown:
            raise UsageError(
                f"{self.name} has no parts {unknown}; choose among {list(self.parts)}."
            )
        return {
            name: factory for name, factory in self.parts.items() if not chosen or name in chosen
        }

    def recipe(self, part: str) -> dict[str, str]:
        """The header of a trace, from which ``rollproof replay`` makes the subject again."""
        recipe = {"stack": self.name, "version": self.version, "part": part}
        if self.found is not None and self.found.checkout is not None:
            recipe["checkout"] = str(self.found.checkout)
        if self.found is not None and not self.found.tested:
            recipe["driven_as"] = self.found.line
        if self.found is not None and self.found.changed:
            recipe["changed"] = _listed(self.found.changed)
        return recipe


class StackPart:
    """A part of a stack (``client``, ``padded-batch``, ...), to be judged by
    ``rollproof.conformance``.

    The framework is imported when the part is judged, not when the factory is made: pytest collects
    the tests of a repository without it.

    Args:
        stack: The name of the stack, as ``rollproof verify --stack`` takes it.
        part: One of its parts; docs/stacks.md lists them.
        checkout: The root folder of a checkout of it. Default: what is installed.
    """

    def __init__(self, stack: str, part: str, *, checkout: str | Path | None = None) -> None:
        self.stack = stack
        self.part = part
        self.checkout: str | None = None if checkout is None else str(checkout)

    def __call__(self) -> Any:
        """Return a fresh subject. Raises as ``load_stack`` does, and ``UsageError`` for an unknown
        part.
        """
        return self._factory()()

    @property
    def recipe(self) -> dict[str, str]:
        """How ``rollproof replay`` makes the subject again."""
        recipe = {"stack": self.stack, "part": self.part}
        return recipe if self.checkout is None else {**recipe, "checkout": self.checkout}

    @property
    def flavours(self) -> tuple[str, ...] | None:
        """The engine flavours that the part speaks; ``None`` if any will do."""
        flavours: tuple[str, ...] | None = getattr(self._factory(), "flavours", None)
        return flavours

    def cases(self, profile: str, seed: int) -> list[Case] | None:
        """Return the schedules that fit the part; ``None``: those of the profile."""
        cases = getattr(self._factory(), "cases", None)
        return None if cases is None else list(cases(profile, seed))

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Load the stack, and silence its loggers until the context ends.

        Its repository's other tests, in the same process, may look at what is logged.
        """
        before = _levels()
        _, silenced = _load(self.stack, self.checkout)
        for name, level in silenced.items():
            logging.getLogger(name).setLevel(level)
        try:
            yield
        finally:
            for name in silenced:
                logging.getLogger(name).setLevel(before.get(name, logging.NOTSET))

    def _factory(self) -> SubjectFactory:
        stack, _ = _load(self.stack, self.checkout)
        factories = {**stack.parts, **stack.batches, **stack.corrections}
        if self.part not in factories:
            raise UsageError(
                f"{stack.title} has no part {self.part!r}; choose among {sorted(factories)}."
            )
        return factories[self.part]


def load_stack(spec: str, *, checkout: str | Path | None = None) -> Stack:
    """Load ``verl`` or ``verl==0.9.1``.

    A version that the adapters do not know is driven as the nearest that they know
    (``Release.line_of``), and the title of the stack says so.

    Args:
        spec: Name of the stack, and the version that must be installed.
        checkout: Folder of a checkout to judge instead of what is installed. Its version is its
            commit. An editable installation is judged as a checkout too.

    Raises:
        UsageError: There is no such stack, or the spec is malformed.
        StackError: It is not installed, or in another version; the text has the command to run.
    """
    name, requested = parse_spec(spec)
    module = importlib.import_module(STACKS[name])
    release: Release = module.RELEASE
    requested = None if requested is None else release.known_as(requested)
    version, folder, changed = _look_up(name, release, requested, checkout)
    if requested is not None and requested != version:
        same_version = version == with_changes(requested, changed)
        raise StackError(
            f"{name}=={requested} was requested, but {version} is"
            f" {_installed(folder)}{_changes(changed, folder)}. Run:\n "
            f" {release.install(requested, again=same_version)}"
        )
    found = Found(version=version, line=release.line_of(version), checkout=folder, changed=changed)
    _refuse_another_checkout(name, release, folder)
    try:
        stack: Stack = module.load(found)
    except RollproofError:
        raise
    # a framework's modules raise anything while they are imported, SystemExit included
    except (Exception, SystemExit) as error:
        raise StackError(
            f"{name} {version} is {_installed(folder)}, but importing it fails:"
            f" {describe_error_with_place(error)}."
        ) from error
    _refuse_another_checkout(name, release, folder)
    return replace(stack, found=found)


def release_of(name: str) -> Release:
    """What must be installed for the stack ``name``; does not import it.

    Raises:
        UsageError: No stack has this name.
    """
    known, _ = parse_spec(name)
    release: Release = importlib.import_module(STACKS[known]).RELEASE
    return release


@functools.cache
def _load(stack: str, checkout: str | None) -> tuple[Stack, Mapping[str, int]]:
    """Return the stack, and the levels of the loggers that its adapters have silenced."""
    before = _levels()
    loaded = load_stack(stack, checkout=checkout)
    # The packages that it imports set levels of their own loggers too, but lower ones.
    return loaded, {
        name: level
        for name, level in _levels().items()
        if level >= logging.ERROR and level != before.get(name)
    }


def _levels() -> dict[str, int]:
    """Return the level of each logger that there is."""
    loggers = logging.root.manager.loggerDict
    return {
        name: logger.level for name, logger in loggers.items() if isinstance(logger, logging.Logger)
    }


def _look_up(
    name: str, release: Release, requested: str | None, checkout: str | Path | None
) -> tuple[str, Path | None, tuple[str, ...]]:
    """The version that is there, the folder of its checkout, and its changed files."""
    if checkout is None:
        folder = editable_folder(release.distribution)
        if folder is not None and (folder / release.module_file).is_file():
            return checked_out(folder, release), folder.resolve(), changed_files(folder, release)
        if release.repository is None:
            version = installed_version(release.distribution)
            if version is None:
                raise StackError(
                    f"{name} is not installed here, so it cannot be judged. Run:\n "
                    f" {release.install(requested)}"
                )
            changed = changed_in_place(release)
            return with_changes(version, changed), None, changed
        raise StackError(
            f"{name} is not on a package index, so it is judged from a checkout, `--stack {name}"
            f" --checkout DIR`. Run:\n  {release.install(requested)}"
        )
    folder = Path(checkout).expanduser()
    return checked_out(folder, release), folder.resolve(), changed_files(folder, release)


def _installed(folder: Path | None) -> str:
    return "installed" if folder is None else "checked out"


def _changes(changed: Sequence[str], folder: Path | None) -> str:
    """A parenthesis with the files that differ from the commit or from what was installed."""
    if not changed:
        return ""
    verb, them = ("are", "them") if len(changed) > 1 else ("is", "it")
    original = "installed" if folder is None else f"the commit has {them}"
    return f" ({_listed(changed)} {verb} not as {original})"


def _listed(files: Sequence[str]) -> str:
    """The first of ``files``, and how many more there are."""
    return f"{files[0]} and {len(files) - 1} more" if len(files) > 1 else files[0]


def _refuse_another_checkout(name: str, release: Release, folder: Path | None) -> None:
    """Raise ``StackError`` if the framework was imported from elsewhere than ``folder``: that one
    would be judged instead.
    """
    other = None if folder is None else imported_from(folder, release)
    if other is not None:
        raise StackError(
            f"{name} is already imported from {other}, not from {folder}: judge each checkout in a"
            " process of its own."
        )


def parse_spec(spec: str) -> tuple[str, str | None]:
    """``"verl==0.9.1"`` -> ``("verl", "0.9.1")``.

    Raises:
        UsageError: No stack has this name, or the operator is not ``==``.
    """
    # the only operator is ==: a range would leave open what was judged
    name, operator, version = (part.strip() for part in spec.partition("=="))
    if (
        not name.replace("-", "_").isidentifier()
        or (operator and not version)
        or any(char in version for char in "<>=!~, ")
    ):
        raise UsageError(
            f"{spec!r} names no stack: write NAME or NAME==VERSION, with NAME among"
            f" {sorted(STACKS)}."
        )
    if name not in STACKS:
        # names have hyphens, packages underscores: both are typed
        near = difflib.get_close_matches(name.lower().replace("_", "-"), STACKS, n=1, cutoff=0.5)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"No stack is named {name!r}.{guess} Stacks: {sorted(STACKS)}. Code of your own is"
            " judged with `--subject module:factory`."
        )
    return name, version or None
