"""Releases: what must be there for a stack to be judged, and what was found on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

from rollproof.errors import StackError

__all__ = ["Found", "Release", "checked_out", "installed_version", "requirements_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """What must be installed for a stack: its distribution, the versions that the adapters know (oldest first), its pinned dependencies.

    A stack that no package index has is judged from a checkout of ``repository`` (an address that git can clone): its versions
    are commits, ``package`` is a file of its own that every checkout has, relative to its root, and ``roots`` are the folders from
    which its modules are imported. ``beside`` are further distributions that are installed without their dependencies.
    """

    distribution: str
    versions: tuple[str, ...]
    requirements: str
    repository: str | None = None
    package: str = ""
    roots: tuple[str, ...] = (".",)
    beside: tuple[str, ...] = ()

    def install(self, version: str | None = None) -> str:
        """The commands that install ``version`` (default: the newest known) beside rollproof."""
        wanted = version if version in self.versions else self.versions[-1]
        first = f"python -m pip install -r {requirements_file(self.requirements)}"
        if self.beside:
            first += f" && python -m pip install --no-deps {' '.join(self.beside)}"
        if self.repository is None:
            return f"{first} && python -m pip install --no-deps {self.distribution}=={wanted}"
        folder = self.distribution
        return f"{first} && git clone {self.repository} {folder} && git -C {folder} checkout {wanted}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was found: the installed ``version``, the ``line`` of the adapter's table by which it is driven, the ``checkout`` if it is one.

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
    """The version of an installed distribution (the one that an import would find first), without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def checked_out(folder: Path, release: Release, name: str) -> str:
    """The version of a checkout: its commit, as the adapters' table writes it where it is there; puts it first on the import path.

    A folder without git's data (an unpacked archive) is ``unversioned``. Raises ``StackError`` for what is no checkout of ``release``.
    """
    if not folder.is_dir():
        raise StackError(f"--checkout {folder}: there is no such folder. {name} is judged from a checkout of {release.repository}.")
    if not (folder / release.package).is_file():
        raise StackError(
            f"--checkout {folder} is no checkout of {name}: it has no {release.package}. "
            f"Name the folder that git made from {release.repository}."
        )
    roots = [str((folder / root).resolve()) for root in release.roots]
    if sys.path[: len(roots)] != roots:
        sys.path[:0] = roots
    commit = _commit(folder)
    return next((known for known in release.versions if commit.startswith(known)), commit[:9] or "unversioned")


def _commit(folder: Path) -> str:
    """The commit that is checked out, or nothing: without git, or where the folder is within a repository of something else."""
    git = shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return ""
    done = subprocess.run(  # noqa: S603 - git itself, on the folder that the user names
        [git, "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=30
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def requirements_file(name: str) -> str:
    """Path of a pinned list of dependencies that is shipped with rollproof."""
    return str(resources.files("rollproof.stacks") / "requirements" / name)
