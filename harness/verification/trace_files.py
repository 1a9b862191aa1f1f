"""The trace files of a command line: found in folders, selected, and divided into units of work.

Memory holds a path and a size a file. How files are divided depends on the files alone, so that a
verdict does not depend on who judges them.
"""

from __future__ import annotations

import filecmp
import heapq
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from pathlib import Path

import numpy as np

from rollproof.errors import UsageError

__all__ = ["ENDINGS", "Sample", "TraceFiles", "find_traces", "sample_of", "since_of", "walk"]

ENDINGS = (".arrow", ".json")
"""Endings of the files of a folder that are taken for traces."""
_UNIT_FILES = 256
_UNIT_BYTES = 64 << 20
"""The most files, and bytes of several files, that are judged as one unit of work."""
_ENDS = 64 << 10
"""Bytes at both ends of a file by which copies are suspected, before they are compared."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """How many files are judged: a number, or a share (above 0, below 1)."""

    files: int | None = None
    share: float | None = None


@dataclass(kw_only=True, slots=True)
class TraceFiles:
    """The files to judge.

    paths: Their paths, in the order of the command line; those of a folder sorted.
    sizes: Their bytes, -1 for one that is gone.
    copies: The place of the file that a file has the same bytes as, by its own place.
    notes: What was left out, and why.
    """

    paths: list[str]
    sizes: list[int]
    copies: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(size for size in self.sizes if size > 0)

    def units(self) -> Iterator[range]:
        """Yield the places of consecutive files that are judged together: a long file is alone."""
        first = size = 0
        for place, own in enumerate(self.sizes):
            full = place - first >= _UNIT_FILES or size + own > _UNIT_BYTES
            if place > first and full:
                yield range(first, place)
                first, size = place, 0
            size += max(own, 0)
        if first < len(self):
            yield range(first, len(self))


def find_traces(
    paths: Sequence[Path], *, since: float | None = None, sample: Sample | None = None
) -> TraceFiles:
    """Return the files that ``paths`` name, and those of the folders among them.

    Args:
        paths: Files, whatever their names, and folders, with all folders in them.
        since: Leave out files that were last changed before this time, in seconds since 1970.
        sample: Judge only some of the files. Which ones depends on their paths alone.

    Raises:
        UsageError: A path does not exist, or no file is left.
    """
    found: list[str] = []
    others = 0
    for path in paths:
        if path.is_dir():
            for name in walk(path):
                if name.endswith(ENDINGS):
                    found.append(name)
                else:
                    others += 1
        # a link that leads nowhere is counted as unreadable, not refused
        elif path.exists() or path.is_symlink():
            found.append(str(path))
        else:
            raise UsageError(f"There is no trace at {path}: check the path.")
    notes = []
    if others:
        notes.append(
            f"{_files(others)} of the folders not read: their names do not end in"
            f" {' or '.join(ENDINGS)}"
        )
    if not found:
        raise UsageError(
            f"No trace is in {', '.join(map(str, paths))}: the names of traces end in"
            f" {' or '.join(ENDINGS)}."
        )
    if since is not None:
        fresh = [name for name in found if _changed(name) >= since]
        if len(fresh) < len(found):
            notes.append(f"{_files(len(found) - len(fresh))} older than --since were left out")
        if not fresh:
            raise UsageError("Every trace is older than --since: nothing is left to judge.")
        found = fresh
    if sample is not None:
        chosen = _sampled(found, sample)
        if len(chosen) < len(found):
            notes.append(f"a sample: {len(chosen):,} of {len(found):,} files were judged")
        found = chosen
    sizes = [_size(name) for name in found]
    return TraceFiles(paths=found, sizes=sizes, copies=_copies(found, sizes), notes=notes)


def since_of(text: str) -> float:
    """Return the time that ``--since`` names: an age such as ``90m``, ``24h`` or ``7d``, or a date
    in ISO 8601. Raises ``UsageError``.
    """
    age = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if age is not None:
        return time.time() - float(age[1]) * _UNITS[age[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--since takes an age (90m, 24h, 7d) or a date (2026-01-31, 2026-01-31T08:00), not"
            f" {text!r}."
        ) from None


def sample_of(text: str) -> Sample:
    """Return what ``--sample`` asks for: a number of files, or a share such as ``5%``.

    Raises ``UsageError``.
    """
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if share is not None and 0 < float(share[1]) <= 100:
        return Sample(share=float(share[1]) / 100)
    if share is None and text.strip().isdecimal() and 0 < int(text) < 2**31:
        return Sample(files=int(text))
    raise UsageError(f"--sample takes a number of files (100) or a share (5%), not {text!r}.")


def walk(folder: Path) -> Iterator[str]:
    """Yield the files of a folder, sorted. Raises ``UsageError`` if a folder cannot be read."""

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}.")

    for place, folders, names in os.walk(folder, onerror=refuse):
        # in place: os.walk goes down in the order of this list
        folders.sort()
        for name in sorted(names):
            yield os.path.join(place, name)  # noqa: PTH118 - a Path takes three times the memory


def _sampled(paths: list[str], sample: Sample) -> list[str]:
    """Return the files with the smallest hashes of their paths: the same ones in each run."""
    if sample.share is not None:
        bound = int(sample.share * 2**64)
        chosen = [path for path in paths if _hash(path) < bound]
        # a small share of few files would be none
        return chosen or [min(paths, key=_hash)]
    kept = set(heapq.nsmallest(sample.files or 1, range(len(paths)), lambda i: _hash(paths[i])))
    return [path for place, path in enumerate(paths) if place in kept]


def _hash(path: str) -> int:
    return int.from_bytes(blake2b(os.fsencode(path), digest_size=8).digest(), "big")


def _copies(paths: Sequence[str], sizes: Sequence[int]) -> dict[int, int]:
    """Return which files have the same bytes as an earlier one."""
    copies: dict[int, int] = {}
    for group in _of_equal_size(sizes):
        alike: dict[bytes, list[int]] = defaultdict(list)
        for place in group:
            ends = _ends_of(paths[place], sizes[place])
            if ends is None:
                continue
            for earlier in alike[ends]:
                if _same(paths[earlier], paths[place]):
                    copies[place] = earlier
                    break
            else:
                alike[ends].append(place)
    return copies


def _of_equal_size(sizes: Sequence[int]) -> Iterator[Iterable[int]]:
    """Yield the places of files that share a size, without empty ones."""
    array = np.array(sizes, dtype=np.int64)
    # stable: of equal files the first one given is the original
    order = np.argsort(array, kind="stable")
    cuts = np.flatnonzero(np.diff(array[order])) + 1
    for group in np.split(order, cuts):
        if len(group) > 1 and array[group[0]] > 0:
            yield group.tolist()


def _ends_of(path: str, size: int) -> bytes | None:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - see walk
            digest = blake2b(file.read(_ENDS), digest_size=8)
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    except OSError:
        return None
    return digest.digest()


def _same(a: str, b: str) -> bool:
    try:
        return filecmp.cmp(a, b, shallow=False)
    except OSError:
        return False
    finally:
        # it believes a result as long as sizes and times are the same
        filecmp.clear_cache()


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116 - see walk
    except OSError:
        # one that is gone is not older: reading it tells what is wrong
        return float("inf")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - see walk
    except OSError:
        return -1


def _files(count: int) -> str:
    return f"{count:,} file{'s' if count != 1 else ''}"
