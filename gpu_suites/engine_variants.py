"""Engines: released engines on a GPU, each in the settings that change how it computes or
schedules, as targets of conformance.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.version import Version

from rollproof.core.engine_protocol import EngineSettings
from rollproof.core.records import Scalar
from rollproof.core.subjects import EngineSubject
from rollproof.engines.engine_targets import REAL, EngineTarget, engine_target
from rollproof.engines.experiments import Setting
from rollproof.errors import UsageError
from rollproof.fakes.tiny_models import make_checkpoint
from rollproof.gpu_suites.requirements import installed, interpreter

__all__ = [
    "KNOWN",
    "KV_TOKENS",
    "NO_FLOAT32",
    "PARALLEL",
    "VARIANTS",
    "Known",
    "Variant",
    "flavour_of",
    "gap_engine",
    "gpu_target",
    "known_of",
    "on_gpu",
    "surroundings",
]

_FLAVOURS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "vllm": (("0.30", "vllm-0.26"),),
    "sglang": (("0.5.19", "sglang-0.5.17"),),
}
"""For each engine, (first release that is otherwise, flavour of those before it), ascending; later
ones have the engine's own name.
"""

_SURROUNDINGS: Mapping[str, Mapping[str, str]] = {
    # FlashInfer is one more package that not every host has, and whose samplers are not what is
    # judged here of several GPUs, plain NCCL: symmetric memory with multicast is not everyone's to
    # use
    "vllm": {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    },
    "sglang": {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"},
}
_IEEE = {"TRITON_F32_DEFAULT": "ieee", "NVIDIA_TF32_OVERRIDE": "0"}
"""float32 as a CPU has it: Triton's dot products round their operands to 10 bits (TF32) unless told
otherwise.
"""

NO_FLOAT32: Mapping[str, str] = MappingProxyType(
    {
        "sglang": (
            "SGLang's kernels for CUDA have no float32: rmsnorm of sglang-kernel 0.4.5 'failed to"
            " dispatch data type Float'"
        )
    }
)
"""Engines that cannot compute in float32 on a GPU, and why."""

_HEADS: Mapping[str, Any] = MappingProxyType({"head_dim": 64})
"""The tiny model of the CPU runs, with heads that kernels for GPUs take (SGLang's fused rotary
positions refuse 32).
"""

_ROOM: Mapping[str, Scalar] = MappingProxyType(
    {"gpu_memory_utilization": 0.12, "kv_cache_memory_bytes": 4 << 30}
)
"""A share of the card, and KV that is not measured: vLLM's profiling raises where another process
gives memory back meanwhile.
"""

_BASE: Mapping[str, Mapping[str, Scalar]] = {
    "vllm": {
        "load": "reload",
        "attention_backend": "TRITON_ATTN",
        "moe_backend": "triton",
        **_ROOM,
    },
    "sglang": {"device": "cuda", "mem_fraction_static": 0.5},
}
"""What an engine is started with on every GPU, beside what the CPU runs have: weights are really
loaded anew, and KV_TOKENS are kept.
"""
KV_TOKENS = 65536
"""Tokens of KV where a setting does not name fewer: engines would take all memory that they are let
have.
"""


_NGRAM = (
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,'
    ' "prompt_lookup_min": 1}'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """How an engine is set. ``extra`` are options by engine: an engine that is not among its keys
    has no such setting.

    ``dtype`` is that of engines that have it on a GPU (``dtype_of``). ``full``: it is run with
    ``--rollproof-full`` only.
    """

    name: str
    about: str
    extra: Mapping[str, Mapping[str, Scalar]] = field(
        default_factory=lambda: {"vllm": {}, "sglang": {}}
    )
    dtype: str = "float32"
    prefix_cache: bool = True
    full: bool = True

    def dtype_of(self, engine: str) -> str:
        """The dtype in which the engine runs: where it has no float32 on a GPU, bfloat16."""
        return "bfloat16" if self.dtype == "float32" and engine in NO_FLOAT32 else self.dtype

    def exact(self, engine: str) -> bool:
        """Whether the engine's values may be held against an independent forward in float32."""
        return self.dtype_of(engine) == "float32"


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        one.name: one
        for one in (
            Variant(name="eager", about="no graphs; what the CPU runs judge, unchanged"),
            Variant(
                name="graphs",
                full=False,
                about="CUDA graphs, and in vLLM compiled code",
                extra={
                    "vllm": {"enforce_eager": False, "max_cudagraph_capture_size": 8},
                    "sglang": {"disable_cuda_graph": False, "cuda_graph_max_bs_decode": 8},
                },
            ),
            Variant(
                name="no-prefix-cache", about="nothing is shared between calls", prefix_cache=False
            ),
            Variant(
                name="no-overlap",
                about="the next step is scheduled when the last one is done",
                extra={
                    "vllm": {"async_scheduling": False},
                    "sglang": {"disable_overlap_schedule": True},
                },
            ),
            Variant(
                name="bf16",
                about="bfloat16, as engines are used",
                dtype="bfloat16",
                extra={"vllm": {}},
            ),
            Variant(name="fp16", about="float16", dtype="float16"),
            Variant(
                name="flash",
                about="FlashAttention (3 on a Hopper card) in the place of Triton's attention",
                dtype="bfloat16",
                extra={"vllm": {"attention_backend": "FLASH_ATTN"}},
            ),
            Variant(
                name="ngram",
                about="speculative decoding: tokens proposed from what was said before",
                extra={"vllm": {"speculative_config": _NGRAM}},
            ),
        )
    }
)
"""Settings by name."""

# an all-reduce of the engine's own sums in another order than NCCL's
_NCCL: Mapping[str, Scalar] = {"disable_custom_all_reduce": True}
PARALLEL: Mapping[str, Mapping[str, Callable[[int], Mapping[str, Scalar]]]] = MappingProxyType(
    {
        "vllm": {
            "tensors": lambda gpus: {"tensor_parallel_size": gpus, **_NCCL},
            "experts": lambda gpus: {
                "tensor_parallel_size": gpus,
                "enable_expert_parallel": True,
                **_NCCL,
            },
        },
        "sglang": {
            "tensors": lambda gpus: {"tp_size": gpus, **_NCCL},
            "experts": lambda gpus: {"tp_size": gpus, "ep_size": gpus, **_NCCL},
        },
    }
)
"""How an engine is divided over a number of GPUs: options by engine, and by what is divided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What is known to fail in one experiment on a release: ``checks``, and why.

    ``ends`` says that the engine does not survive it, ``certain`` that it fails every time.
    """

    checks: tuple[str, ...]
    reason: str
    ends: bool = False
    certain: bool = True


_BEYOND = (
    "vLLM 0.26 asserts routed_experts_prompt_start < len(prompt) in its scheduler: one such call"
    " ends the engine (docs/track-record.md)"
)
_WAITING = (
    "SGLang 0.5.17 raises for a call that is aborted while it waits for the end of a pause"
    " (docs/track-record.md)"
)
KNOWN: Mapping[str, Mapping[str, Known]] = MappingProxyType(
    {
        "vllm-0.26": {
            "offset": Known(checks=("engine.answers",), reason=_BEYOND, ends=True),
            "refusals": Known(checks=("engine.answers",), reason=_BEYOND, ends=True),
            "streams": Known(
                checks=("engine.parts", "engine.opt-in"),
                reason=(
                    "vLLM 0.26 forgets the routes where it merges parts of a delta stream that came"
                    " fast (docs/track-record.md)"
                ),
                certain=False,
            ),
        },
        "sglang-0.5.17": {
            "refusals": Known(
                checks=("stitch.logprobs-length",),
                reason=(
                    "SGLang returns a logprob beside no token to a call without a budget"
                    " (docs/track-record.md)"
                ),
            ),
            "update-retract-cleared": Known(
                checks=("engine.answers",),
                reason=(
                    "SGLang 0.5.17 empties no cache while retracted calls wait in its queue"
                    " (docs/track-record.md)"
                ),
            ),
            "parked": Known(
                checks=("engine.refusals", "engine.paused-calls"),
                reason=_WAITING,
            ),
            "load": Known(
                checks=("engine.refusals",),
                reason=_WAITING + ": a client that resumes during a pause loses its call",
                certain=False,
            ),
        },
    }
)
"""What is known to fail: by flavour and experiment. Each is reproduced by hand."""


def known_of(engine: str) -> Mapping[str, Known]:
    """What is known to fail in the release of an engine that is installed, by experiment."""
    return KNOWN.get(flavour_of(engine, installed(engine).version or "0"), {})


def flavour_of(engine: str, version: str) -> str:
    """The declared conventions of a release."""
    for first, flavour in _FLAVOURS.get(engine, ()):
        if Version(version) < Version(first):
            return flavour
    return engine


def surroundings(engine: str, dtype: str) -> dict[str, str]:
    """Environment variables for an engine's process, where the caller has not set them."""
    wanted = {**_SURROUNDINGS.get(engine, {}), **(_IEEE if dtype == "float32" else {})}
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextmanager
def on_gpu(
    engine: str, dtype: str, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """While inside, processes that are started have the ``surroundings``, and ``more`` of them."""
    added = {**surroundings(engine, dtype), **more}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def gap_engine(engine: str, settings: EngineSettings) -> EngineSubject:
    """The adapter of an engine for rollouts whose gap is measured: ``settings`` with what every run
    on a GPU has.
    """
    module, _, attribute = REAL[engine].adapter.partition(":")
    extra: dict[str, Scalar] = {**_BASE[engine], **_own(engine), **settings.extra}
    own = replace(settings, kv_tokens=settings.kv_tokens or KV_TOKENS, extra=extra)
    made: EngineSubject = getattr(importlib.import_module(module), attribute)(own)
    return made


def _own(engine: str) -> dict[str, Scalar]:
    return {
        "python": interpreter(engine),
        "flavour": flavour_of(engine, installed(engine).version or "0"),
    }


def gpu_target(
    engine: str, variant: str, folder: Path, *, model: str | Path | None = None, seed: int = 0
) -> EngineTarget:
    """The engine in that setting, with the experiments, models and oracle of its CPU run.
    ``folder`` takes the models.

    Raises ``UsageError`` for a setting that the engine does not have, ``EngineStartError`` where it
    is not installed.
    """
    chosen = VARIANTS.get(variant)
    if chosen is None or engine not in chosen.extra:
        known = [one.name for one in VARIANTS.values() if engine in one.extra]
        raise UsageError(f"{engine} has no setting {variant!r} on a GPU; choose among {known}.")
    if model is None:
        model = make_checkpoint(folder / "A", "qwen3_moe", seed=seed, **_HEADS)
    whole = engine_target(engine, model=model, folder=folder, seed=seed)
    own: dict[str, Scalar] = {
        **_BASE[engine],
        **_own(engine),
        **chosen.extra[engine],
    }
    settings: dict[Setting, EngineSettings] = {
        setting: replace(
            one,
            dtype=chosen.dtype_of(engine),
            prefix_cache=chosen.prefix_cache,
            kv_tokens=one.kv_tokens or KV_TOKENS,
            extra={**one.extra, **own},
        )
        for setting, one in whole.settings.items()
    }
    oracle = whole.oracle if chosen.exact(engine) else (lambda _engine, _checkpoints: None)
    return replace(
        whole,
        name=f"{engine}-{variant}",
        settings=settings,
        oracle=oracle,
        lull=0.2,
        deadline=120.0,
        ahead=True,
    )
