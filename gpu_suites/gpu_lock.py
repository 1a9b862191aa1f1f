"""Locks on the free GPUs of the host, so that two sessions of these suites do not share one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rollproof.engines.gpus import Gpu, find_gpus, shared

__all__ = ["Claim"]

_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A session's claim on GPUs of the host, which other sessions of these suites then skip.

    ``release`` restores environment and GPUs; the end of the process does, too.

    Attributes:
        left: why each GPU is skipped, if the driver does not say it.
        hidden: number of GPUs that are hidden from CUDA.
        before: environment variables to restore.
        locks: open lock files.
    """

    left: tuple[str, ...] = ()
    hidden: int = 0
    before: tuple[tuple[str, str | None], ...] = ()
    locks: tuple[int, ...] = ()

    @classmethod
    def make(cls) -> Claim:
        """Claim the free GPUs, and hide the others from CUDA in this process and its children.

        Nothing is hidden if there is no other GPU, or no free one. With ``ROLLPROOF_SHARE_GPUS``
        none is claimed.
        """
        reasons = {gpu: gpu.taken for gpu in find_gpus().gpus}
        locks = []
        for gpu in [gpu for gpu, reason in reasons.items() if reason is None and not shared()]:
            lock = _lock(gpu)
            if isinstance(lock, str):
                reasons[gpu] = lock
            elif lock is not None:
                locks.append(lock)
        free = [gpu for gpu, reason in reasons.items() if reason is None]
        left = tuple(
            reason
            for gpu, reason in reasons.items()
            if reason is not None and (free or gpu.taken is None)
        )
        if not free or not left:
            return cls(left=left, locks=tuple(locks))
        before = tuple((name, os.environ.get(name)) for name in (_VISIBLE, _ORDER))
        # by number in the driver's order, because not every engine reads UUIDs
        os.environ[_VISIBLE] = ",".join(str(gpu.index) for gpu in free)
        os.environ[_ORDER] = "PCI_BUS_ID"
        return cls(left=left, hidden=len(left), before=before, locks=tuple(locks))

    @property
    def refused(self) -> str | None:
        """Why nothing may be run although the driver reports a free GPU, or ``None``."""
        if not self.left or self.hidden:
            return None
        return f"{'; '.join(self.left)}: give each session its own by CUDA_VISIBLE_DEVICES"

    def release(self) -> None:
        """Restore the environment, and unlock the GPUs."""
        for name, value in self.before:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for lock in self.locks:
            # closing alone does not unlock a file that a forked process has open
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def _lock(gpu: Gpu) -> int | str | None:
    """Return a file that is locked while this process has the GPU.

    Or why there is none; or ``None`` if the system allows no such file.
    """
    # The file is never deleted: another process could have it open and lock it, while a third one
    # creates and locks a new file of that name.
    path = Path(tempfile.gettempdir()) / f"rollproof-{gpu.uuid or f'gpu-{gpu.index}'}.lock"
    # anybody may put a link there that leads to a file of ours: it is neither followed nor emptied
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except PermissionError:  # another user created it
        try:
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
    except OSError as error:
        return _not_ours(gpu, path) if error.errno == errno.ELOOP else None
    there = os.fstat(lock)
    if not stat.S_ISREG(there.st_mode) or there.st_nlink > 1:
        os.close(lock)
        return _not_ours(gpu, path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(lock, 20).decode(errors="replace").strip()
        os.close(lock)
        process = f" (process {holder})" if holder.isdigit() else ""
        return f"GPU {gpu.index} is claimed by another session of these suites{process}"
    with contextlib.suppress(OSError):
        if there.st_uid != os.geteuid():
            return lock
        os.ftruncate(lock, 0)
        # only for the message of the session that finds the lock taken
        os.write(lock, str(os.getpid()).encode())
    return lock


def _not_ours(gpu: Gpu, path: Path) -> str:
    return f"the lock of GPU {gpu.index} is a link, not a file of these suites: remove {path}"
