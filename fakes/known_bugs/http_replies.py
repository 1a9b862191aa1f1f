"""Known bugs of HTTP clients: replies that are misread, retried wrongly, or used although they are
incomplete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pybase64

from rollproof.core.case import ActionKind
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
    SglangClient,
    SglangPartialStreamClient,
    SglangStreamClient,
    VllmClient,
    parse_version,
)
from rollproof.fakes.clients.resuming import PartialSample
from rollproof.fakes.http.client import BrokenReply, HttpReply
from rollproof.fakes.http.fault_plan import FaultPlan, WireFault, WireFaultKind
from rollproof.fakes.http.request_body import words_of
from rollproof.fakes.http.serve_options import RoutesForm
from rollproof.fakes.known_bugs._planting import ENDING, act, case, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


def _plan(kind: WireFaultKind, **fields: Any) -> FaultPlan:
    return FaultPlan(faults=(WireFault(do=kind, path="/generate", **{"nth": (1,), **fields}),))


def _events(error: BrokenReply) -> list[Any]:
    return [] if error.partial is None else error.partial.events()


class _WireDtypeKeyIgnored(SglangClient):
    """Reads the bytes as int32, whatever type the server names."""

    served: ClassVar[Mapping[str, Any]] = {"routes": RoutesForm.COMPACT}

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        # servers without the key send int32, so older clients do not look for one
        return super().rows({**meta, "routed_experts_dtype": "int32"})


class _WireBigEndian(SglangClient):
    """Reads the bytes in network order."""

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        return None if rows is None else rows.byteswap()


class _WireInt32AsBytes(SglangClient):
    """Reads the int32 array as bytes, as many as the rows that it expects."""

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        if rows is None:
            return None
        model = self.fleet.case.model
        flat = np.frombuffer(pybase64.b64decode(meta["routed_experts"]), np.uint8)[: rows.size]
        return flat.reshape(-1, model.num_layers, model.top_k).astype(np.int32)


class _WireLayersFirst(SglangClient):
    """Reads the buffer as (layers, rows, top_k)."""

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        if rows is None:
            return None
        count, layers, top_k = rows.shape
        return np.ascontiguousarray(rows.reshape(layers, count, top_k).transpose(1, 0, 2))


class _WireTopKFromBuffer(SglangClient):
    """Computes top-k from the length of the buffer and the number of rows that it believes to have
    requested.
    """

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        if rows is None or len(rows) % 2:
            return rows
        return rows.reshape(len(rows) // 2, rows.shape[1], -1)


class _WireCumulativeAsDelta(SglangStreamClient):
    """Joins the tokens of events that each contain all of them."""

    def decode(self, reply: HttpReply) -> Any:
        last = super().decode(reply)
        # SGLang repeats all tokens in each event unless incremental_streaming_output is on
        last["output_ids"] = [token for event in reply.events() for token in event["output_ids"]]
        last["meta_info"]["output_token_logprobs"] = [
            logprob
            for event in reply.events()
            for logprob in event["meta_info"]["output_token_logprobs"]
        ]
        return last


class _WireDeltaAsCumulative(SglangStreamClient):
    """Takes the last event for the reply, although the server streams deltas."""

    served: ClassVar[Mapping[str, Any]] = {"incremental": True}


class _WireCutStreamIsStop(SglangStreamClient):
    """Returns a broken stream as if the model had stopped."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.TRUNCATE)

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        try:
            return await super().call(server_id, sample, sent, budget)
        except BrokenReply as error:
            last = _events(error)[-1]
            last["meta_info"]["finish_reason"] = {"type": "stop"}
            return self.output(sample, last)


class _WireShortStreamIsLength(SglangStreamClient):
    """Returns a stream that ends early, in order, as if its budget were used up."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.WRONG_LENGTH)

    def decode(self, reply: HttpReply) -> Any:
        last = reply.events()[-1]
        last["meta_info"]["finish_reason"] = last["meta_info"]["finish_reason"] or {
            "type": "length"
        }
        return last


class _WireRetryCountsBoth(SglangStreamClient):
    """Keeps the tokens of a broken stream, and makes the whole call again."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.RESET)

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        try:
            return await super().call(server_id, sample, sent, budget)
        except BrokenReply as error:
            partial = self.output(sample, {**_events(error)[-1]})
            self.merge_tokens(sample, partial)
            self.merge_logprobs(sample, partial)
            self.merge_versions(sample, partial)
            raise


class _WirePartialTokenLost(SglangPartialStreamClient):
    """Continues from the tokens of a broken stream, and returns all but the last of them."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.RESET)

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        super().absorb(sample, sent, output)
        if output.finish_reason is FinishReason.ABORT:
            self.end: int = len(sample.response) - 1

    def finished(self, sample: PartialSample) -> Rollout:
        for values in (sample.response, sample.logprobs, sample.mask, sample.labels):
            del values[self.end]
        return super().finished(sample)


class _WirePartialTokenSentTwice(SglangPartialStreamClient):
    """Continues from the tokens of a broken stream, and sends the last one twice."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.RESET)

    def resume_prompt(self, sample: PartialSample) -> tuple[int, ...]:
        return (*sample.ids, *sample.response[-1:])


class _WireRetryForgetsSampling(SglangClient):
    """Answers a status 503 by another call with the server's own sampling parameters."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.STATUS, after_engine=True)

    def sampling_for(self, sample: PartialSample) -> dict[str, Scalar]:
        return super().sampling_for(sample) if sample.attempts <= 1 else {}


class _WireSlowReplyCountsTwice(SglangClient):
    """Makes a slow call again, uses the first reply, and adds the other one later."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.SLOW, seconds=30.0)

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        first = asyncio.ensure_future(super().call(server_id, sample, sent, budget))
        done, _ = await asyncio.wait({first}, timeout=20.0)
        if done:
            return first.result()
        second = await super().call(server_id, sample, sent, budget)
        self.absorb(sample, len(sent), await first)
        return second


class _WireFailureIsASample(SglangClient):
    """Ends the sample at a status 503, with the tokens so far."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.STATUS, nth=(2,))

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        try:
            return await super().call(server_id, sample, sent, budget)
        except ConnectionError:
            return EngineOutput(
                token_ids=(), logprobs=np.zeros(0), routes=None, finish_reason=FinishReason.LENGTH
            )


class _WireAbortByPrefix(SglangClient):
    """Names calls like their request, and aborts that name once more after the request's end."""

    def handle(self, sample: PartialSample) -> str:
        return sample.request.request_id

    async def rollout(self, request: Request) -> Rollout | None:
        rollout = await super().rollout(request)
        await self.clients["s0"].request("POST", "/abort_request", {"rid": request.request_id})
        return rollout


class _WireVersionAfterReply(SglangClient):
    """Asks the server for its version after the reply, instead of reading the reply's own."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        output = await super().call(server_id, sample, sent, budget)
        reply = await self.clients[server_id].request("GET", "/model_info")
        version = parse_version(reply.json()["weight_version"])
        span = Span(start=0, end=len(output.token_ids), version=version)
        return EngineOutput(
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            routes=output.routes,
            routes_start=output.routes_start,
            finish_reason=output.finish_reason,
            version=version,
            spans=(span,) if output.token_ids else (),
        )

    def pause_mode(self, fleet: Any) -> PauseMode:
        return PauseMode(fleet.pause_mode)


class _WireVersionsAsText(SglangClient):
    """Compares versions as the texts that HTTP transports."""

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        texts = [str(label) for label in sample.labels]
        return {"min_version": int(min(texts)), "max_version": int(max(texts))}


class _WireTokensFromText(SglangClient):
    """Tokenises the text again, which lacks the end of the sequence."""

    def tokens(self, decoded: Mapping[str, Any]) -> tuple[int, ...]:
        end = f"w{self.fleet.policy.eos_id}"
        return words_of(
            " ".join(word for word in decoded["text"].split() if word != end),
            self.fleet.policy.vocab,
        )

    def logprobs(self, meta: Mapping[str, Any]) -> Any:
        end = self.fleet.policy.eos_id
        return np.array(
            [logprob for logprob, token, _ in meta["output_token_logprobs"] if token != end]
        )


class _WireReasonObjectAsText(SglangClient):
    """Compares SGLang's finish reason, an object, with the word ``abort``."""

    def reason(self, reason: Any) -> FinishReason:
        return FinishReason.ABORT if reason == "abort" else FinishReason.STOP


class _WireQueuedAbortKey(SglangClient):
    """Reads a key that the reply to a call aborted in the queue does not have."""

    def output(self, sample: PartialSample, decoded: Any) -> EngineOutput:
        assert decoded["meta_info"]["prompt_tokens"] > 0
        return super().output(sample, decoded)


class _WireFirstRowCut(VllmClient):
    """Cuts off the first row, as if it were the header of the file."""

    def rows(self, text: str) -> IntArray:
        return super().rows(text)[1:]


_PLAIN = case(flavour="sglang")
_WARM = case(flavour="sglang", requests=(request(sampling={"temperature": 0.7}),))
_CUT = case(act(ActionKind.ABORT, 3), flavour="sglang")
_QUEUED = case(act(ActionKind.ABORT, 0, queued=True), flavour="sglang")
_LONG = case(requests=(request(max_tokens=9),), flavour="sglang")
_ALIKE = case(
    requests=(request("r1", max_tokens=3), request("r10", (31, 32, 33), max_tokens=9)),
    flavour="sglang",
)
_OVERTAKEN = case(act(ActionKind.SYNC, 3), flavour="sglang", pause_mode=PauseMode.IN_PLACE)
_TENTH = case(act(ActionKind.SYNC, 3), flavour="sglang", first_version=9)
_ENDS = case(model=ENDING, requests=(request(max_tokens=24),), seed=1, flavour="sglang")

BUGS = (
    KnownBug(
        id="wire-dtype-key-ignored",
        summary=(
            "Routes that a server sends in a compact type, with its name next to them, are read"
            " as int32: a quarter of the rows."
        ),
        refs=("cf. SkyRL#1378", "cf. prime-rl#3051"),
        make=_WireDtypeKeyIgnored,
        cases=(_PLAIN,),
        detected_by=("routes.rows",),
    ),
    KnownBug(
        id="wire-big-endian",
        summary=(
            "Routes are read in network byte order, which SGLang does not use: expert 3 becomes"
            " 50,331,648."
        ),
        refs=("cf. prime-rl#2813",),
        make=_WireBigEndian,
        cases=(_PLAIN,),
        detected_by=("routes.in-range",),
    ),
    KnownBug(
        id="wire-int32-as-bytes",
        summary=(
            "Routes in int32 are read byte by byte, up to the expected number: three of four are"
            " expert 0."
        ),
        refs=("cf. prime-rl#3051",),
        make=_WireInt32AsBytes,
        cases=(_PLAIN,),
        detected_by=("routes.distinct",),
        may_fail=("routes.captured",),
    ),
    KnownBug(
        id="wire-layers-first",
        summary=(
            "A buffer without a shape is read as (layers, rows, top_k): every shape is right,"
            " every row is another token's."
        ),
        refs=("cf. prime-rl#2813",),
        make=_WireLayersFirst,
        cases=(_PLAIN,),
        detected_by=("routes.content",),
    ),
    KnownBug(
        id="wire-top-k-from-buffer",
        summary=(
            "The number of experts in a row is computed from the length of the buffer instead of"
            " the model's config."
        ),
        refs=("miles sglang_rollout.py::_decode_topk_buffer",),
        make=_WireTopKFromBuffer,
        cases=(_PLAIN,),
        detected_by=("routes.shape",),
        may_fail=("routes.rows",),
    ),
    KnownBug(
        id="wire-cumulative-as-delta",
        summary=(
            "Stream events that each contain all tokens so far are joined as if each contained"
            " only the new ones."
        ),
        refs=("cf. vllm#37094",),
        make=_WireCumulativeAsDelta,
        cases=(_PLAIN,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-delta-as-cumulative",
        summary="The last event of a stream of deltas is taken for the complete reply.",
        refs=("cf. sglang#34488",),
        make=_WireDeltaAsCumulative,
        cases=(_PLAIN,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-cut-stream-is-stop",
        summary="A stream that breaks is returned as a finished sample, with finish reason stop.",
        refs=("cf. vllm#47933",),
        make=_WireCutStreamIsStop,
        cases=(_PLAIN,),
        detected_by=("stitch.finish-reason",),
        may_fail=("routes.presence",),
    ),
    KnownBug(
        id="wire-short-stream-is-length",
        summary=(
            "A stream that ends early and in order, without a reason, is returned as if the"
            " budget were used up."
        ),
        refs=("cf. AReaL#858",),
        make=_WireShortStreamIsLength,
        cases=(_PLAIN,),
        detected_by=("stitch.finish-length",),
        may_fail=("routes.presence",),
    ),
    KnownBug(
        id="wire-retry-counts-both",
        summary=(
            "The tokens of a broken stream are kept, the whole call is repeated, and its tokens"
            " are added: the beginning appears twice."
        ),
        refs=("cf. AReaL#1498",),
        make=_WireRetryCountsBoth,
        cases=(_PLAIN,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-partial-token-lost",
        summary=(
            "A stack continues from the tokens of a broken stream, and loses the last one of them."
        ),
        refs=("cf. sglang#34488",),
        make=_WirePartialTokenLost,
        cases=(_LONG,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-partial-token-sent-twice",
        summary=(
            "A stack continues from the tokens of a broken stream, and sends the last one of them"
            " twice."
        ),
        refs=("cf. vllm#22283",),
        make=_WirePartialTokenSentTwice,
        cases=(_LONG,),
        detected_by=("stitch.resume-prompt",),
        may_fail=("routes.rows",),
    ),
    KnownBug(
        id="wire-slow-reply-counts-twice",
        summary="A slow call is made again, and the tokens of both replies are added.",
        refs=("cf. AReaL#1498",),
        make=_WireSlowReplyCountsTwice,
        cases=(_PLAIN,),
        detected_by=("lifecycle.one-reply-per-retry",),
    ),
    KnownBug(
        id="wire-retry-forgets-sampling",
        summary="The call after a status 503 uses the server's own sampling parameters.",
        refs=("cf. AReaL#1498",),
        make=_WireRetryForgetsSampling,
        cases=(_WARM,),
        detected_by=("stitch.sampling-params",),
    ),
    KnownBug(
        id="wire-failure-is-a-sample",
        summary=(
            "A status 503 to the resuming call turns the tokens so far into a finished sample,"
            " which is trained on."
        ),
        refs=("cf. slime#2124",),
        make=_WireFailureIsASample,
        cases=(_CUT,),
        detected_by=("stitch.finish-length",),
        may_fail=("lifecycle.aborts-do-not-surface",),
    ),
    KnownBug(
        id="wire-abort-by-prefix",
        summary=(
            "When a request has ended, its id is aborted once more to be sure; SGLang ends all"
            " calls with ids that begin with it."
        ),
        refs=("sglang#25561",),
        make=_WireAbortByPrefix,
        cases=(_ALIKE,),
        detected_by=("lifecycle.abort-hits-target",),
    ),
    KnownBug(
        id="wire-version-after-reply",
        summary=(
            "The server's version is read after the reply: tokens sampled before an update are"
            " tagged with the new version."
        ),
        refs=("AReaL#1569",),
        make=_WireVersionAfterReply,
        cases=(_OVERTAKEN,),
        detected_by=("versions.min-max",),
    ),
    KnownBug(
        id="wire-versions-as-text",
        summary=(
            "Versions are compared as the texts that HTTP transports, so that 10 comes before 9."
        ),
        refs=("cf. slime#2260",),
        make=_WireVersionsAsText,
        cases=(_TENTH,),
        detected_by=("versions.min-max",),
    ),
    KnownBug(
        id="wire-tokens-from-text",
        summary=(
            "Ids are tokenised again from the text of the reply, which lacks the end of the"
            " sequence."
        ),
        refs=("slime#1861",),
        make=_WireTokensFromText,
        cases=(_ENDS,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-reason-object-as-text",
        summary=(
            "SGLang's reason is an object, and is compared with the word abort: a sample that was"
            " cut off is returned as finished."
        ),
        refs=("cf. slime#327",),
        make=_WireReasonObjectAsText,
        cases=(_CUT,),
        detected_by=("lifecycle.aborts-do-not-surface",),
        may_fail=("stitch.finish-reason",),
    ),
    KnownBug(
        id="wire-queued-abort-key",
        summary=(
            "The client reads a key that the reply to a call aborted in the queue does not have,"
            " and the rollout fails."
        ),
        refs=("slime#327",),
        make=_WireQueuedAbortKey,
        cases=(_QUEUED,),
        detected_by=("lifecycle.no-error-without-fault",),
    ),
    KnownBug(
        id="wire-first-row-cut",
        summary="The first row of an .npy file is cut off, as if it were the file's header.",
        refs=("cf. slime#1045",),
        make=_WireFirstRowCut,
        cases=(case(),),
        detected_by=("routes.rows",),
    ),
)
