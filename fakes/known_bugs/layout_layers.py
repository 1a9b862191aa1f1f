"""Known bugs of layouts, layers: columns, pipeline stages, virtual stages, schedules, recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from rollproof.core.contract import LayerAxis
from rollproof.core.records import IntArray
from rollproof.fakes.known_bugs._layout_runner import layout_bug
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_layouts import Layer, MegatronLike, Pass
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Rank
from rollproof.layouts.pipeline_schedules import Operation
from rollproof.layouts.stages import Stages

__all__ = ["BUGS"]


class _OrdinalOfAll(MegatronLike):
    """The n-th router reads column n of a payload that has a column for every layer."""

    def column(self, layout: Layout, layer: Layer) -> int:
        return super().column(replace(layout, layer_axis=LayerAxis.MOE), layer)


class _LayerOfMoe(MegatronLike):
    """Layer n reads column n of a payload that has columns for MoE layers only, counted from the
    end where there are fewer.
    """

    layout: ClassVar[Layout] = replace(MegatronLike.layout, layer_axis=LayerAxis.MOE)

    def column(self, layout: Layout, layer: Layer) -> int:
        return layer % layout.columns


class _OffsetOfRouters(MegatronLike):
    """The offset of a stage counts layers, dense ones too; the routers behind it count on from
    there.
    """

    layout: ClassVar[Layout] = replace(MegatronLike.layout, layer_axis=LayerAxis.MOE)

    def select(
        self, layout: Layout, rows: IntArray, rank: Rank, chunk: int
    ) -> dict[Layer, IntArray]:
        first = min(self.built(layout, rank, chunk), default=0)
        routers = self.routed(layout, rank, chunk)
        return {layer: rows[:, (first + i) % layout.columns] for i, layer in enumerate(routers)}


class _ClampsColumns(MegatronLike):
    """A column that is not there is replaced by the last one that is."""

    def select(
        self, layout: Layout, rows: IntArray, rank: Rank, chunk: int
    ) -> dict[Layer, IntArray]:
        chosen = {
            layer: min(self.column(layout, layer), rows.shape[1] - 1)
            for layer in self.routed(layout, rank, chunk)
        }
        return {layer: rows[:, column] for layer, column in chosen.items()}


class _SwapsLayers(MegatronLike):
    def select(
        self, layout: Layout, rows: IntArray, rank: Rank, chunk: int
    ) -> dict[Layer, IntArray]:
        chosen = super().select(layout, rows, rank, chunk)
        return dict(zip(chosen, reversed(chosen.values()), strict=True))


class _AliasesMtp(MegatronLike):
    """The head behind the last layer numbers its own layers from 0 again, and takes their column."""

    def select(
        self, layout: Layout, rows: IntArray, rank: Rank, chunk: int
    ) -> dict[Layer, IntArray]:
        chosen = super().select(layout, rows, rank, chunk)
        if (rank.pp, chunk) == (layout.mesh.pp - 1, layout.mesh.vpp - 1):
            chosen[0] = rows[:, 0]
        return chosen


class _CountsDense(MegatronLike):
    def routers(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        return self.built(layout, rank, chunk)


class _EvenStages(MegatronLike):
    """Layers are dealt out as if all stages held as many as the first one."""

    def stage_layers(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        built = super().stage_layers(layout, rank, chunk)
        if layout.mesh.vpp > 1 or layout.stages == Stages():
            return built
        first = rank.pp * (layout.num_layers // layout.mesh.pp)
        return list(range(first, first + len(built)))


class _EmbeddingNotCounted(MegatronLike):
    def stage_layers(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        built = super().stage_layers(layout, rank, chunk)
        counted = layout.stages.embedding and (rank.pp, chunk) > (0, 0) and layout.mesh.vpp == 1
        return [layer + 1 for layer in built] if counted else built


class _ChunksInOnePiece(MegatronLike):
    """A rank builds one run of layers, cut into chunks, where chunks alternate between ranks."""

    def stage_layers(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        if layout.mesh.vpp == 1:
            return super().stage_layers(layout, rank, chunk)
        counts = layout.stages.counts(layout.num_layers, layout.mesh.pp, layout.mesh.vpp)
        first = sum(map(sum, counts[: rank.pp])) + sum(counts[rank.pp][:chunk])
        return list(range(first, first + counts[rank.pp][chunk]))


class _ScheduleWithoutGroups(MegatronLike):
    def schedule(self, layout: Layout, microbatches: int) -> list[Pass]:
        return [
            (microbatch, chunk)
            for chunk in range(layout.mesh.vpp)
            for microbatch in range(microbatches)
        ]


class _OneQueue(MegatronLike):
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
                used.append(queue.pop(0))
        return used, len(queue) if recompute else 0


class _OneSlot(MegatronLike):
    """A recompute uses the target that was installed last, whichever microbatch it was of."""

    def serve(
        self, layout: Layout, operations: Sequence[Operation], recompute: bool
    ) -> tuple[list[Pass], int]:
        slot: dict[int, Pass] = {}
        used = []
        for operation in operations:
            if not operation.backward:
                slot[operation.chunk] = (operation.microbatch, operation.chunk)
            if recompute or not operation.backward:
                used.append(slot[operation.chunk])
        return used, 0


class _LeavesTargets(MegatronLike):
    """Nothing empties the queues where no recompute does."""

    def serve(
        self, layout: Layout, operations: Sequence[Operation], recompute: bool
    ) -> tuple[list[Pass], int]:
        used, left = super().serve(layout, operations, recompute)
        return used, left if recompute else len(used)


class _ChunksNotReordered(MegatronLike):
    """Recordings are taken microbatch by microbatch, although they were made chunk by chunk."""

    def reorder(
        self, layout: Layout, recorded: Sequence[IntArray], microbatches: int, rank: Rank
    ) -> list[IntArray]:
        vpp = layout.mesh.vpp
        return [
            np.concatenate(recorded[vpp * m : vpp * (m + 1)], axis=1) for m in range(microbatches)
        ]


class _StagesInRankOrder(MegatronLike):
    def gather_stages(self, layout: Layout, stages: Sequence[IntArray]) -> IntArray:
        return np.concatenate(stages, axis=1)


BUGS: tuple[KnownBug, ...] = (
    layout_bug(
        "column-counts-routers",
        "The n-th router reads column n of a payload that has a column for every layer, so that"
        " dense layers shift all behind them.",
        ("verl#5037", "slime#819", "ROLL router_replay_utils.py"),
        _OrdinalOfAll,
        "select targets",
        "layer-map",
        "targets",
    ),
    layout_bug(
        "column-counts-layers",
        "Layer n reads column n of a payload that has columns for MoE layers only.",
        ("verl#5037", "slime#810"),
        _LayerOfMoe,
        "select targets",
        "layer-map",
        "targets",
    ),
    layout_bug(
        "offset-counts-dense",
        "The offset of a pipeline stage counts dense layers, where the payload's columns do not.",
        ("verl#5452", "verl#5037", "ROLL router_replay_utils.py"),
        _OffsetOfRouters,
        "select",
        "layer-map",
    ),
    layout_bug(
        "missing-columns-made-up",
        "A payload of too few layers is taken, and its last column stands for those that it lacks.",
        ("cf. verl set_router_replay_data", "cf. miles sglang_rollout.py"),
        _ClampsColumns,
        "targets",
        "refuses",
    ),
    layout_bug(
        "layers-swapped",
        "The layers of a stage are handed out in reverse order.",
        ("cf. verl#7340",),
        _SwapsLayers,
        "select",
        "layer-map",
    ),
    layout_bug(
        "mtp-aliases-a-layer",
        "The layer of a multi-token-prediction head is numbered as the first layer, and takes its"
        " targets.",
        ("NeMo-RL#3903", "cf. verl iter_model_routers"),
        _AliasesMtp,
        "select",
        "layer-map",
    ),
    layout_bug(
        "routers-of-dense-layers",
        "Every layer of a stage is taken to have a router.",
        ("slime#819", "ROLL router_replay_utils.py"),
        _CountsDense,
        "routers",
        "stages",
        "virtual-stages",
    ),
    layout_bug(
        "stages-taken-for-even",
        "The offset of a stage is its rank times the mean number of layers, although stages are"
        " uneven.",
        ("cf. Megatron-LM get_transformer_layer_offset",),
        _EvenStages,
        "stage_layers",
        "stages",
    ),
    layout_bug(
        "embedding-not-counted",
        "The embedding is counted as a layer where layers are divided, and not where the offset is"
        " made.",
        ("cf. Megatron-LM get_transformer_layer_offset",),
        _EmbeddingNotCounted,
        "stage_layers",
        "stages",
    ),
    layout_bug(
        "chunks-in-one-piece",
        "A pipeline rank's chunks are taken for one run of layers.",
        ("verl#7106", "NeMo-RL#2740", "SkyRL#2078"),
        _ChunksInOnePiece,
        "stage_layers",
        "virtual-stages",
    ),
    layout_bug(
        "schedule-without-groups",
        "All microbatches are taken to run through one chunk before the next chunk begins.",
        ("cf. verl#7805",),
        _ScheduleWithoutGroups,
        "schedule",
        "schedule",
    ),
    layout_bug(
        "queue-shared-by-chunks",
        "The chunks of a rank share one queue of targets, and empty it in another order than they"
        " fill it.",
        ("AReaL#1166",),
        _OneQueue,
        "serve",
        "recompute",
    ),
    layout_bug(
        "recompute-uses-newest-target",
        "A recompute uses the target that was installed last, which under a pipeline is a later"
        " microbatch's.",
        ("AReaL#1166", "cf. verl set_model_router_replay_action"),
        _OneSlot,
        "serve",
        "recompute",
    ),
    layout_bug(
        "targets-left",
        "Targets that no recompute takes are left for the next step.",
        ("SkyRL#1908", "cf. Megatron-LM router_replay.py"),
        _LeavesTargets,
        "serve",
        "recompute",
    ),
    layout_bug(
        "chunks-not-reordered",
        "Recordings are taken to come microbatch by microbatch, and come chunk by chunk.",
        ("verl#7106", "verl#7805"),
        _ChunksNotReordered,
        "reorder",
        "chunk-order",
    ),
    layout_bug(
        "stages-in-rank-order",
        "The layers of pipeline ranks are put behind each other, although each rank holds several"
        " chunks.",
        ("verl#7106", "cf. verl pp_gather"),
        _StagesInRankOrder,
        "gather_stages",
        "stage-gather",
    ),
)
"""Known bugs of layers."""
