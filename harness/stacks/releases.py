"""Releases: what must be there for a stack to be judged, and what was found on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from rollproof.errors import StackError

__all__ = [
    "STACKS",
    "Found",
    "Release",
    "changed_files",
    "checked_out",
    "imported_from",
    "installed_version",
    "requirements_file",
    "verdicts_file",
]

STACKS: Mapping[str, str] = {
    "verl": "rollproof.stacks.verl",
    "areal": "rollproof.stacks.areal",
    "verifiers": "rollproof.stacks.verifiers",
    "prime-rl": "rollproof.stacks.prime_rl",
    "rlinf": "rollproof.stacks.rlinf",
    "skyrl": "rollproof.stacks.skyrl",
    "trl": "rollproof.stacks.trl",
    "openrlhf": "rollproof.stacks.openrlhf",
    "slime": "rollproof.stacks.slime",
    "areno": "rollproof.stacks.areno",
    "nemo-rl": "rollproof.stacks.nemo_rl",
    "roll": "rollproof.stacks.roll",
    "miles": "rollproof.stacks.miles",
}
"""Name of each stack, and its package: ``RELEASE``, ``load(found) -> Stack``, the verdicts that it
is known for, and its pinned dependencies.
"""

_CHANGED = "+changed"
"""Ends the version of a checkout whose files are not those of its commit."""
_ABBREVIATED = 7
"""Digits by which git names a commit, at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """What must be installed for ``stack``: its distribution, the versions that the adapters know
    (oldest first), and what ``requirements_file`` lists.

    A stack that no package index has is judged from a checkout of ``repository`` (an address that
    git can clone): its versions are commits, ``package`` is a file of its own that every checkout
    has, relative to its root, and ``roots`` are the folders from which its modules are imported.
    ``beside`` are further distributions that are installed without their dependencies.
    """

    distribution: str
    versions: tuple[str, ...]
    stack: str
    repository: str | None = None
    package: str = ""
    roots: tuple[str, ...] = (".",)
    beside: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The dotted name of ``package``: ``src/prime_rl/of.py`` below the root ``src`` is
        ``prime_rl.of``.
        """
        path = PurePosixPath(self.package)
        root = next((root for root in self.roots if path.is_relative_to(root)), ".")
        return ".".join(path.relative_to(root).with_suffix("").parts)

    def known_as(self, version: str) -> str:
        """``version`` as the table writes it: of a commit, any abbreviation from seven digits on,
        or all of it.
        """
        return next(
            (known for known in self.versions if self.repository and _same_commit(known, version)),
            version,
        )

    def install(self, version: str | None = None) -> str:
        """The commands that install ``version`` (default: the newest known) beside rollproof."""
        # a package index has versions that the adapters do not know: who forces one wants that one
        wanted = (
            version
            if version in self.versions or (version and self.repository is None)
            else self.versions[-1]
        )
        first = f"python -m pip install -r {requirements_file(self.stack)}"
        if self.beside:
            first += f" && python -m pip install --no-deps {' '.join(self.beside)}"
        if self.repository is None:
            # some of them ask for a newer Python than their rollout code needs (SkyRL 0.4.0: 3.12)
            return (
                f"{first} && python -m pip install --no-deps --ignore-requires-python"
                f" {self.distribution}=={wanted}"
            )
        folder = self.distribution
        return (
            f"{first} && git clone {self.repository} {folder} && git -C {folder} checkout {wanted}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was found: the installed ``version``, the ``line`` of the adapter's table by which it is
    driven, the ``checkout`` if it is one.

    ``version`` and ``line`` differ where ``--force`` drives a version that nobody tested.
    """

    version: str
    line: str
    checkout: Path | None = None

    @property
    def tested(self) -> bool:
        """Whether the adapters know this very version."""
        return self.version == self.line


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution (the one that an import would find first), without
    importing it.
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def checked_out(folder: Path, release: Release, name: str) -> str:
    """The version of a checkout: its commit, as the adapters' table writes it where it is there;
    puts it first on the import path.

    A folder without git's data (an unpacked archive) is ``unversioned``; one with changes to its
    Python files is ``<commit>+changed``. Raises ``StackError`` for what is no checkout of
    ``release``.
    """
    if not folder.is_dir():
        raise StackError(
            f"--checkout {folder}: there is no such folder. {name} is judged from a checkout of"
            f" {release.repository}."
        )
    if not (folder / release.package).is_file():
        raise StackError(
            f"--checkout {folder} is no checkout of {name}: it has no {release.package}. "
            f"Name the folder that git made from {release.repository}."
        )
    roots = [str((folder / root).resolve()) for root in release.roots]
    if sys.path[: len(roots)] != roots:
        sys.path[:0] = roots
    commit = _commit(folder)
    version = next(
        (known for known in release.versions if commit.startswith(known)),
        commit[:9] or "unversioned",
    )
    return version + _CHANGED if changed_files(folder, release) else version


def changed_files(folder: Path, release: Release) -> tuple[str, ...]:
    """Python files of the commit, below the roots, that are there with other content; one that is
    gone is missed when it is imported.

    The index is not asked: a part of a repository, checked out without it, is a checkout too.
    """
    if not _commit(folder):
        return ()
    entries = (
        entry.partition("\t")
        for entry in _git(folder, "ls-tree", "-r", "-z", "HEAD", *release.roots).split("\0")
    )
    files = {
        path: about.split()
        for about, _, path in entries
        if about.startswith("100") and path.endswith(".py")
    }
    there = [path for path in files if (folder / path).is_file()]
    now = _git(folder, "hash-object", "--stdin-paths", given="\n".join(there)).split()
    return tuple(path for path, is_now in zip(there, now, strict=False) if files[path][2] != is_now)


def imported_from(folder: Path, release: Release) -> str | None:
    """The file that ``release.module`` was imported from, where that is another than the one in
    ``folder``.
    """
    file = getattr(sys.modules.get(release.module), "__file__", None)
    return (
        None
        if file is None or Path(file).resolve() == (folder / release.package).resolve()
        else file
    )


def _same_commit(known: str, version: str) -> bool:
    return len(version) >= _ABBREVIATED and (version.startswith(known) or known.startswith(version))


def _commit(folder: Path) -> str:
    """The commit that is checked out, or nothing: without git, or where the folder is within a
    repository of something else.
    """
    return _git(folder, "rev-parse", "HEAD").strip() if (folder / ".git").exists() else ""


def _git(folder: Path, *asked: str, given: str = "") -> str:
    """What git says of ``folder``, or nothing where it says nothing."""
    git = shutil.which("git")
    if git is None:
        return ""
    # within a hook git names its own repository by these, whatever -C says
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(  # noqa: S603 - git itself, on the folder that the user names
        [git, "-C", str(folder), *asked],
        input=given,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        check=False,
        timeout=60,
        env=environment,
    )
    return done.stdout if done.returncode == 0 else ""


def requirements_file(stack: str) -> str:
    """Path of the pinned list of what ``stack`` needs, which is shipped with rollproof."""
    return str(resources.files(STACKS[stack]) / "requirements.txt")


def verdicts_file(stack: str) -> Traversable:
    """The matrix of known verdicts of ``stack``, which is shipped with rollproof."""
    return resources.files(STACKS[stack]) / "verdicts.toml"
