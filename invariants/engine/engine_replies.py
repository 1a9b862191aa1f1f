"""Checks on the parts of replies: they are as declared, however a call ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Contract, Rows, Versions
from rollproof.core.engine_contract import EngineTerms, Refusal, ReplyKey, RoutesSwitch, StreamMode
from rollproof.core.events.rollout import Call, Chunk, Reference, Reply, Weights
from rollproof.core.records import EngineOutput, FinishReason
from rollproof.invariants._shared.phrases import count
from rollproof.invariants.engine.independent_forward import (
    NEAR_TIE,
    TOLERANCE,
    PerReply,
    captured_rows,
    moe_rows,
    readable,
)
from rollproof.invariants.routes.route_phrases import has_routes
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "Served",
    "engine_identity",
    "engine_opt_in",
    "engine_parts",
    "engine_rows",
    "engine_spans",
    "engine_stream",
    "is_served",
    "refusal_of",
]


def refusal_of(terms: EngineTerms, call: Call) -> Refusal | None:
    """Return how an engine of these terms answers a call that it cannot serve; ``None`` if it must
    serve it.
    """
    if not call.prompt_ids:
        return terms.empty_prompt
    if call.max_tokens is not None and call.max_tokens < 1:
        return terms.zero_budget
    if len(call.prompt_ids) > terms.longest_prompt:
        return Refusal.ERROR
    if call.routes_start > len(call.prompt_ids):
        return terms.bad_start
    budget = call.max_tokens or 0
    return terms.excess_budget if len(call.prompt_ids) + budget > terms.max_length else None


def is_served(terms: EngineTerms, call: Call) -> bool:
    """Return whether the engine must serve a call, by its terms."""
    return refusal_of(terms, call) in (None, Refusal.IGNORED)


class Served(PerReply):
    """Passes on the replies to calls that can be served."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        assert self.contract.engine is not None
        self.terms: EngineTerms = self.contract.engine

    def judge(
        self, call: Call, reply: Reply, references: Sequence[Reference], out: Collector
    ) -> None:
        if is_served(self.terms, call):
            self.judge_served(call, reply, out)

    def judge_served(self, call: Call, reply: Reply, out: Collector) -> None:
        """Judge one reply."""
        raise NotImplementedError(
            f"{type(self).__name__} must look at the replies that it is shown"
        )


class EngineRows(Served):
    """Of N tokens of prompt and response the last was never forwarded, however the call ended."""

    def judge_served(self, call: Call, reply: Reply, out: Collector) -> None:
        output = reply.output
        if output.routes is None or not output.token_ids:
            return
        aborted = output.finish_reason is FinishReason.ABORT
        # vLLM #39917: an abort between forward pass and sampling left a row too many.
        out.exercised("rows of aborted calls" if aborted else "rows of finished calls")
        total = len(call.prompt_ids) + len(output.token_ids) - output.routes_start
        expected = total if self.contract.rows is Rows.ALL else total - 1
        if len(output.routes) != expected:
            out.finding(
                "a reply has another number of rows than tokens were forwarded",
                expected=(
                    f"{count(expected, 'row')}: {len(call.prompt_ids)} prompt +"
                    f" {len(output.token_ids)} sampled tokens"
                    f"{'' if self.contract.rows is Rows.ALL else ' - 1'}"
                    f"{f' - {output.routes_start} (offset)' if output.routes_start else ''}"
                ),
                observed=(
                    f"{count(len(output.routes), 'row')}, in a reply that ended by"
                    f" {output.finish_reason}"
                ),
                where={"call": reply.call_id, "server": call.server_id},
                hint=(
                    "Rows of a discarded step were returned, or those of the last step were"
                    " dropped. Check aborts between forward pass and sampling, async scheduling"
                    " (vLLM #39917), and whether the engine ignores routes_start."
                ),
            )


class EngineParts(Served):
    """The parts of a reply depend on how far its call had come."""

    def judge_served(self, call: Call, reply: Reply, out: Collector) -> None:
        output = reply.output
        aborted = output.finish_reason is FinishReason.ABORT
        allowed = [self.terms.keys_aborted if aborted else self.terms.keys_finished]
        stage = "aborted after a token" if aborted else "ended by itself"
        if not output.token_ids:
            if not aborted:
                return
            # A call aborted in the queue never ran, and one aborted while running did: both forms
            # are declared.
            allowed, stage = (
                [self.terms.keys_early, self.terms.keys_queued],
                "aborted before the first token",
            )
        out.exercised(f"replies that {stage}" if not aborted else f"replies {stage}")
        shown = {
            ReplyKey.LOGPROBS: output.logprobs is not None,
            ReplyKey.ROUTES: output.routes is not None,
            ReplyKey.SPANS: bool(output.spans),
            ReplyKey.CACHED: output.cached_tokens is not None,
        }
        # Parts that the call did not request may be present or not.
        compared = set(ReplyKey)
        compared -= set() if call.want_logprobs else {ReplyKey.LOGPROBS}
        requested = self.contract.has_routes and (
            call.want_routes or self.terms.routes_switch is RoutesSwitch.ENGINE
        )
        compared -= set() if requested else {ReplyKey.ROUTES}
        present = {key for key in compared if shown[key]}
        if not any(present == compared & set(keys) for keys in allowed):
            expected = " or ".join(
                sorted({", ".join(sorted(compared & set(keys))) or "nothing" for keys in allowed})
            )
            out.finding(
                "a reply lacks declared parts, or has undeclared ones",
                expected=f"{expected}, of a call that {stage if not aborted else f'was {stage}'}",
                observed=", ".join(sorted(present)) or "nothing",
                where={"call": reply.call_id, "server": call.server_id},
                hint=(
                    "Engines end calls in several places (running, preempted, queued), and"
                    " each builds its own reply: a consumer that reads a part unconditionally"
                    " fails on the other paths (SGLang #11673, #11093; vime#49)."
                ),
            )


class EngineSpans(Served):
    """Spans are contiguous from 0, differ from one to the next, and cover the tokens."""

    def judge_served(self, call: Call, reply: Reply, out: Collector) -> None:
        spans, length = reply.output.spans, len(reply.output.token_ids)
        if not spans or not length:
            return
        out.exercised("replies with spans")
        starts = [0, *(span.end for span in spans)]
        broken = (
            any(span.start != start for span, start in zip(spans, starts, strict=False))
            or starts[-1] != length
        )
        repeated = any(span.version == following.version for span, following in pairwise(spans))
        if broken or repeated or any(span.end <= span.start for span in spans):
            out.finding(
                "version spans do not cover the tokens one after the other",
                expected=(
                    f"spans from 0 to {length}, each beginning where the previous one ends,"
                    " under another version"
                ),
                observed=", ".join(f"{span.version}: {span.start}-{span.end}" for span in spans),
                where={"call": reply.call_id, "server": call.server_id},
                hint=(
                    "Spans are built from the token counts at updates: check them after an"
                    " update, after a retraction, and if tokens are cut at a stop sequence."
                ),
            )


class EngineOptIn(Served):
    """Routes are large: a call that did not request them must not get them, unless the engine has
    only one switch.
    """

    def judge_served(self, call: Call, reply: Reply, out: Collector) -> None:
        if not reply.output.token_ids:
            return
        aborted = reply.output.finish_reason is FinishReason.ABORT
        if aborted and ReplyKey.ROUTES not in self.terms.keys_aborted:
            return  # engine.parts judges them
        out.exercised(
            "calls that request routes" if call.want_routes else "calls that do not request routes"
        )
        expected = call.want_routes or self.terms.routes_switch is RoutesSwitch.ENGINE
        if (reply.output.routes is not None) != expected:
            out.finding(
                (
                    "routes were returned to a call that did not request them"
                    if not expected
                    else "a call that requested routes got none"
                ),
                expected=(
                    f"{'routes' if expected else 'no routes'}: the engine declares"
                    f" routes_switch='{self.terms.routes_switch}'"
                ),
                observed=(
                    "no routes"
                    if expected
                    else (
                        "rows of shape"
                        f" {reply.output.routes.shape if reply.output.routes is not None else ()}"
                    )
                ),
                where={"call": reply.call_id, "server": call.server_id},
                hint=(
                    "In a mixed batch the flag of one request was applied to all, or to none (slime"
                    " #1909)."
                ),
            )


class EngineStream(Served):
    """The pieces that a caller puts together are the reply."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._chunks: dict[int, list[Chunk]] = {}

    def on_chunk(self, event: Chunk, out: Collector) -> None:
        """Store the pieces until the reply comes."""
        self._chunks.setdefault(event.call_id, []).append(event)

    def judge_served(self, call: Call, reply: Reply, out: Collector) -> None:
        chunks = self._chunks.pop(reply.call_id, [])
        if not chunks or call.stream in (None, StreamMode.FINAL):
            return
        out.exercised(f"{call.stream} streams")
        tokens: tuple[int, ...] = ()
        problem = ""
        for chunk in chunks:
            if call.stream is StreamMode.CUMULATIVE and chunk.token_ids[: len(tokens)] != tokens:
                problem = problem or "a chunk does not continue the previous one"
            tokens = (
                chunk.token_ids
                if call.stream is StreamMode.CUMULATIVE
                else tokens + chunk.token_ids
            )
        # vLLM #22283 and #47933, SGLang #34488: the chunk that ends an aborted call repeats or
        # loses a token.
        ends = sum(chunk.finished for chunk in chunks)
        if tokens != reply.output.token_ids:
            problem = (
                problem
                or f"the chunks make {count(len(tokens), 'token')}: {list(tokens[-4:])} at the end"
            )
        if ends != 1 or not chunks[-1].finished:
            problem = problem or f"{ends} chunks are marked as the last"
        if any(chunk.rows is not None for chunk in chunks[:-1]):
            problem = problem or "a chunk before the last one has routes"
        rows = None if reply.output.routes is None else len(reply.output.routes)
        if chunks[-1].rows != rows:
            problem = problem or f"the last chunk has {chunks[-1].rows} rows"
        if problem:
            out.finding(
                "the chunks of a stream do not make up the reply",
                expected=(
                    f"{count(len(reply.output.token_ids), 'token')},"
                    f" {list(reply.output.token_ids[-4:])} at the end, and {rows} rows on the last"
                    " chunk"
                ),
                observed=(
                    f"{problem} ({call.stream}, {len(chunks)} chunks, ended by"
                    f" {reply.output.finish_reason})"
                ),
                where={"call": reply.call_id, "server": call.server_id},
                hint=(
                    "The chunk that ends an aborted call repeats or loses a token, or is missing"
                    " (SGLang #34488, vLLM #22283, #47933)."
                ),
            )


class EngineIdentity(PerReply):
    """Compares a call with an equal one before an identity update, layer by layer."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._since_update: list[tuple[Call, Reply]] = []
        self._before_update: list[tuple[Call, Reply]] = []

    def on_weights(self, event: Weights, out: Collector) -> None:
        super().on_weights(event, out)
        if event.identity:
            self._before_update += self._since_update
        # A real update in between makes the two calls incomparable.
        else:
            self._before_update = []
        self._since_update = []

    def judge(
        self, call: Call, reply: Reply, references: Sequence[Reference], out: Collector
    ) -> None:
        self._since_update.append((call, reply))
        for other, earlier in self._before_update:
            if (
                other.prompt_ids == call.prompt_ids
                and other.sampling == call.sampling
                and other.max_tokens == call.max_tokens
            ):
                self._compare(call, earlier, reply, references, out)
                return

    def _compare(
        self,
        call: Call,
        before: Reply,
        after: Reply,
        references: Sequence[Reference],
        out: Collector,
    ) -> None:
        terms = self.contract.engine
        first, second = before.output, after.output
        # Values are compared up to the first different token: after it the two calls have different
        # contexts.
        shared = next(
            (
                i
                for i, (x, y) in enumerate(zip(first.token_ids, second.token_ids, strict=False))
                if x != y
            ),
            min(len(first.token_ids), len(second.token_ids)),
        )
        out.exercised("calls repeated after an identity update")
        changes = []
        # Without a seed two calls may sample different tokens.
        if terms is not None and terms.seeded and first.token_ids != second.token_ids:
            changes.append(f"token {shared} of {len(first.token_ids)} is different")
        if first.logprobs is not None and second.logprobs is not None:
            gap = np.abs(first.logprobs[:shared] - second.logprobs[:shared])
            if len(gap) and gap.max() > TOLERANCE:
                changes.append(f"logprobs differ by up to {gap.max():.3g} nats")
        layers, reordered = self._differing_layers(
            first, second, len(call.prompt_ids) + shared, references
        )
        if layers:
            changes.append(
                f"rows differ in {len(layers)} of {self.contract.route_layers} layers"
                f" (layers {layers})"
            )
        elif reordered:
            changes.append(f"the experts of a row are in another order, in layers {reordered}")
        if changes:
            out.finding(
                "an update to equal weights changed what the engine returns",
                expected="the same tokens, logprobs and rows for the same call, before and after",
                observed="; ".join(changes),
                where={
                    "call": after.call_id,
                    "server": call.server_id,
                    "index": after.index,
                    **({"layer": layers[0]} if layers else {}),
                },
                hint=(
                    "The load is not repeatable: weights that were packed, transposed or"
                    " fused after the first load are loaded again into unused buffers, or"
                    " loaded twice (SGLang #14178, #15246; vLLM #48312)."
                ),
            )

    def _differing_layers(
        self, before: EngineOutput, after: EngineOutput, stop: int, references: Sequence[Reference]
    ) -> tuple[list[int], list[int]]:
        """Return the layers with other experts, and those with the same ones in another order that
        rounding does not explain.

        ``stop``: so many tokens of prompt and reply are the same in both calls.
        """
        start = before.routes_start
        # routes of another shape have no layers to name: routes.shape reports them
        if (
            not (readable(self.contract, before) and readable(self.contract, after))
            or start != after.routes_start
        ):
            return [], []
        rows_before, rows_after = (
            captured_rows(self.contract, output)[: max(stop - start, 0)]
            for output in (before, after)
        )
        size = min(len(rows_before), len(rows_after))
        rows_before, rows_after = rows_before[:size], rows_after[:size]
        changed = (np.sort(rows_before, axis=2) != np.sort(rows_after, axis=2)).any(axis=(0, 2))
        layers = [self.contract.layer_of_column(int(i)) for i in np.flatnonzero(changed)]
        if not references:
            return layers, []
        differs = (moe_rows(self.contract, rows_before) != moe_rows(self.contract, rows_after)).any(
            axis=2
        )
        moe, positions = list(self.contract.moe_layers or ()), slice(start, start + size)
        for reference in references:
            decided = (reference.orders[positions][:, moe] >= NEAR_TIE) & (
                reference.margins[positions][:, moe] >= NEAR_TIE
            )
            differs[: len(decided)] &= decided
        return layers, [moe[int(column)] for column in np.flatnonzero(differs.any(axis=0))]


def _streams(contract: Contract) -> str | None:
    offered = contract.engine is not None and set(contract.engine.stream_modes) - {StreamMode.FINAL}
    return None if offered else "the engine declares that it streams only the complete reply"


def _has_spans(contract: Contract) -> str | None:
    return (
        None
        if contract.versions is Versions.SPAN
        else f"the contract declares versions='{contract.versions}', not spans"
    )


_REPLIES = "the replies of an engine"
engine_rows: Check = trace_check(
    "engine.rows",
    promise=("A reply has one row per forwarded token from its offset on, however the call ended."),
    needs=_REPLIES + " with routes",
    exercised_by=("rows of finished calls", "rows of aborted calls"),
    applies=has_routes,
    about="engines",
)(EngineRows)
engine_parts: Check = trace_check(
    "engine.parts",
    promise=("A reply has the parts that the engine declares for the end of its call."),
    needs=_REPLIES,
    exercised_by=(
        "replies that ended by itself",
        "replies aborted after a token",
        "replies aborted before the first token",
    ),
    about="engines",
)(EngineParts)
engine_spans: Check = trace_check(
    "engine.spans",
    promise="The version spans of a reply follow one another from its first token to its last.",
    needs=_REPLIES + " with spans",
    exercised_by="replies with spans",
    applies=_has_spans,
    about="engines",
)(EngineSpans)
engine_opt_in: Check = trace_check(
    "engine.opt-in",
    promise=("Routes are in the replies to the calls that requested them, as the engine declares."),
    needs=_REPLIES,
    exercised_by=("calls that request routes", "calls that do not request routes"),
    applies=has_routes,
    about="engines",
)(EngineOptIn)
engine_stream: Check = trace_check(
    "engine.stream",
    promise=(
        "The chunks of a stream make up the reply: every token once, one end, the routes on"
        " the last chunk."
    ),
    needs="Chunk events and the reply of a streamed call",
    exercised_by=("cumulative streams", "delta streams"),
    applies=_streams,
    about="engines",
)(EngineStream)
engine_identity: Check = trace_check(
    "engine.identity",
    promise=(
        "After an update to equal weights, the same call has the same tokens, logprobs and rows"
        " in every layer."
    ),
    needs="a call, an identity update, and the same call again",
    exercised_by="calls repeated after an identity update",
    about="engines",
)(EngineIdentity)
