"""The parts of verl that are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollproof.stacks._support.part import Part
from rollproof.stacks.verl.agent_loop import AgentLoopSubject
from rollproof.stacks.verl.batch import PaddedBatch, SampleDicts, UnpaddedBatch
from rollproof.stacks.verl.resume_client import ClientSubject
from rollproof.stacks.verl.rollout_servers import CONVENTIONS
from rollproof.stacks.verl.upstream import Verl
from rollproof.stacks.verl.weight_update import CheckpointSubject

__all__ = ["batches_of", "parts_of"]

_TURNS = 3
_FLAVOURS = tuple(CONVENTIONS)


def parts_of(verl: Verl) -> Mapping[str, Part]:
    """All parts, by name."""
    parts = (
        Part(name="client", make=lambda: ClientSubject(verl), flavours=_FLAVOURS),
        Part(
            name="single-turn-agent-loop",
            make=lambda: AgentLoopSubject(verl, multi_turn=False),
            flavours=_FLAVOURS,
        ),
        Part(
            name="tool-agent-loop",
            make=lambda: AgentLoopSubject(verl, multi_turn=True),
            flavours=_FLAVOURS,
            turns=_TURNS,
        ),
        Part(name="checkpoint-manager", make=lambda: CheckpointSubject(verl), flavours=_FLAVOURS),
    )
    return {part.name: part for part in parts}


def batches_of(verl: Verl) -> Mapping[str, Callable[[], Any]]:
    """The conversions into training batches, by name."""
    batches: dict[str, Callable[[], Any]] = {
        "sample-dicts": lambda: SampleDicts(verl),
        "padded-batch": lambda: PaddedBatch(verl),
    }
    if verl.facts.unpads_on_cpu:
        batches["unpadded-batch"] = lambda: UnpaddedBatch(verl)
    return batches
