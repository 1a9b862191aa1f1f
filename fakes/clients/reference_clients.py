"""Reference resume managers: what correct stacks do with aborted calls, in the four ways of the
field.

``REFERENCES`` has them by name, under the conventions that stacks declare.
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
from rollproof.core.records import EngineOutput, Version
from rollproof.core.subjects import RolloutSubject
from rollproof.fakes.clients.resuming import FROZEN, AsSampled, ClientOptions, PartialSample
from rollproof.fakes.engine.flavours import ReprefillRows
from rollproof.fakes.engine.fleet import Fleet

__all__ = [
    "REFERENCES",
    "AsSampled",
    "AsSampledCalls",
    "AsSampledMoe",
    "AsSampledSpans",
    "AsSampledTokens",
    "AsSampledTurns",
    "AsSampledUntagged",
    "ClientOptions",
    "EngineKeep",
    "LatestPrefill",
    "LatestPrefillRows",
    "PartialOffManager",
    "PartialOffSurfaced",
    "PartialSample",
]


class LatestPrefill(AsSampled):
    """Resumes on the client's side; every row comes from the last call, which prefilled the
    sequence anew.
    """

    def pause_mode(self, fleet: Fleet) -> PauseMode:
        """Frozen calls keep their first rows, unless the engine overwrites them after a retraction."""
        fits = (
            fleet.flavour.recompute is ReprefillRows.OVERWRITTEN
            and fleet.pause_mode is PauseMode.RETRACT
        )
        return PauseMode.ABORT if fleet.pause_mode in FROZEN and not fits else fleet.pause_mode

    def provenance(self, fleet: Fleet) -> Provenance:
        """Which forward a row of a resumed sample comes from."""
        return Provenance.LATEST_PREFILL

    def routes_start(self, sample: PartialSample) -> int:
        """Every call returns all rows."""
        return 0

    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        """The new rows replace the old ones; where none came, the old ones stay."""
        if output.routes is not None:
            sample.rows = output.routes[: sent + len(output.token_ids) - 1].copy()


class EngineKeep(AsSampled):
    """Makes one call a turn; the engine freezes it during weight updates and goes on afterwards. An
    abort surfaces.
    """

    options: ClassVar[ClientOptions] = ClientOptions(partial_off=PartialOff.SURFACED)
    resume: ClassVar[ResumeBy] = ResumeBy.ENGINE

    def pause_mode(self, fleet: Fleet) -> PauseMode:
        """An update may not abort what only the engine resumes."""
        return PauseMode.KEEP if fleet.pause_mode is PauseMode.ABORT else fleet.pause_mode

    def provenance(self, fleet: Fleet) -> Provenance:
        """As sampled, unless the engine overwrites rows and updates make it compute them again."""
        again = fleet.pause_mode is PauseMode.RETRACT or (
            fleet.pause_mode is PauseMode.KEEP and fleet.clear_cache
        )
        overwritten = fleet.flavour.recompute is ReprefillRows.OVERWRITTEN
        return Provenance.LATEST_PREFILL if overwritten and again else Provenance.AS_SAMPLED

    def aborts_surface(self, fleet: Fleet) -> bool:
        """Nobody resumes an aborted call."""
        return True

    def resumes(self, sample: PartialSample) -> bool:
        """Nobody resumes an aborted call."""
        return False


class PartialOffManager(AsSampled):
    """Never resumes: an aborted sample is dropped or surfaced."""

    resume: ClassVar[ResumeBy] = ResumeBy.NONE

    def aborts_surface(self, fleet: Fleet) -> bool:
        """Whether a caller may be handed an aborted sample."""
        return self.chosen.partial_off is PartialOff.SURFACED

    def resumes(self, sample: PartialSample) -> bool:
        """Never."""
        return False


class AsSampledTokens(AsSampled):
    """One row a token, the last one marked -1; a tag on every token."""

    options: ClassVar[ClientOptions] = ClientOptions(versions=Versions.TOKEN, rows=Rows.ALL)


class AsSampledSpans(AsSampled):
    """Spans as the finest tag; the last row holds the experts 0 to k - 1."""

    options: ClassVar[ClientOptions] = ClientOptions(
        versions=Versions.SPAN, rows=Rows.ALL, final_row=Filler.ARANGE
    )


class AsSampledBounds(AsSampled):
    """Bounds: the newest update that had ended when a rollout began and when it ended, widened to
    what the engines showed.
    """

    options: ClassVar[ClientOptions] = ClientOptions(versions=Versions.BOUNDS)

    def start(self, fleet: Fleet) -> None:
        """Count from the first version on."""
        super().start(fleet)
        self._ended: Version = fleet.case.first_version
        self._begun: dict[str, Version] = {}

    async def update_weights(self, version: int | None) -> None:
        """An update without a label has no number to count."""
        await super().update_weights(version)
        self._ended = version

    async def run(self, sample: PartialSample) -> bool:
        """What had ended before the first call is the lower bound."""
        self._begun[sample.request.request_id] = self._ended
        return await super().run(sample)

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        """Both bounds, where the engines showed any version."""
        shown = super().version_tags(sample)
        if not shown or shown["min_version"] is None:
            return shown
        counted = [
            n
            for n in (self._begun.pop(sample.request.request_id), self._ended)
            if isinstance(n, int)
        ]
        return {
            "min_version": min([shown["min_version"], *counted]),
            "max_version": max([shown["max_version"], *counted]),
        }


class AsSampledCalls(AsSampled):
    """A tag for each call."""

    options: ClassVar[ClientOptions] = ClientOptions(versions=Versions.CALL)


class AsSampledMoe(AsSampled):
    """MoE layers only; one tag for the sample."""

    options: ClassVar[ClientOptions] = ClientOptions(
        versions=Versions.SAMPLE, layer_axis=LayerAxis.MOE
    )


class AsSampledUntagged(AsSampled):
    """No version tag."""

    options: ClassVar[ClientOptions] = ClientOptions(versions=Versions.NONE)


class AsSampledTurns(AsSampled):
    """Multi-turn rollouts: the environment's tokens stand in the response, masked out."""

    options: ClassVar[ClientOptions] = ClientOptions(multi_turn=True)


class LatestPrefillRows(LatestPrefill):
    """One row a token, the last one zeros: legal, and flagged."""

    options: ClassVar[ClientOptions] = ClientOptions(rows=Rows.ALL, final_row=Filler.ZEROS)


class PartialOffSurfaced(PartialOffManager):
    """Aborted samples are handed over, with finish reason ``abort``."""

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
        "latest-prefill": LatestPrefill,
        "latest-prefill-rows": LatestPrefillRows,
        "engine-keep": EngineKeep,
        "partial-off": PartialOffManager,
        "partial-off-surfaced": PartialOffSurfaced,
    }
)
"""Factories without arguments, by name."""
