"""Known bugs of routing: rows that are lost, doubled, displaced, cast, filled or computed anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rollproof.case import ActionKind, EngineOptions, Model
from rollproof.contract import Contract, LayerAxis, Rows
from rollproof.fakes.calls import EngineCall
from rollproof.fakes.coded import CodedPolicy, VersionSpan
from rollproof.fakes.engine import FakeEngine
from rollproof.fakes.flavours import Recompute
from rollproof.fakes.fleet import Fleet
from rollproof.fakes.known_bugs.planting import ABORTED, CLEAN, EMPTY, ENDING, SYNCED, act, case, on_engine, on_policy, request
from rollproof.fakes.kv import PrefixCache
from rollproof.fakes.managers import AsSampled, AsSampledTokens, EngineKeep, Options, Sample
from rollproof.known_bug import KnownBug
from rollproof.lending import lend
from rollproof.records import EngineOutput, IntArray, Rollout
from rollproof.trace import Call, PauseMode

__all__ = ["BUGS"]


class _AllRows(AsSampled):
    """Asks for all rows on every call, as clients did before engines could leave the known ones out."""

    def routes_start(self, sample: Sample) -> int:
        return 0


class _Concatenates(_AllRows):
    def merge_routes(self, sample: Sample, sent: int, output: EngineOutput) -> None:
        if output.routes is not None:
            sample.rows = output.routes if sample.rows is None else np.concatenate([sample.rows, output.routes])


class _Replaces(_AllRows):
    def merge_routes(self, sample: Sample, sent: int, output: EngineOutput) -> None:
        if output.routes is not None:
            sample.rows = output.routes[: sent + len(output.token_ids) - 1].copy()


class _AppendsTail(_AllRows):
    """Right by number: where the engine returns a row for the last token too, each segment brings its filler along."""

    def merge_routes(self, sample: Sample, sent: int, output: EngineOutput) -> None:
        if output.routes is None:
            return
        tail = output.routes[-len(output.token_ids) :]
        sample.rows = output.routes if sample.rows is None else np.concatenate([sample.rows, tail])

    def final_routes(self, sample: Sample) -> IntArray | None:
        if sample.rows is not None:
            sample.rows = sample.rows[: len(sample.ids) - 1]
        return super().final_routes(sample)


class _TorchCat(_AllRows):
    def merge_routes(self, sample: Sample, sent: int, output: EngineOutput) -> None:
        if sample.rows is not None:
            raise TypeError("expected Tensor as element 0 in argument 0, but got numpy.ndarray")
        super().merge_routes(sample, sent, output)


class _FailsOnEmpty(AsSampled):
    def absorb(self, sample: Sample, sent: int, output: EngineOutput) -> None:
        if not output.token_ids:
            raise ValueError("not enough values to unpack (expected 2, got 0)")
        super().absorb(sample, sent, output)


class _LastTurnOnly(_AllRows):
    def merge_routes(self, sample: Sample, sent: int, output: EngineOutput) -> None:
        if sample.turn and output.routes is not None:
            sample.rows = output.routes[: sent + len(output.token_ids) - 1].copy()
        else:
            super().merge_routes(sample, sent, output)


class _CutsTokensOnly(AsSampled):
    def finished(self, sample: Sample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None
        return replace(rollout, response_ids=rollout.response_ids[:-2], logprobs=rollout.logprobs[:-2])


class _OneTokenLate(AsSampled):
    def final_routes(self, sample: Sample) -> IntArray | None:
        rows = super().final_routes(sample)
        return rows if rows is None else np.concatenate([rows[:1], rows[:-1]])


class _ByOrdinal(AsSampled):
    """Maps the columns of MoE layers by their ordinal although the engine's columns count every layer."""

    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), layer_axis=LayerAxis.MOE)

    def on_declared_layers(self, rows: IntArray) -> IntArray:
        return rows[:, : len(self.fleet.case.model.moe_layers)]


class _ShiftedLayers(AsSampled):
    def final_routes(self, sample: Sample) -> IntArray | None:
        rows = super().final_routes(sample)
        return rows if rows is None else np.roll(rows, 1, axis=1)


class _SharedResult(AsSampled):
    """Fills each sample from the result slot of whichever request ended last."""

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._slot: IntArray | None = None

    def final_routes(self, sample: Sample) -> IntArray | None:
        mine = super().final_routes(sample)
        shown, self._slot = (mine if self._slot is None or mine is None else self._slot[: len(mine)]), mine
        return shown


class _ZeroPadded(AsSampled):
    def final_routes(self, sample: Sample) -> IntArray | None:
        rows = super().final_routes(sample)
        if rows is None:
            return None
        out = np.zeros_like(rows)
        out[:-2] = rows[:-2]
        return out


class _ZerosForLast(AsSampledTokens):
    def final_routes(self, sample: Sample) -> IntArray | None:
        rows = super().final_routes(sample)
        if rows is not None:
            rows[-1] = 0
        return rows


class _UncapturedSuffix(AsSampled):
    """Declares a captured prefix, and hands over a guess for the token that was never forwarded."""

    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), rows=Rows.CAPTURED_PREFIX)

    def final_routes(self, sample: Sample) -> IntArray | None:
        rows = super().final_routes(sample)
        return rows if rows is None else np.concatenate([rows, rows[-1:]])


class _WrongByteOrder(AsSampled):
    def final_routes(self, sample: Sample) -> IntArray | None:
        rows = super().final_routes(sample)
        if rows is None:
            return None
        experts = self.contract.num_experts or 1
        return ((rows.astype(np.int64) + 3) % experts).astype(rows.dtype)


class _Narrowed(AsSampled):
    """Stores ids in eight bits, and widens them again for the sample."""

    def on_declared_layers(self, rows: IntArray) -> IntArray:
        return super().on_declared_layers(rows.astype(np.uint8))


class _NarrowType(AsSampled):
    def final_routes(self, sample: Sample) -> IntArray | None:
        rows = super().final_routes(sample)
        return rows if rows is None else rows.astype(np.uint8)


class _OtherType(AsSampled):
    def final_routes(self, sample: Sample) -> IntArray | None:
        rows = super().final_routes(sample)
        return rows if rows is None else rows.astype(np.int16)


class _TopKFromSize(AsSampled):
    """Divides the size of a buffer that is too long by rows and layers, and takes what comes out for top-k."""

    def final_routes(self, sample: Sample) -> IntArray | None:
        rows = super().final_routes(sample)
        return rows if rows is None else np.concatenate([rows, rows], axis=2)


class _SurplusRow(AsSampled):
    def final_routes(self, sample: Sample) -> IntArray | None:
        rows = super().final_routes(sample)
        return rows if rows is None else np.concatenate([rows, rows[-1:]])


class _DropsRoutes(AsSampled):
    def final_routes(self, sample: Sample) -> IntArray | None:
        return None


class _FlagLost(AsSampled):
    async def call(self, server_id: str, sample: Sample, sent: tuple[int, ...], budget: int | None) -> EngineOutput:
        sample.request = replace(sample.request, want_routes=False)
        return await super().call(server_id, sample, sent, budget)


class _Recycled(AsSampled):
    """Hands over a view of a buffer that the next request writes into."""

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._buffer: IntArray | None = None

    def final_routes(self, sample: Sample) -> IntArray | None:
        rows = super().final_routes(sample)
        if rows is None:
            return None
        if self._buffer is None:
            self._buffer = np.zeros((64, *rows.shape[1:]), dtype=rows.dtype)
        self._buffer[: len(rows)] = rows
        return self._buffer[: len(rows)]


class _WritesIntoReply(AsSampled):
    """Marks the last row of the engine's own array before it is copied."""

    def merge_routes(self, sample: Sample, sent: int, output: EngineOutput) -> None:
        if output.routes is not None:
            routes = lend("routes", output.routes)
            super().merge_routes(sample, sent, output)
            routes[-1] = 0


class _StageMissing(CodedPolicy):
    """The layers of the second pipeline stage never reach the first one."""

    def routes_spans(self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int) -> IntArray:
        rows = super().routes_spans(spans, ids, start, stop)
        rows[:, self.num_layers // 2 :] = 0
        return rows


class _PromptRowsMissing(CodedPolicy):
    """The rows of the first two tokens were not written when they were read."""

    def routes_spans(self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int) -> IntArray:
        rows = super().routes_spans(spans, ids, start, stop)
        rows[: max(0, 2 - start)] = 0
        return rows


class _CapturedOnce(CodedPolicy):
    """A CUDA graph replays the forward, and the capture still shows the one that was recorded."""

    def routes_spans(self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int) -> IntArray:
        rows = super().routes_spans(spans, ids, start, stop)
        rows[:] = super().routes_spans([(0, 1, 0)], ids, 0, 1)
        return rows


class _SharedExpert(CodedPolicy):
    """The fused shared expert stands behind the last routed one, and is not cut off."""

    def routes_spans(self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int) -> IntArray:
        rows = super().routes_spans(spans, ids, start, stop)
        rows[:, :, -1] = self.num_experts
        return rows


class _StaleSlots(CodedPolicy):
    """Slots that were given to this call still hold the rows of the one before."""

    def routes_spans(self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int) -> IntArray:
        return super().routes_spans(spans, [*ids[:1], *(token + 1 for token in ids[1:])], start, stop)


class _Overwrites(FakeEngine):
    """Declares that rows stay, but stores them by slot, where a second prefill writes over them."""

    def _enqueue(self, call: Call, rid: str | None) -> EngineCall:
        self._batch._flavour = replace(self.flavour, recompute=Recompute.OVERWRITTEN)
        return super()._enqueue(call, rid)


class _KeepsPrefixCache(FakeEngine):
    """Says that it dropped its prefix cache at the pause, and serves from it afterwards."""

    async def pause(self, mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> None:
        kept, self._batch.cache = self._batch.cache, PrefixCache()
        await super().pause(mode, clear_cache)
        self._batch.cache = kept


_TWO = (request(), request("r1", (31, 32, 33)))
_BY_TURNS = case(requests=_TWO, arrivals=(0.0, 20.0))
_WIDE = case(model=Model(num_experts=300))
_DENSE_FIRST = case(model=Model(num_layers=4, moe_layers=(1, 2, 3)))
_RETRACTED = case(act(ActionKind.SYNC, 3), pause_mode=PauseMode.RETRACT)
_CACHED = case(act(ActionKind.SYNC, 3), engine=EngineOptions(prefix_cache=True))

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="concat-on-resume",
        summary="Each resume appends the routes of the whole sequence to those of the calls before.",
        refs=("verl#6029", "AReaL inf_bridge.py"),
        make=_Concatenates,
        cases=(ABORTED, SYNCED),
        kills=("routes.rows",),
    ),
    KnownBug(
        id="replace-on-resume",
        summary="Each resume replaces the routes: tokens sampled by old weights get rows of the new ones.",
        refs=("verl#6046", "verl#6029"),
        make=_Replaces,
        cases=(SYNCED,),
        kills=("routes.provenance",),
    ),
    KnownBug(
        id="segment-filler-kept",
        summary="With one row a token, the filler row at the end of each segment is kept instead of the row that the next call computes.",
        refs=("verl#7158",),
        make=_AppendsTail,
        cases=(case(act(ActionKind.ABORT, 3), flavour="rows-T"),),
        kills=("routes.captured",),
    ),
    KnownBug(
        id="later-turn-replaces",
        summary="In a conversation, the routes of each turn replace those of all turns before.",
        refs=("verl#6054", "verl#5825", "verl#7222"),
        make=_LastTurnOnly,
        cases=(case(act(ActionKind.SYNC, 3), model=ENDING, requests=(request(max_tokens=24, turns=((21, 22), (23, 24))),), seed=1),),
        kills=("routes.provenance",),
    ),
    KnownBug(
        id="torch-cat-on-numpy",
        summary="Resumed routes are concatenated with torch.cat, and numpy arrays make it raise.",
        refs=("verl#7158", "ROLL user_defined_rollout_loop.py"),
        make=_TorchCat,
        cases=(ABORTED,),
        kills=("lifecycle.no-error-without-fault",),
    ),
    KnownBug(
        id="fails-on-empty-abort",
        summary="An abort before the first token makes the client raise.",
        refs=("verl#5936", "vime#49"),
        make=_FailsOnEmpty,
        cases=(EMPTY,),
        kills=("lifecycle.no-error-without-fault",),
    ),
    KnownBug(
        id="writes-to-read-only",
        summary="The client writes into the engine's array, which is read-only.",
        refs=("verl#5519",),
        make=_WritesIntoReply,
        cases=(case(flavour="sglang"),),
        kills=("lifecycle.no-error-without-fault",),
    ),
    KnownBug(
        id="reply-written-to",
        summary="The client writes into the engine's array, which nothing forbids here.",
        refs=("verl#5519",),
        make=_WritesIntoReply,
        cases=(CLEAN,),
        kills=("routes.reply-untouched",),
    ),
    KnownBug(
        id="tokens-cut-rows-not",
        summary="The response is cut to its length, its routes are not.",
        refs=("verl#6027", "verl#6089", "miles#1069"),
        make=_CutsTokensOnly,
        cases=(ABORTED,),
        kills=("routes.rows",),
        also=("stitch.tokens",),
    ),
    KnownBug(
        id="surplus-row",
        summary="A row is repeated at the end for the token that was never forwarded, although none is declared.",
        refs=("slime#1045", "miles sglang_rollout.py"),
        make=_SurplusRow,
        cases=(CLEAN,),
        kills=("routes.rows",),
    ),
    KnownBug(
        id="one-token-late",
        summary="Every row stands at the next token's position.",
        refs=("verl#6473", "verl#7075"),
        make=_OneTokenLate,
        cases=(CLEAN, ABORTED),
        kills=("routes.position",),
    ),
    KnownBug(
        id="layers-by-ordinal",
        summary="Columns are taken for MoE layers in order, although the engine counts dense layers too.",
        refs=("verl#5037", "slime#810"),
        make=_ByOrdinal,
        cases=(_DENSE_FIRST,),
        kills=("routes.layer",),
    ),
    KnownBug(
        id="layers-shifted",
        summary="The choice of layer l stands in the column of layer l + 1.",
        refs=("NeMo-RL#3903",),
        make=_ShiftedLayers,
        cases=(CLEAN,),
        kills=("routes.layer",),
    ),
    KnownBug(
        id="rows-of-another-request",
        summary="A result slot is read after another request has written it.",
        refs=("sglang#34319",),
        make=_SharedResult,
        cases=(_BY_TURNS,),
        kills=("routes.isolation",),
    ),
    KnownBug(
        id="zero-padded",
        summary="Routes that come up short are filled with zeros: expert 0, top_k times.",
        refs=("verl agent_loop.py (0.9.1)", "ROLL functionals.py", "slime#941"),
        make=_ZeroPadded,
        cases=(ABORTED,),
        kills=("routes.captured",),
    ),
    KnownBug(
        id="zeros-for-missing",
        summary="The row of the token that was never forwarded is zeros, not the declared mark.",
        refs=("verl#7841", "prime-rl _pad_routed_experts"),
        make=_ZerosForLast,
        cases=(CLEAN,),
        kills=("routes.filler",),
    ),
    KnownBug(
        id="uncaptured-suffix",
        summary="A row that nobody captured is handed over as part of the captured prefix.",
        refs=("SkyRL#1908",),
        make=_UncapturedSuffix,
        cases=(CLEAN,),
        kills=("routes.filler",),
    ),
    KnownBug(
        id="misdecoded",
        summary="The receiver decodes the bytes otherwise than the sender encoded them; every id is legal, and wrong.",
        refs=("prime-rl#2813",),
        make=_WrongByteOrder,
        cases=(CLEAN,),
        kills=("routes.content",),
    ),
    KnownBug(
        id="ids-wrapped",
        summary="Ids pass through eight bits, and those above 255 come out as others.",
        refs=("verl#5240", "prime-rl#3051"),
        make=_Narrowed,
        cases=(_WIDE,),
        kills=("routes.dtype",),
        also=("routes.distinct",),
    ),
    KnownBug(
        id="type-too-narrow",
        summary="Routes are handed over in eight bits, which do not hold every expert.",
        refs=("verl#5240", "verl#7407"),
        make=_NarrowType,
        cases=(_WIDE,),
        kills=("routes.dtype",),
        also=("routes.distinct",),
    ),
    KnownBug(
        id="type-undeclared",
        summary="Routes come in another integer type than declared, which a decoder of bytes misreads.",
        refs=("SkyRL#1378",),
        make=_OtherType,
        cases=(CLEAN,),
        kills=("routes.dtype",),
    ),
    KnownBug(
        id="top-k-from-size",
        summary="Top-k is computed from the size of a buffer that is twice too long.",
        refs=("miles sglang_rollout.py", "AReaL reshape(rows, -1)"),
        make=_TopKFromSize,
        cases=(CLEAN,),
        kills=("routes.shape",),
    ),
    KnownBug(
        id="routes-dropped",
        summary="The engine returned routes, and the agent loop leaves them out of its output.",
        refs=("verl#5368",),
        make=_DropsRoutes,
        cases=(CLEAN,),
        kills=("routes.presence",),
    ),
    KnownBug(
        id="routes-flag-lost",
        summary="The caller's flag does not reach the engine, which returns no routes.",
        refs=("slime#1145", "slime#1909", "miles#407"),
        make=_FlagLost,
        cases=(CLEAN,),
        kills=("routes.presence",),
    ),
    KnownBug(
        id="buffer-recycled",
        summary="The sample holds a view of a buffer that the next request writes into.",
        refs=("sglang#34319",),
        make=_Recycled,
        cases=(_BY_TURNS,),
        kills=("routes.handed-over",),
    ),
    KnownBug(
        id="pipeline-stage-missing",
        summary="The layers of a pipeline stage are zeros: nobody gathered them.",
        refs=("slime#395", "slime#2175", "vllm#44116"),
        make=on_policy(_StageMissing),
        cases=(CLEAN,),
        kills=("routes.live", "routes.engine"),
    ),
    KnownBug(
        id="prompt-rows-missing",
        summary="Rows of the prompt are zeros: the copy from the prefill was not finished when they were read.",
        refs=("sglang#23885", "llm-d-router#1473"),
        make=on_policy(_PromptRowsMissing),
        cases=(CLEAN,),
        kills=("routes.distinct", "routes.engine"),
    ),
    KnownBug(
        id="captured-once",
        summary="Every row is the same: the capture ran once, when the CUDA graph was recorded.",
        refs=("sglang#12162",),
        make=on_policy(_CapturedOnce),
        cases=(CLEAN,),
        kills=("routes.live", "routes.engine"),
    ),
    KnownBug(
        id="shared-expert-kept",
        summary="The id of a fused shared expert is returned as one of the top-k.",
        refs=("sglang#36515",),
        make=on_policy(_SharedExpert),
        cases=(CLEAN,),
        kills=("routes.in-range", "routes.engine"),
    ),
    KnownBug(
        id="stale-slots",
        summary="KV moved to new slots without its rows: they are those of the slots' former owner.",
        refs=("sglang#26975", "vllm#39568"),
        make=on_policy(_StaleSlots),
        cases=(CLEAN,),
        kills=("routes.engine",),
    ),
    KnownBug(
        id="prefill-overwrites-rows",
        summary="A retracted call is prefilled anew under new weights, and its rows are overwritten; its logprobs stay.",
        refs=("miles#3277", "sglang#39633", "miles#3307"),
        make=on_engine(_Overwrites, EngineKeep),
        cases=(_RETRACTED,),
        kills=("routes.immutable",),
    ),
    KnownBug(
        id="prefix-cache-outlives-weights",
        summary="The prefix cache is not reset at a weight update, so later calls get rows and KV of older weights.",
        refs=("NeMo-RL#4018", "SkyRL#2246", "prime-rl#1650"),
        make=on_engine(_KeepsPrefixCache),
        cases=(_CACHED,),
        kills=("routes.prefix-cache", "weights.no-stale-cache"),
    ),
)
"""Known bugs of routing."""
