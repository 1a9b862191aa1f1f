"""Records of what the conformance driver requests from an engine. They can cross a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rollproof.core.engine_contract import SamplingOption, StreamMode
from rollproof.core.records import Scalar

__all__ = ["EngineSettings", "Piece", "Query", "Watch", "WeightUpdate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How an engine is started; ``None`` leaves an option to the engine."""

    model: Path
    """The folder of a checkpoint."""
    version: str = "A"
    """The name of its weights."""
    label: str = "w0"
    """The label that the engine shows for them at first."""
    dtype: str = "float32"
    """Element type of the forward."""
    max_length: int = 256
    """Tokens of prompt and response that a call may have."""
    max_batch: int = 8
    """Calls that run at the same time."""
    prefill_chunk: int | None = 32
    """Tokens of prompt that one step computes."""
    kv_tokens: int | None = None
    """Capacity of the KV cache, of each kind of attention if layers have several."""
    prefix_cache: bool = True
    routes: bool = True
    logprobs_mode: str | None = None
    seed: int = 0
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    """Other options, by the engine's own names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """One call of an engine."""

    handle: str
    """The engine's own name of the call, for ``abort``. No handle is a prefix of another."""
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    seed: int | None = None
    """Seed of this call; ``None``: the engine's."""
    samples: int = 1
    """Number of continuations."""
    want_routes: bool = True
    want_logprobs: bool = True
    routes_start: int | None = None
    """Request only rows from that position on; ``None``: all."""
    stream: StreamMode = StreamMode.CUMULATIVE
    ignore_end: bool = True
    """Ignore the model's own end tokens: the call ends when its budget is used up."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the call. Never set together with ``ignore_end``, which switches off
    both in SGLang."""
    stop: tuple[str, ...] = ()
    """Strings that end the call."""
    sampling: Mapping[SamplingOption, float] = field(default_factory=dict)
    """Further sampling parameters, of those that the engine's terms declare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a streamed reply as the engine sent it."""

    token_ids: tuple[int, ...]
    """Those of the chunk: all so far, or the new ones, depending on the stream's mode."""
    sampled: int
    """All tokens so far."""
    rows: int | None = None
    """Route rows that came with it; ``None``: none."""
    finished: bool = False
    sample: int = 0
    """Index of the continuation."""


Watch: TypeAlias = "Callable[[Piece], None]"
"""Called with every piece of a reply, as soon as the engine has sent it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """New weights for an engine."""

    path: Path
    """The folder of their checkpoint."""
    version: str
    """The name of the weights."""
    label: str
    """The label that the engine shows for them."""
    identity: bool = False
    """Whether the engine has these weights already."""
    clear_cache: bool = True
    """Whether no KV of older weights may be used afterwards."""
