"""The engine of a fake server: its weights by name, and the trace of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from random import getrandbits
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from rollproof.core.contract import KvPolicy
from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.core.events.rollout import Fault, Weights
from rollproof.core.records import EngineOutput, Version
from rollproof.core.report_headers import OWNER_HEADER, ROLLOUT_HEADER
from rollproof.core.trace import Header, Recorder, TraceSink
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.exceptions import BadCall, TransferFailed
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.flavours import Flavour, engine_contract, flavour_named
from rollproof.fakes.engine.fleet import CURRENT_REQUEST
from rollproof.fakes.engine.inflight import InflightCall, Wire
from rollproof.fakes.http.call_samples import CURRENT_ROLLOUT, CallAttribution, Samples
from rollproof.fakes.http.connections import delivery_of
from rollproof.fakes.http.fault_plan import FaultPlan, PlanProgress, WireFault, WireFaultKind
from rollproof.fakes.http.request_body import BadRequest, header_of, text_of
from rollproof.fakes.http.serve_options import ServeOptions

__all__ = ["CallSpec", "EngineBackend"]

_CALLERS: Sequence[tuple[ContextVar[Any], str]] = (
    (CURRENT_REQUEST, OWNER_HEADER),
    (CURRENT_ROLLOUT, ROLLOUT_HEADER),
)
"""What a client's headers say of the caller, and where the engine's hooks look for it."""
_AT_ONCE = 64
"""Calls of one request that begin in one turn of the loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSpec:
    """One engine call of a client's request.

    Attributes:
        prompt: token ids.
        rid: the handle by which the client may abort the call.
        max_tokens: most tokens to sample; ``None``: as many as fit.
        sampling: sampling parameters.
        routes: whether routes are returned.
        logprobs: whether logprobs of sampled tokens are returned.
        routes_start: position of the first row of routes.
        prompt_logprobs: first token of the prompt that gets a logprob; -1: none.
        top_logprobs: alternatives for each token.
        ids: whether the client speaks in token ids: it sent them, or requested them back.
        adapter: the name of the adapter that serves the call; ``None``: the base model.
        sampling_mask: whether sampling masks are returned.
    """

    prompt: tuple[int, ...]
    rid: str
    max_tokens: int | None
    sampling: Mapping[str, Any]
    routes: bool = True
    logprobs: bool = True
    routes_start: int = 0
    prompt_logprobs: int = -1
    top_logprobs: int = 0
    ids: bool = False
    adapter: str | None = None
    sampling_mask: bool = False


class EngineBackend:
    """The engine of one fake server, made inside a running event loop.

    Args:
        options: what the server is.
        sinks: take every event as it is recorded.
        keep: keep events in memory, too.
        plan: faults of the wire, and actions of the engine.
        existing: an engine and its recorder, such as one of a fleet, with its own schedule of
            actions.
        first: the first of several servers that share one trace.
        server_id: the id of the server in the trace.
    """

    def __init__(
        self,
        options: ServeOptions,
        sinks: Iterable[TraceSink] = (),
        *,
        keep: bool = True,
        plan: FaultPlan | None = None,
        existing: tuple[FakeEngine, Recorder] | None = None,
        first: EngineBackend | None = None,
        server_id: str = "s0",
    ) -> None:
        self.options: ServeOptions = options
        self.plan: FaultPlan = plan or FaultPlan()
        self.faults: PlanProgress | None = (
            PlanProgress(self.plan, self._record_fault) if self.plan.faults else None
        )
        self.samples: Samples | None = None
        self.attribution: CallAttribution | None = None
        self._rids: set[str] = set()
        self._adapters: set[str] = set()
        self._empty_aborts = 0
        self._versions: dict[str, int] = {} if first is None else first._versions
        if existing is not None:
            self.engine: FakeEngine
            self.recorder: Recorder
            self.engine, self.recorder = existing
        else:
            if first is None:
                self.recorder = Recorder(asyncio.get_running_loop().time, sinks, keep=keep)
                promised = options.contract
                self.samples = Samples(
                    self.recorder,
                    opens_rollouts=promised is not None and not promised.multi_turn,
                )
                self.attribution = CallAttribution(
                    self.samples, self.plan.actions, self.recorder, options
                )
            else:
                self.recorder, self.samples = first.recorder, first.samples
                self.attribution = first.attribution
            assert self.attribution is not None, "an engine of a fleet shares no trace this way"
            self.engine = FakeEngine(
                server_id,
                CodedPolicy.from_model(options.model, options.seed),
                flavour_named(options.flavour),
                options.engine,
                self.recorder,
                version=0,
                label=options.label,
                hooks=self.attribution,
                max_length=options.max_length,
            )
            self.attribution.servers[server_id] = self.engine
            if first is None:
                self.attribution.update = self.update_weights
            self.recorder.record(
                Weights(server_id=server_id, version=0, label=options.label, flushed=True)
            )
        self.policy: CodedPolicy = self.engine.policy
        self.flavour: Flavour = self.engine.flavour

    @staticmethod
    def header(options: ServeOptions) -> Header:
        """Return the trace header of such an engine; without a declared contract the engine's own
        is the stack's.
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

    def shown_text(self, tokens: Sequence[int], *, ids: bool) -> str:
        """Return the text of tokens: none for clients that get their ids, if the engine shows it so
        (``EngineOptions.empty_text``).
        """
        return "" if ids and self.options.engine.empty_text else text_of(tokens)

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self.policy.vocab

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and response together."""
        return self.engine.max_length

    @property
    def label(self) -> str | None:
        """The weight label that the engine shows, as text."""
        return None if self.engine.label is None else str(self.engine.label)

    async def generate(
        self,
        request: Request,
        spec: CallSpec,
        *,
        stream: StreamMode | None = None,
        on_token: Callable[[InflightCall], None] | None = None,
        unique: bool = False,
        siblings: set[int] | None = None,
    ) -> EngineOutput:
        """Run one engine call of a client's ``request``.

        Args:
            request: the HTTP request; its delivery says whether the reply arrives.
            spec: the call.
            stream: how the reply is streamed; ``None`` for one reply at the end.
            on_token: called after each sampled token of a stream.
            unique: refuse a handle that a call in flight has, as SGLang does.
            siblings: first tokens of the other samples of its prompt (n > 1).

        Raises:
            BadRequest: the handle is in use.
        """
        if unique:
            if spec.rid in self._rids:
                raise BadRequest(f"Duplicate request ID detected: {spec.rid}", param="rid")
            self._rids.add(spec.rid)
        # the engine's hooks look there: a call has no field for the request of its caller
        tokens: list[tuple[ContextVar[Any], Token[Any]]] = [
            (variable, variable.set(value))
            for variable, name in _CALLERS
            if (value := header_of(request.scope, name)) is not None
        ]
        delivery = delivery_of(request.scope)
        wire = Wire(
            stream,
            on_token,
            delivered=not delivery.lost,
            late=delivery.delay,
            caller_left=delivery.is_disconnected,
        )
        # the first call takes the delay: of several samples, it holds up the whole answer
        delivery.delay = 0.0
        delivery.on_uncertain.append(partial(self._record_uncertain_reply, wire))
        output = None
        try:
            output = await self.engine.generate(
                prompt_ids=spec.prompt,
                max_tokens=spec.max_tokens,
                request_id=spec.rid,
                sampling=spec.sampling,
                want_routes=spec.routes,
                want_logprobs=spec.logprobs,
                routes_start=spec.routes_start,
                siblings=siblings,
                wire=wire,
                adapter=spec.adapter,
                return_sampling_mask=spec.sampling_mask,
            )
            return output
        except BadCall as error:
            # an adapter may be gone by the time that a parked call is admitted
            raise BadRequest(str(error)) from error
        finally:
            if self.samples is not None:
                self.samples.answered(spec.rid, spec.prompt, output if wire.open else None)
            # the delivery refers to the wire: together they would wait for the garbage collector
            wire.caller_left = None
            for variable, token in tokens:
                variable.reset(token)
            if unique:
                # after an abort, too: SGLang once kept the id of a queued call, and refused it when
                # it was sent again (sglang#24070)
                self._rids.discard(spec.rid)

    async def generate_all(
        self, request: Request, specs: Sequence[CallSpec], *, unique: bool = False
    ) -> list[EngineOutput]:
        """Run several calls at once, and return their outputs in order."""
        if len(specs) == 1:  # a task of its own takes as long as reading the request
            return [await self.generate(request, specs[0], unique=unique)]
        # the samples of a prompt differ, as those of the fleet do
        drawn: dict[tuple[int, ...], set[int]] = {tuple(spec.prompt): set() for spec in specs}
        tasks: list[asyncio.Task[EngineOutput]] = []
        try:
            for number, spec in enumerate(specs, 1):
                calls = self.generate(
                    request, spec, unique=unique, siblings=drawn[tuple(spec.prompt)]
                )
                tasks.append(asyncio.create_task(calls))
                if not number % _AT_ONCE:
                    await asyncio.sleep(0)  # other clients have their turn
            return list(await asyncio.gather(*tasks))
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise

    def version_of(self, name: str | None) -> int:
        """Return the version of the weights ``name`` (a path): the same name is the same weights.
        Without a name they are the next version of this engine.
        """
        if name is None:
            return self.engine.version + 1
        # a checkpoint that is loaded again is the same weights, so nothing of the cache is stale
        if name not in self._versions:
            self._versions[name] = max(self._versions.values(), default=0) + 1
        return self._versions[name]

    def request_named(self, scope: Scope) -> str | None:
        """Return the request that a client names in the headers of a call."""
        owner, rollout = header_of(scope, OWNER_HEADER), header_of(scope, ROLLOUT_HEADER)
        if owner is None and rollout is not None and self.samples is not None:
            return self.samples.request_of_rollout(rollout)
        return owner

    def tags_empty_abort(self) -> bool:
        """Count a reply to a call aborted before it ran; returns whether it has a label."""
        self._empty_aborts += 1
        return not self.options.untagged_aborts or self._empty_aborts % 2 == 0

    def new_id(self) -> str:
        """Return a random handle for a call that its client gave none."""
        return f"{getrandbits(128):032x}"

    async def load(self, name: str | None, label: Version, *, flush: bool) -> None:
        """Load the weights ``name`` under ``label``.

        Args:
            name: a path, or ``None`` for the next version.
            label: ``None`` leaves the label as it is.
            flush: drop the prefix cache.

        Raises:
            TransferFailed: the schedule of faults says so.
        """
        # loading the same weights again is no update: KV and rows stay valid
        version = self.version_of(name)
        await self.engine.load(
            version,
            self.engine.label if label is None else label,
            identity=version == self.engine.version,
        )
        if flush:
            self.engine.reset_prefix_cache()

    async def load_or_refuse(self, name: str | None, label: Version, *, flush: bool) -> None:
        """Do the same; a failed transfer is a refusal with status 500."""
        try:
            await self.load(name, label, flush=flush)
        except TransferFailed as error:
            raise BadRequest(str(error), 500) from error

    async def load_adapter(self, name: str, path: str, *, in_place: bool = True) -> bool:
        """Load the adapter of ``path`` under ``name``; return False if the engine has one of that
        name, and keeps it.

        Raises:
            BadRequest: the flavour cannot replace an adapter, or the schedule of faults says so.
        """
        try:
            loaded = await self.engine.load_adapter(name, self.version_of(path), in_place=in_place)
        except BadCall as error:
            raise BadRequest(str(error), param="lora_name") from error
        except TransferFailed as error:
            raise BadRequest(str(error), 500) from error
        self._adapters.add(name)
        return loaded

    async def unload_adapter(self, name: str) -> bool:
        """Unload an adapter; return False if the engine has none of that name."""
        if name not in self.engine.adapters:
            return False
        await self.engine.unload_adapter(name)
        return True

    def adapter_named(self, model: str) -> str | None:
        """Return the adapter that a client calls by the name of a model; ``None``: it is a name of
        the base model, which may have any.

        Raises:
            BadRequest: it is the name of an adapter that was unloaded.
        """
        if model in self.engine.adapters:
            return model
        if model in self._adapters:
            raise BadRequest(f"The model `{model}` does not exist.", 404, param="model")
        return None

    async def update_weights(self, name: str | None = None) -> None:
        """Bring weights to every server of the trace, as a trainer does that stops the engines:
        calls are aborted, the cache is dropped, and the name is the new label.

        Args:
            name: of the weights; ``None`` for new ones, ``step-1``, ``step-2``, ...
        """
        assert self.attribution is not None, "an engine of a fleet is updated by its subject"
        number = len(self._versions) + 1
        while name is None and f"step-{number}" in self._versions:
            number += 1
        label = name or f"step-{number}"
        version = self.version_of(label)
        engines = [engine for engine in self.attribution.servers.values() if engine.alive]
        for engine in engines:
            await engine.pause(PauseMode.ABORT, clear_cache=True)
        for engine in engines:
            await engine.load(version, label, identity=version == engine.version)
        for engine in engines:
            await engine.resume()

    def relabel(self, label: str) -> None:
        """Publish ``label``; the weights stay."""
        self.engine.relabel(label)

    def loads(self) -> Mapping[str, int]:
        """Return the calls that run and that wait, and their tokens."""
        calls = self.engine.in_flight
        running = sum(call.running for call in calls)
        return {
            "running": running,
            "waiting": len(calls) - running,
            "tokens": sum(len(call.ids) for call in calls),
        }

    def _record_uncertain_reply(self, wire: Wire) -> None:
        """Record that a reply which was counted as delivered may have arrived in part, or not at
        all: its client closed the connection before it can be known to have read it.
        """
        if wire.sent_call is not None:
            self.recorder.record(
                Fault(what="broken-stream", server_id=self.engine.server_id, call_id=wire.sent_call)
            )
            wire.sent_call = None

    def _record_fault(self, fault: WireFault, path: str) -> None:
        """Record a planned fault that concerns no engine call. A reply that is lost or cut short is
        recorded by the engine, with its call.
        """
        kind = {WireFaultKind.SLOW: "late-reply", WireFaultKind.STATUS: "reject"}.get(fault.do)
        if kind is None or fault.after_engine:
            return
        detail = (
            f"planned: {fault.status} of {path}"
            if kind == "reject"
            else f"planned: {fault.seconds:g} s, {path}"
        )
        self.recorder.record(Fault(what=kind, server_id=self.engine.server_id, detail=detail))
