"""Backing: the fake engine behind an HTTP face, its weights by name, and the trace of what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollproof.case import EngineOptions, Model
from rollproof.contract import KvPolicy
from rollproof.fakes.batching import EngineHooks
from rollproof.fakes.coded import CodedPolicy
from rollproof.fakes.engine import MAX_LENGTH, FakeEngine
from rollproof.fakes.flavours import Flavour, engine_contract, flavour_named
from rollproof.records import Version
from rollproof.trace import Header, Recorder, TraceSink, Weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollproof.fakes.calls import EngineCall

__all__ = ["Backing", "Sampled", "ServeOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What a served engine is: ``flavour``, the ``model`` it stands for, ``engine`` options (times in real seconds), the first ``label``.

    ``max_length`` bounds prompt and response, ``max_body`` a request's bytes. ``incremental`` streams only what is new in each event;
    without a ``tokenizer`` (SGLang's skip_tokenizer_init) replies have no text.
    """

    flavour: str
    model: Model = field(default_factory=Model)
    engine: EngineOptions = field(default_factory=lambda: EngineOptions(max_batch=256, step=0.001, prefix_cache=True))
    label: str = "default"
    seed: int = 0
    max_length: int = MAX_LENGTH
    max_body: int = 64 << 20
    incremental: bool = False
    tokenizer: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a call has sampled so far, and the key of the coded policy under which the last token was."""

    tokens: tuple[int, ...]
    key: Version


class _Watching(EngineHooks):
    """Tells those who stream of each token of their call."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: dict[str, asyncio.Queue[Sampled]] = {}

    def watches(self, request_id: str) -> bool:
        return request_id in self.queues

    def sampled(self, call: EngineCall) -> bool:
        queue = self.queues.get(call.rid)
        if queue is not None:
            queue.put_nowait(Sampled(tokens=tuple(call.ids[call.prompt_len :]), key=call.key))
        return False


class Backing:
    """One engine, made inside a running event loop. ``sinks`` are handed every event as it happens; ``keep`` holds them in memory, too.

    ``behind`` is an engine that is there already, with its recorder (one of a fleet): its calls cannot be watched token by token.
    """

    def __init__(
        self,
        options: ServeOptions,
        sinks: Iterable[TraceSink] = (),
        *,
        keep: bool = True,
        behind: tuple[FakeEngine, Recorder] | None = None,
    ) -> None:
        self.options = options
        self.flavour: Flavour = flavour_named(options.flavour)
        self._hooks = _Watching()
        self._versions: dict[str, int] = {}
        self._newest = 0
        self.served: int = 0
        self.policy: CodedPolicy
        self.recorder: Recorder
        self.engine: FakeEngine
        if behind is not None:
            self.engine, self.recorder = behind
            self.policy = self.engine.policy
            return
        self.policy = CodedPolicy.from_model(options.model, options.seed)
        self.recorder = Recorder(asyncio.get_running_loop().time, sinks, keep=keep)
        self.engine = FakeEngine(
            "s0",
            self.policy,
            self.flavour,
            options.engine,
            self.recorder,
            version=0,
            label=options.label,
            hooks=self._hooks,
            max_length=options.max_length,
        )
        self.recorder.record(Weights(server_id="s0", version=0, label=options.label, flushed=True))

    @staticmethod
    def header(options: ServeOptions) -> Header:
        """What the trace of such an engine says about itself."""
        contract = engine_contract(flavour_named(options.flavour), options.model, KvPolicy.KEEP)
        policy = CodedPolicy.from_model(options.model, options.seed)
        return Header(subject=f"served {options.flavour}", contract=contract, engine=contract, seed=options.seed, coding=policy.to_dict())

    def version_of(self, name: str | None) -> int:
        """The weights that ``name`` (a path) stands for: the same name is the same weights; without one, new weights each time."""
        if name is not None and name in self._versions:
            return self._versions[name]
        self._newest += 1
        if name is not None:
            self._versions[name] = self._newest
        return self._newest

    async def load(self, name: str | None, label: Version, *, flush: bool) -> None:
        """Take the weights ``name`` under ``label`` (``None``: the label stays as it was), and drop shared KV where ``flush`` says so."""
        version = self.version_of(name)
        await self.engine.load(version, self.engine.label if label is None else label, identity=version == self.engine.version)
        if flush:
            self.engine.reset_prefix_cache()

    @contextmanager
    def watched(self, rid: str) -> Iterator[asyncio.Queue[Sampled]]:
        """A queue that is told of the call ``rid`` each time it has sampled a token."""
        queue: asyncio.Queue[Sampled] = asyncio.Queue()
        self._hooks.queues[rid] = queue
        try:
            yield queue
        finally:
            del self._hooks.queues[rid]

    def loads(self) -> Mapping[str, int]:
        """Calls that run and that wait, and tokens in use."""
        calls = self.engine.in_flight
        running = sum(call.running for call in calls)
        return {"running": running, "waiting": len(calls) - running, "tokens": sum(len(call.ids) for call in calls)}
