"""SGLang as an engine under test: ``sglang.Engine`` in a process of its own, on a CPU or a GPU.

It declares a flavour of the fake engine (``rollproof.fakes.engine.flavours``): the real engine is
judged by the conventions that the fake emulates.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rollproof.core.contract import Contract, Logprobs
from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.core.engine_protocol import EngineSettings, Query, Watch, WeightUpdate
from rollproof.core.records import EngineOutput
from rollproof.engines.contracts import declared
from rollproof.engines.host.host_client import EngineProcess
from rollproof.engines.sglang.sglang_replies import joined, output_of, piece_of
from rollproof.errors import EngineRefused, UsageError
from rollproof.fakes.engine.flavours import Flavour, flavour_named

__all__ = ["MODES", "SglangEngine", "engine_options", "incremental"]

MODES: Mapping[PauseMode, str] = MappingProxyType(
    {PauseMode.ABORT: "abort", PauseMode.RETRACT: "retract", PauseMode.IN_PLACE: "in_place"}
)
"""SGLang's name of each pause that it has (``PauseGenerationReqInput.mode``)."""
_HOST = "rollproof.engines.sglang.sglang_host"
_RAW = {Logprobs.RAW: "1", Logprobs.TEMPERATURE_SCALED: "0"}
"""``SGLANG_RETURN_ORIGINAL_LOGPROB`` for a mode of logprobs."""
_OWN_KEYS = ("device", "python", "flavour", "load", "deadline")
"""Keys of ``EngineSettings.extra`` that are not SGLang's own."""
_SETTLING_S = 5.0


class SglangEngine:
    """An ``rollproof.core.subjects.EngineSubject``.

    Keys of ``settings.extra``:

    - ``device``: ``"cpu"`` or ``"cuda"`` (default: CUDA if there is one).
    - ``python``: an interpreter that has SGLang (default: this one).
    - ``flavour``: the declared conventions.
    - ``load``: how weights are updated, ``"disk"`` or ``"tensors"``.
    - ``deadline``: seconds that a start may take.
    - every other key is an argument of ``sglang.Engine``. With ``incremental_streaming_output`` a
      streamed reply comes in parts; without it each chunk repeats all before it.

    Weights can change under running calls only during a pause; otherwise SGLang lets an update wait
    for the calls in flight.
    """

    contract: Contract

    def __init__(
        self, settings: EngineSettings, progress: Callable[[str], None] | None = None
    ) -> None:
        extra = settings.extra
        self.settings = settings
        flavour = flavour_named(str(extra.get("flavour", "sglang")))
        self.contract = declared(
            incremental(flavour) if extra.get("incremental_streaming_output") else flavour, settings
        )
        if settings.logprobs_mode is not None:
            if settings.logprobs_mode not in _RAW:
                raise UsageError(
                    f"SGLang has the logprobs {[str(mode) for mode in _RAW]}, not"
                    f" {settings.logprobs_mode!r}."
                )
            self.contract = replace(self.contract, logprobs=Logprobs(settings.logprobs_mode))
        self._progress = progress
        self._process: EngineProcess | None = None
        self._retracted = 0
        load = extra.get("load", "disk")
        if load not in ("disk", "tensors"):
            raise UsageError(
                "extra['load'] says how SGLang gets new weights: 'disk' or 'tensors', not"
                f" {load!r}."
            )
        self._load = f"load_{load}"

    async def start(self) -> None:
        """Start the engine.

        Raises ``EngineStartError`` if SGLang is missing, of another version, dies, or is too slow.
        """
        options = engine_options(self.settings)
        extra = self.settings.extra
        python = {"python": str(extra["python"])} if "python" in extra else {}
        mode = self.settings.logprobs_mode
        self._process = await EngineProcess.start(
            _HOST,
            options,
            name="sglang",
            environment={"SGLANG_RETURN_ORIGINAL_LOGPROB": _RAW[Logprobs(mode)]} if mode else {},
            deadline=float(extra.get("deadline") or 300.0),
            progress=self._progress,
            **python,
        )

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        """Run one call. Raises ``EngineRefused`` if SGLang answers with an error."""
        sampling: dict[str, Any] = {
            "temperature": query.temperature,
            "max_new_tokens": query.max_tokens,
            "n": query.samples,
            "ignore_eos": query.ignore_end,
            **{str(option): value for option, value in query.sampling.items()},
        }
        if query.stop_token_ids:
            sampling["stop_token_ids"] = list(query.stop_token_ids)
        if query.seed is not None:
            sampling["sampling_seed"] = query.seed
        arguments: dict[str, Any] = {
            "rid": query.handle,
            "input_ids": list(query.prompt_ids),
            "sampling_params": sampling,
            "return_logprob": query.want_logprobs,
            "return_routed_experts": query.want_routes and self.contract.has_routes,
            "stream": query.stream is not StreamMode.FINAL,
        }
        if query.routes_start is not None and self.contract.has_routes:
            arguments["routed_experts_start_len"] = query.routes_start
        chunks: dict[int, list[Mapping[str, Any]]] = {}
        async for answer in self._running.stream("generate", deadline=None, **arguments):
            for chunk in answer if isinstance(answer, list) else [answer]:
                chunks.setdefault(chunk.get("index") or 0, []).append(chunk)
                watch(piece_of(chunk, self.contract))
        parts = query.stream is StreamMode.DELTA
        replies = [
            joined(chunks[index]) if parts else chunks[index][-1] for index in sorted(chunks)
        ]
        for reply in replies:
            _refuse_error(reply["meta_info"]["finish_reason"] or {})
        self._retracted += sum(reply["meta_info"].get("num_retractions") or 0 for reply in replies)
        return [output_of(reply, self.contract, query.routes_start or 0) for reply in replies]

    async def abort(self, handle: str) -> None:
        """Abort every call with an id that begins with ``handle``."""
        await self._running.call("abort", rid=handle)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Pause.

        Raises ``UsageError`` for a mode that SGLang does not have, and ``EngineRefused`` if the
        cache cannot be cleared.
        """
        if mode not in MODES:
            raise UsageError(
                f"SGLang has no pause {mode!s}; it has {[str(name) for name in MODES]}."
            )
        await self._running.call("pause", mode=MODES[mode])
        if clear_cache:
            await self.clear_cache()
        else:
            # the scheduler handles messages in order: when it answers, the pause is in force
            await self._running.call("state")

    async def resume(self) -> None:
        await self._running.call("resume")

    async def update_weights(self, update: WeightUpdate) -> None:
        """Update the weights. Raises ``EngineRefused`` if SGLang reports that it failed."""
        result = await self._running.call(
            self._load, path=str(update.path), label=update.label, flush=update.clear_cache
        )
        _succeeded("the weight update", result)

    async def clear_cache(self) -> None:
        """Clear the radix cache. Raises ``EngineRefused`` while calls run or are in a pause."""
        # a call that has its reply may still be in the scheduler's last batch: try again for a
        # while if no call is open
        end = time.monotonic() + _SETTLING_S
        while not (result := await self._running.call("flush"))["success"]:
            if time.monotonic() > end or (await self._running.call("loads"))["held"]:
                break
            await asyncio.sleep(0.05)
        _succeeded("flush_cache", result)

    async def counters(self) -> Mapping[str, float]:
        """Count retractions of the calls answered so far (``meta_info["num_retractions"]``), and
        open calls.
        """
        return {"preemptions": float(self._retracted), **await self._running.call("loads")}

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


def incremental(flavour: Flavour) -> Flavour:
    """Return the conventions of an engine with ``incremental_streaming_output``."""
    return replace(
        flavour,
        name=f"{flavour.name}-incremental",
        stream_modes=(StreamMode.FINAL, StreamMode.DELTA),
    )


def engine_options(settings: EngineSettings) -> dict[str, Any]:
    """Return what the host needs to start ``sglang.Engine``.

    These are arguments for all devices, for each kind of device, and the model's classes.
    """
    architectures = (
        json.loads((settings.model / "config.json").read_text(encoding="utf-8")).get(
            "architectures"
        )
        or []
    )
    extra = {name: value for name, value in settings.extra.items() if name not in _OWN_KEYS}
    engine = {
        "model_path": str(settings.model),
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "context_length": settings.max_length,
        "max_running_requests": settings.max_batch,
        "chunked_prefill_size": settings.prefill_chunk or -1,
        "disable_radix_cache": not settings.prefix_cache,
        "enable_return_routed_experts": settings.routes,
        "random_seed": settings.seed,
        "weight_version": settings.label,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "skip_server_warmup": True,
        "log_level": "warning",
        **({"max_total_tokens": settings.kv_tokens} if settings.kv_tokens else {}),
    }
    return {
        "engine": engine,
        "device": settings.extra.get("device"),
        "cpu": {
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.1,
            "max_total_tokens": settings.kv_tokens or 4096,
            **extra,
        },
        "cuda": {
            "attention_backend": "triton",
            "moe_runner_backend": "triton",
            "mem_fraction_static": 0.3,
            **extra,
        },
        "architectures": architectures,
    }


def _refuse_error(reason: Mapping[str, Any]) -> None:
    # SGLang refuses a streamed call by an abort with the status of an HTTP error, any other call by
    # an exception
    if reason.get("status_code") is not None:
        raise EngineRefused(
            f"SGLang refused the call: {reason.get('message')}",
            kind=str(reason.get("err_type") or reason["status_code"]),
        )


def _succeeded(operation: str, result: Mapping[str, Any]) -> None:
    if not result["success"]:
        raise EngineRefused(
            f"SGLang reports that {operation} failed:"
            f" {result['message'] or 'without a reason (usually calls are running)'}"
        )
