"""Clients of the known bugs of the wire: each is a manager that speaks HTTP and does one thing
wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pybase64

from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import (
    EngineOutput,
    FinishReason,
    IntArray,
    Request,
    Rollout,
    Scalar,
    Span,
)
from rollproof.fakes.clients.http_clients import (
    SglangKeeper,
    SglangManager,
    SglangStreamer,
    VllmManager,
    versioned,
)
from rollproof.fakes.clients.resuming import Sample
from rollproof.fakes.http.engine_backend import RoutesForm
from rollproof.fakes.http.fault_plan import FaultPlan, WireFault, WireFaultKind
from rollproof.fakes.http.in_process_client import BrokenOff, Heard
from rollproof.fakes.http.request_body import words_of

__all__ = [
    "AddsCumulative",
    "BigEndian",
    "Bytes",
    "CountsBoth",
    "CutIsEnd",
    "FailureIsEnd",
    "GivesUpWaiting",
    "IgnoresDtype",
    "KeepsLastDelta",
    "LayersFirst",
    "LosesKept",
    "NeedsCounts",
    "OneRowLate",
    "ReasonIsText",
    "RetriesBare",
    "SendsTwice",
    "ShortIsLength",
    "TextOrder",
    "TidiesUp",
    "TokensFromText",
    "TopKFromBuffer",
    "VersionAfterwards",
]


def _plan(kind: WireFaultKind, **fields: Any) -> FaultPlan:
    return FaultPlan(faults=(WireFault(do=kind, path="/generate", **{"nth": (1,), **fields}),))


def _events(error: BrokenOff) -> list[Any]:
    return [] if error.heard is None else error.heard.events()


class IgnoresDtype(SglangManager):
    """Takes the bytes for int32, whatever the server says that they are."""

    served: ClassVar[Mapping[str, Any]] = {"routes": RoutesForm.COMPACT}

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        return super().rows({**meta, "routed_experts_dtype": "int32"})


class BigEndian(SglangManager):
    """Takes the bytes for those of the network."""

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        return None if rows is None else rows.byteswap()


class Bytes(SglangManager):
    """Reads the int32 as bytes, and as many rows of them as are expected."""

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        if rows is None:
            return None
        model = self.fleet.case.model
        flat = np.frombuffer(pybase64.b64decode(meta["routed_experts"]), np.uint8)[: rows.size]
        return flat.reshape(-1, model.num_layers, model.top_k).astype(np.int32)


class LayersFirst(SglangManager):
    """Lays the buffer out as (layers, rows, top_k)."""

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        if rows is None:
            return None
        count, layers, top_k = rows.shape
        return np.ascontiguousarray(rows.reshape(layers, count, top_k).transpose(1, 0, 2))


class TopKFromBuffer(SglangManager):
    """Reckons from the length of the buffer how many experts a row has; the rows are as many as it
    thinks that it asked for.
    """

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        if rows is None or len(rows) % 2:
            return rows
        return rows.reshape(len(rows) // 2, rows.shape[1], -1)


class AddsCumulative(SglangStreamer):
    """Joins the tokens of events each of which holds all of them."""

    def reply(self, heard: Heard) -> Any:
        last = super().reply(heard)
        last["output_ids"] = [token for event in heard.events() for token in event["output_ids"]]
        last["meta_info"]["output_token_logprobs"] = [
            one for event in heard.events() for one in event["meta_info"]["output_token_logprobs"]
        ]
        return last


class KeepsLastDelta(SglangStreamer):
    """Takes the last event for the whole, where the server streams only what is new."""

    served: ClassVar[Mapping[str, Any]] = {"incremental": True}


class CutIsEnd(SglangStreamer):
    """A stream that breaks off is handed over as if the model had stopped."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.TRUNCATE)

    async def call(
        self, server_id: str, sample: Sample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        try:
            return await super().call(server_id, sample, sent, budget)
        except BrokenOff as error:
            last = _events(error)[-1]
            last["meta_info"]["finish_reason"] = {"type": "stop"}
            return self.output(sample, last)


class ShortIsLength(SglangStreamer):
    """A stream that ends early, and in order, is handed over as if its budget were used up."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.WRONG_LENGTH)

    def reply(self, heard: Heard) -> Any:
        last = heard.events()[-1]
        last["meta_info"]["finish_reason"] = last["meta_info"]["finish_reason"] or {
            "type": "length"
        }
        return last


class CountsBoth(SglangStreamer):
    """Keeps what a broken stream had brought, and makes the whole call again."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.RESET)

    async def call(
        self, server_id: str, sample: Sample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        try:
            return await super().call(server_id, sample, sent, budget)
        except BrokenOff as error:
            partial = self.output(sample, {**_events(error)[-1]})
            self.merge_tokens(sample, partial)
            self.merge_logprobs(sample, partial)
            self.merge_versions(sample, partial)
            raise


class LosesKept(SglangKeeper):
    """Goes on from what a broken stream had brought, and hands over all but its last token."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.RESET)

    def absorb(self, sample: Sample, sent: int, output: EngineOutput) -> None:
        super().absorb(sample, sent, output)
        if output.finish_reason is FinishReason.ABORT:
            self.end: int = len(sample.response) - 1

    def finished(self, sample: Sample) -> Rollout:
        for values in (sample.response, sample.logprobs, sample.mask, sample.labels):
            del values[self.end]
        return super().finished(sample)


class SendsTwice(SglangKeeper):
    """Goes on from what a broken stream had brought, and sends its last token twice."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.RESET)

    def resume_prompt(self, sample: Sample) -> tuple[int, ...]:
        return (*sample.ids, *sample.response[-1:])


class RetriesBare(SglangManager):
    """A status 503 is answered by another call with the server's own sampling parameters."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.STATUS, after_engine=True)

    def sampling_for(self, sample: Sample) -> dict[str, Scalar]:
        return super().sampling_for(sample) if sample.attempts <= 1 else {}


class GivesUpWaiting(SglangManager):
    """Makes a call again that takes long, takes what comes first, and adds the other when it comes."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.SLOW, seconds=30.0)

    async def call(
        self, server_id: str, sample: Sample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        first = asyncio.ensure_future(super().call(server_id, sample, sent, budget))
        done, _ = await asyncio.wait({first}, timeout=20.0)
        if done:
            return first.result()
        second = await super().call(server_id, sample, sent, budget)
        self.absorb(sample, len(sent), await first)
        return second


class FailureIsEnd(SglangManager):
    """A status 503 is the end of the sample, whatever it has."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.STATUS, nth=(2,))

    async def call(
        self, server_id: str, sample: Sample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        try:
            return await super().call(server_id, sample, sent, budget)
        except ConnectionError:
            return EngineOutput(
                token_ids=(), logprobs=np.zeros(0), routes=None, finish_reason=FinishReason.LENGTH
            )


class TidiesUp(SglangManager):
    """Names its calls as the request is named, and when it has ended aborts what may be left of
    them.
    """

    def handle(self, sample: Sample) -> str:
        return sample.request.request_id

    async def rollout(self, request: Request) -> Rollout | None:
        rollout = await super().rollout(request)
        await self.lines["s0"].ask("POST", "/abort_request", {"rid": request.request_id})
        return rollout


class VersionAfterwards(SglangManager):
    """Asks the server for its version when the reply is there, in place of reading the reply's own."""

    async def call(
        self, server_id: str, sample: Sample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        output = await super().call(server_id, sample, sent, budget)
        told = (await self.lines[server_id].ask("GET", "/model_info")).json()["weight_version"]
        span = Span(start=0, end=len(output.token_ids), version=versioned(told))
        return EngineOutput(
            token_ids=output.token_ids, logprobs=output.logprobs, routes=output.routes, routes_start=output.routes_start,
            finish_reason=output.finish_reason, version=versioned(told), spans=(span,) if output.token_ids else (),
        )  # fmt: skip

    def pause_mode(self, fleet: Any) -> PauseMode:
        return PauseMode(fleet.pause_mode)


class TextOrder(SglangManager):
    """Compares versions as the texts that the wire makes of them."""

    def version_tags(self, sample: Sample) -> dict[str, Any]:
        texts = [str(label) for label in sample.labels]
        return {"min_version": int(min(texts)), "max_version": int(max(texts))}


class TokensFromText(SglangManager):
    """Makes the ids anew from the text, out of which the end of the sequence was taken."""

    def tokens(self, reply: Mapping[str, Any]) -> tuple[int, ...]:
        end = f"w{self.fleet.policy.eos_id}"
        return words_of(
            " ".join(word for word in reply["text"].split() if word != end), self.fleet.policy.vocab
        )

    def logprobs(self, meta: Mapping[str, Any]) -> Any:
        end = self.fleet.policy.eos_id
        return np.array(
            [logprob for logprob, token, _ in meta["output_token_logprobs"] if token != end]
        )


class ReasonIsText(SglangManager):
    """Looks for the word ``abort`` where SGLang has an object."""

    def reason(self, told: Any) -> FinishReason:
        return FinishReason.ABORT if told == "abort" else FinishReason.STOP


class NeedsCounts(SglangManager):
    """Reads a key that the reply to a call aborted in the queue does not have."""

    def output(self, sample: Sample, reply: Any) -> EngineOutput:
        assert reply["meta_info"]["prompt_tokens"] > 0
        return super().output(sample, reply)


class OneRowLate(VllmManager):
    """Cuts the first row off, as if it were the header of the file."""

    def rows(self, text: str) -> IntArray:
        return super().rows(text)[1:]
