"""vLLM as an engine under test: ``AsyncLLM`` in a process of its own, on a CPU or a GPU.

It declares a flavour of the fake engine (``rollproof.fakes.engine.flavours``): the real engine is
judged by the conventions that the fake emulates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from rollproof.core.contract import Contract, Logprobs
from rollproof.core.engine_contract import EngineTerms, PauseMode, SamplingOption, StreamMode
from rollproof.core.engine_protocol import EngineSettings, Piece, Query, Watch, WeightUpdate
from rollproof.core.model_config import kv_groups_of
from rollproof.core.records import EngineOutput, FinishReason, IntArray, Span
from rollproof.engines.contracts import declared
from rollproof.engines.host.host_client import EngineProcess
from rollproof.engines.vllm.vllm_cpu import is_cpu_build
from rollproof.errors import SubjectError, UsageError
from rollproof.fakes.engine.flavours import Flavour, flavour_named

__all__ = ["MODES", "VllmEngine", "engine_options", "offline", "output_of"]

MODES: Mapping[PauseMode, str] = MappingProxyType(
    {PauseMode.ABORT: "abort", PauseMode.WAIT: "wait", PauseMode.KEEP: "keep"}
)
"""vLLM's name of each pause that it has (``AsyncLLM.pause_generation``)."""
_HOST = "rollproof.engines.vllm.vllm_host"
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_OWN_KEYS = ("python", "flavour", "deadline", "load", "offline")
"""Keys of ``EngineSettings.extra`` that are not vLLM's own."""
_LOGPROBS = {"raw_logprobs": Logprobs.RAW, "processed_logprobs": Logprobs.PROCESSED}
"""The logprobs of each ``logprobs_mode`` of vLLM (vllm/config/model.py)."""
_BLOCK = 32
"""Tokens of a KV block: the fewest that vLLM's CPU attention accepts."""


class _Process(EngineProcess):
    """A host of vLLM. It outlives the engine core that it started."""

    fatal = ("EngineDeadError",)


class VllmEngine:
    """An ``rollproof.core.subjects.EngineSubject``.

    Keys of ``settings.extra``:

    - ``offline``: use ``vllm.LLM``, which runs batches and does nothing else meanwhile.
    - ``python``: an interpreter that has vLLM (default: this one).
    - ``flavour``: the declared conventions.
    - ``load``: how weights are updated. ``"reload"`` is vLLM's own way. ``"edit"`` writes the
      differences in place; only an identity update reloads.
    - ``deadline``: seconds that a start may take.
    - every other key is a field of vLLM's ``AsyncEngineArgs``; a mapping is given as JSON.
    """

    contract: Contract

    def __init__(
        self, settings: EngineSettings, progress: Callable[[str], None] | None = None
    ) -> None:
        self.settings = settings
        flavour = flavour_named(str(settings.extra.get("flavour", "vllm")))
        contract = declared(
            offline(flavour) if settings.extra.get("offline") else flavour, settings
        )
        mode = settings.logprobs_mode or "raw_logprobs"
        if mode not in _LOGPROBS:
            raise UsageError(
                f"vLLM's logprobs_mode {mode!r} returns no logprobs to compare; choose among"
                f" {list(_LOGPROBS)}."
            )
        self.contract = replace(
            contract, logprobs=_LOGPROBS[mode], engine=_without_filters(contract, settings)
        )
        self._progress = progress
        self._process: EngineProcess | None = None
        self._loaded = settings.model
        load = settings.extra.get("load", "reload")
        if load not in ("reload", "edit"):
            raise UsageError(
                f"extra['load'] says how vLLM gets new weights: 'reload' or 'edit', not {load!r}."
            )
        self._edits = load == "edit"

    async def start(self) -> None:
        """Start the engine.

        Raises ``EngineStartError`` if vLLM is missing, of another version, dies, or is too slow.
        """
        extra = self.settings.extra
        python = {"python": str(extra["python"])} if "python" in extra else {}
        self._process = await _Process.start(
            _HOST,
            engine_options(self.settings),
            name="vllm",
            environment={
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
            deadline=float(extra.get("deadline") or 400.0),
            progress=self._progress,
            **python,
        )
        await self._running.call("label", label=self.settings.label)

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        """Run one call. Raises ``EngineRefused`` if vLLM answers with an error."""
        sampling: dict[str, Any] = {
            "temperature": query.temperature,
            "max_tokens": query.max_tokens,
            "n": query.samples,
            "seed": query.seed,
            "ignore_eos": query.ignore_end,
            **{str(option): value for option, value in query.sampling.items()},
        }
        if query.stop_token_ids:
            sampling["stop_token_ids"] = list(query.stop_token_ids)
        if query.want_logprobs:
            sampling["logprobs"] = 0
        if query.routes_start is not None:
            sampling["routed_experts_prompt_start"] = query.routes_start
        joined: dict[int, dict[str, Any]] = {}
        cached: int | None = None
        async for answer in self._running.stream(
            "generate",
            deadline=None,
            request_id=query.handle,
            prompt_ids=list(query.prompt_ids),
            sampling=sampling,
            stream=str(query.stream),
        ):
            cached = answer["cached"]
            for part in answer["outputs"]:
                sample = _joined(
                    joined.get(part["index"]), part, delta=query.stream is StreamMode.DELTA
                )
                joined[part["index"]] = sample
                routes = part["routes"]
                watch(
                    Piece(
                        token_ids=tuple(part["token_ids"]),
                        sampled=len(sample["token_ids"]),
                        rows=None if routes is None else routes["shape"][0],
                        finished=part["reason"] is not None,
                        sample=part["index"],
                    )
                )
        return [
            output_of(joined[index], cached, query.routes_start or 0) for index in sorted(joined)
        ]

    async def abort(self, handle: str) -> None:
        await self._running.call("abort", request_id=handle)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Raises ``UsageError`` for a mode that vLLM does not have."""
        if mode not in MODES:
            raise UsageError(f"vLLM has no pause {mode!s}; it has {[str(name) for name in MODES]}.")
        await self._running.call("pause", mode=MODES[mode], clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._running.call("resume")

    async def update_weights(self, update: WeightUpdate) -> None:
        """Change the weights in place, clear the prefix cache on request, and publish the label."""
        if self._edits and not update.identity:
            await self._running.call("edit", before=str(self._loaded), after=str(update.path))
        else:
            await self._running.call("load", path=str(update.path))
        self._loaded = update.path
        if update.clear_cache:
            await self._running.call("clear")
        await self._running.call("label", label=update.label)

    async def clear_cache(self) -> None:
        await self._running.call("clear")

    async def counters(self) -> Mapping[str, float]:
        counts: Mapping[str, float] = await self._running.call("counters")
        return counts

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()

    @property
    def process(self) -> EngineProcess:
        """The process of the engine. Raises ``UsageError`` before ``start``."""
        return self._running

    @property
    def _running(self) -> EngineProcess:
        if self._process is None:
            raise UsageError("The engine is not started: await start() first.")
        return self._process


def _without_filters(contract: Contract, settings: EngineSettings) -> EngineTerms | None:
    """Return the terms, without top-p and top-k on the CPU build, which cannot run their kernel
    (``rollproof.engines.vllm.vllm_cpu``).
    """
    terms = contract.engine
    if terms is None or "python" in settings.extra or not is_cpu_build():
        return terms
    missing = (SamplingOption.TOP_P, SamplingOption.TOP_K)
    return replace(
        terms, sampling=tuple(option for option in terms.sampling if option not in missing)
    )


def engine_options(settings: EngineSettings) -> dict[str, Any]:
    """Return arguments of ``AsyncEngineArgs``: for all devices, and for each kind of device."""
    # each kind of layer is a group with blocks of its own; vLLM never assigns one of the blocks
    count = kv_groups_of(settings.model) * (settings.kv_tokens or 0) // _BLOCK + 1
    blocks = {"num_gpu_blocks_override": count} if settings.kv_tokens else {}
    engine = {
        "model": str(settings.model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": settings.dtype,
        "max_model_len": settings.max_length,
        "max_num_seqs": settings.max_batch,
        "enable_prefix_caching": settings.prefix_cache,
        "enable_return_routed_experts": settings.routes,
        "disable_log_stats": False,  # its counters show preemptions
        "seed": settings.seed,
        "block_size": _BLOCK,
        **({"max_num_batched_tokens": settings.prefill_chunk} if settings.prefill_chunk else {}),
        **({"logprobs_mode": settings.logprobs_mode} if settings.logprobs_mode else {}),
        **blocks,
        **{name: value for name, value in settings.extra.items() if name not in _OWN_KEYS},
    }
    return {
        "engine": engine,
        "cpu": {},
        "cuda": {"gpu_memory_utilization": settings.extra.get("gpu_memory_utilization", 0.3)},
        "offline": bool(settings.extra.get("offline")),
    }


def offline(flavour: Flavour) -> Flavour:
    """Return the conventions of ``vllm.LLM``: ``flavour`` without streams, aborts and pauses."""
    return replace(
        flavour,
        name=f"{flavour.name}-offline",
        pause_modes=(),
        stream_modes=(StreamMode.FINAL,),
        aborts=False,
    )


def output_of(part: Mapping[str, Any], cached: int | None, routes_start: int) -> EngineOutput:
    """Convert the (joined) output of a sample."""
    native = str(part["reason"])
    if native not in _REASONS:
        raise SubjectError(
            f"vLLM ended a call with the finish reason {native!r}; rollproof knows {[*_REASONS]}."
        )
    logprobs = part["logprobs"]
    return EngineOutput(
        token_ids=tuple(part["token_ids"]),
        logprobs=(
            None
            if logprobs is None
            else np.array([np.nan if value is None else value for value in logprobs])
        ),
        routes=_routes(part["routes"]),
        finish_reason=_REASONS[native],
        routes_start=routes_start,
        spans=tuple(
            Span(start=start, end=end, version=version)
            for version, start, end in part["spans"] or ()
        ),
        cached_tokens=cached,
        native=native,
    )


def _routes(sent: Mapping[str, Any] | None) -> IntArray | None:
    if sent is None:
        return None
    return (
        np.frombuffer(bytes.fromhex(sent["data"]), dtype=np.dtype(sent["dtype"]))
        .reshape(sent["shape"])
        .copy()
    )


def _joined(
    before: dict[str, Any] | None, part: Mapping[str, Any], *, delta: bool
) -> dict[str, Any]:
    """Return the sample so far: a cumulative output replaces it, a delta extends it."""
    if before is None or not delta:
        return dict(part)
    logprobs = [*(before["logprobs"] or ()), *(part["logprobs"] or ())]
    returned = before["logprobs"] is not None or part["logprobs"] is not None
    return {
        **part,
        "token_ids": [*before["token_ids"], *part["token_ids"]],
        "logprobs": logprobs if returned else None,
    }
