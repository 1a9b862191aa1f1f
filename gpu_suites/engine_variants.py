"""Released engines on a GPU, in settings that change how they compute or schedule, as targets."""

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
    "KnownFailure",
    "Variant",
    "flavour_of",
    "gap_engine",
    "gpu_target",
    "known_failures_of",
    "on_gpu",
    "surroundings",
]

# For each engine, (first release that differs, flavour of those before it), ascending.
# The flavour of later releases has the engine's name.
_FLAVOURS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "vllm": (("0.30", "vllm-0.26"),),
    "sglang": (("0.5.19", "sglang-0.5.17"),),
}

_SURROUNDINGS: Mapping[str, Mapping[str, str]] = {
    # FlashInfer is one more package that not every host has, and its samplers are not judged here.
    # Several GPUs use plain NCCL: symmetric memory with multicast is not available to everyone.
    "vllm": {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    },
    "sglang": {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"},
}
# float32 as on a CPU: by default Triton's dot products round their operands to 10 bits (TF32)
_IEEE = {"TRITON_F32_DEFAULT": "ieee", "NVIDIA_TF32_OVERRIDE": "0"}

NO_FLOAT32: Mapping[str, str] = MappingProxyType(
    {
        "sglang": (
            "SGLang's kernels for CUDA have no float32: rmsnorm of sglang-kernel 0.4.5 'failed to"
            " dispatch data type Float'"
        )
    }
)
"""Engines that cannot compute in float32 on a GPU, and why."""

# The tiny model of the CPU runs, with heads that GPU kernels accept (SGLang's fused rotary
# positions do not accept 32).
_HEADS: Mapping[str, Any] = MappingProxyType({"head_dim": 64})

# A share of the GPU, and a fixed size of KV: vLLM's profiling raises if another process releases
# memory meanwhile.
_ROOM: Mapping[str, Scalar] = MappingProxyType(
    {"gpu_memory_utilization": 0.12, "kv_cache_memory_bytes": 4 << 30}
)

# Options of an engine on every GPU, in addition to those of the CPU runs.
# Weights are really loaded again, and KV has room for KV_TOKENS.
_BASE: Mapping[str, Mapping[str, Scalar]] = {
    "vllm": {
        "load": "reload",
        "attention_backend": "TRITON_ATTN",
        "moe_backend": "triton",
        **_ROOM,
    },
    "sglang": {"device": "cuda", "mem_fraction_static": 0.5},
}
KV_TOKENS = 65536
"""Tokens of KV unless a setting names fewer: engines would take all memory that they can."""


_NGRAM = (
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,'
    ' "prompt_lookup_min": 1}'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A setting of an engine.

    Attributes:
        name: its name.
        about: what it is.
        extra: options by engine; other engines do not have the setting.
        dtype: the dtype of engines that have it on a GPU (``dtype_of``).
        prefix_cache: whether calls share prefixes.
        full: whether it is run with ``--rollproof-full`` only.
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
        """Return the dtype in which the engine runs: bfloat16 if it has no float32 on a GPU."""
        return "bfloat16" if self.dtype == "float32" and engine in NO_FLOAT32 else self.dtype

    def exact(self, engine: str) -> bool:
        """Whether the engine's values can be compared with an independent forward in float32."""
        return self.dtype_of(engine) == "float32"


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        variant.name: variant
        for variant in (
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
                about="speculative decoding: tokens proposed from the context",
                extra={"vllm": {"speculative_config": _NGRAM}},
            ),
        )
    }
)
"""Settings by name."""

# the engine's own all-reduce sums in another order than NCCL's
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
class KnownFailure:
    """What is known to fail in one experiment on a release.

    Attributes:
        checks: the checks that fail.
        reason: why.
        ends: whether the engine does not survive the experiment.
        certain: whether it fails every time.
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
KNOWN: Mapping[str, Mapping[str, KnownFailure]] = MappingProxyType(
    {
        "vllm-0.26": {
            "offset": KnownFailure(checks=("engine.answers",), reason=_BEYOND, ends=True),
            "refusals": KnownFailure(checks=("engine.answers",), reason=_BEYOND, ends=True),
            "streams": KnownFailure(
                checks=("engine.parts", "engine.opt-in"),
                reason=(
                    "vLLM 0.26 forgets the routes where it merges parts of a delta stream that came"
                    " fast (docs/track-record.md)"
                ),
                certain=False,
            ),
        },
        "sglang-0.5.17": {
            "refusals": KnownFailure(
                checks=("stitch.logprobs-length",),
                reason=(
                    "SGLang returns a logprob without a token to a call without a budget"
                    " (docs/track-record.md)"
                ),
            ),
            "update-retract-cleared": KnownFailure(
                checks=("engine.answers",),
                reason=(
                    "SGLang 0.5.17 empties no cache while retracted calls wait in its queue"
                    " (docs/track-record.md)"
                ),
            ),
            "parked": KnownFailure(
                checks=("engine.refusals", "engine.paused-calls"),
                reason=_WAITING,
            ),
            "load": KnownFailure(
                checks=("engine.refusals",),
                reason=_WAITING + ": a client that resumes during a pause loses its call",
                certain=False,
            ),
        },
    }
)
"""Known failures by flavour and experiment. Each was reproduced by hand."""


def known_failures_of(engine: str) -> Mapping[str, KnownFailure]:
    """Return the known failures of the installed release of an engine, by experiment."""
    return KNOWN.get(flavour_of(engine, installed(engine).version or "0"), {})


def flavour_of(engine: str, version: str) -> str:
    """Return the flavour of a release: its declared conventions."""
    for first, flavour in _FLAVOURS.get(engine, ()):
        if Version(version) < Version(first):
            return flavour
    return engine


def surroundings(engine: str, dtype: str) -> dict[str, str]:
    """Return environment variables for an engine's process that the caller has not set."""
    variables = {**_SURROUNDINGS.get(engine, {}), **(_IEEE if dtype == "float32" else {})}
    return {name: value for name, value in variables.items() if name not in os.environ}


@contextmanager
def on_gpu(
    engine: str, dtype: str, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """Give processes that start within the context the ``surroundings``, and ``more``."""
    added = {**surroundings(engine, dtype), **more}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def gap_engine(engine: str, settings: EngineSettings) -> EngineSubject:
    """Return the adapter of an engine for the gap: ``settings`` with those of every GPU run."""
    module, _, attribute = REAL[engine].adapter.partition(":")
    extra: dict[str, Scalar] = {**_BASE[engine], **_own(engine), **settings.extra}
    own = replace(settings, kv_tokens=settings.kv_tokens or KV_TOKENS, extra=extra)
    # an adapter needs nothing of its engine, which may be in another interpreter
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
    """Return the engine in a setting, with the experiments, models and oracle of its CPU run.

    The models are made in ``folder``. Raises ``UsageError`` for a setting that the engine does not
    have, ``EngineStartError`` if it is not installed.
    """
    chosen = VARIANTS.get(variant)
    if chosen is None or engine not in chosen.extra:
        names = [other.name for other in VARIANTS.values() if engine in other.extra]
        raise UsageError(f"{engine} has no setting {variant!r} on a GPU; choose among {names}.")
    if model is None:
        model = make_checkpoint(folder / "A", "qwen3_moe", seed=seed, **_HEADS)
    target = engine_target(engine, model=model, folder=folder, seed=seed)
    own: dict[str, Scalar] = {
        **_BASE[engine],
        **_own(engine),
        **chosen.extra[engine],
    }
    settings: dict[Setting, EngineSettings] = {
        setting: replace(
            base,
            dtype=chosen.dtype_of(engine),
            prefix_cache=chosen.prefix_cache,
            kv_tokens=base.kv_tokens or KV_TOKENS,
            extra={**base.extra, **own},
        )
        for setting, base in target.settings.items()
    }
    # in half precision an independent forward differs by rounding, and no check compares with it
    oracle = target.oracle if chosen.exact(engine) else (lambda _engine, _checkpoints: None)
    return replace(
        target,
        name=f"{engine}-{variant}",
        settings=settings,
        oracle=oracle,
        lull=0.2,
        deadline=120.0,
        ahead=True,
    )
