"""Parts of AReaL, with schedules that show faults of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.records import Request
from rollproof.stacks._support.part import Part

__all__ = ["ArealPart"]

_ABORTS = 24
"""More than the bridge resubmits (``max_resubmit_retries``, 20)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ArealPart(Part):
    """A part whose schedules end with a request that is aborted again and again, one whose reply an
    update overtakes, and one that goes on after a weight transfer that broke.
    """

    def cases(self, profile: str, seed: int | None = None) -> Iterator[Case]:
        # The profile's schedules abort a request a few times at most.
        yield from super().cases(profile, seed)
        for flavour in self.flavours:
            yield _aborted_often(flavour)
            yield _overtaken(flavour)
            yield _broken_transfer(flavour)


def _aborted_often(flavour: str) -> Case:
    request = Request(request_id="r0", prompt_ids=(2, 12, 13), max_tokens=2 * _ABORTS)
    aborts = tuple(
        Action(when=Trigger(request="r0", tokens=i), do=ActionKind.ABORT)
        for i in range(1, _ABORTS + 1)
    )
    return Case(flavour=flavour, requests=(request,), actions=aborts)


def _overtaken(flavour: str) -> Case:
    """The first reply is in transit while the second request triggers an update."""
    requests = (
        Request(request_id="r0", prompt_ids=(2, 12, 13), max_tokens=2),
        Request(request_id="r1", prompt_ids=(3, 12, 13), max_tokens=12),
    )
    late = Action(when=Trigger(request="r0", tokens=1), do=ActionKind.LATE_REPLY, steps=30)
    update = Action(when=Trigger(request="r1", tokens=6), do=ActionKind.SYNC)
    return Case(flavour=flavour, requests=requests, actions=(late, update))


def _broken_transfer(flavour: str) -> Case:
    """The request is aborted for an update whose transfer breaks, and another one follows it."""
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(2 + i, 12, 13), max_tokens=8) for i in range(2)
    )
    update = Action(when=Trigger(request="r0", tokens=3), do=ActionKind.SYNC_FAILS)
    return Case(flavour=flavour, requests=requests, arrivals=(0, 60), actions=(update,))
