"""The program that runs a vLLM engine: ``python -m rollproof.engines.vllm.vllm_host FD``.

vLLM spawns its engine core, and multiprocessing runs the main module again in it before it
unpickles its work: the stand-ins for a CPU are installed at the top of this module, so that they
are in place in both processes before vLLM is.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rollproof.engines.host.host_server import Host, run_host
from rollproof.engines.vllm import vllm_cpu
from rollproof.errors import EngineStartError

__all__ = ["VllmHost", "main"]

if __name__ == "__mp_main__":  # in a process that vLLM spawned
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if vllm_cpu.is_cpu_build():
        vllm_cpu.install()


def main() -> None:
    """Start the engine that the caller's options describe, and answer until the caller ends it."""
    run_host(lambda options: (OfflineHost if options["offline"] else VllmHost)(options))


class VllmHost(Host):
    """``vllm.v1.engine.async_llm.AsyncLLM`` and the operations on it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        arguments = _arguments(options)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def do_generate(
        self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any], stream: str
    ) -> AsyncIterator[dict[str, Any]]:
        """Run one call; yield every output of vLLM as plain values."""
        async for output in self.engine.generate(
            {"prompt_token_ids": prompt_ids}, _sampling(sampling, stream), request_id
        ):
            yield _plain_output(output)

    async def do_abort(self, request_id: str) -> None:
        """``AsyncLLM.abort``."""
        await self.engine.abort(request_id)

    async def do_pause(self, mode: str, clear_cache: bool) -> None:
        """``AsyncLLM.pause_generation``."""
        await self.engine.pause_generation(mode=mode, clear_cache=clear_cache)

    async def do_resume(self) -> None:
        """``AsyncLLM.resume_generation``."""
        await self.engine.resume_generation()

    async def do_load(self, path: str) -> None:
        """Load a checkpoint's weights in place, on every worker."""
        await self.engine.collective_rpc("reload_weights", kwargs={"weights_path": path})

    async def do_edit(self, before: str, after: str) -> list[str]:
        """Write the differences of two checkpoints into the model, on every worker."""
        names: list[str] = (await self.engine.collective_rpc("edit_weights", args=(before, after)))[
            0
        ]
        return names

    async def do_label(self, label: str) -> None:
        """``AsyncLLM.update_weight_version``."""
        # releases without it (up to 0.26 at least) show no labels
        if hasattr(self.engine, "update_weight_version"):
            await self.engine.update_weight_version(label)

    async def do_clear(self) -> bool:
        """``AsyncLLM.reset_prefix_cache``."""
        return bool(await self.engine.reset_prefix_cache())

    async def do_counters(self) -> dict[str, float]:
        """Return counters of vLLM, summed over engines."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return _counted(get_metrics_snapshot())

    async def do_stop(self) -> None:
        """Shut the engine core down, then end."""
        await asyncio.to_thread(self.engine.shutdown)
        await super().do_stop()


class OfflineHost(Host):
    """``vllm.LLM`` and the operations on it. Calls that arrive together are one batch of
    ``LLM.generate``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        # the engine runs in this process: one to start, and its scheduler sees a whole batch at
        # once
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        arguments = _arguments(options)
        from vllm.entrypoints.llm import LLM

        self.llm: Any = LLM(**arguments)
        self._busy = asyncio.Lock()
        self._waiting: list[tuple[list[int], Any, asyncio.Future[Any]]] = []

    async def do_generate(
        self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any], stream: str
    ) -> dict[str, Any]:
        """Run one call, in a batch with those that arrive at the same time."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt_ids, _sampling(sampling, stream), done))
        await asyncio.sleep(_TOGETHER)
        async with self._busy:
            batch, self._waiting = self._waiting, []
            if batch:
                await asyncio.to_thread(self._run, batch)
        return _plain_output(await done)

    async def do_load(self, path: str) -> None:
        """Load a checkpoint's weights in place."""
        async with self._busy:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    async def do_edit(self, before: str, after: str) -> list[str]:
        """Write the differences of two checkpoints into the model."""
        async with self._busy:
            names: list[str] = self.llm.collective_rpc("edit_weights", args=(before, after))[0]
        return names

    async def do_label(self, label: str) -> None:
        """``LLMEngine.set_weight_version``, where the release has labels."""
        if hasattr(self.llm.llm_engine, "set_weight_version"):
            self.llm.llm_engine.set_weight_version(label)

    async def do_clear(self) -> bool:
        """``LLM.reset_prefix_cache``."""
        return bool(self.llm.reset_prefix_cache())

    async def do_counters(self) -> dict[str, float]:
        """Return counters of vLLM."""
        return _counted(self.llm.get_metrics())

    def _run(self, batch: list[tuple[list[int], Any, asyncio.Future[Any]]]) -> None:
        """Run one ``LLM.generate``."""
        loop = batch[0][2].get_loop()

        def settle(done: asyncio.Future[Any], output: Any, error: Exception | None) -> None:
            loop.call_soon_threadsafe(
                lambda: done.set_exception(error) if error is not None else done.set_result(output)
            )

        def generate(part: list[tuple[list[int], Any, asyncio.Future[Any]]]) -> list[Any]:
            prompts = [{"prompt_token_ids": ids} for ids, _, _ in part]
            outputs: list[Any] = self.llm.generate(
                prompts, [params for _, params, _ in part], use_tqdm=False
            )
            return outputs

        try:
            for (_, _, done), output in zip(batch, generate(batch), strict=True):
                settle(done, output, None)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the reply to the call that caused it
            if len(batch) == 1:
                settle(batch[0][2], None, error)
                return
            # vLLM refuses a batch as a whole: run its calls one by one, so that only the culprit is
            # refused
            for call in batch:
                self._run([call])


_TOGETHER = 0.1
"""Seconds within which calls that were sent at the same time arrive."""


def _arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a vLLM engine on this device.

    Raises ``EngineStartError`` if vLLM is missing or does not fit.
    """
    if vllm_cpu.is_cpu_build():
        vllm_cpu.install()
        # then the worker lives in the core's process (vllm/platforms/cpu.py): each further process
        # would import for half a minute
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        raise EngineStartError(
            f"vLLM cannot be imported ({error}). `nox -s engines` installs it into a virtual"
            " environment of its own."
        ) from error
    device = "cpu" if current_platform.is_cpu() else "cuda"
    arguments = {**options["engine"], **options[device]}
    # settings are scalars; what vLLM has as a mapping (speculative_config) comes as JSON, as on its
    # command line
    engine = {
        name: json.loads(value) if isinstance(value, str) and value.startswith("{") else value
        for name, value in arguments.items()
    }
    return {**engine, "worker_extension_cls": "rollproof.engines.vllm.vllm_worker.WeightEditor"}


def _sampling(sampling: Mapping[str, Any], stream: str) -> Any:
    """Return ``SamplingParams``; without ``ignore_eos`` in them the call ends by its budget."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kinds = {
        "final": RequestOutputKind.FINAL_ONLY,
        "cumulative": RequestOutputKind.CUMULATIVE,
        "delta": RequestOutputKind.DELTA,
    }
    return SamplingParams(
        **{"ignore_eos": True, **sampling}, detokenize=False, output_kind=kinds[stream]
    )


def _counted(metrics: Any) -> dict[str, float]:
    names = {
        "vllm:num_preemptions": "preemptions",
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
    }
    counts = dict.fromkeys(names.values(), 0.0)
    for metric in metrics:
        if metric.name in names:
            counts[names[metric.name]] += float(getattr(metric, "value", 0))
    return counts


def _plain_output(output: Any) -> dict[str, Any]:
    """Return a ``RequestOutput`` as plain values."""
    return {
        "cached": output.num_cached_tokens,
        "finished": output.finished,
        "outputs": [_plain_sample(sample) for sample in output.outputs],
    }


def _plain_sample(output: Any) -> dict[str, Any]:
    """Return what a caller of vLLM sees of a ``CompletionOutput``."""
    routes = output.routed_experts
    spans = getattr(output, "weight_versions", None)  # not in releases up to 0.26 at least
    return {
        "index": output.index,
        "token_ids": list(output.token_ids),
        "logprobs": (
            None
            if output.logprobs is None
            else [
                _of_token(entry, token)
                for entry, token in zip(output.logprobs, output.token_ids, strict=False)
            ]
        ),
        "routes": (
            None
            if routes is None
            else {
                "dtype": str(routes.dtype),
                "shape": list(routes.shape),
                "data": routes.tobytes().hex(),
            }
        ),
        "reason": output.finish_reason,
        "spans": (
            None if spans is None else [[span.version, span.start, span.end] for span in spans]
        ),
    }


def _of_token(entry: Any, token: int) -> float | None:
    """Return the logprob of the sampled token; ``None`` if the entry has others only."""
    logprob = entry.get(token)
    return None if logprob is None else float(logprob.logprob)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
