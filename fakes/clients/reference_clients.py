"""Reference resume clients: the four ways in which correct stacks treat aborted calls.

``REFERENCES`` lists them by name, with the conventions that stacks declare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from rollproof.core.contract import (
    Filler,
    LayerAxis,
    PartialOff,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.engine_contract import PauseMode
from rollproof.core.limits import AnswerCut, RolloutLimits
from rollproof.core.own_stops import OwnStops
from rollproof.core.records import EngineOutput, Version
from rollproof.core.subjects import RolloutSubject
from rollproof.fakes.clients.adapter_clients import AsSampledAdapters
from rollproof.fakes.clients.delta_clients import AsSampledDeltas
from rollproof.fakes.clients.mask_clients import AsSampledMasks
from rollproof.fakes.clients.resuming import FROZEN, AsSampled, ClientOptions, PartialSample
from rollproof.fakes.clients.step_clients import AsSampledBranches, AsSampledSteps
from rollproof.fakes.engine.flavours import ReprefillRows
from rollproof.fakes.engine.fleet import Fleet

__all__ = [
    "REFERENCES",
    "AsSampled",
    "AsSampledAdapters",
    "AsSampledBranches",
    "AsSampledCalls",
    "AsSampledDeltas",
    "AsSampledLimits",
    "AsSampledMasks",
    "AsSampledMoe",
    "AsSampledSpans",
    "AsSampledSteps",
    "AsSampledTokens",
    "AsSampledTurns",
    "AsSampledUntagged",
    "ClientOptions",
    "EngineKeep",
    "LatestPrefill",
    "LatestPrefillRows",
    "PartialOffClient",
    "PartialOffSurfaced",
    "PartialSample",
]


class LatestPrefill(AsSampled):
    """Resumes by itself; every row comes from the last call, which prefilled the sequence again."""

    def pause_mode(self, fleet: Fleet) -> PauseMode:
        """Return a mode after which rows come from the latest prefill.

        Frozen calls keep their first rows, unless the engine overwrites them after a retraction.
        """
        fits = (
            fleet.flavour.recompute is ReprefillRows.OVERWRITTEN
            and fleet.pause_mode is PauseMode.RETRACT
        )
        return PauseMode.ABORT if fleet.pause_mode in FROZEN and not fits else fleet.pause_mode

    def provenance(self, fleet: Fleet) -> Provenance:
        """Return which forward a row of a resumed sample comes from."""
        return Provenance.LATEST_PREFILL

    def routes_start(self, sample: PartialSample) -> int:
        """Return 0: every call returns all rows."""
        return 0

    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        """Replace the rows by the new ones, if there are any."""
        if output.routes is not None:
            sample.rows = output.routes[: sent + len(output.token_ids) - 1].copy()


class EngineKeep(AsSampled):
    """Makes one call a turn, which the engine freezes during weight updates and continues after
    them. An abort surfaces.
    """

    options: ClassVar[ClientOptions] = ClientOptions(partial_off=PartialOff.SURFACED)
    resume: ClassVar[ResumeBy] = ResumeBy.ENGINE

    def pause_mode(self, fleet: Fleet) -> PauseMode:
        """Return a mode without aborts: only the engine resumes these calls."""
        return PauseMode.KEEP if fleet.pause_mode is PauseMode.ABORT else fleet.pause_mode

    def provenance(self, fleet: Fleet) -> Provenance:
        """Return as-sampled, unless the engine overwrites rows when updates recompute them."""
        again = fleet.pause_mode is PauseMode.RETRACT or (
            fleet.pause_mode is PauseMode.KEEP and fleet.clear_cache
        )
        overwritten = fleet.flavour.recompute is ReprefillRows.OVERWRITTEN
        return Provenance.LATEST_PREFILL if overwritten and again else Provenance.AS_SAMPLED

    def aborts_surface(self, fleet: Fleet) -> bool:
        """Return True: the client does not resume an aborted call."""
        return True

    def resumes(self, sample: PartialSample) -> bool:
        """Return False: an aborted call is the end."""
        return False


class PartialOffClient(AsSampled):
    """Never resumes: an aborted sample is dropped or surfaced."""

    resume: ClassVar[ResumeBy] = ResumeBy.NONE

    def aborts_surface(self, fleet: Fleet) -> bool:
        """Whether a caller may get an aborted sample."""
        return self.chosen.partial_off is PartialOff.SURFACED

    def resumes(self, sample: PartialSample) -> bool:
        """Return False."""
        return False


class AsSampledTokens(AsSampled):
    """Returns one row a token, the last one filled with -1, and a tag on every token."""

    options: ClassVar[ClientOptions] = ClientOptions(versions=Versions.TOKEN, rows=Rows.ALL)


class AsSampledSpans(AsSampled):
    """Returns spans as the finest tag; the last row contains the experts 0 to k - 1."""

    options: ClassVar[ClientOptions] = ClientOptions(
        versions=Versions.SPAN, rows=Rows.ALL, final_row=Filler.ARANGE
    )


class AsSampledBounds(AsSampled):
    """Returns version bounds: the newest update that was complete when a rollout began and when it
    ended, widened to the versions that the engines showed.
    """

    options: ClassVar[ClientOptions] = ClientOptions(versions=Versions.BOUNDS)

    def start(self, fleet: Fleet) -> None:
        """Start with the first version."""
        super().start(fleet)
        self._ended: Version = fleet.case.first_version
        self._begun: dict[str, Version] = {}

    async def update_weights(self, version: int | None) -> None:
        """Update, and remember the number; an update without a label has none."""
        await super().update_weights(version)
        self._ended = version

    async def run(self, sample: PartialSample) -> bool:
        """Remember the newest complete update before the first call: the lower bound."""
        self._begun[sample.request.request_id] = self._ended
        return await super().run(sample)

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        """Return both bounds if the engines showed any version."""
        shown = super().version_tags(sample)
        if not shown or shown["min_version"] is None:
            return shown
        begun = self._begun.pop(sample.request.request_id)
        counted = [number for number in (begun, self._ended) if isinstance(number, int)]
        return {
            "min_version": min([shown["min_version"], *counted]),
            "max_version": max([shown["max_version"], *counted]),
        }


class AsSampledCalls(AsSampled):
    """Returns a version tag for each call."""

    options: ClassVar[ClientOptions] = ClientOptions(versions=Versions.CALL)


class AsSampledMoe(AsSampled):
    """Returns routes of MoE layers only, and one tag for the sample."""

    options: ClassVar[ClientOptions] = ClientOptions(
        versions=Versions.SAMPLE, layer_axis=LayerAxis.MOE
    )


class AsSampledUntagged(AsSampled):
    """Returns no version tag."""

    options: ClassVar[ClientOptions] = ClientOptions(versions=Versions.NONE)


class AsSampledTurns(AsSampled):
    """Runs multi-turn rollouts; the environment's tokens are in the response, masked out."""

    options: ClassVar[ClientOptions] = ClientOptions(multi_turn=True)


class AsSampledLimits(AsSampled):
    """Runs multi-turn rollouts under limits of its own, and ends turns at a stop sequence itself.
    Replies may lack logprobs, whose tokens it masks out, and routes, in whose place it has the
    experts 0 to k - 1.
    """

    options: ClassVar[ClientOptions] = ClientOptions(
        multi_turn=True,
        limits=RolloutLimits(
            response=9,
            length=17,
            context=17,
            turns=3,
            turn_tokens=6,
            answers_cut_turns=True,
            answer=4,
            answer_keeps=AnswerCut.END,
        ),
        # a string such as "</answer>" has several tokens
        own_stops=OwnStops(sequences=((522, 9217, 29),)),
        filler=Filler.ARANGE,
        reply_gaps=True,
    )


class LatestPrefillRows(LatestPrefill):
    """Returns one row a token, the last one zeros, which the contract declares."""

    options: ClassVar[ClientOptions] = ClientOptions(rows=Rows.ALL, final_row=Filler.ZEROS)


class PartialOffSurfaced(PartialOffClient):
    """Returns aborted samples, with finish reason ``abort``."""

    options: ClassVar[ClientOptions] = ClientOptions(partial_off=PartialOff.SURFACED)


REFERENCES: Mapping[str, Callable[[], RolloutSubject]] = MappingProxyType(
    {
        "as-sampled": AsSampled,
        "as-sampled-tokens": AsSampledTokens,
        "as-sampled-spans": AsSampledSpans,
        "as-sampled-bounds": AsSampledBounds,
        "as-sampled-calls": AsSampledCalls,
        "as-sampled-moe": AsSampledMoe,
        "as-sampled-untagged": AsSampledUntagged,
        "as-sampled-turns": AsSampledTurns,
        "as-sampled-limits": AsSampledLimits,
        "as-sampled-adapters": AsSampledAdapters,
        "as-sampled-deltas": AsSampledDeltas,
        "as-sampled-masks": AsSampledMasks,
        "as-sampled-steps": AsSampledSteps,
        "as-sampled-branches": AsSampledBranches,
        "latest-prefill": LatestPrefill,
        "latest-prefill-rows": LatestPrefillRows,
        "engine-keep": EngineKeep,
        "partial-off": PartialOffClient,
        "partial-off-surfaced": PartialOffSurfaced,
    }
)
"""Factories without arguments, by name."""
