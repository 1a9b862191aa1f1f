"""Claiming: of the cards that this process may use those that are free, so that what takes the first card takes a free one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rollproof.gpu_suites.gate import find_gpus
from rollproof.gpu_suites.needs import free_gpus

__all__ = ["Claim"]

_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Cards of the host that a session leaves alone: ``left`` says why, one each. ``release`` gives the environment back."""

    left: tuple[str, ...]
    before: tuple[tuple[str, str | None], ...]

    @classmethod
    def make(cls) -> Claim:
        """Hide the cards that are taken from CUDA, in this process and in those that it starts; nothing where all are, or none is.

        Cards are named by their numbers, in the driver's order: not every engine reads UUIDs.
        """
        found = find_gpus()
        free = free_gpus(found)
        if not free or len(free) == len(found.gpus):
            return cls(left=(), before=())
        before = tuple((name, os.environ.get(name)) for name in (_VISIBLE, _ORDER))
        os.environ[_VISIBLE] = ",".join(str(gpu.index) for gpu in free)
        os.environ[_ORDER] = "PCI_BUS_ID"
        return cls(left=tuple(why for gpu in found.gpus if (why := gpu.taken)), before=before)

    def release(self) -> None:
        """Show again what was hidden."""
        for name, value in self.before:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
