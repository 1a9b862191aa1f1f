"""Managers that speak HTTP: the reference of ``fakes.resuming`` before the faces of SGLang and
vLLM, in virtual time.

Written to be broken, as that one is: each step of reading a reply is a method of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from rollproof.core.records import EngineOutput, FinishReason, IntArray, LogprobArray, Span, Version
from rollproof.fakes.clients.resuming import AsSampled, PartialSample
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.http.asgi import Face
from rollproof.fakes.http.engine_backend import Backing, RoutesForm, ServeOptions
from rollproof.fakes.http.fault_plan import FaultPlan
from rollproof.fakes.http.in_process_client import BrokenOff, Heard, Line
from rollproof.fakes.http.routes_encoding import from_flat, from_npy
from rollproof.fakes.http.sglang.server import sglang_app
from rollproof.fakes.http.vllm.server import vllm_app

__all__ = [
    "HttpManager",
    "Keeping",
    "SglangKeeper",
    "SglangManager",
    "SglangStreamer",
    "VllmKeeper",
    "VllmManager",
    "VllmStreamer",
    "versioned",
]


class HttpManager(AsSampled):
    """Calls its engines over HTTP. ``plan`` are faults of the wire, ``served`` options of the
    faces.
    """

    plan: ClassVar[FaultPlan] = FaultPlan()
    served: ClassVar[Mapping[str, Any]] = {}
    path: ClassVar[str] = ""
    unfinished: ClassVar[bool] = False
    """Whether a stream that ended without a reason is taken for a call that was cut off."""
    lines: Mapping[str, Line]

    def start(self, fleet: Fleet) -> None:
        """A line to each server of the fleet."""
        super().start(fleet)
        case = fleet.case
        options = ServeOptions(
            flavour=case.flavour,
            model=case.model,
            engine=case.engine,
            seed=case.seed,
            **self.served,
        )
        self.lines = {
            name: Line(self.face(Backing(options, behind=(engine, fleet.recorder), plan=self.plan)))
            for name, engine in fleet.servers.items()
        }

    def face(self, backing: Backing) -> Face:
        """The face that its engines have."""
        raise NotImplementedError(f"{type(self).__name__} must say whose face it speaks to")

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        """One call. What is no answer is a broken connection: the same call is made again."""
        sample.attempts += 1
        heard = await self.lines[server_id].ask("POST", self.path, self.asked(sample, sent, budget))
        if heard.status >= 500:
            raise ConnectionError(f"status {heard.status}")
        if heard.status >= 400:
            raise ValueError(heard.body.decode(errors="replace"))
        return self.read(sample, heard, len(sent))

    def handle(self, sample: PartialSample) -> str:
        """Each call has a handle of its own, of which none is the beginning of another."""
        return f"{sample.request.request_id}#{sample.attempts}#"

    def asked(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> dict[str, Any]:
        """The body of a call."""
        raise NotImplementedError(f"{type(self).__name__} must say what it sends")

    def read(self, sample: PartialSample, heard: Heard, sent: int) -> EngineOutput:
        """The reply to a call of ``sent`` prompt tokens. A body that breaks off is a broken
        connection.
        """
        try:
            reply = self.reply(heard)
        except ValueError as error:
            raise ConnectionError(f"the body is no JSON: {error}") from error
        return self.output(sample, reply)

    def reply(self, heard: Heard) -> Any:
        """The JSON of a reply."""
        return heard.json()

    def output(self, sample: PartialSample, reply: Any) -> EngineOutput:
        """The reply as a record."""
        raise NotImplementedError(f"{type(self).__name__} must say how a reply is read")


class SglangManager(HttpManager):
    """Before SGLang's ``/generate``."""

    flavours: ClassVar[tuple[str, ...]] = ("sglang", "sglang-0.5.17")
    path: ClassVar[str] = "/generate"

    def face(self, backing: Backing) -> Face:
        return sglang_app(backing)

    def asked(
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

    def output(self, sample: PartialSample, reply: Any) -> EngineOutput:
        meta = reply["meta_info"]
        return EngineOutput(
            token_ids=self.tokens(reply),
            logprobs=self.logprobs(meta),
            routes=self.rows(meta),
            routes_start=self.routes_start(sample),
            finish_reason=self.reason(meta["finish_reason"]),
            version=versioned(meta.get("weight_version")),
            spans=self.spans(meta),
        )

    def tokens(self, reply: Mapping[str, Any]) -> tuple[int, ...]:
        """The ids, never the text."""
        return tuple(reply["output_ids"])

    def logprobs(self, meta: Mapping[str, Any]) -> LogprobArray | None:
        """One for each token."""
        given = meta.get("output_token_logprobs")
        return (
            None
            if given is None
            else np.array([logprob for logprob, _, _ in given], dtype=np.float64)
        )

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        """The rows, whose type is named where it is not int32; the model says how many layers and
        experts a row has.
        """
        text = meta.get("routed_experts")
        if text is None:
            return None
        model = self.fleet.case.model
        return from_flat(
            text, model.num_layers, model.top_k, meta.get("routed_experts_dtype", "int32")
        )

    def reason(self, told: Mapping[str, Any] | None) -> FinishReason:
        """The type of the reason; a reply without one is not finished."""
        return FinishReason(told["type"]) if told is not None else FinishReason.ABORT

    def spans(self, meta: Mapping[str, Any]) -> tuple[Span, ...]:
        """Versions by token, where the release has them."""
        told = meta.get("weight_versions", ())
        return tuple(
            Span(start=one["start"], end=one["end"], version=versioned(one["version"]))
            for one in told
        )


class SglangStreamer(SglangManager):
    """The same over a stream, each of whose events holds all tokens so far."""

    def asked(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> dict[str, Any]:
        return {**super().asked(sample, sent, budget), "stream": True}

    def reply(self, heard: Heard) -> Any:
        """The last event, if it says how the call ended. Raises ``ValueError`` where none does."""
        events = heard.events()
        if not events or (events[-1]["meta_info"]["finish_reason"] is None and not self.unfinished):
            raise ValueError("the stream ended without a reason")
        return events[-1]


class VllmManager(HttpManager):
    """Before vLLM's ``/inference/v1/generate``."""

    flavours: ClassVar[tuple[str, ...]] = ("vllm", "vllm-0.26")
    path: ClassVar[str] = "/inference/v1/generate"
    served: ClassVar[Mapping[str, Any]] = {"routes": RoutesForm.NPY}

    def face(self, backing: Backing) -> Face:
        return vllm_app(backing)

    def asked(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            **self.sampling_for(sample),
            "routed_experts_prompt_start": self.routes_start(sample),
        }
        if budget is not None:
            sampling["max_tokens"] = budget
        if sample.request.want_logprobs:
            sampling["logprobs"] = 0
        return {
            "request_id": self.handle(sample),
            "token_ids": list(sent),
            "sampling_params": sampling,
        }

    def output(self, sample: PartialSample, reply: Any) -> EngineOutput:
        (choice,) = reply["choices"]
        routes, spans = choice["routed_experts"], choice["weight_versions"] or ()
        return EngineOutput(
            token_ids=tuple(choice["token_ids"]),
            logprobs=self.logprobs(choice),
            routes=None if routes is None else self.rows(routes),
            routes_start=self.routes_start(sample),
            finish_reason=FinishReason(choice["finish_reason"]),
            spans=tuple(
                Span(start=one["start"], end=one["end"], version=versioned(one["version"]))
                for one in spans
            ),
        )

    def logprobs(self, choice: Mapping[str, Any]) -> LogprobArray | None:
        """One for each token."""
        told = choice["logprobs"]
        return (
            None
            if told is None
            else np.array([one["logprob"] for one in told["content"]], dtype=np.float64)
        )

    def rows(self, text: str) -> IntArray:
        """The rows."""
        return from_npy(text)


class VllmStreamer(VllmManager):
    """The same over a stream, each of whose events holds what is new."""

    def asked(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> dict[str, Any]:
        return {**super().asked(sample, sent, budget), "stream": True}

    def reply(self, heard: Heard) -> Any:
        """All events as one reply. Raises ``ValueError`` where none says how the call ended."""
        choices = [choice for event in heard.events() for choice in event["choices"]]
        if not choices or (choices[-1]["finish_reason"] is None and not self.unfinished):
            raise ValueError("the stream ended without a reason")
        told = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        joined = {
            **choices[-1],
            "finish_reason": choices[-1]["finish_reason"] or "abort",
            "token_ids": [token for choice in choices for token in choice["token_ids"]],
            "logprobs": (
                {"content": [one for part in told for one in part["content"]]} if told else None
            ),
        }
        return {"choices": [joined]}


class Keeping(HttpManager):
    """Keeps what a stream has brought that breaks off, and goes on from there as from an abort,
    where partial rollout is on.
    """

    unfinished: ClassVar[bool] = True

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        try:
            return await super().call(server_id, sample, sent, budget)
        except BrokenOff as error:
            if error.heard is None or not self.fleet.case.partial:
                raise
            return self.read(sample, error.heard, len(sent))


class SglangKeeper(Keeping, SglangStreamer):
    """Before SGLang's ``/generate``."""


class VllmKeeper(Keeping, VllmStreamer):
    """Before vLLM's ``/inference/v1/generate``."""


def versioned(label: str | None) -> Version:
    """A fleet numbers its labels, and HTTP makes text of them."""
    return int(label) if label is not None and label.isdecimal() else None
