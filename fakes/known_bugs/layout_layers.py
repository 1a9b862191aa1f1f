"""Known bugs of layouts: columns, pipeline stages, virtual stages, schedules, recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from rollproof.core.contract import LayerAxis
from rollproof.core.records import IntArray
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_layouts import Layer, MegatronLike, Pass
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Rank
from rollproof.layouts.pipeline import Operation, Stages

__all__ = ["BUGS"]


class _LayoutColumnCountsRouters(MegatronLike):
    """The n-th router reads column n of a payload that has a column for every layer."""

    def column(self, layout: Layout, layer: Layer) -> int:
        # the payload is on the axis of all layers
        return super().column(replace(layout, layer_axis=LayerAxis.MOE), layer)


class _LayoutColumnCountsLayers(MegatronLike):
    """Layer n reads column n of a payload with columns for MoE layers only, counted from the end if
    there are fewer.
    """

    layout: ClassVar[Layout] = replace(MegatronLike.layout, layer_axis=LayerAxis.MOE)

    def column(self, layout: Layout, layer: Layer) -> int:
        # an index beyond the columns wraps around, so no error is raised
        return layer % layout.columns


class _LayoutOffsetCountsDense(MegatronLike):
    """The offset of a stage counts dense layers, too; its routers count on from there."""

    layout: ClassVar[Layout] = replace(MegatronLike.layout, layer_axis=LayerAxis.MOE)

    def select(
        self, layout: Layout, rows: IntArray, rank: Rank, chunk: int
    ) -> dict[Layer, IntArray]:
        # the first layer of the stage, not the number of routers before it
        first = min(self.built(layout, rank, chunk), default=0)
        routers = self.routed(layout, rank, chunk)
        return {layer: rows[:, (first + i) % layout.columns] for i, layer in enumerate(routers)}


class _LayoutMissingColumnsMadeUp(MegatronLike):
    """Replaces a missing column by the last one."""

    def select(
        self, layout: Layout, rows: IntArray, rank: Rank, chunk: int
    ) -> dict[Layer, IntArray]:
        chosen = {
            layer: min(self.column(layout, layer), rows.shape[1] - 1)
            for layer in self.routed(layout, rank, chunk)
        }
        return {layer: rows[:, column] for layer, column in chosen.items()}


class _LayoutLayersSwapped(MegatronLike):
    def select(
        self, layout: Layout, rows: IntArray, rank: Rank, chunk: int
    ) -> dict[Layer, IntArray]:
        chosen = super().select(layout, rows, rank, chunk)
        # the stage is right, the order within it is reversed
        return dict(zip(chosen, reversed(chosen.values()), strict=True))


class _LayoutMtpAliasesALayer(MegatronLike):
    """The MTP head numbers its own layers from 0 again, and takes the columns of those layers."""

    def select(
        self, layout: Layout, rows: IntArray, rank: Rank, chunk: int
    ) -> dict[Layer, IntArray]:
        chosen = super().select(layout, rows, rank, chunk)
        if (rank.pp, chunk) == (layout.mesh.pp - 1, layout.mesh.vpp - 1):
            # layer 0 of the head is taken for layer 0 of the model
            # Megatron numbers layers of such a head from 1 again
            chosen[0] = rows[:, 0]
        return chosen


class _LayoutRoutersOfDenseLayers(MegatronLike):
    def routers(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        # dense layers are among the built ones
        return self.built(layout, rank, chunk)


class _LayoutStagesTakenForEven(MegatronLike):
    """Assumes that all stages have as many layers as the first one."""

    def stage_layers(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        built = super().stage_layers(layout, rank, chunk)
        if layout.mesh.vpp > 1 or layout.stages == Stages():
            return built
        # wrong as soon as stages have different numbers of layers
        first = rank.pp * (layout.num_layers // layout.mesh.pp)
        return list(range(first, first + len(built)))


class _LayoutEmbeddingNotCounted(MegatronLike):
    def stage_layers(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        built = super().stage_layers(layout, rank, chunk)
        # one side divides layers plus embedding, the other side layers only
        counted = layout.stages.embedding and (rank.pp, chunk) > (0, 0) and layout.mesh.vpp == 1
        return [layer + 1 for layer in built] if counted else built


class _LayoutChunksInOnePiece(MegatronLike):
    """A rank builds one run of layers, cut into chunks, although chunks alternate between ranks."""

    def stage_layers(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        if layout.mesh.vpp == 1:
            return super().stage_layers(layout, rank, chunk)
        counts = layout.stages.counts(layout.num_layers, layout.mesh.pp, layout.mesh.vpp)
        first = sum(map(sum, counts[: rank.pp])) + sum(counts[rank.pp][:chunk])
        return list(range(first, first + counts[rank.pp][chunk]))


class _LayoutQueueSharedByChunks(MegatronLike):
    """Chunks share one queue."""

    def serve(
        self, layout: Layout, operations: Sequence[Operation], recompute: bool
    ) -> tuple[list[Pass], int]:
        queue: list[Pass] = []
        used = []
        for operation in operations:
            if not operation.backward:
                queue.append((operation.microbatch, operation.chunk))
                used.append(queue[-1])
            elif recompute:
                # backward passes run the chunks in reverse, so the oldest target is of another
                # chunk
                used.append(queue.pop(0))
        return used, len(queue) if recompute else 0


class _LayoutRecomputeUsesNewestTarget(MegatronLike):
    """A recompute uses the newest target, of whichever microbatch."""

    def serve(
        self, layout: Layout, operations: Sequence[Operation], recompute: bool
    ) -> tuple[list[Pass], int]:
        slot: dict[int, Pass] = {}
        used = []
        for operation in operations:
            if not operation.backward:
                # under 1F1B the next forward comes before the backward of this microbatch
                slot[operation.chunk] = (operation.microbatch, operation.chunk)
            if recompute or not operation.backward:
                used.append(slot[operation.chunk])
        return used, 0


class _LayoutTargetsLeft(MegatronLike):
    """Does not empty the queues if there is no recompute."""

    def serve(
        self, layout: Layout, operations: Sequence[Operation], recompute: bool
    ) -> tuple[list[Pass], int]:
        used, left = super().serve(layout, operations, recompute)
        return used, left if recompute else len(used)


class _LayoutChunksNotReordered(MegatronLike):
    """Reads recordings microbatch by microbatch, although they were made chunk by chunk."""

    def reorder(
        self, layout: Layout, recorded: Sequence[IntArray], microbatches: int, rank: Rank
    ) -> list[IntArray]:
        vpp = layout.mesh.vpp
        return [
            np.concatenate(recorded[vpp * m : vpp * (m + 1)], axis=1) for m in range(microbatches)
        ]


class _LayoutStagesInRankOrder(MegatronLike):
    def gather_stages(self, layout: Layout, stages: Sequence[IntArray]) -> IntArray:
        # with virtual stages a rank has layers of several places
        return np.concatenate(stages, axis=1)


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="layout-column-counts-routers",
        summary=(
            "The n-th router reads column n of a payload that has a column for every layer, "
            "so that dense layers shift all behind them."
        ),
        refs=("verl#5037", "slime#819", "ROLL router_replay_utils.py"),
        kind="layouts",
        make=_LayoutColumnCountsRouters,
        only=("select", "targets"),
        detected_by=("layout.layer-map", "layout.targets"),
    ),
    KnownBug(
        id="layout-column-counts-layers",
        summary=("Layer n reads column n of a payload that has columns for MoE layers only."),
        refs=("verl#5037", "slime#810"),
        kind="layouts",
        make=_LayoutColumnCountsLayers,
        only=("select", "targets"),
        detected_by=("layout.layer-map", "layout.targets"),
    ),
    KnownBug(
        id="layout-offset-counts-dense",
        summary=(
            "The offset of a pipeline stage counts dense layers, where the payload's columns "
            "do not."
        ),
        refs=("verl#5452", "verl#5037", "ROLL router_replay_utils.py"),
        kind="layouts",
        make=_LayoutOffsetCountsDense,
        only=("select",),
        detected_by=("layout.layer-map",),
    ),
    KnownBug(
        id="layout-missing-columns-made-up",
        summary=(
            "A payload of too few layers is taken, and its last column stands for those that "
            "it lacks."
        ),
        refs=("cf. verl set_router_replay_data", "cf. miles sglang_rollout.py"),
        kind="layouts",
        make=_LayoutMissingColumnsMadeUp,
        only=("targets",),
        detected_by=("layout.refuses",),
    ),
    KnownBug(
        id="layout-layers-swapped",
        summary="The layers of a stage are handed out in reverse order.",
        refs=("cf. verl#7340",),
        kind="layouts",
        make=_LayoutLayersSwapped,
        only=("select",),
        detected_by=("layout.layer-map",),
    ),
    KnownBug(
        id="layout-mtp-aliases-a-layer",
        summary=(
            "The layer of a multi-token-prediction head is numbered as the first layer, and "
            "takes its targets."
        ),
        refs=("NeMo-RL#3903", "cf. verl iter_model_routers"),
        kind="layouts",
        make=_LayoutMtpAliasesALayer,
        only=("select",),
        detected_by=("layout.layer-map",),
    ),
    KnownBug(
        id="layout-routers-of-dense-layers",
        summary="Every layer of a stage is taken to have a router.",
        refs=("slime#819", "ROLL router_replay_utils.py"),
        kind="layouts",
        make=_LayoutRoutersOfDenseLayers,
        only=("routers",),
        detected_by=("layout.stages", "layout.virtual-stages"),
    ),
    KnownBug(
        id="layout-stages-taken-for-even",
        summary=(
            "The offset of a stage is its rank times the mean number of layers, although "
            "stages are uneven."
        ),
        refs=("cf. Megatron-LM get_transformer_layer_offset",),
        kind="layouts",
        make=_LayoutStagesTakenForEven,
        only=("stage_layers",),
        detected_by=("layout.stages",),
    ),
    KnownBug(
        id="layout-embedding-not-counted",
        summary=(
            "The embedding is counted as a layer where layers are divided, and not where the "
            "offset is made."
        ),
        refs=("cf. Megatron-LM get_transformer_layer_offset",),
        kind="layouts",
        make=_LayoutEmbeddingNotCounted,
        only=("stage_layers",),
        detected_by=("layout.stages",),
    ),
    KnownBug(
        id="layout-chunks-in-one-piece",
        summary="A pipeline rank's chunks are taken for one run of layers.",
        refs=("verl#7106", "NeMo-RL#2740", "SkyRL#2078"),
        kind="layouts",
        make=_LayoutChunksInOnePiece,
        only=("stage_layers",),
        detected_by=("layout.virtual-stages",),
    ),
    KnownBug(
        id="layout-queue-shared-by-chunks",
        summary=(
            "The chunks of a rank share one queue of targets, and empty it in another order "
            "than they fill it."
        ),
        refs=("AReaL#1166",),
        kind="layouts",
        make=_LayoutQueueSharedByChunks,
        only=("serve",),
        detected_by=("layout.recompute",),
    ),
    KnownBug(
        id="layout-recompute-uses-newest-target",
        summary=(
            "A recompute uses the target that was installed last, which under a pipeline is a "
            "later microbatch's."
        ),
        refs=("AReaL#1166", "cf. verl set_model_router_replay_action"),
        kind="layouts",
        make=_LayoutRecomputeUsesNewestTarget,
        only=("serve",),
        detected_by=("layout.recompute",),
    ),
    KnownBug(
        id="layout-targets-left",
        summary="Targets that no recompute takes are left for the next step.",
        refs=("SkyRL#1908", "cf. Megatron-LM router_replay.py"),
        kind="layouts",
        make=_LayoutTargetsLeft,
        only=("serve",),
        detected_by=("layout.recompute",),
    ),
    KnownBug(
        id="layout-chunks-not-reordered",
        summary=(
            "Recordings are read as microbatch by microbatch, although they come chunk by chunk."
        ),
        refs=("verl#7106", "verl#7805"),
        kind="layouts",
        make=_LayoutChunksNotReordered,
        only=("reorder",),
        detected_by=("layout.chunk-order",),
    ),
    KnownBug(
        id="layout-stages-in-rank-order",
        summary=(
            "The layers of pipeline ranks are joined in rank order, although each rank has"
            " several chunks."
        ),
        refs=("verl#7106", "cf. verl pp_gather"),
        kind="layouts",
        make=_LayoutStagesInRankOrder,
        only=("gather_stages",),
        detected_by=("layout.stage-gather",),
    ),
)
