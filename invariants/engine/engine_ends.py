"""Checks on how calls end: at their end tokens, within the context, and each sample for itself."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING

from rollproof.core.contract import Contract, Logprobs
from rollproof.core.engine_contract import EngineTerms, StopShown
from rollproof.core.events.rollout import Call, Reply, Submit
from rollproof.core.records import FinishReason, Scalar
from rollproof.invariants._shared.phrases import count
from rollproof.invariants.engine.engine_replies import Served
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = ["engine_ends", "engine_length", "engine_samples"]

_LOG_BY_CHANCE = -13.8
"""The natural logarithm of one in a million: two draws do not agree by such a chance."""
_LAST_PLACES = 10


class EngineEnds(Served):
    """A call ends at the first token that ends it, and at none by itself."""

    def judge_served(self, call: Call, reply: Reply, out: Collector) -> None:
        output = reply.output
        if call.end_tokens is None or output.finish_reason not in (
            FinishReason.STOP,
            FinishReason.LENGTH,
        ):
            return
        shown = _shown_ends(self.terms, call)
        stopped = output.finish_reason is FinishReason.STOP
        where: dict[str, Scalar] = {
            "call": reply.call_id,
            "server": call.server_id,
            "request": call.request_id,
        }
        # At the last token of its budget a call ends by both.
        earlier = output.token_ids[:-1] if output.token_ids else ()
        passed = next((i for i, token in enumerate(earlier) if token in shown), None)
        if passed is not None:
            out.finding(
                "a call went on after a token that ends it",
                expected=f"an end at token {passed} ({earlier[passed]}), by stop",
                observed=(
                    f"{count(len(output.token_ids), 'token')}; it ended by {output.finish_reason}"
                ),
                where={**where, "index": passed},
                hint=(
                    "The engine does not know this token as one that ends the call: a stop token"
                    " does not reach it, or it knows one of several end tokens only."
                ),
            )
            return
        if not stopped:
            return
        out.exercised("calls that ended by stop")
        last = output.token_ids[-1] if output.token_ids else None
        if not shown:
            out.finding(
                "a call ended by stop although no token ends it",
                expected="length: the call ignores the model's end tokens and names no others",
                observed=f"stop after {count(len(output.token_ids), 'token')}",
                where=where,
                hint=(
                    "The finish reason is that of another call, or the request to ignore end tokens"
                    " is lost."
                ),
            )
        elif last is not None and shown.get(last) is StopShown.STRIPPED:
            out.finding(
                "a reply has the token that ended it, which the engine declares to strip",
                expected="a reply that ends before it",
                observed=f"token {last} at the end",
                where=where,
                hint="Declare it as kept, or a client drops the last token of the answer.",
            )
        elif last not in shown and StopShown.STRIPPED not in shown.values():
            out.finding(
                "a call ended by stop, and its reply lacks the token that ended it",
                expected=f"one of {sorted(shown)[:8]} at the end",
                observed=(
                    f"{last} at the end of {count(len(output.token_ids), 'token')}"
                    if output.token_ids
                    else "no tokens"
                ),
                where=where,
                hint=(
                    "A trainer never sees the policy end its answer: the token was cut off together"
                    " with the text of the stop. An engine that strips it by design declares it."
                ),
            )


def _shown_ends(terms: EngineTerms, call: Call) -> Mapping[int, StopShown]:
    """Return the tokens that end a call, with what a reply shows of them."""
    kinds = (
        (call.stop_string_tokens, terms.stop_string),
        (call.stop_token_ids, terms.stop_token),
        (call.end_tokens or (), terms.end_token),
    )
    return {token: shown for tokens, shown in kinds for token in tokens if shown is not None}


class EngineLength(Served):
    """Prompt and response fit the context."""

    def judge_served(self, call: Call, reply: Reply, out: Collector) -> None:
        prompt, sampled = len(call.prompt_ids), len(reply.output.token_ids)
        limit = self.terms.max_length
        if prompt + sampled > limit - _LAST_PLACES:
            out.exercised(f"calls that ended in the last {_LAST_PLACES} places")
        if prompt + sampled > limit:
            out.finding(
                "a call went beyond the context",
                expected=f"at most {limit} tokens of prompt and response",
                observed=f"{prompt} + {sampled} tokens; it ended by {reply.output.finish_reason}",
                where={
                    "call": reply.call_id,
                    "server": call.server_id,
                    "request": call.request_id,
                },
                hint=(
                    "The last tokens were computed at positions that the model was not trained on,"
                    " or from a KV block of another call."
                ),
            )


class EngineSamples(Served):
    """Two samples of one call with the same tokens, which are too improbable for that."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._groups: dict[str, str] = {}
        self._samples: dict[str, list[tuple[Call, Reply]]] = {}

    def on_submit(self, event: Submit, out: Collector) -> None:
        if event.request.group is not None:
            self._groups[event.request.request_id] = event.request.group

    def judge_served(self, call: Call, reply: Reply, out: Collector) -> None:
        group = self._groups.get(call.request_id)
        if group is not None:
            self._samples.setdefault(group, []).append((call, reply))

    def finish(self, out: Collector) -> None:
        super().finish(out)
        for samples in self._samples.values():
            for (_, first), (call, second) in combinations(samples, 2):
                if not _improbable_again(self.contract, call, second):
                    continue
                out.exercised("pairs of samples of one call")
                if first.output.token_ids == second.output.token_ids:
                    out.finding(
                        "two samples of one call are the same",
                        expected="another draw for each sample",
                        observed=(
                            f"the same {count(len(second.output.token_ids), 'token')} in calls"
                            f" {first.call_id} and {second.call_id}"
                        ),
                        where={"call": second.call_id, "server": call.server_id},
                        hint=(
                            "The samples share a seed, or one is returned several times: a group"
                            " has no spread, and no advantage."
                        ),
                    )
                    return


def _improbable_again(contract: Contract, call: Call, reply: Reply) -> bool:
    """Return whether another draw would hardly give these tokens, by the engine's own logprobs."""
    temperature, logprobs = call.sampling.get("temperature"), reply.output.logprobs
    if logprobs is None or (temperature != 1 and contract.logprobs is Logprobs.RAW):
        return False
    return bool(temperature) and float(logprobs.sum()) < _LOG_BY_CHANCE


def _ends(contract: Contract) -> str | None:
    terms = contract.engine
    declared = terms is not None and (terms.end_token, terms.stop_token, terms.stop_string) != (
        None,
        None,
        None,
    )
    return (
        None
        if declared
        else "the engine does not declare what replies show of the tokens that end them"
    )


def _limited(contract: Contract) -> str | None:
    declared = contract.engine is not None and contract.engine.spare_positions is not None
    return None if declared else "the engine does not declare how much of its context calls fill"


def _sampled(contract: Contract) -> str | None:
    if contract.logprobs is Logprobs.NONE:
        return "the engine returns no logprobs: nothing shows how probable equal samples are"
    offered = contract.engine is not None and contract.engine.samples
    return None if offered else "the engine declares that a call has one sample"


_NEEDS = "calls whose end tokens are known, and their replies"
engine_ends: Check = trace_check(
    "engine.ends",
    promise=(
        "A call ends at the first end token, stop token or stop string, and its reply shows that"
        " token as declared; no other call ends by stop."
    ),
    needs=_NEEDS,
    exercised_by="calls that ended by stop",
    applies=_ends,
    about="engines",
)(EngineEnds)
engine_length: Check = trace_check(
    "engine.length",
    promise="Prompt and response of a call fit the context of the model.",
    needs="replies to calls that end near the context's limit",
    exercised_by=f"calls that ended in the last {_LAST_PLACES} places",
    applies=_limited,
    about="engines",
)(EngineLength)
engine_samples: Check = trace_check(
    "engine.samples",
    promise="The samples of one call are drawn apart.",
    needs="a call for several samples, with logprobs",
    exercised_by="pairs of samples of one call",
    applies=_sampled,
    about="engines",
)(EngineSamples)
