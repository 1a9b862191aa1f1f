"""A rollout client that keeps a given contract: what stands where a stack's own client goes, in the
test files that ``rollproof init`` writes.
"""

from __future__ import annotations

from dataclasses import replace

from rollproof.core.contract import (
    Contract,
    Filler,
    PartialOff,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.records import Request, Rollout
from rollproof.fakes.clients.reference_clients import (
    AsSampled,
    AsSampledBounds,
    AsSampledMasks,
    ClientOptions,
    EngineKeep,
    LatestPrefill,
    PartialOffClient,
    PartialSample,
)
from rollproof.fakes.engine.fleet import Fleet

__all__ = ["StandIn"]

_ROUTES = (
    "rows",
    "final_row",
    "layer_axis",
    "num_layers",
    "moe_layers",
    "num_experts",
    "top_k",
    "filler",
    "provenance",
)


class StandIn:
    """Calls the engines of a fleet as the contract says, and returns samples that keep it.

    Args:
        fleet: The engines that the test's cases bring.
        contract: What the samples are to keep.
    """

    def __init__(self, fleet: Fleet, contract: Contract) -> None:
        client = _base(contract)(
            ClientOptions(
                versions=contract.versions,
                rows=Rows.FORWARDED if contract.rows is Rows.NONE else contract.rows,
                final_row=contract.final_row or Filler.NONE,
                layer_axis=contract.layer_axis,
                partial_off=contract.partial_off or PartialOff.DROPPED,
                multi_turn=contract.multi_turn,
                limits=contract.limits,
                own_stops=contract.own_stops,
                filler=contract.filler or Filler.NONE,
                reply_gaps=contract.reply_gaps,
            )
        )
        client.start(fleet)
        declared = contract if contract.has_routes else client.contract
        client.contract = replace(
            contract,
            # the client stores rows in one type, the first of those that the contract allows
            dtype=declared.dtypes[0],
            **{field: getattr(declared, field) for field in _ROUTES},
        )
        self._client, self._contract = client, contract

    async def generate(self, request: Request) -> Rollout | None:
        """Return one sample, whatever interrupts it; ``None`` for one that was dropped."""
        sample = await self._client.rollout(request)
        if sample is None:
            return None
        return replace(
            sample,
            routes=sample.routes if self._contract.has_routes else None,
            finish_reason=sample.finish_reason if self._contract.finish_reason else None,
        )

    async def update_weights(self, version: int | None) -> None:
        """Load the weights of a version on all engines, which stop or freeze their calls."""
        await self._client.update_weights(version)


class _KeptAndResumed(EngineKeep):
    """Lets the engine freeze calls during updates, and sends again what is aborted otherwise."""

    def aborts_surface(self, fleet: Fleet) -> bool:
        """Whether a caller may get an aborted sample: with partial rollout off alone."""
        return AsSampled.aborts_surface(self, fleet)

    def resumes(self, sample: PartialSample) -> bool:
        """Whether an aborted sample is sent again."""
        return AsSampled.resumes(self, sample)


def _base(contract: Contract) -> type[AsSampled]:
    """Return the class of the reference client that keeps what the contract says."""
    bases = _resuming(contract)
    if contract.sampling_masks:
        bases.append(AsSampledMasks)
    return type("Client", tuple(bases), {}) if bases else AsSampled


def _resuming(contract: Contract) -> list[type[AsSampled]]:
    """Return the classes that treat aborts, versions and rows as the contract says."""
    if contract.resume is ResumeBy.NONE:
        return [PartialOffClient]
    kept = EngineKeep if contract.abort_surfaces else _KeptAndResumed
    bases: list[type[AsSampled]] = []
    if contract.versions is Versions.BOUNDS:
        bases.append(AsSampledBounds)
    if contract.provenance is Provenance.LATEST_PREFILL:
        bases.append(LatestPrefill)
    if contract.resume is ResumeBy.ENGINE:
        bases.insert(0, kept)
    return bases
