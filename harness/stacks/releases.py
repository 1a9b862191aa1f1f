"""What must be installed for a stack to be judged, and what is installed on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Any

from rollproof.errors import StackError

__all__ = [
    "STACKS",
    "Found",
    "Release",
    "changed_files",
    "changed_in_place",
    "check_checkout",
    "checked_out",
    "editable_folder",
    "imported_from",
    "installed_version",
    "requirements_file",
    "verdicts_file",
    "with_changes",
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
"""Package of each stack by its name: it has ``RELEASE``, ``load(found) -> Stack``, the file of the
verdicts that the stack is known for, and that of its pinned dependencies.
"""

_CHANGED = "+changed"
"""Suffix of the version of a checkout that differs from its commit, or of an installed package that
differs from what was installed.
"""
_ABBREVIATED = 7
"""Least digits of an abbreviated commit, as git writes it."""
_RELEASED = re.compile(r"\d+(\.\d+)+")
"""What the version of a release begins with, and a commit does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """What must be installed for a stack.

    Fields:
        stack: Its name in ``STACKS``.
        distribution: Its name on a package index.
        versions: The versions that the adapters know, oldest first. Those of a stack that is on no
            package index are commits.
        repository: Address to clone, for a stack that is on no package index and is judged from a
            checkout only.
        module_file: A file of the framework that the adapters import, relative to the root of a
            checkout, by which a checkout is recognised.
        roots: Folders of a checkout from which its modules are imported.
        no_deps: Further distributions to install without their dependencies.
    """

    stack: str
    distribution: str
    versions: tuple[str, ...]
    repository: str | None = None
    module_file: str
    roots: tuple[str, ...] = (".",)
    no_deps: tuple[str, ...] = ()

    @property
    def installed(self) -> str:
        """How messages say that it is there: ``installed`` or ``checked out``."""
        return "installed" if self.repository is None else "checked out"

    @property
    def module(self) -> str:
        """Dotted name of ``module_file``: ``src/prime_rl/of.py`` below the root ``src`` is
        ``prime_rl.of``.
        """
        path = PurePosixPath(self.module_file)
        root = next((root for root in self.roots if path.is_relative_to(root)), ".")
        return ".".join(path.relative_to(root).with_suffix("").parts)

    def known_as(self, version: str) -> str:
        """``version`` as ``versions`` has it: a commit may be abbreviated from seven digits on."""
        return next(
            (
                candidate
                for candidate in self.versions
                if self.repository and _same_commit(candidate, version)
            ),
            version,
        )

    def line_of(self, version: str) -> str:
        """The known version as which ``version`` is driven: the newest that is not newer.

        That is the oldest one for a version that is older than all, and the newest for a commit,
        whose age is not known.
        """
        if version in self.versions or not _RELEASED.match(version):
            return version if version in self.versions else self.versions[-1]
        older = [
            candidate for candidate in self.versions if _numbers(candidate) <= _numbers(version)
        ]
        return max(older, key=_numbers, default=self.versions[0])

    def install(self, version: str | None = None, *, again: bool = False) -> str:
        """The commands that install ``version`` (default: the newest known) next to rollproof.

        A checkout's commit, which no package index has, counts as the newest known. ``again``
        replaces what is installed under the same version.
        """
        # A package index has versions that the adapters do not know; of a repository only the
        # known commits are sure to exist.
        indexed = self.repository is None and _RELEASED.match(version or "")
        installable = version in self.versions or indexed
        target = version if version and installable else self.versions[-1]
        commands = [f"python -m pip install -r {requirements_file(self.stack)}"]
        if self.no_deps:
            commands.append(f"python -m pip install --no-deps {' '.join(self.no_deps)}")
        if self.repository is None:
            # Some ask for a newer Python than their rollout code needs (SkyRL 0.4.0: 3.12).
            commands.append(
                f"python -m pip install {'--force-reinstall ' if again else ''}--no-deps"
                f" --ignore-requires-python {self.distribution}=={target}"
            )
        else:
            folder = self.distribution
            commands.append(f"git clone {self.repository} {folder}")
            commands.append(f"git -C {folder} checkout {target}")
        return " && ".join(commands)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What is installed.

    Fields:
        version: The installed version.
        line: The version of the adapter's table by which it is driven. It differs from ``version``
            if the adapters do not know that one.
        checkout: Its folder, if it is a checkout.
        changed: Its Python files that differ from the commit, or from what was installed.
    """

    version: str
    line: str
    checkout: Path | None = None
    changed: tuple[str, ...] = ()

    @property
    def tested(self) -> bool:
        """Whether the adapters know this very version."""
        return self.version == self.line


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a release: ``0.9.1.dev3`` is ``(0, 9, 1)``."""
    match = _RELEASED.match(version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it; None if there is none.

    One that pip installed from a repository or a folder may be a fork: its commit, or ``local``,
    follows a plus.
    """
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    origin = _origin(distribution)
    if "vcs_info" in origin:
        return f"{version}+{origin['vcs_info']['commit_id'][:9]}"
    return f"{version}+local" if "dir_info" in origin else version


def editable_folder(distribution: str) -> Path | None:
    """The folder that an editable installation (``pip install -e``) imports from; None if the
    distribution is not installed so.
    """
    origin = _origin(distribution)
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(urllib.request.url2pathname(urllib.parse.urlparse(origin["url"]).path))


def _origin(distribution: str) -> dict[str, Any]:
    """What pip records of a distribution that it installed from a folder, an archive or a
    repository; empty for one from an index.
    """
    try:
        text = metadata.distribution(distribution).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    origin: dict[str, Any] = json.loads(text) if text else {}
    return origin


def checked_out(folder: Path, release: Release) -> str:
    """Put a checkout first on the import path, and return its version.

    The version is its commit, as ``release.versions`` has it. A folder without git's data (an
    unpacked archive) is ``unversioned``; one with changes to its Python files is
    ``<commit>+changed``.

    Raises:
        StackError: The folder is not a checkout of ``release``.
    """
    check_checkout(folder, release)
    # first on the path: an installed release of the same name must not be judged instead
    roots = [str((folder / root).resolve()) for root in release.roots]
    if sys.path[: len(roots)] != roots:
        sys.path[:0] = roots
    commit = _commit(folder)
    version = next(
        (candidate for candidate in release.versions if commit.startswith(candidate)),
        commit[:9] or "unversioned",
    )
    return with_changes(version, changed_files(folder, release))


def check_checkout(folder: Path, release: Release) -> None:
    """Raise ``StackError`` if ``folder`` is not a checkout of ``release``."""
    if not folder.is_dir():
        raise StackError(
            f"--checkout {folder}: there is no such folder. Name the folder of a checkout of"
            f" {release.stack}{_address(release)}."
        )
    if not (folder / release.module_file).is_file():
        raise StackError(
            f"--checkout {folder} is not a checkout of {release.stack}: it has no"
            f" {release.module_file}. Name the root of a checkout of"
            f" {release.stack}{_address(release)}."
        )


def with_changes(version: str, changed: Sequence[str]) -> str:
    """``version`` with a mark that ``changed`` files differ from it, if there are any."""
    return version + _CHANGED if changed else version


def changed_in_place(release: Release) -> tuple[str, ...]:
    """Python files of the installed package whose content differs from what was installed.

    ``RECORD``, which every installer writes next to a distribution, has the hash of each file.
    Deleted files do not count: an import reports them.
    """
    package = release.module.partition(".")[0]
    try:
        files = metadata.distribution(release.distribution).files or ()
    except metadata.PackageNotFoundError:
        return ()
    return tuple(
        str(file)
        for file in files
        if file.parts[0] == package
        and file.suffix == ".py"
        and file.hash is not None
        and _differs(Path(file.locate()), file.hash.mode, file.hash.value)
    )


def _differs(file: Path, algorithm: str, digest: str) -> bool:
    """Whether a file is there with another content than ``digest`` says; as in ``RECORD``, the
    digest is in URL-safe base64 without padding.
    """
    if not file.is_file() or algorithm not in hashlib.algorithms_available:
        return False
    content = hashlib.new(algorithm, file.read_bytes()).digest()
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode() != digest


def _address(release: Release) -> str:
    return "" if release.repository is None else f" ({release.repository})"


def changed_files(folder: Path, release: Release) -> tuple[str, ...]:
    """Python files below the roots whose content differs from the commit's.

    Deleted files do not count: an import reports them.
    """
    if not _commit(folder):
        return ()
    # Not `git status`: the index may be empty, as in a part of a repository that was checked out
    # without it.
    entries = (
        entry.partition("\t")
        for entry in _git(folder, "ls-tree", "-r", "-z", "HEAD", *release.roots).split("\0")
    )
    files = {
        path: fields.split()
        for fields, _, path in entries
        if fields.startswith("100") and path.endswith(".py")
    }
    present = [path for path in files if (folder / path).is_file()]
    hashes = _git(folder, "hash-object", "--stdin-paths", stdin="\n".join(present)).split()
    return tuple(
        path for path, content in zip(present, hashes, strict=False) if files[path][2] != content
    )


def imported_from(folder: Path, release: Release) -> str | None:
    """The file that ``release.module`` was imported from, if it is not the one in ``folder``."""
    # imported modules stay imported, whatever the path says now
    file = getattr(sys.modules.get(release.module), "__file__", None)
    if file is None or Path(file).resolve() == (folder / release.module_file).resolve():
        return None
    return str(file)


def _same_commit(candidate: str, version: str) -> bool:
    return len(version) >= _ABBREVIATED and (
        version.startswith(candidate) or candidate.startswith(version)
    )


def _commit(folder: Path) -> str:
    """The commit that is checked out; empty without git, or if ``folder`` is only a part of the
    repository of something else.
    """
    return _git(folder, "rev-parse", "HEAD").strip() if (folder / ".git").exists() else ""


def _git(folder: Path, *arguments: str, stdin: str = "") -> str:
    """The output of a git command in ``folder``; empty if it fails or there is no git."""
    git = shutil.which("git")
    if git is None:
        return ""
    # Within a hook git names its own repository by these variables, which take precedence over -C.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    finished = subprocess.run(  # noqa: S603 - git itself, on the folder that the user names
        [git, "-C", str(folder), *arguments],
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        check=False,
        timeout=60,
        env=environment,
    )
    return finished.stdout if finished.returncode == 0 else ""


def requirements_file(stack: str) -> str:
    """Path of the pinned dependencies of ``stack``, which are shipped with rollproof."""
    return str(resources.files(STACKS[stack]) / "requirements.txt")


def verdicts_file(stack: str) -> Traversable:
    """The file of the known verdicts of ``stack``, which is shipped with rollproof."""
    return resources.files(STACKS[stack]) / "verdicts.toml"
