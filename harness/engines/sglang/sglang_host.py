"""The program that runs an SGLang engine: ``python -m rollproof.engines.sglang.sglang_host FD``.

SGLang spawns its scheduler and detokenizer, and multiprocessing runs the main module again in each
of them before it unpickles their work. So the stand-ins are installed at the end of this module:
they are in place in every process before SGLang.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from rollproof.engines.host.host_server import Host, run_host
from rollproof.errors import EngineStartError

__all__ = ["STAND_INS", "SglangHost"]

STAND_INS = "ROLLPROOF_SGLANG_STAND_INS"
"""Environment variable that tells SGLang's children to install the stand-ins of
``rollproof.engines.sglang.sglang_cpu``.
"""


class SglangHost(Host):
    """An ``sglang.Engine`` and the operations on it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        _import_only(tuple(options.get("architectures", ())))
        device = _device(options.get("device"))
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.managers import io_struct

        self.messages: Any = io_struct
        engine = _without_detokenizer(Engine) if device == "cpu" else Engine
        self.engine: Any = engine(**{**options["engine"], **options[device], "device": device})
        self.manager: Any = self.engine.tokenizer_manager

    async def do_generate(self, **arguments: Any) -> AsyncIterator[Any]:
        """Run ``Engine.async_generate``; yield its chunks with ``stream``, else its one reply."""
        reply = await self.engine.async_generate(**arguments)
        if not arguments.get("stream"):
            yield reply
            return
        async for chunk in reply:
            yield chunk

    async def do_abort(self, rid: str) -> None:
        """Abort the requests with an id that begins with ``rid``; all of them for ``"*"``."""
        self.manager.abort_request(rid="" if rid == "*" else rid, abort_all=rid == "*")

    async def do_pause(self, mode: str) -> None:
        """Pause; ``mode`` is SGLang's own name of it."""
        await self.manager.pause_generation(self.messages.PauseGenerationReqInput(mode=mode))

    async def do_resume(self) -> None:
        """Continue."""
        request = self.messages.ContinueGenerationReqInput
        # since 0.5.12 it empties the cache of CUDA's allocator by default, and there may be no CUDA
        has_field = "torch_empty_cache" in getattr(request, "__annotations__", {})
        await self.manager.continue_generation(
            request(torch_empty_cache=False) if has_field else request()
        )

    async def do_flush(self) -> dict[str, Any]:
        """Empty the radix cache; SGLang refuses while calls run."""
        result = await self.manager.flush_cache()
        return {"success": bool(result.success), "message": str(getattr(result, "message", ""))}

    async def do_load_disk(self, path: str, label: str | None, flush: bool) -> dict[str, Any]:
        """``update_weights_from_disk``."""
        request = self.messages.UpdateWeightFromDiskReqInput(
            model_path=path, flush_cache=flush, weight_version=label
        )
        success, message, *_ = await self.manager.update_weights_from_disk(request, None)
        return {"success": bool(success), "message": str(message)}

    async def do_load_tensors(self, path: str, label: str | None, flush: bool) -> dict[str, Any]:
        """``update_weights_from_tensor`` with all tensors of a checkpoint.

        It runs inside an update session if the release has them.
        """
        request = self.messages.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=self.engine._serialize_tensors_per_rank(_tensors(path), None),
            flush_cache=flush,
            weight_version=label,
        )
        begin = getattr(self.messages, "BeginWeightUpdateReqInput", None)
        if begin is not None:
            await self.manager.begin_weight_update(begin())
        try:
            success, message = await self.manager.update_weights_from_tensor(request, None)
        finally:
            if begin is not None:
                await self.manager.end_weight_update(self.messages.EndWeightUpdateReqInput())
        return {"success": bool(success), "message": str(message)}

    async def do_relabel(self, label: str, abort_all: bool) -> None:
        """Publish a label for the same weights."""
        # SGLang's own default of abort_all_requests is true: it would end every call
        request = self.messages.UpdateWeightVersionReqInput(
            new_version=label, abort_all_requests=abort_all
        )
        if abort_all:  # the HTTP server's part of the job (srt/entrypoints/http_server.py)
            self.manager.abort_request(abort_all=True)
        await self.manager.update_weight_version(request)

    async def do_state(self) -> bool:
        """Return when the scheduler has done everything that was sent to it before."""
        return bool(await self.manager.get_internal_state())

    async def do_loads(self) -> dict[str, float]:
        """Count the calls that have no reply yet."""
        return {"held": float(len(self.manager.rid_to_state))}

    async def do_weights(self, name: str, count: int) -> Any:
        """Return the first ``count`` rows of a parameter in the scheduler."""
        return await self.manager.get_weights_by_name(
            self.messages.GetWeightsByNameReqInput(name=name, truncate_size=count), None
        )


def _device(requested: str | None) -> str:
    """Return the device to run on, and prepare this process and its children for it."""
    import torch

    device = requested or ("cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if device == "cpu":
        from rollproof.engines.sglang import sglang_cpu

        os.environ.update({STAND_INS: "1", "SGLANG_USE_CPU_ENGINE": "1"})
        # more threads are no help to a tiny model, and on a busy machine they wait for each other:
        # 5 tokens a second instead of 100
        threads = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
        # compiling the penalties costs a minute on a CPU, and computes the same
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        sglang_cpu.install()
    return device


def _without_detokenizer(engine: Any) -> Any:
    """Return the class with one process less."""
    # with skip_tokenizer_init the scheduler answers the caller directly
    # (srt/managers/scheduler_components/ipc_channels.py), and the detokenizer imports SGLang for
    # nothing: a third of a start on a CPU

    class Engine(engine):  # type: ignore[misc]  # SGLang is not installed where types are checked
        @classmethod
        def _launch_detokenizer_subprocesses(
            cls, *_: Any, **__: Any
        ) -> tuple[list[Any], list[str]]:
            return [], []

    return Engine


def _tensors(path: str) -> list[tuple[str, Any]]:
    from safetensors.torch import load_file

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{path} has no safetensors: an update without tensors would succeed and change"
            " nothing."
        )
    return [item for file in files for item in load_file(file).items()]


def _import_only(architectures: tuple[str, ...]) -> None:
    """Let SGLang import the files of these model classes only; all files if none defines them."""
    # importing all of them takes half of a start on a CPU. SGLANG_DISABLED_MODEL_ARCHS names files
    # to skip (srt/models/registry.py)
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise EngineStartError(
            "SGLang is not installed in the interpreter that should run it. `nox -s engines` makes"
            " an environment that has it."
        )
    files = sorted(Path(package.submodule_search_locations[0], "srt", "models").glob("*.py"))
    definition = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b", re.MULTILINE)
    needed = {
        file.stem
        for file in files
        if architectures and definition.search(file.read_text(encoding="utf-8"))
    }
    if needed:
        os.environ.setdefault(
            "SGLANG_DISABLED_MODEL_ARCHS",
            ",".join(file.stem for file in files if file.stem not in needed),
        )


def _in_its_own_loop(host: Host, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    assert isinstance(host, SglangHost)
    host.engine.loop.run_until_complete(serve())


if os.environ.get(STAND_INS) and __name__ == "__mp_main__":
    from rollproof.engines.sglang import sglang_cpu

    sglang_cpu.install()


if __name__ == "__main__":
    run_host(SglangHost, _in_its_own_loop)
