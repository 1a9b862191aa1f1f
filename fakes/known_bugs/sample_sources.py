"""Known bugs of where a sample comes from: from no engine, or from the call of another request."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollproof.core.records import FinishReason, Request, Rollout
from rollproof.fakes.clients.reference_clients import AsSampled, PartialSample
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import case, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]

_GROUP = case(requests=(request(group="g"), request("r1", group="g")))
_THREE = case(
    requests=(
        request(max_tokens=2, group="g"),
        request("r1", group="g"),
        request("r2", group="g"),
    )
)
_PAIR = case(requests=(request(), request("r1", (31, 32, 33))))


class _SampleMadeUp(AsSampled):
    async def run(self, sample: PartialSample) -> bool:
        if sample.request.request_id == "r0":
            return await super().run(sample)
        # a mock of a test that is still installed
        budget = sample.request.budget or 4
        sample.response, sample.mask = list(range(300, 300 + budget)), [1] * budget
        sample.logprobs, sample.labels = [-1.0] * budget, [0] * budget
        sample.finish = FinishReason.LENGTH
        sample.rows = self.fleet.policy.routes(0, sample.ids)[:-1]
        return True


class _OneReplyForGroup(AsSampled):
    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._groups: dict[str | None, asyncio.Task[Rollout | None]] = {}

    async def rollout(self, request: Request) -> Rollout | None:
        if request.group not in self._groups:
            self._groups[request.group] = asyncio.ensure_future(super().rollout(request))
        return await asyncio.shield(self._groups[request.group])


class _SiblingsSwapped(AsSampled):
    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._finished: list[Rollout] = []

    async def rollout(self, request: Request) -> Rollout | None:
        rollout = await super().rollout(request)
        if rollout is not None:
            self._finished.append(rollout)
        while len(self._finished) < len(self.fleet.case.requests):
            await self.wait()
        # results are matched in the order in which they ended, the last one first
        number = [other.request_id for other in self._finished].index(request.request_id)
        return replace(self._finished[-1 - number], request_id=request.request_id)


class _GroupSharesHandle(AsSampled):
    def handle(self, sample: PartialSample) -> str:
        return sample.request.group or super().handle(sample)

    async def rollout(self, request: Request) -> Rollout | None:
        rollout = await super().rollout(request)
        # meant for calls of this sample that a retry may have left
        for server in self.fleet.servers.values():
            await server.abort(request.group or "")
        return rollout


BUGS = (
    KnownBug(
        id="sample-made-up",
        summary="A mock that was left in place answers every second request instead of an engine.",
        refs=("cf. marin#1818",),
        make=_SampleMadeUp,
        cases=(_PAIR,),
        detected_by=("stitch.sampled-by-engine", "stitch.tokens"),
    ),
    KnownBug(
        id="one-reply-for-group",
        summary="The engine is called once for a prompt, and all n samples get that one reply.",
        refs=("cf. ms-swift#7858", "cf. ms-swift#3450"),
        make=_OneReplyForGroup,
        cases=(_GROUP,),
        detected_by=("stitch.sampled-by-engine",),
    ),
    KnownBug(
        id="siblings-swapped",
        summary="The samples of one prompt are matched to their requests in the wrong order.",
        refs=("cf. vllm#394", "cf. Light-R1#33"),
        make=_SiblingsSwapped,
        cases=(_GROUP,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="group-shares-handle",
        summary=(
            "The calls of all samples of a prompt have the same handle, so that the abort of one"
            " ends the others."
        ),
        refs=("cf. sglang#25561", "cf. sglang#5963"),
        make=_GroupSharesHandle,
        cases=(_THREE,),
        detected_by=("lifecycle.abort-hits-target",),
    ),
)
