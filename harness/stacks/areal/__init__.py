"""AReaL, released and unmodified: its inference engine client and the bridge of its inference
service, with their resume loops, and its decoupled PPO.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.areal.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import AReaL and return its parts. Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.part import by_name
    from rollproof.stacks.areal.bridge import BridgeSubject
    from rollproof.stacks.areal.corrections import corrections
    from rollproof.stacks.areal.inference_engine import AReaLSubject
    from rollproof.stacks.areal.schedules import ArealPart
    from rollproof.stacks.areal.upstream import import_areal

    areal = import_areal(found.version)
    flavours = ("sglang", "vllm")
    return Stack(
        name=RELEASE.stack,
        version=found.version,
        parts=by_name(
            ArealPart(
                name="remote-engine",
                make=lambda: AReaLSubject(areal),
                flavours=flavours,
                thin=12,
            ),
            ArealPart(
                name="inference-bridge",
                make=lambda: BridgeSubject(areal),
                flavours=flavours,
                thin=12,
            ),
        ),
        corrections=corrections(),
    )
