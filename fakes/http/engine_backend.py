"""Backing: the fake engine behind an HTTP face, its weights by name, and the trace of what it was
asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from random import getrandbits
from typing import Any

from rollproof.core.case import EngineOptions, Model
from rollproof.core.contract import Contract, KvPolicy
from rollproof.core.engine_contract import StreamMode
from rollproof.core.events.rollout import Fault, Weights
from rollproof.core.records import EngineOutput, Version
from rollproof.core.trace import Header, Recorder, TraceSink
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.exceptions import TransferFailed
from rollproof.fakes.engine.fake_engine import MAX_LENGTH, FakeEngine
from rollproof.fakes.engine.flavours import Flavour, engine_contract, flavour_named
from rollproof.fakes.engine.fleet import CURRENT_REQUEST
from rollproof.fakes.engine.inflight import InflightCall, Wire
from rollproof.fakes.http.asgi import OWNER_HEADER, Asked
from rollproof.fakes.http.call_samples import Attributing, Samples
from rollproof.fakes.http.fault_plan import FaultPlan, Faults, WireFault, WireFaultKind
from rollproof.fakes.http.request_body import BadRequest

__all__ = ["Backing", "RoutesForm", "ServeOptions", "Wanted"]


class RoutesForm(StrEnum):
    """How routes are written into JSON."""

    INT32 = "int32"
    """Base64 of int32, without a shape: SGLang."""
    COMPACT = "compact"
    """Base64 of the smallest type, whose name stands in ``routed_experts_dtype``: SGLang with
    SGLANG_ROUTED_EXPERTS_DTYPE.
    """
    NPY = "npy"
    """Base64 of a ``.npy`` file: vLLM."""
    DESCRIBED = "described"
    """Base64 with shape, dtype and the position of the first row: prime-rl, which has it in place
    of vLLM's own.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What a served engine is: ``flavour``, the ``model`` it stands for, ``engine`` options (times
    in real seconds), the first ``label``.

    ``max_length`` bounds prompt and response, ``max_body`` a request's bytes. ``incremental``
    streams only what is new in each event; without a ``tokenizer`` (SGLang's skip_tokenizer_init)
    replies have no text. ``routes`` is the form of routes where it is not the server's own;
    ``nested_routes``: SkyRL's endpoint sends lists in lists, as 0.3 did. ``contract`` is what the
    stack promises.
    """

    flavour: str
    model: Model = field(default_factory=Model)
    engine: EngineOptions = field(
        default_factory=lambda: EngineOptions(max_batch=256, step=0.001, prefix_cache=True)
    )
    label: str = "default"
    seed: int = 0
    max_length: int = MAX_LENGTH
    max_body: int = 64 << 20
    incremental: bool = False
    tokenizer: bool = True
    routes: RoutesForm | None = None
    nested_routes: bool = False
    contract: Contract | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One call that a client asks for. ``prompt_logprobs``: from which token of the prompt on (-1:
    none); ``top``: how many a token.
    """

    prompt: tuple[int, ...]
    rid: str
    max_tokens: int | None
    sampling: Mapping[str, Any]
    routes: bool = True
    logprobs: bool = True
    routes_start: int = 0
    prompt_logprobs: int = -1
    top: int = 0


class Backing:
    """One engine, made inside a running event loop. ``sinks`` are handed every event as it happens;
    ``keep`` holds them in memory, too.

    ``behind`` is an engine that is there already, with its recorder (one of a fleet, whose schedule
    of faults holds). ``beside`` is the first of several that are served together, as ``server_id``:
    they share a trace.
    """

    def __init__(
        self,
        options: ServeOptions,
        sinks: Iterable[TraceSink] = (),
        *,
        keep: bool = True,
        plan: FaultPlan | None = None,
        behind: tuple[FakeEngine, Recorder] | None = None,
        beside: Backing | None = None,
        server_id: str = "s0",
    ) -> None:
        self.options: ServeOptions = options
        self.plan: FaultPlan = plan or FaultPlan()
        self.faults: Faults | None = Faults(self.plan, self._befell) if self.plan.faults else None
        sinks = tuple(sinks)
        self._names: dict[str, int] = {} if beside is None else beside._names
        self._rids: set[str] = set()
        self.samples: Samples | None = None
        self.hooks: Attributing | None = None
        if behind is not None:
            self.engine: FakeEngine = behind[0]
            self.recorder: Recorder = behind[1]
        else:
            self.recorder = (
                Recorder(asyncio.get_running_loop().time, sinks, keep=keep)
                if beside is None
                else beside.recorder
            )
            samples = (
                Samples(self.recorder)
                if beside is None or beside.samples is None
                else beside.samples
            )
            hooks = (
                Attributing(samples, self.plan.actions, self.recorder, options)
                if beside is None
                else beside.hooks
            )
            assert hooks is not None, "an engine of a fleet has none beside it"
            self.samples, self.hooks = samples, hooks
            self.engine = FakeEngine(
                server_id,
                CodedPolicy.from_model(options.model, options.seed),
                flavour_named(options.flavour),
                options.engine,
                self.recorder,
                version=0,
                label=options.label,
                hooks=hooks,
                max_length=options.max_length,
            )
            hooks.servers[server_id] = self.engine
            self.recorder.record(
                Weights(server_id=server_id, version=0, label=options.label, flushed=True)
            )
        self.policy: CodedPolicy = self.engine.policy
        self.flavour: Flavour = self.engine.flavour

    @staticmethod
    def header(options: ServeOptions) -> Header:
        """What the trace of such an engine says about itself; the stack's contract is the engine's
        where none was declared.
        """
        engine = engine_contract(flavour_named(options.flavour), options.model, KvPolicy.KEEP)
        policy = CodedPolicy.from_model(options.model, options.seed)
        return Header(
            subject=f"served {options.flavour}",
            contract=options.contract or engine,
            engine=engine,
            seed=options.seed,
            coding=policy.to_dict(),
        )

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self.policy.vocab

    @property
    def max_length(self) -> int:
        """Tokens that a call may have."""
        return self.engine.max_length

    @property
    def label(self) -> str | None:
        """The label that the engine shows, as text."""
        return None if self.engine.label is None else str(self.engine.label)

    async def generate(
        self,
        asked: Asked,
        wanted: Wanted,
        *,
        stream: StreamMode | None = None,
        heard: Callable[[InflightCall], None] | None = None,
        unique: bool = False,
    ) -> EngineOutput:
        """Have the engine run one call; of a ``stream``, ``heard`` is told of each token. With
        ``unique`` a handle that a call in flight has is refused.
        """
        if unique:
            if wanted.rid in self._rids:
                raise BadRequest(f"Duplicate request ID detected: {wanted.rid}", param="rid")
            self._rids.add(wanted.rid)
        owner = asked.header(OWNER_HEADER)
        token = None if owner is None else CURRENT_REQUEST.set(owner)
        wire = Wire(
            stream,
            heard,
            delivered=not asked.lost,
            late=asked.late,
            caller_left=asked.left,
        )
        asked.late = 0.0
        asked.broken.append(partial(self._broke, wire))
        output = None
        try:
            output = await self.engine.generate(
                prompt_ids=wanted.prompt,
                max_tokens=wanted.max_tokens,
                request_id=wanted.rid,
                sampling=wanted.sampling,
                want_routes=wanted.routes,
                want_logprobs=wanted.logprobs,
                routes_start=wanted.routes_start,
                wire=wire,
            )
            return output
        finally:
            if self.samples is not None:
                self.samples.answered(wanted.rid, wanted.prompt, output if wire.open else None)
            wire.caller_left = None  # which refers to the request, and the request to the wire
            if token is not None:
                CURRENT_REQUEST.reset(token)
            if unique:
                self._rids.discard(wanted.rid)

    def version_of(self, name: str | None) -> int:
        """The weights that ``name`` (a path) stands for: the same name is the same weights; without
        one, the next of this engine.
        """
        if name is None:
            return self.engine.version + 1
        if name not in self._names:
            self._names[name] = max(self._names.values(), default=0) + 1
        return self._names[name]

    def new_id(self) -> str:
        """The handle of a call that its client gave none: random, as servers draw it."""
        return f"{getrandbits(128):032x}"

    async def load(self, name: str | None, label: Version, *, flush: bool) -> None:
        """Take the weights ``name`` under ``label`` (``None``: the label stays as it was), and drop
        shared KV where ``flush`` says so.

        Raises ``TransferFailed``.
        """
        version = self.version_of(name)
        await self.engine.load(
            version,
            self.engine.label if label is None else label,
            identity=version == self.engine.version,
        )
        if flush:
            self.engine.reset_prefix_cache()

    async def load_or_refuse(self, name: str | None, label: Version, *, flush: bool) -> None:
        """The same, with a failed transfer as a refusal with status 500."""
        try:
            await self.load(name, label, flush=flush)
        except TransferFailed as error:
            raise BadRequest(str(error), 500) from error

    def relabel(self, label: str) -> None:
        """Publish ``label``; the weights stay."""
        self.engine.relabel(label)

    def _broke(self, wire: Wire) -> None:
        """Record that a reply which was taken for delivered may have come in part, or not at all:
        its client left before it had read it.
        """
        if wire.sent_call is not None:
            self.recorder.record(
                Fault(what="broken-stream", server_id=self.engine.server_id, call_id=wire.sent_call)
            )
            wire.sent_call = None

    def _befell(self, fault: WireFault, path: str) -> None:
        """Record what the engine knows nothing of; a reply that is lost or cut short it records
        itself, with its call.
        """
        what = {WireFaultKind.SLOW: "late-reply", WireFaultKind.STATUS: "reject"}.get(fault.do)
        if what is not None and not fault.after_engine:
            detail = (
                f"planned: {fault.status} of {path}"
                if what == "reject"
                else f"planned: {fault.seconds:g} s, {path}"
            )
            self.recorder.record(Fault(what=what, server_id=self.engine.server_id, detail=detail))

    def loads(self) -> Mapping[str, int]:
        """Calls that run and that wait, and tokens in use."""
        calls = self.engine.in_flight
        running = sum(call.running for call in calls)
        return {
            "running": running,
            "waiting": len(calls) - running,
            "tokens": sum(len(call.ids) for call in calls),
        }
