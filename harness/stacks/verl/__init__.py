"""verl, released and unmodified: its resume client, its agent loops, its batch conversions and its
weight update.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.verl.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import verl and return its parts. Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.part import Part, by_name
    from rollproof.stacks.verl.agent_loop import AgentLoopSubject
    from rollproof.stacks.verl.batch import PaddedBatch, SampleDicts, UnpaddedBatch
    from rollproof.stacks.verl.corrections import corrections
    from rollproof.stacks.verl.resume_client import ClientSubject
    from rollproof.stacks.verl.rollout_servers import CONVENTIONS
    from rollproof.stacks.verl.upstream import import_verl
    from rollproof.stacks.verl.weight_update import CheckpointSubject

    verl = import_verl(found)
    flavours = tuple(CONVENTIONS)
    parts = by_name(
        Part(name="client", make=lambda: ClientSubject(verl), flavours=flavours),
        Part(
            name="single-turn-agent-loop",
            make=lambda: AgentLoopSubject(verl, multi_turn=False),
            flavours=flavours,
        ),
        Part(
            name="tool-agent-loop",
            make=lambda: AgentLoopSubject(verl, multi_turn=True),
            flavours=flavours,
            turns=3,
        ),
        Part(name="checkpoint-manager", make=lambda: CheckpointSubject(verl), flavours=flavours),
    )
    batches = {
        "sample-dicts": lambda: SampleDicts(verl),
        "padded-batch": lambda: PaddedBatch(verl),
    }
    if verl.facts.unpads_on_cpu:
        batches["unpadded-batch"] = lambda: UnpaddedBatch(verl)
    return Stack(
        name=RELEASE.stack,
        version=found.version,
        parts=parts,
        batches=batches,
        corrections=corrections(),
    )
