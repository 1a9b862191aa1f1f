"""Asks: what the conformance driver asks of an engine, as records that can cross a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rollproof.core.engine_contract import StreamMode
from rollproof.core.records import Scalar

__all__ = ["EngineSettings", "Piece", "Query", "Watch", "WeightUpdate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How an engine is started; ``None`` means: as the engine does by itself.

    ``model`` is the folder of a checkpoint, ``version`` the name of its weights and ``label`` the
    label that the engine shows for them at first. ``dtype`` is that of the forward, ``max_length``
    the tokens of prompt and response that a call may have, ``max_batch`` the calls that run at
    once, ``prefill_chunk`` the tokens of prompt computed in one step, ``kv_tokens`` the capacity of
    the KV cache (of each kind of attention, where layers have several). ``routes`` and
    ``logprobs_mode`` are engine options; ``extra`` holds others by the engine's own names.
    """

    model: Path
    version: str = "A"
    label: str = "w0"
    dtype: str = "float32"
    max_length: int = 256
    max_batch: int = 8
    prefill_chunk: int | None = 32
    kv_tokens: int | None = None
    prefix_cache: bool = True
    routes: bool = True
    logprobs_mode: str | None = None
    seed: int = 0
    extra: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """One call of an engine. ``handle`` is the engine's own name of it, for ``abort``; no handle is
    the beginning of another.

    ``temperature`` 0 is greedy. ``samples`` asks for n continuations; ``seed`` is the request's own
    (``None``: the engine's). ``routes_start`` asks for rows from that position on, ``None`` asks
    for nothing of the kind. The model's end-of-sequence token is ignored: a call ends by its
    budget.
    """

    handle: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    samples: int = 1
    want_routes: bool = True
    want_logprobs: bool = True
    routes_start: int | None = None
    stream: StreamMode = StreamMode.CUMULATIVE


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a streamed reply as the engine sent it.

    ``token_ids`` are those of the chunk (all so far, or the new ones: as its mode says),
    ``sampled`` counts all tokens so far, ``rows`` the route rows that came with it (``None``:
    none). ``sample`` is the index of the continuation.
    """

    token_ids: tuple[int, ...]
    sampled: int
    rows: int | None = None
    finished: bool = False
    sample: int = 0


Watch: TypeAlias = "Callable[[Piece], None]"
"""Called for every piece of a reply, as soon as the engine sent it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """The weights become those of the checkpoint folder ``path``, named ``version``, shown as
    ``label``.

    ``identity`` says that the engine has these weights already. ``clear_cache`` asks that no KV of
    older weights is used after it.
    """

    path: Path
    version: str
    label: str
    identity: bool = False
    clear_cache: bool = True
