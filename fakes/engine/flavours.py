"""Flavours: the conventions of engine releases, declared as data.

Each value was measured on a release of the engine or read from its source. The fake engine reads
these fields and never branches on a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from rollproof.core.case import Model
from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    LayerAxis,
    Logprobs,
    Provenance,
    ResumeBy,
    Rows,
    TagRead,
    Versions,
)
from rollproof.core.engine_contract import (
    EngineTerms,
    PausedCalls,
    PauseMode,
    Refusal,
    ReplyKey,
    RoutesSwitch,
    SamplingOption,
    StopShown,
    StreamMode,
)
from rollproof.core.records import FinishReason
from rollproof.errors import UsageError

__all__ = [
    "FLAVOURS",
    "AdapterIdentity",
    "Flavour",
    "PausedCalls",
    "ReprefillRows",
    "VersionTag",
    "engine_contract",
    "engine_terms",
    "flavour_named",
]


class VersionTag(StrEnum):
    """Weight-version labels of a reply."""

    NONE = "none"
    EMISSION = "emission"
    """One label: the server's when the reply was emitted; wrong after an update during the call."""
    ADMISSION = "admission"
    """One label: the server's when the call was admitted. May name weights that sampled no token
    (vLLM #54443).
    """
    SPANS = "spans"
    """The label under which each token was sampled, as spans over the tokens of the call."""
    SPANS_AND_LAST = "spans-and-last"
    """Spans, and the label of the last span; a call without tokens shows one empty span."""


class ReprefillRows(StrEnum):
    """Effect of a second prefill of a call on the rows of tokens that were already sampled."""

    KEPT = "kept"
    """Rows stay those of the first computation."""
    OVERWRITTEN = "overwritten"
    """Rows are stored by KV slot: the recompute overwrites them (SGLang #39633, #24001)."""


class AdapterIdentity(StrEnum):
    """What the prefix cache of an engine takes for the identity of an adapter."""

    NAME = "name"
    """Its name: KV of a former adapter of that name is used (vLLM #42125, #30931)."""
    LOAD = "load"
    """An id that each load gets (SGLang)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flavour:
    """Declared conventions of an engine.

    source: the releases, and how the conventions were found.
    enrolled: subjects that name no flavours run on it, if their contract fits. A new flavour is run
        by those alone who name it, until every reference and the engine suite were run on it.
    rows, final_row, layer_axis: the layout of routes, as in ``Contract``.
    dtypes: pairs (largest number of experts, numpy name), ascending; the first that fits is used.
    writable: the caller may write into the returned routes.
    native: the engine's own finish reasons.
    queued_abort_keeps_keys: an abort in the waiting queue, or during the prefill, has the keys of
        any other reply. If false, it has no routes and no count of cached tokens, and
        ``queued_message`` as its message (SGLang's ``_make_abort_req``, measured on 0.5.21).
    abort_message: the message of an aborted call that was sampling.
    abort_logprobs, abort_routes: a call that was aborted after a token has logprobs, and routes.
    empty_logprobs: a reply without tokens has an empty array of logprobs.
    queued_counts: an abort in the waiting queue says that 0 tokens were cached.
    routes_start: calls have the option to return routes from a row on.
    abort_by_prefix: aborting ``"1"`` also aborts ``"10"``.
    pause_modes: those that the engine offers; the fake accepts all of them.
    adapter_identity: what separates the KV of adapters in the prefix cache.
    adapters_in_place: an adapter may be replaced under its name; if false, that is an error, and
        the old one must be unloaded, which waits for the calls that it serves (SGLang).
    routes_switch to repetition_over_prompt: as in ``EngineTerms``; the fake refuses every empty
        prompt.
    """

    name: str
    source: str
    enrolled: bool = False
    rows: Rows = Rows.FORWARDED
    final_row: Filler | None = None
    layer_axis: LayerAxis = LayerAxis.ALL
    dtypes: tuple[tuple[int, str], ...]
    writable: bool = True
    recompute: ReprefillRows = ReprefillRows.KEPT
    version_tag: VersionTag = VersionTag.NONE
    native: Mapping[FinishReason, str]
    queued_message: str = ""
    abort_message: str = ""
    abort_logprobs: bool = True
    abort_routes: bool = True
    empty_logprobs: bool = False
    queued_abort_keeps_keys: bool = True
    queued_counts: bool = False
    routes_start: bool = False
    paused_calls: PausedCalls = PausedCalls.PARK
    abort_by_prefix: bool = False
    logprobs: Logprobs = Logprobs.RAW
    pause_modes: tuple[PauseMode, ...] = (PauseMode.ABORT,)
    routes_switch: RoutesSwitch = RoutesSwitch.ENGINE
    stream_modes: tuple[StreamMode, ...] = (StreamMode.FINAL, StreamMode.CUMULATIVE)
    zero_budget: Refusal = Refusal.ERROR
    empty_prompt: Refusal = Refusal.ERROR
    seeded: bool = True
    aborts: bool = True
    prompt_margin: int = 1
    spare_positions: int | None = None
    excess_budget: Refusal | None = None
    end_token: StopShown | None = None
    stop_token: StopShown | None = None
    stop_string: StopShown | None = None
    sampling: tuple[SamplingOption, ...] = ()
    penalised_logprobs: bool | None = None
    repetition_over_prompt: bool = True
    adapter_identity: AdapterIdentity = AdapterIdentity.NAME
    adapters_in_place: bool = True

    def dtype(self, num_experts: int) -> np.dtype[np.integer]:
        """Return the integer type of the rows for a model of ``num_experts``."""
        for largest, name in self.dtypes:
            if num_experts <= largest:
                return np.dtype(name)
        raise UsageError(
            f"Flavour {self.name!r} has no row dtype for {num_experts} experts; it declares"
            f" {self.dtypes}."
        )

    @property
    def shows_spans(self) -> bool:
        """Whether replies show a label for every token."""
        return self.version_tag in (VersionTag.SPANS, VersionTag.SPANS_AND_LAST)


def engine_contract(flavour: Flavour, model: Model, kv_policy: KvPolicy) -> Contract:
    """Return the contract of one engine call of ``flavour`` for ``model``."""
    # A flavour contains a mapping, so only the name of a shipped one can be a key of the cache.
    if FLAVOURS.get(flavour.name) is flavour:
        return _shipped_contract(flavour.name, model, kv_policy)
    return _contract(flavour, model, kv_policy)


# A run needs it three times, and a thousand cases share a model: making and validating a contract
# costs as much as a call.
@lru_cache(maxsize=256)
def _shipped_contract(name: str, model: Model, kv_policy: KvPolicy) -> Contract:
    return _contract(FLAVOURS[name], model, kv_policy)


def _contract(flavour: Flavour, model: Model, kv_policy: KvPolicy) -> Contract:
    overwritten = flavour.recompute is ReprefillRows.OVERWRITTEN
    return Contract(
        rows=flavour.rows,
        resume=ResumeBy.ENGINE,
        versions=_ENGINE_VERSIONS[flavour.version_tag],
        tag_read=_TAG_READ.get(flavour.version_tag),
        logprobs=flavour.logprobs,
        abort_surfaces=True,
        kv_policy=kv_policy,
        final_row=flavour.final_row,
        layer_axis=flavour.layer_axis,
        **model.sizes,
        filler=Filler.NONE,
        dtype=flavour.dtype(model.num_experts).name,
        provenance=Provenance.LATEST_PREFILL if overwritten else Provenance.AS_SAMPLED,
    )


def engine_terms(
    flavour: Flavour,
    max_length: int,
    *,
    end_tokens: tuple[int, ...] = (),
    token_text: str | None = None,
) -> EngineTerms:
    """Return the terms of calls of ``flavour``, of up to ``max_length`` tokens each.

    ``end_tokens`` are the model's own, and ``token_text`` the text of a token as in
    ``EngineTerms``; without them calls do not end that way.
    """
    shown = (ReplyKey.SPANS,) if flavour.shows_spans else ()
    always = (ReplyKey.SPANS,) if flavour.version_tag is VersionTag.SPANS_AND_LAST else ()
    empty = (ReplyKey.LOGPROBS,) if flavour.empty_logprobs else ()
    complete = (ReplyKey.LOGPROBS, ReplyKey.ROUTES, *shown, ReplyKey.CACHED)
    return EngineTerms(
        max_length=max_length,
        pause_modes=flavour.pause_modes,
        recomputing=tuple(
            mode for mode in flavour.pause_modes if mode in (PauseMode.KEEP, PauseMode.RETRACT)
        ),
        paused_calls=flavour.paused_calls,
        stream_modes=flavour.stream_modes,
        routes_switch=flavour.routes_switch,
        routes_start=flavour.routes_start,
        bad_start=Refusal.ERROR if flavour.routes_start else Refusal.IGNORED,
        zero_budget=flavour.zero_budget,
        empty_prompt=flavour.empty_prompt,
        abort_by_prefix=flavour.abort_by_prefix,
        seeded=flavour.seeded,
        aborts=flavour.aborts,
        prompt_margin=flavour.prompt_margin,
        spare_positions=flavour.spare_positions,
        excess_budget=flavour.excess_budget,
        end_tokens=end_tokens,
        end_token=flavour.end_token if end_tokens else None,
        stop_token=flavour.stop_token,
        stop_string=None if token_text is None else flavour.stop_string,
        token_text=token_text,
        sampling=flavour.sampling,
        penalised_logprobs=flavour.penalised_logprobs,
        repetition_over_prompt=flavour.repetition_over_prompt,
        keys_finished=complete,
        keys_aborted=tuple(
            key
            for key in complete
            if (flavour.abort_logprobs or key is not ReplyKey.LOGPROBS)
            and (flavour.abort_routes or key is not ReplyKey.ROUTES)
        ),
        keys_early=(
            (*empty, *always, ReplyKey.CACHED)
            if flavour.queued_abort_keeps_keys
            else (*empty, *always)
        ),
        keys_queued=(*empty, *always, *((ReplyKey.CACHED,) if flavour.queued_counts else ())),
    )


def flavour_named(name: str) -> Flavour:
    """Return the flavour of that name. Raises ``UsageError`` for an unknown one."""
    try:
        return FLAVOURS[name]
    except KeyError:
        raise UsageError(
            f"No engine flavour is named {name!r}; choose among {sorted(FLAVOURS)}."
        ) from None


_ENGINE_VERSIONS: Mapping[VersionTag, Versions] = {
    VersionTag.NONE: Versions.NONE,
    VersionTag.EMISSION: Versions.SAMPLE,
    VersionTag.ADMISSION: Versions.SAMPLE,
    VersionTag.SPANS: Versions.SPAN,
    VersionTag.SPANS_AND_LAST: Versions.SPAN,
}
_TAG_READ: Mapping[VersionTag, TagRead] = {
    VersionTag.EMISSION: TagRead.EMISSION,
    VersionTag.ADMISSION: TagRead.ADMISSION,
}
_ANY = 1 << 31
_PLAIN = MappingProxyType(
    {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
)
_VLLM_MODES = (PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP)
_SGLANG_MODES = (PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE)
_VLLM_DTYPES = ((256, "uint8"), (1 << 16, "uint16"))


def _sglang(name: str, source: str, tag: VersionTag) -> Flavour:
    return Flavour(
        name=name,
        source=source,
        enrolled=True,
        dtypes=((_ANY, "int32"),),
        # routes are decoded from base64 into a buffer that numpy does not own (np.frombuffer),
        # hence read-only; rows are stored by KV slot (SGLang #39633, #24001)
        writable=False,
        recompute=ReprefillRows.OVERWRITTEN,
        version_tag=tag,
        native=_PLAIN,
        # _make_abort_req builds this reply, without routes and cached tokens (0.5.21)
        queued_message="Abort in waiting queue",
        abort_message="Aborted",
        empty_logprobs=True,
        queued_abort_keeps_keys=False,
        routes_start=True,
        # abort_request compares handles with startswith
        abort_by_prefix=True,
        logprobs=Logprobs.TEMPERATURE_SCALED,
        pause_modes=_SGLANG_MODES,
        routes_switch=RoutesSwitch.REQUEST,
        stream_modes=(StreamMode.FINAL, StreamMode.CUMULATIVE),
        zero_budget=Refusal.EMPTY,
        seeded=False,
        # a prompt must be shorter than max_req_input_len, 6 below the context length
        # (srt/managers/tp_worker.py), and a budget ends 2 below it (scheduler.py,
        # init_req_max_new_tokens); a budget beyond the context is an error (tokenizer_manager.py)
        prompt_margin=7,
        spare_positions=2,
        excess_budget=Refusal.ERROR,
        # output_ids_through_stop includes what ended the call (schedule_batch.py)
        end_token=StopShown.KEPT,
        stop_token=StopShown.KEPT,
        stop_string=StopShown.KEPT,
        sampling=tuple(SamplingOption),
        # penalties change the logits before the sampler takes logprobs of either mode
        penalised_logprobs=True,
        repetition_over_prompt=False,
        # lora_id of the registry is part of the radix cache's extra key; unload_lora_adapter waits
        # for the requests of that id (managers/tokenizer_manager.py)
        adapter_identity=AdapterIdentity.LOAD,
        adapters_in_place=False,
    )


def _vllm(
    name: str, source: str, tag: VersionTag, paused: PausedCalls = PausedCalls.PARK
) -> Flavour:
    return Flavour(
        name=name,
        source=source,
        enrolled=True,
        dtypes=_VLLM_DTYPES,
        version_tag=tag,
        native=_PLAIN,
        empty_logprobs=True,
        # a call aborted in the queue reports 0 cached tokens (0.32, run)
        queued_counts=True,
        routes_start=True,
        paused_calls=paused,
        pause_modes=_VLLM_MODES,
        stream_modes=(StreamMode.FINAL, StreamMode.CUMULATIVE, StreamMode.DELTA),
        # a call fills max_model_len, whatever its budget (v1/core/sched/utils.py, check_stop)
        spare_positions=0,
        excess_budget=Refusal.IGNORED,
        # only the text leaves out what ended the call (v1/engine/detokenizer.py)
        end_token=StopShown.KEPT,
        stop_token=StopShown.KEPT,
        stop_string=StopShown.KEPT,
        sampling=tuple(SamplingOption),
        # raw logprobs are taken before the penalties (v1/worker/gpu/sample/sampler.py)
        penalised_logprobs=False,
    )


FLAVOURS: Mapping[str, Flavour] = MappingProxyType(
    {
        flavour.name: flavour
        for flavour in (
            _vllm(
                "vllm",
                "vLLM 0.32 and later (capture by KV block hash, weight_versions): run on CPU",
                VersionTag.SPANS,
            ),
            _vllm(
                "vllm-0.26",
                "vLLM 0.22 to 0.26 (capture by slot, no weight_versions): from source",
                VersionTag.NONE,
            ),
            _vllm(
                "vllm-gated",
                "vLLM behind verl 0.9.1's admission gate with reject_request: from source",
                VersionTag.SPANS,
                PausedCalls.REJECT,
            ),
            _sglang(
                "sglang",
                "SGLang 0.5.19 and later (weight_versions): run on CPU",
                VersionTag.SPANS_AND_LAST,
            ),
            _sglang(
                "sglang-0.5.17",
                "SGLang 0.5.8 to 0.5.18 (one weight_version, read at emission): from source",
                VersionTag.EMISSION,
            ),
            Flavour(
                name="trtllm",
                enrolled=True,
                source="TensorRT-LLM #18397, #12272: from source",
                layer_axis=LayerAxis.MOE,
                dtypes=((_ANY, "int32"),),
                native=MappingProxyType({**_PLAIN, FinishReason.ABORT: "cancelled"}),
                paused_calls=PausedCalls.RAISE,
            ),
            Flavour(
                name="rows-T",
                enrolled=True,
                source=(
                    "the N-row engine of verl's CPU fixtures"
                    " (test_llm_server_routed_experts_on_cpu.py)"
                ),
                rows=Rows.ALL,
                final_row=Filler.MINUS_ONE,
                dtypes=((_ANY, "int32"),),
                version_tag=VersionTag.EMISSION,
                native=_PLAIN,
                pause_modes=_VLLM_MODES,
            ),
        )
    }
)
"""All flavours by name."""
