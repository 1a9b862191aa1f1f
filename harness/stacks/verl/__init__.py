"""verl, released and unmodified: its resume client, its agent loops, its batch conversion and its weight update."""

from __future__ import annotations

from rollproof.stacks import Stack
from rollproof.stacks.verl.versions import RELEASE, import_verl

__all__ = ["RELEASE", "load"]


def load(version: str) -> Stack:
    """Import verl ``version`` and give its parts. Raises ``StackError`` where it cannot be imported."""
    from rollproof.stacks.verl.parts import batches_of, parts_of

    verl = import_verl(version)
    return Stack(name="verl", version=version, parts=parts_of(verl), batches=batches_of(verl))
