"""verl, released and unmodified: its resume client, its agent loops, its batch conversion and its
weight update.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.verl.upstream import RELEASE, import_verl

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import verl and give its parts. Raises ``StackError`` where it cannot be imported."""
    from rollproof.stacks.verl.verl_parts import batches_of, parts_of

    verl = import_verl(found.version, found.line)
    return Stack(name="verl", version=found.version, parts=parts_of(verl), batches=batches_of(verl))
