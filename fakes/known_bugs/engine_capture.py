"""Known bugs of routes in an engine: what it captures, and how it encodes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rollproof.core.case import ActionKind, EngineOptions, Model
from rollproof.core.contract import Contract, LayerAxis
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Call
from rollproof.core.records import EngineOutput, IntArray
from rollproof.fakes.clients.reference_clients import AsSampled, EngineKeep, PartialSample
from rollproof.fakes.coded.policy import CodedPolicy, VersionSpan
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.flavours import ReprefillRows
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.engine.kv_cache import PrefixCache
from rollproof.fakes.known_bugs._planting import CLEAN, act, case, on_engine, on_policy
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _LayersByOrdinal(AsSampled):
    """Maps the columns of MoE layers by their ordinal, although the engine's columns count every
    layer.
    """

    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), layer_axis=LayerAxis.MOE)

    def on_declared_layers(self, rows: IntArray) -> IntArray:
        return rows[:, : len(self.fleet.case.model.moe_layers)]


class _LayersShifted(AsSampled):
    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        return rows if rows is None else np.roll(rows, 1, axis=1)


class _DenseColumnsNotCleared(AsSampled):
    """Leaves an earlier sample's values in the buffer of the dense layers."""

    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        if rows is None:
            return None
        rows[:, 0] = np.roll(rows[:, 1], 1, axis=0)
        return rows


class _BytesMisdecoded(AsSampled):
    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        if rows is None:
            return None
        experts = self.contract.num_experts or 1
        # any permutation of the ids shows the fault: every id stays legal
        return ((rows.astype(np.int64) + 3) % experts).astype(rows.dtype)


class _IdsWrapped(AsSampled):
    """Stores ids in eight bits, and widens them again for the sample."""

    def on_declared_layers(self, rows: IntArray) -> IntArray:
        return super().on_declared_layers(rows.astype(np.uint8))


class _TypeTooNarrow(AsSampled):
    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        # the model of the case has more than 256 experts
        return rows if rows is None else rows.astype(np.uint8)


class _TypeUndeclared(AsSampled):
    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        # the values are right; a reader of raw bytes expects the declared type
        return rows if rows is None else rows.astype(np.int16)


class _TopKFromSize(AsSampled):
    """Divides the size of a buffer that is too long by rows and layers to get top-k."""

    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        return rows if rows is None else np.concatenate([rows, rows], axis=2)


class _DenseTakenToBeFirst(_LayersByOrdinal):
    def on_declared_layers(self, rows: IntArray) -> IntArray:
        # the last columns: right if all dense layers are the first ones
        return rows[:, -len(self.contract.moe_layers or ()) :]


class _RoutesDropped(AsSampled):
    def final_routes(self, sample: PartialSample) -> IntArray | None:
        return None


class _RoutesFlagLost(AsSampled):
    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        # the caller's flag is lost before the call
        sample.request = replace(sample.request, want_routes=False)
        return await super().call(server_id, sample, sent, budget)


class _PipelineStageMissing(CodedPolicy):
    """The layers of the second pipeline stage never reach the first one."""

    def routes_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> IntArray:
        rows = super().routes_spans(spans, ids, start, stop)
        rows[:, self.num_layers // 2 :] = 0
        return rows


class _PromptRowsMissing(CodedPolicy):
    """Reads the rows of the first two tokens before they are written."""

    def routes_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> IntArray:
        rows = super().routes_spans(spans, ids, start, stop)
        # a prefill server replied before its capture was copied
        rows[: max(0, 2 - start)] = 0
        return rows


class _CapturedOnce(CodedPolicy):
    """A CUDA graph replays the forward, but the capture still shows the recorded one."""

    def routes_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> IntArray:
        rows = super().routes_spans(spans, ids, start, stop)
        rows[:] = super().routes_spans([(0, 1, 0)], ids, 0, 1)
        return rows


class _SharedExpertKept(CodedPolicy):
    """Does not cut off the fused shared expert, which follows the last routed one."""

    def routes_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> IntArray:
        rows = super().routes_spans(spans, ids, start, stop)
        rows[:, :, -1] = self.num_experts
        return rows


class _StaleSlots(CodedPolicy):
    """Returns rows that the previous call left in its slots."""

    def routes_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> IntArray:
        # SGLang's HiCache loads KV back into other slots, and the rows do not move with it
        return super().routes_spans(
            spans, [*ids[:1], *(token + 1 for token in ids[1:])], start, stop
        )


class _PrefillOverwritesRows(FakeEngine):
    """Declares that rows stay, but stores them by slot, so a second prefill overwrites them."""

    def _enqueue(self, call: Call, rid: str | None) -> InflightCall:
        self._scheduler._flavour = replace(self.flavour, recompute=ReprefillRows.OVERWRITTEN)
        return super()._enqueue(call, rid)


class _PrefixCacheOutlivesWeights(FakeEngine):
    """Reports its prefix cache as dropped at the pause, and uses it afterwards."""

    async def pause(self, mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> None:
        cache, self._scheduler.cache = self._scheduler.cache, PrefixCache()
        await super().pause(mode, clear_cache)
        self._scheduler.cache = cache


_WIDE = case(model=Model(num_experts=300))
_DENSE_BETWEEN = case(model=Model(num_layers=5, moe_layers=(0, 2, 4)))
_DENSE_FIRST = case(model=Model(num_layers=4, moe_layers=(1, 2, 3)))
_RETRACTED = case(act(ActionKind.SYNC, 3), pause_mode=PauseMode.RETRACT)
_CACHED = case(act(ActionKind.SYNC, 3), engine=EngineOptions(prefix_cache=True))

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="dense-columns-not-cleared",
        summary=(
            "The columns of dense layers contain leftovers of the buffer, which look like a"
            " choice of experts."
        ),
        refs=("cf. sglang#23885", "cf. sglang#34319"),
        make=_DenseColumnsNotCleared,
        cases=(_DENSE_FIRST,),
        detected_by=("routes.dense-columns",),
    ),
    KnownBug(
        id="layers-by-ordinal",
        summary=(
            "Columns are read as MoE layers in order, although the engine counts dense layers too."
        ),
        refs=("verl#5037", "slime#810"),
        make=_LayersByOrdinal,
        cases=(_DENSE_FIRST,),
        detected_by=("routes.layer",),
    ),
    KnownBug(
        id="dense-taken-to-be-first",
        summary=(
            "The last columns are taken for those of the MoE layers, in a model whose dense layers"
            " lie between them."
        ),
        refs=("cf. verl#5037", "cf. slime#810"),
        make=_DenseTakenToBeFirst,
        cases=(_DENSE_BETWEEN,),
        detected_by=("routes.layer",),
    ),
    KnownBug(
        id="layers-shifted",
        summary="The choice of layer l is in the column of layer l + 1.",
        refs=("NeMo-RL#3903",),
        make=_LayersShifted,
        cases=(CLEAN,),
        detected_by=("routes.layer",),
    ),
    KnownBug(
        id="bytes-misdecoded",
        summary=(
            "The receiver decodes the bytes in another way than the sender encoded them; every id"
            " is legal, and wrong."
        ),
        refs=("prime-rl#2813",),
        make=_BytesMisdecoded,
        cases=(CLEAN,),
        detected_by=("routes.content",),
    ),
    KnownBug(
        id="ids-wrapped",
        summary="Ids are stored in eight bits on the way, and ids above 255 become other ids.",
        refs=("verl#5240", "prime-rl#3051"),
        make=_IdsWrapped,
        cases=(_WIDE,),
        detected_by=("routes.dtype",),
    ),
    KnownBug(
        id="type-too-narrow",
        summary="Routes are returned in eight bits, which cannot represent every expert.",
        refs=("verl#5240", "verl#7407"),
        make=_TypeTooNarrow,
        cases=(_WIDE,),
        detected_by=("routes.dtype",),
    ),
    KnownBug(
        id="type-undeclared",
        summary=(
            "Routes have another integer type than declared, which a decoder of bytes misreads."
        ),
        refs=("SkyRL#1378",),
        make=_TypeUndeclared,
        cases=(CLEAN,),
        detected_by=("routes.dtype",),
    ),
    KnownBug(
        id="top-k-from-size",
        summary="Top-k is computed from the size of a buffer that is twice too long.",
        refs=("miles sglang_rollout.py", "AReaL reshape(rows, -1)"),
        make=_TopKFromSize,
        cases=(CLEAN,),
        detected_by=("routes.shape",),
    ),
    KnownBug(
        id="routes-dropped",
        summary="The engine returned routes, and the agent loop omits them from its output.",
        refs=("verl#5368",),
        make=_RoutesDropped,
        cases=(CLEAN,),
        detected_by=("routes.presence",),
    ),
    KnownBug(
        id="routes-flag-lost",
        summary="The caller's flag does not reach the engine, which returns no routes.",
        refs=("slime#1145", "slime#1909", "miles#407"),
        make=_RoutesFlagLost,
        cases=(CLEAN,),
        detected_by=("routes.presence",),
    ),
    KnownBug(
        id="pipeline-stage-missing",
        summary="The layers of a pipeline stage are zeros: they were not gathered.",
        refs=("slime#395", "slime#2175", "vllm#44116"),
        make=on_policy(_PipelineStageMissing),
        cases=(CLEAN,),
        detected_by=("routes.live", "routes.engine"),
    ),
    KnownBug(
        id="prompt-rows-missing",
        summary=(
            "Rows of the prompt are zeros: they were read before the copy from the prefill was"
            " complete."
        ),
        refs=("sglang#23885", "llm-d-router#1473"),
        make=on_policy(_PromptRowsMissing),
        cases=(CLEAN,),
        detected_by=("routes.distinct", "routes.engine"),
    ),
    KnownBug(
        id="captured-once",
        summary="Every row is the same: the capture ran once, when the CUDA graph was recorded.",
        refs=("sglang#12162",),
        make=on_policy(_CapturedOnce),
        cases=(CLEAN,),
        detected_by=("routes.live", "routes.engine"),
    ),
    KnownBug(
        id="shared-expert-kept",
        summary="The id of a fused shared expert is returned as one of the top-k.",
        refs=("sglang#36515",),
        make=on_policy(_SharedExpertKept),
        cases=(CLEAN,),
        detected_by=("routes.in-range", "routes.engine"),
    ),
    KnownBug(
        id="stale-slots",
        summary=(
            "KV moved to new slots without its rows: the rows are those of the slots' former owner."
        ),
        refs=("sglang#26975", "vllm#39568"),
        make=on_policy(_StaleSlots),
        cases=(CLEAN,),
        detected_by=("routes.engine",),
    ),
    KnownBug(
        id="prefill-overwrites-rows",
        summary=(
            "A retracted call is prefilled again under new weights, which overwrites its rows but"
            " not its logprobs."
        ),
        refs=("miles#3277", "sglang#39633", "miles#3307"),
        make=on_engine(_PrefillOverwritesRows, EngineKeep),
        cases=(_RETRACTED,),
        detected_by=("routes.immutable",),
    ),
    KnownBug(
        id="prefix-cache-outlives-weights",
        summary=(
            "The prefix cache is not reset at a weight update, so later calls get rows and KV of"
            " older weights."
        ),
        refs=("NeMo-RL#4018", "SkyRL#2246", "prime-rl#1650"),
        make=on_engine(_PrefixCacheOutlivesWeights),
        cases=(_CACHED,),
        detected_by=("routes.prefix-cache", "weights.no-stale-cache"),
    ),
)
