"""The parts of AReaL that are judged, and a schedule that they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.records import Request
from rollproof.stacks._support.part import Part
from rollproof.stacks.areal.bridge import BridgeSubject
from rollproof.stacks.areal.inference_engine import EngineSubject
from rollproof.stacks.areal.upstream import AReaL

__all__ = ["parts_of"]

_FLAVOURS = ("sglang", "vllm")
_THIN = 12
_ABORTS = 24
"""More than the bridge asks again for (``max_resubmit_retries``, 20)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _ArealPart(Part):
    """A part whose schedules end with a request that is aborted again and again, and one whose
    reply an update overtakes.
    """

    def cases(self, profile: str, seed: int | None = None) -> Iterator[Case]:
        yield from super().cases(profile, seed)
        for flavour in self.flavours:
            yield _aborted_often(flavour)
            yield _overtaken(flavour)


def _aborted_often(flavour: str) -> Case:
    request = Request(request_id="r0", prompt_ids=(2, 12, 13), max_tokens=2 * _ABORTS)
    aborts = tuple(
        Action(when=Trigger(request="r0", tokens=i), do=ActionKind.ABORT)
        for i in range(1, _ABORTS + 1)
    )
    return Case(flavour=flavour, requests=(request,), actions=aborts)


def _overtaken(flavour: str) -> Case:
    """The first reply travels while the second request has new weights loaded."""
    requests = (
        Request(request_id="r0", prompt_ids=(2, 12, 13), max_tokens=2),
        Request(request_id="r1", prompt_ids=(3, 12, 13), max_tokens=12),
    )
    late = Action(when=Trigger(request="r0", tokens=1), do=ActionKind.LATE_REPLY, steps=30)
    update = Action(when=Trigger(request="r1", tokens=6), do=ActionKind.SYNC)
    return Case(flavour=flavour, requests=requests, actions=(late, update))


def parts_of(areal: AReaL) -> Mapping[str, Part]:
    """All parts, by name."""
    parts = (
        _ArealPart(
            name="remote-engine", make=lambda: EngineSubject(areal), flavours=_FLAVOURS, thin=_THIN
        ),
        _ArealPart(
            name="inference-bridge",
            make=lambda: BridgeSubject(areal),
            flavours=_FLAVOURS,
            thin=_THIN,
        ),
    )
    return {part.name: part for part in parts}
