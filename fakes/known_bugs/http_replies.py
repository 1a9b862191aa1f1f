"""Known bugs of the wire: replies over HTTP that are read wrongly, retried wrongly, or taken for
whole when they are not.
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
    SglangKeeper,
    SglangManager,
    SglangStreamer,
    VllmManager,
    versioned,
)
from rollproof.fakes.clients.resuming import PartialSample
from rollproof.fakes.http.engine_backend import RoutesForm
from rollproof.fakes.http.fault_plan import FaultPlan, WireFault, WireFaultKind
from rollproof.fakes.http.in_process_client import BrokenOff, Heard
from rollproof.fakes.http.request_body import words_of
from rollproof.fakes.known_bugs._planting import ENDING, act, case, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


def _plan(kind: WireFaultKind, **fields: Any) -> FaultPlan:
    return FaultPlan(faults=(WireFault(do=kind, path="/generate", **{"nth": (1,), **fields}),))


def _events(error: BrokenOff) -> list[Any]:
    return [] if error.heard is None else error.heard.events()


class _WireDtypeKeyIgnored(SglangManager):
    """Takes the bytes for int32, whatever the server says that they are."""

    served: ClassVar[Mapping[str, Any]] = {"routes": RoutesForm.COMPACT}

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        return super().rows({**meta, "routed_experts_dtype": "int32"})


class _WireBigEndian(SglangManager):
    """Takes the bytes for those of the network."""

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        return None if rows is None else rows.byteswap()


class _WireInt32AsBytes(SglangManager):
    """Reads the int32 as bytes, and as many rows of them as are expected."""

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        if rows is None:
            return None
        model = self.fleet.case.model
        flat = np.frombuffer(pybase64.b64decode(meta["routed_experts"]), np.uint8)[: rows.size]
        return flat.reshape(-1, model.num_layers, model.top_k).astype(np.int32)


class _WireLayersFirst(SglangManager):
    """Lays the buffer out as (layers, rows, top_k)."""

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        if rows is None:
            return None
        count, layers, top_k = rows.shape
        return np.ascontiguousarray(rows.reshape(layers, count, top_k).transpose(1, 0, 2))


class _WireTopKFromBuffer(SglangManager):
    """Reckons from the length of the buffer how many experts a row has; the rows are as many as it
    thinks that it asked for.
    """

    def rows(self, meta: Mapping[str, Any]) -> IntArray | None:
        rows = super().rows(meta)
        if rows is None or len(rows) % 2:
            return rows
        return rows.reshape(len(rows) // 2, rows.shape[1], -1)


class _WireCumulativeAsDelta(SglangStreamer):
    """Joins the tokens of events each of which holds all of them."""

    def reply(self, heard: Heard) -> Any:
        last = super().reply(heard)
        last["output_ids"] = [token for event in heard.events() for token in event["output_ids"]]
        last["meta_info"]["output_token_logprobs"] = [
            one for event in heard.events() for one in event["meta_info"]["output_token_logprobs"]
        ]
        return last


class _WireDeltaAsCumulative(SglangStreamer):
    """Takes the last event for the whole, where the server streams only what is new."""

    served: ClassVar[Mapping[str, Any]] = {"incremental": True}


class _WireCutStreamIsStop(SglangStreamer):
    """A stream that breaks off is handed over as if the model had stopped."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.TRUNCATE)

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        try:
            return await super().call(server_id, sample, sent, budget)
        except BrokenOff as error:
            last = _events(error)[-1]
            last["meta_info"]["finish_reason"] = {"type": "stop"}
            return self.output(sample, last)


class _WireShortStreamIsLength(SglangStreamer):
    """A stream that ends early, and in order, is handed over as if its budget were used up."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.WRONG_LENGTH)

    def reply(self, heard: Heard) -> Any:
        last = heard.events()[-1]
        last["meta_info"]["finish_reason"] = last["meta_info"]["finish_reason"] or {
            "type": "length"
        }
        return last


class _WireRetryCountsBoth(SglangStreamer):
    """Keeps what a broken stream had brought, and makes the whole call again."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.RESET)

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        try:
            return await super().call(server_id, sample, sent, budget)
        except BrokenOff as error:
            partial = self.output(sample, {**_events(error)[-1]})
            self.merge_tokens(sample, partial)
            self.merge_logprobs(sample, partial)
            self.merge_versions(sample, partial)
            raise


class _WirePartialTokenLost(SglangKeeper):
    """Goes on from what a broken stream had brought, and hands over all but its last token."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.RESET)

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        super().absorb(sample, sent, output)
        if output.finish_reason is FinishReason.ABORT:
            self.end: int = len(sample.response) - 1

    def finished(self, sample: PartialSample) -> Rollout:
        for values in (sample.response, sample.logprobs, sample.mask, sample.labels):
            del values[self.end]
        return super().finished(sample)


class _WirePartialTokenSentTwice(SglangKeeper):
    """Goes on from what a broken stream had brought, and sends its last token twice."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.RESET)

    def resume_prompt(self, sample: PartialSample) -> tuple[int, ...]:
        return (*sample.ids, *sample.response[-1:])


class _WireRetryForgetsSampling(SglangManager):
    """A status 503 is answered by another call with the server's own sampling parameters."""

    plan: ClassVar[FaultPlan] = _plan(WireFaultKind.STATUS, after_engine=True)

    def sampling_for(self, sample: PartialSample) -> dict[str, Scalar]:
        return super().sampling_for(sample) if sample.attempts <= 1 else {}


class _WireSlowReplyCountsTwice(SglangManager):
    """Makes a call again that takes long, takes what comes first, and adds the other when it comes."""

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


class _WireFailureIsASample(SglangManager):
    """A status 503 is the end of the sample, whatever it has."""

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


class _WireAbortByPrefix(SglangManager):
    """Names its calls as the request is named, and when it has ended aborts what may be left of
    them.
    """

    def handle(self, sample: PartialSample) -> str:
        return sample.request.request_id

    async def rollout(self, request: Request) -> Rollout | None:
        rollout = await super().rollout(request)
        await self.lines["s0"].ask("POST", "/abort_request", {"rid": request.request_id})
        return rollout


class _WireVersionAfterReply(SglangManager):
    """Asks the server for its version when the reply is there, in place of reading the reply's own."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
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


class _WireVersionsAsText(SglangManager):
    """Compares versions as the texts that the wire makes of them."""

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        texts = [str(label) for label in sample.labels]
        return {"min_version": int(min(texts)), "max_version": int(max(texts))}


class _WireTokensFromText(SglangManager):
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


class _WireReasonObjectAsText(SglangManager):
    """Looks for the word ``abort`` where SGLang has an object."""

    def reason(self, told: Any) -> FinishReason:
        return FinishReason.ABORT if told == "abort" else FinishReason.STOP


class _WireQueuedAbortKey(SglangManager):
    """Reads a key that the reply to a call aborted in the queue does not have."""

    def output(self, sample: PartialSample, reply: Any) -> EngineOutput:
        assert reply["meta_info"]["prompt_tokens"] > 0
        return super().output(sample, reply)


class _WireFirstRowCut(VllmManager):
    """Cuts the first row off, as if it were the header of the file."""

    def rows(self, text: str) -> IntArray:
        return super().rows(text)[1:]


_ONE = case(flavour="sglang")
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
            "Routes that a server sends in a compact type, with its name beside them, are read as"
            " int32: a quarter of the rows."
        ),
        refs=("cf. SkyRL#1378", "cf. prime-rl#3051"),
        make=_WireDtypeKeyIgnored,
        cases=(_ONE,),
        detected_by=("routes.rows",),
    ),
    KnownBug(
        id="wire-big-endian",
        summary=(
            "Routes are read in the byte order of the network, which SGLang does not use: expert 3"
            " becomes 50,331,648."
        ),
        refs=("cf. prime-rl#2813",),
        make=_WireBigEndian,
        cases=(_ONE,),
        detected_by=("routes.in-range",),
    ),
    KnownBug(
        id="wire-int32-as-bytes",
        summary=(
            "Routes in int32 are read byte by byte, and as many of them taken as are expected:"
            " three of four are expert 0."
        ),
        refs=("cf. prime-rl#3051",),
        make=_WireInt32AsBytes,
        cases=(_ONE,),
        detected_by=("routes.distinct",),
        may_fail=("routes.captured",),
    ),
    KnownBug(
        id="wire-layers-first",
        summary=(
            "A buffer without a shape is laid out as (layers, rows, top_k): every shape is right,"
            " every row another token's."
        ),
        refs=("cf. prime-rl#2813",),
        make=_WireLayersFirst,
        cases=(_ONE,),
        detected_by=("routes.content",),
    ),
    KnownBug(
        id="wire-top-k-from-buffer",
        summary=(
            "How many experts a row has is reckoned from the length of the buffer, in place of"
            " being taken from the model."
        ),
        refs=("miles sglang_rollout.py::_decode_topk_buffer",),
        make=_WireTopKFromBuffer,
        cases=(_ONE,),
        detected_by=("routes.shape",),
        may_fail=("routes.rows",),
    ),
    KnownBug(
        id="wire-cumulative-as-delta",
        summary=(
            "Events of a stream that each hold all tokens so far are joined as if each held the new"
            " ones."
        ),
        refs=("cf. vllm#37094",),
        make=_WireCumulativeAsDelta,
        cases=(_ONE,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-delta-as-cumulative",
        summary="Of a stream that tells only what is new, the last event is taken for the whole.",
        refs=("cf. sglang#34488",),
        make=_WireDeltaAsCumulative,
        cases=(_ONE,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-cut-stream-is-stop",
        summary=(
            "A stream whose connection breaks is handed over as a finished sample, with finish"
            " reason stop."
        ),
        refs=("cf. vllm#47933",),
        make=_WireCutStreamIsStop,
        cases=(_ONE,),
        detected_by=("stitch.finish-reason",),
        may_fail=("routes.presence",),
    ),
    KnownBug(
        id="wire-short-stream-is-length",
        summary=(
            "A stream that ends early and in order, without a reason, is handed over as if the"
            " budget were used up."
        ),
        refs=("cf. AReaL#858",),
        make=_WireShortStreamIsLength,
        cases=(_ONE,),
        detected_by=("stitch.finish-length",),
        may_fail=("routes.presence",),
    ),
    KnownBug(
        id="wire-retry-counts-both",
        summary=(
            "What a broken stream had brought is kept, the whole call is made again, and its tokens"
            " are added: the beginning twice."
        ),
        refs=("cf. AReaL#1498",),
        make=_WireRetryCountsBoth,
        cases=(_ONE,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-partial-token-lost",
        summary=(
            "A stack goes on from what a broken stream had brought, and hands over all of it but"
            " the last token."
        ),
        refs=("cf. sglang#34488",),
        make=_WirePartialTokenLost,
        cases=(_LONG,),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-partial-token-sent-twice",
        summary=(
            "A stack goes on from what a broken stream had brought, and sends the last token of it"
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
        summary=(
            "A call that takes long is made again, and when both replies have come both are added."
        ),
        refs=("cf. AReaL#1498",),
        make=_WireSlowReplyCountsTwice,
        cases=(_ONE,),
        detected_by=("lifecycle.one-reply-per-retry",),
    ),
    KnownBug(
        id="wire-retry-forgets-sampling",
        summary=(
            "The call that follows a status 503 is made with the server's own sampling parameters."
        ),
        refs=("cf. AReaL#1498",),
        make=_WireRetryForgetsSampling,
        cases=(_WARM,),
        detected_by=("stitch.sampling-params",),
    ),
    KnownBug(
        id="wire-failure-is-a-sample",
        summary=(
            "A status 503 to the call that resumes makes a finished sample of what there is, which"
            " is trained on."
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
            " calls whose ids begin with it."
        ),
        refs=("sglang#25561",),
        make=_WireAbortByPrefix,
        cases=(_ALIKE,),
        detected_by=("lifecycle.abort-hits-target",),
    ),
    KnownBug(
        id="wire-version-after-reply",
        summary=(
            "The server is asked for its version when the reply has come: tokens sampled before an"
            " update are tagged with the new one."
        ),
        refs=("AReaL#1569",),
        make=_WireVersionAfterReply,
        cases=(_OVERTAKEN,),
        detected_by=("versions.min-max",),
    ),
    KnownBug(
        id="wire-versions-as-text",
        summary=(
            "Versions are compared as the texts that the wire makes of them, so that 10 comes"
            " before 9."
        ),
        refs=("cf. slime#2260",),
        make=_WireVersionsAsText,
        cases=(_TENTH,),
        detected_by=("versions.min-max",),
    ),
    KnownBug(
        id="wire-tokens-from-text",
        summary=(
            "Ids are made anew from the text of the reply, out of which the end of the sequence was"
            " taken."
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
            " cut off is handed over as finished."
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
            "A key is read that the reply to a call aborted in the queue does not have: the rollout"
            " fails."
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
