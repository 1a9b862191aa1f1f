"""Claiming: of the cards that this process may use those that are free, so that what takes the
first card takes a free one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rollproof.engines.gpus import Gpu, find_gpus, shared

__all__ = ["Claim"]

_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A session's claim on cards of the host, which another session of these suites then leaves
    alone.

    ``left`` says of each card that this one leaves alone why, where that is not for the driver to
    tell; ``hidden`` counts those that CUDA is not shown. ``release`` gives environment and cards
    back; a process that ends does, too.
    """

    left: tuple[str, ...] = ()
    hidden: int = 0
    before: tuple[tuple[str, str | None], ...] = ()
    locks: tuple[int, ...] = ()

    @classmethod
    def make(cls) -> Claim:
        """Claim the cards that are free, and hide the others from CUDA, in this process and in
        those that it starts.

        Nothing is hidden where there is no other card, or no free one. Cards are named by their
        numbers, in the driver's order: not every engine reads UUIDs. Where cards are shared none is
        claimed.
        """
        found = find_gpus()
        why = {gpu: gpu.taken for gpu in found.gpus}
        locks = []
        for gpu in (gpu for gpu, taken in why.items() if taken is None and not shared()):
            lock = _lock(gpu)
            if isinstance(lock, str):
                why[gpu] = lock
            elif lock is not None:
                locks.append(lock)
        free = [gpu for gpu, taken in why.items() if taken is None]
        left = tuple(
            taken for gpu, taken in why.items() if taken is not None and (free or gpu.taken is None)
        )
        if not free or not left:
            return cls(left=left, locks=tuple(locks))
        before = tuple((name, os.environ.get(name)) for name in (_VISIBLE, _ORDER))
        os.environ[_VISIBLE] = ",".join(str(gpu.index) for gpu in free)
        os.environ[_ORDER] = "PCI_BUS_ID"
        return cls(left=left, hidden=len(left), before=before, locks=tuple(locks))

    @property
    def refused(self) -> str | None:
        """Why nothing may be run although the driver knows of a free card; ``None`` where something
        may.
        """
        return (
            f"{'; '.join(self.left)}: CUDA_VISIBLE_DEVICES gives each its own"
            if self.left and not self.hidden
            else None
        )

    def release(self) -> None:
        """Show again what was hidden, and let others claim what was claimed."""
        for name, value in self.before:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for lock in self.locks:
            fcntl.flock(
                lock, fcntl.LOCK_UN
            )  # also where a process that was forked still has it open
            os.close(lock)


def _lock(gpu: Gpu) -> int | str | None:
    """A file that is locked as long as this process has the card; why there is none; ``None`` where
    the system allows no such file.
    """
    path = Path(tempfile.gettempdir()) / f"rollproof-{gpu.uuid or f'gpu-{gpu.index}'}.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:  # another user's
        try:
            lock = os.open(path, os.O_RDONLY)
        except OSError:
            return None
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(lock, 20).decode(errors="replace").strip()
        os.close(lock)
        return (
            f"GPU {gpu.index} is claimed by another session of these"
            f" suites{f' (process {holder})' if holder.isdigit() else ''}"
        )
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
    return lock
