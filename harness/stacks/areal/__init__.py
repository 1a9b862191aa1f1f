"""AReaL, released and unmodified: its inference engine client and the bridge of its inference
service, with their loops of resuming.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.areal.upstream import RELEASE, import_areal

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import AReaL and give its parts. Raises ``StackError`` where it cannot be imported."""
    from rollproof.stacks.areal.areal_parts import parts_of

    return Stack(name="areal", version=found.version, parts=parts_of(import_areal(found.version)))
