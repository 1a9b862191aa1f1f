"""Reference resume clients that speak HTTP to fake SGLang and vLLM servers, in virtual time.

Each step of reading a reply is a method of its own, so that a known bug is a few lines on top of
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from rollproof.core.records import EngineOutput, FinishReason, IntArray, LogprobArray, Span, Version
from rollproof.core.routes_encoding import from_flat, from_npy
from rollproof.fakes.clients.resuming import AsSampled, PartialSample
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.http.client import BrokenReply, HttpClient, HttpReply
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fault_plan import FaultPlan
from rollproof.fakes.http.serve_options import RoutesForm, ServeOptions
from rollproof.fakes.http.serving import SERVERS, serve_in_memory
from rollproof.simulation.memory_network import Network
from rollproof.simulation.virtual_loop import VirtualLoop

__all__ = [
    "HttpResumeClient",
    "ResumesBrokenStreams",
    "SglangClient",
    "SglangPartialStreamClient",
    "SglangStreamClient",
    "VllmClient",
    "VllmPartialStreamClient",
    "VllmStreamClient",
    "parse_version",
]

_FIRST_PORT = 30_000


class HttpResumeClient(AsSampled):
    """Calls its engines over HTTP.

    Attributes:
        server: the fake server before each engine, a key of ``SERVERS``.
        path: the endpoint that samples.
        served: options of the servers.
        plan: faults of the wire.
        unfinished: a stream that ended without a finish reason counts as an aborted call.
        clients: a client for each server of the fleet.
    """

    server: ClassVar[str] = ""
    path: ClassVar[str] = ""
    served: ClassVar[Mapping[str, Any]] = {}
    plan: ClassVar[FaultPlan] = FaultPlan()
    unfinished: ClassVar[bool] = False
    clients: Mapping[str, HttpClient]

    def start(self, fleet: Fleet) -> None:
        """Serve each engine of the fleet on the network of the virtual loop."""
        super().start(fleet)
        case = fleet.case
        options = ServeOptions(
            flavour=case.flavour,
            model=case.model,
            engine=case.engine,
            seed=case.seed,
            **self.served,
        )
        make_app, _ = SERVERS[self.server]
        ports = {server_id: _FIRST_PORT + number for number, server_id in enumerate(fleet.servers)}
        apps = {
            ports[server_id]: make_app(
                EngineBackend(options, existing=(engine, fleet.recorder), plan=self.plan)
            )
            for server_id, engine in fleet.servers.items()
        }
        # each case has a loop, and a network, of its own
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "reference clients are run on the virtual clock"
        loop.network = Network(loop)
        serve_in_memory(loop.network, apps)
        self.clients = {server_id: HttpClient(port) for server_id, port in ports.items()}

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        """Make one call. What is no answer counts as a broken connection: the call is repeated."""
        sample.attempts += 1
        body = self.request_body(sample, sent, budget)
        reply = await self.clients[server_id].request("POST", self.path, body)
        # a 5xx may come from a proxy that lost its server: worth another try, unlike a refusal
        if reply.status >= 500:
            raise ConnectionError(f"status {reply.status}")
        if reply.status >= 400:
            raise ValueError(reply.body.decode(errors="replace"))
        return self.read(sample, reply, len(sent))

    def request_body(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> dict[str, Any]:
        """Return the body of a call."""
        raise NotImplementedError(f"{type(self).__name__} must implement request_body")

    def read(self, sample: PartialSample, reply: HttpReply, sent: int) -> EngineOutput:
        """Read the reply to a call of ``sent`` prompt tokens. A body that breaks off counts as a
        broken connection.
        """
        try:
            decoded = self.decode(reply)
        except ValueError as error:
            raise ConnectionError(f"the body is no JSON: {error}") from error
        return self.output(sample, decoded)

    def decode(self, reply: HttpReply) -> Any:
        """Return the JSON of a reply."""
        return reply.json()

    def output(self, sample: PartialSample, decoded: Any) -> EngineOutput:
        """Return the reply as a record."""
        raise NotImplementedError(f"{type(self).__name__} must implement output")


class SglangClient(HttpResumeClient):
    """Speaks to SGLang's ``/generate``."""

    flavours: ClassVar[tuple[str, ...]] = ("sglang", "sglang-0.5.17")
    server: ClassVar[str] = "sglang"
    path: ClassVar[str] = "/generate"

    def request_body(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> dict[str, Any]:
        request = sample.request
        return {
            "rid": self.handle(sample),
            "input_ids": list(sent),
            "sampling_params": {**self.sampling_for(sample), "max_new_tokens": budget},
            "return_logprob": request.want_logprobs,
            "return_routed_experts": request.want_routes,
            "routed_experts_start_len": self.routes_start(sample),
        }

    def output(self, sample: PartialSample, decoded: Any) -> EngineOutput:
        meta = decoded["meta_info"]
        return EngineOutput(
            token_ids=self.tokens(decoded),
            logprobs=self.logprobs(meta),
            routes=self.rows(meta),
            routes_start=self.routes_start(sample),
            finish_reason=self.reason(meta["finish_reason"]),
            version=parse_version(meta.get("weight_version")),
            spans=self.spans(meta),
        )

    def tokens(self, decoded: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the ids; the text is not read."""
        return tuple(decoded["output_ids"])

    def logprobs(self, meta: Mapping[str, Any]) -> LogprobArray | None:
        """Return one logprob for each token."""
        entries = meta.get("output_token_logprobs")
        if entries is None:
            return None
        return np.array([logprob for logprob, _, _ in entries], dtype=np.float64)

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        """Return the rows: the reply names their type unless it is int32, and the model says how
        many layers and experts a row has.
        """
        text = meta.get("routed_experts")
        if text is None:
            return None
        model = self.fleet.case.model
        return from_flat(
            text, model.num_layers, model.top_k, meta.get("routed_experts_dtype", "int32")
        )

    def reason(self, reason: Mapping[str, Any] | None) -> FinishReason:
        """Return the finish reason; a reply without one is not finished."""
        return FinishReason(reason["type"]) if reason is not None else FinishReason.ABORT

    def spans(self, meta: Mapping[str, Any]) -> tuple[Span, ...]:
        """Return which weights sampled which tokens, if the release says it."""
        return _spans(meta.get("weight_versions", ()))


class SglangStreamClient(SglangClient):
    """Reads a stream of events that each have all tokens so far."""

    def request_body(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> dict[str, Any]:
        return {**super().request_body(sample, sent, budget), "stream": True}

    def decode(self, reply: HttpReply) -> Any:
        """Return the last event if it has a finish reason. Raise ``ValueError`` if none has."""
        events = reply.events()
        if not events or (events[-1]["meta_info"]["finish_reason"] is None and not self.unfinished):
            raise ValueError("the stream ended without a reason")
        return events[-1]


class VllmClient(HttpResumeClient):
    """Speaks to vLLM's ``/inference/v1/generate``."""

    flavours: ClassVar[tuple[str, ...]] = ("vllm", "vllm-0.26")
    server: ClassVar[str] = "vllm"
    path: ClassVar[str] = "/inference/v1/generate"
    served: ClassVar[Mapping[str, Any]] = {"routes": RoutesForm.NPY}

    def request_body(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            **self.sampling_for(sample),
            "routed_experts_prompt_start": self.routes_start(sample),
        }
        if budget is not None:
            sampling["max_tokens"] = budget
        if sample.request.want_logprobs:
            sampling["logprobs"] = 0  # the sampled token's logprob, and no alternatives
        return {
            "request_id": self.handle(sample),
            "token_ids": list(sent),
            "sampling_params": sampling,
        }

    def output(self, sample: PartialSample, decoded: Any) -> EngineOutput:
        (choice,) = decoded["choices"]
        routes = choice["routed_experts"]
        return EngineOutput(
            token_ids=tuple(choice["token_ids"]),
            logprobs=self.logprobs(choice),
            routes=None if routes is None else self.rows(routes),
            routes_start=self.routes_start(sample),
            finish_reason=FinishReason(choice["finish_reason"]),
            spans=_spans(choice["weight_versions"] or ()),
        )

    def logprobs(self, choice: Mapping[str, Any]) -> LogprobArray | None:
        """Return one logprob for each token."""
        if choice["logprobs"] is None:
            return None
        entries = choice["logprobs"]["content"]
        return np.array([entry["logprob"] for entry in entries], dtype=np.float64)

    def rows(self, text: str) -> IntArray:
        """Return the rows."""
        return from_npy(text)


class VllmStreamClient(VllmClient):
    """Reads a stream of events that each have what is new."""

    def request_body(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> dict[str, Any]:
        return {**super().request_body(sample, sent, budget), "stream": True}

    def decode(self, reply: HttpReply) -> Any:
        """Join all events into one reply. Raise ``ValueError`` if none has a finish reason."""
        choices = [choice for event in reply.events() for choice in event["choices"]]
        if not choices or (choices[-1]["finish_reason"] is None and not self.unfinished):
            raise ValueError("the stream ended without a reason")
        # an event that only ends the call has no tokens, and null for their logprobs
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        content = [entry for part in parts for entry in part["content"]]
        joined = {
            **choices[-1],
            "finish_reason": choices[-1]["finish_reason"] or "abort",
            "token_ids": [token for choice in choices for token in choice["token_ids"]],
            "logprobs": {"content": content} if parts else None,
        }
        return {"choices": [joined]}


class ResumesBrokenStreams(HttpResumeClient):
    """Resumes a stream that breaks off from what it has brought, as after an abort, if partial
    rollout is on.
    """

    unfinished: ClassVar[bool] = True

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        try:
            return await super().call(server_id, sample, sent, budget)
        except BrokenReply as error:
            if error.partial is None or not self.fleet.case.partial:
                raise
            return self.read(sample, error.partial, len(sent))


class SglangPartialStreamClient(ResumesBrokenStreams, SglangStreamClient):
    """Speaks to SGLang's ``/generate``."""


class VllmPartialStreamClient(ResumesBrokenStreams, VllmStreamClient):
    """Speaks to vLLM's ``/inference/v1/generate``."""


def _spans(entries: Any) -> tuple[Span, ...]:
    return tuple(
        Span(start=entry["start"], end=entry["end"], version=parse_version(entry["version"]))
        for entry in entries
    )


def parse_version(label: str | None) -> Version:
    """Return the number of a label: a fleet numbers its labels, and HTTP makes text of them."""
    return int(label) if label is not None and label.isdecimal() else None
