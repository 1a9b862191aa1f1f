"""The parts of verl that are judged, as factories of subjects, each with the schedules that fit it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollproof.case import Case
from rollproof.schedules import Limits, profile_named, random_cases
from rollproof.stacks.verl.agent_loop import AgentLoopSubject
from rollproof.stacks.verl.batch import PaddedBatch, SampleDicts, UnpaddedBatch
from rollproof.stacks.verl.checkpoint import CheckpointSubject
from rollproof.stacks.verl.client import ClientSubject
from rollproof.stacks.verl.server import CONVENTIONS
from rollproof.stacks.verl.versions import Verl

__all__ = ["Part", "batches_of", "parts_of"]

_TURNS = 3
_TURN_TOKENS = 4
"""On average a turn ends after so many tokens: without natural ends there is one turn only."""


@dataclass(frozen=True, eq=False)
class Part:
    """A factory of subjects. ``turns``: requests get up to so many answers of the environment."""

    name: str
    make: Callable[[], Any]
    turns: int = 0
    flavours: tuple[str, ...] = tuple(CONVENTIONS)

    def __call__(self) -> Any:
        """A fresh subject."""
        return self.make()

    def cases(self, profile: str, seed: int | None = None) -> Iterator[Case]:
        """The profile's schedules, restricted to what the part can be asked for, and multi-turn ones where it has turns."""
        from rollproof.campaign import cases_for
        from rollproof.probing import probe

        settings = profile_named(profile)
        used = settings.seed_for(seed)
        yield from cases_for(self, profile=profile, seed=used, flavours=self.flavours)
        if not self.turns:
            return
        share = max(1, settings.random_cases // len(self.flavours))
        for flavour, contract, model in probe(self, self.flavours):
            for case in random_cases(used, share, flavour=flavour, contract=contract, model=model, limits=Limits(turns=self.turns)):
                yield replace(case, model=replace(case.model, eos_every=_TURN_TOKENS))


def parts_of(verl: Verl) -> Mapping[str, Part]:
    """All parts, by name."""
    parts = (
        Part("client", lambda: ClientSubject(verl)),
        Part("single-turn-agent-loop", lambda: AgentLoopSubject(verl, multi_turn=False)),
        Part("tool-agent-loop", lambda: AgentLoopSubject(verl, multi_turn=True), turns=_TURNS),
        Part("checkpoint-manager", lambda: CheckpointSubject(verl)),
    )
    return {part.name: part for part in parts}


def batches_of(verl: Verl) -> Mapping[str, Callable[[], Any]]:
    """The conversions into training batches, by name."""
    batches: dict[str, Callable[[], Any]] = {"sample-dicts": lambda: SampleDicts(verl), "padded-batch": lambda: PaddedBatch(verl)}
    if verl.facts.unpads_on_cpu:
        batches["unpadded-batch"] = lambda: UnpaddedBatch(verl)
    return batches
