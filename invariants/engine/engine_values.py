"""Checks on the values of a real engine: its rows and logprobs are those of an independent forward
pass of its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Contract, Logprobs
from rollproof.core.engine_contract import SamplingOption
from rollproof.core.events.rollout import Call, Reference, Reply, Weights
from rollproof.invariants._shared.phrases import count, ranges
from rollproof.invariants.engine.independent_forward import (
    NEAR_TIE,
    TOLERANCE,
    Fit,
    Mask,
    PerReply,
    captured_rows,
    fit_of,
    logprobs_of,
    moe_rows,
    readable,
)
from rollproof.invariants.routes.route_phrases import has_routes
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "engine_logprob_mode",
    "engine_logprobs",
    "engine_order",
    "engine_routes",
    "engine_sampling",
]

_NO_REFERENCE = "the trace holds no independent forward pass (Reference events)"


class _ValueCheck(PerReply):
    """Passes on each reply that one served version must explain; ``engine.identity`` judges what
    follows an identity update.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._after_identity = False

    def on_weights(self, event: Weights, out: Collector) -> None:
        super().on_weights(event, out)
        self._after_identity = event.identity

    def judge(
        self, call: Call, reply: Reply, references: Sequence[Reference], out: Collector
    ) -> None:
        if not references:
            if reply.output.token_ids:
                out.absent(_NO_REFERENCE)
            return
        if self.kv_outlives_weights or self._after_identity:
            return
        fits = [fit_of(self.contract, call, reply.output, reference) for reference in references]
        self.compare(call, reply, references, fits, out)

    def compare(
        self,
        call: Call,
        reply: Reply,
        references: Sequence[Reference],
        fits: Sequence[Fit],
        out: Collector,
    ) -> None:
        """Compare a reply with the references of every version that was served until then."""
        raise NotImplementedError(
            f"{type(self).__name__} must compare the replies that it is shown"
        )


class EngineRoutes(_ValueCheck):
    """A row must be the choice of some served version; the version checks judge which one."""

    def compare(
        self,
        call: Call,
        reply: Reply,
        references: Sequence[Reference],
        fits: Sequence[Fit],
        out: Collector,
    ) -> None:
        output = reply.output
        if not len(fits[0].rows):
            return
        assert output.routes is not None
        matching, doubtful = (
            _any_fit(fit.rows for fit in fits),
            _any_fit(fit.doubtful_rows for fit in fits),
        )
        # SGLang #26975: rows of cached prefix tokens were not moved with their KV.
        cached = max(0, (output.cached_tokens or 0) - output.routes_start)
        out.exercised("rows compared", int((~doubtful).sum()))
        out.exercised("rows of cached tokens", int((~doubtful)[:cached].sum()))
        wrong = np.flatnonzero(~matching & ~doubtful)
        if not len(wrong):
            return
        first = int(wrong[0])
        # The expected row is shown for the version that explains most of the reply.
        best = max(zip(references, fits, strict=True), key=lambda pair: int(pair[1].rows.sum()))[0]
        actual = moe_rows(self.contract, output.routes)[first]
        moe = list(self.contract.moe_layers or ())
        expected = (
            best.routes[output.routes_start + first, moe]
            if output.routes_start + first < len(best.routes)
            else None
        )
        columns = (
            []
            if expected is None
            else [
                i for i in range(len(moe)) if set(actual[i].tolist()) != set(expected[i].tolist())
            ]
        )
        column = columns[0] if columns else 0
        out.finding(
            "an engine's rows are not what its weights choose",
            expected=(
                "nothing: no token was forwarded there"
                if expected is None
                else f"experts {expected[column].tolist()}, by weights {best.version}"
            ),
            observed=(
                f"experts {actual[column].tolist()}; {count(len(wrong), 'row')} of {len(matching)}"
                f" (position {ranges((wrong + output.routes_start).tolist())}) fit no weights that"
                f" were served; here in {len(columns)} of {len(moe)} layers"
            ),
            where={
                "call": reply.call_id,
                "position": output.routes_start + first,
                "layer": moe[column],
                "server": call.server_id,
            },
            hint=(
                "The rows belong to another token, layer or request: a slot was read too late,"
                " a prefix lost its rows but not its KV (SGLang #26975), padding rows were"
                " read (vLLM #43737), or a kernel bypasses the capture (vLLM #44116)."
            ),
        )


class EngineLogprobs(_ValueCheck):
    """A logprob must be that of some served version in the declared mode; ``engine.logprob-mode``
    judges the other mode.
    """

    def compare(
        self,
        call: Call,
        reply: Reply,
        references: Sequence[Reference],
        fits: Sequence[Fit],
        out: Collector,
    ) -> None:
        if not len(fits[0].tokens):
            return
        assert reply.output.logprobs is not None
        matching, doubtful = (
            _any_fit(fit.tokens for fit in fits),
            _any_fit(fit.doubtful_tokens for fit in fits),
        )
        # vLLM (logprobs_mode) and SGLang (SGLANG_RETURN_ORIGINAL_LOGPROB) can return either mode.
        if not matching.all() and any(fit.is_of_another_mode() is not None for fit in fits):
            return
        out.exercised("logprobs compared", int((~doubtful).sum()))
        wrong = np.flatnonzero(~matching & ~doubtful)
        if len(wrong):
            first = int(wrong[0])
            sent = len(call.prompt_ids)
            values = {
                str(reference.version): values[sent + first]
                for reference in references
                if (
                    values := logprobs_of(self.contract, call, reference).get(
                        self.contract.logprobs
                    )
                )
                is not None
            }
            out.finding(
                "an engine's logprobs are not those of its weights",
                expected=" or ".join(
                    f"{value:.5f} by weights {version}" for version, value in values.items()
                )
                + f", within {TOLERANCE:g}",
                observed=(
                    f"{reply.output.logprobs[first]:.5f}; so for {len(wrong)} of"
                    f" {count(len(matching), 'token')} (token {ranges(wrong.tolist())})"
                ),
                where={"call": reply.call_id, "index": first, "server": call.server_id},
                hint=(
                    "KV of other weights or of another sequence was read, or the value belongs to"
                    " another token."
                ),
            )


class EngineLogprobMode(_ValueCheck):
    """At a temperature, or with tokens left out, the modes differ at nearly every token."""

    def compare(
        self,
        call: Call,
        reply: Reply,
        references: Sequence[Reference],
        fits: Sequence[Fit],
        out: Collector,
    ) -> None:
        if not len(fits[0].tokens):
            return
        for fit in fits:
            # Greedy and plain sampling do not tell the modes apart.
            if not fit.other_modes or fit.doubtful_tokens.all():
                continue
            if fit.tokens.all():
                out.exercised("replies whose logprobs differ between modes")
                return
            other = fit.is_of_another_mode()
            if other is not None:
                out.finding(
                    "logprobs are of another mode than the declared one",
                    expected=(
                        f"{self.contract.logprobs} logprobs (the contract declares"
                        f" logprobs='{self.contract.logprobs}')"
                    ),
                    observed=(
                        f"{other} ones for all {count(len(fit.tokens), 'token')} of a call with"
                        f" {_parameters(call)}"
                    ),
                    where={"call": reply.call_id, "server": call.server_id, "version": fit.version},
                    hint=(
                        "A trainer that divides logits by the temperature needs scaled logprobs,"
                        " any other trainer raw ones: a mismatch gives importance ratios far from"
                        " 1 (trl #4159). vLLM: logprobs_mode; SGLang:"
                        " SGLANG_RETURN_ORIGINAL_LOGPROB."
                    ),
                )
                return


class EngineSampling(_ValueCheck):
    """A token that top-k, top-p or min-p leaves out cannot be sampled."""

    def compare(
        self,
        call: Call,
        reply: Reply,
        references: Sequence[Reference],
        fits: Sequence[Fit],
        out: Collector,
    ) -> None:
        filters = [
            option for option in SamplingOption if option in call.sampling and not option.penalty
        ]
        known = [
            reference.processed[len(call.prompt_ids) :]
            for reference in references
            if reference.processed is not None
        ]
        if not filters or not known or not reply.output.token_ids:
            return
        tokens = len(reply.output.token_ids)
        left_out = np.ones(tokens, dtype=bool)
        for processed in known:
            left_out &= np.isneginf(processed)
        # Behind a near-tie of experts the distribution may be another one.
        for reference in references:
            left_out &= ~_behind_near_tie(self.contract, call, reply, reference)
        out.exercised("tokens sampled under top-p, top-k or min-p", tokens)
        if left_out.any():
            place = int(np.flatnonzero(left_out)[0])
            out.finding(
                "a token was sampled that the call's parameters leave out",
                expected=f"a token that {_parameters(call)} leaves",
                observed=(
                    f"token {reply.output.token_ids[place]}; so for {int(left_out.sum())} of"
                    f" {count(tokens, 'token')} (token {ranges(np.flatnonzero(left_out).tolist())})"
                ),
                where={"call": reply.call_id, "index": place, "server": call.server_id},
                hint=(
                    "The parameter does not reach the sampler, or another call's of the same batch"
                    " is applied: the samples are of another policy than the trainer assumes."
                ),
            )


class EngineOrder(_ValueCheck):
    """The order matters if a consumer weights experts by their position."""

    def compare(
        self,
        call: Call,
        reply: Reply,
        references: Sequence[Reference],
        fits: Sequence[Fit],
        out: Collector,
    ) -> None:
        output = reply.output
        if output.routes is None or not readable(self.contract, output):
            return
        moe = list(self.contract.moe_layers or ())
        chosen = moe_rows(self.contract, captured_rows(self.contract, output))
        compared = []
        # A row that fits several versions is right if it is in the order of one of them.
        excused: Mask = np.zeros(len(chosen), dtype=bool)
        for reference, fit in zip(references, fits, strict=True):
            excused |= fit.rows & fit.doubtful_rows
            rows = np.flatnonzero(fit.rows & ~fit.doubtful_rows)
            positions = rows + output.routes_start
            decided = (reference.orders[positions][:, moe] >= NEAR_TIE) & (
                reference.margins[positions][:, moe] >= NEAR_TIE
            )
            differs = (chosen[rows] != reference.routes[positions][:, moe]).any(axis=2) & decided
            if len(rows):
                out.exercised("choices compared in order", int(decided.sum()))
            excused[rows[~differs.any(axis=1)]] = True
            compared.append((reference, rows, differs, int(decided.sum())))
        for reference, rows, differs, total in compared:
            wrong = differs & ~excused[rows][:, None]
            if not wrong.any():
                continue
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            position = int(rows[row]) + output.routes_start
            out.finding(
                "the chosen experts are not in the order of their scores",
                expected=f"experts {reference.routes[position, moe[column]].tolist()}",
                observed=(
                    f"{chosen[rows[row], column].tolist()}; so in {int(wrong.sum())} of"
                    f" {total} choices"
                ),
                where={
                    "call": reply.call_id,
                    "position": position,
                    "layer": moe[column],
                    "version": str(reference.version),
                },
                hint=(
                    "The ids were sorted, or a kernel returns its top-k unordered: pair"
                    " each weight with its expert by id."
                ),
            )
            return


def _any_fit(masks: Iterable[Mask]) -> Mask:
    combined: Mask = np.any(list(masks), axis=0)
    return combined


def _parameters(call: Call) -> str:
    named = [f"temperature {call.sampling.get('temperature')}"]
    named += [
        f"{option}={call.sampling[option]}" for option in SamplingOption if option in call.sampling
    ]
    return ", ".join(named)


def _behind_near_tie(contract: Contract, call: Call, reply: Reply, reference: Reference) -> Mask:
    """Return ``(tokens,)``: whether two experts' scores were so close before a token that rounding
    decides how the model goes on.
    """
    moe = list(contract.moe_layers or ())
    sent, tokens = len(call.prompt_ids), len(reply.output.token_ids)
    ties = np.flatnonzero((reference.margins[:, moe] < NEAR_TIE).any(axis=1))
    first = int(ties[0]) if len(ties) else sent + tokens
    behind: Mask = np.arange(tokens) + sent > first
    return behind


def _has_logprobs(contract: Contract) -> str | None:
    return "the contract declares logprobs='none'" if contract.logprobs is Logprobs.NONE else None


def _has_filters(contract: Contract) -> str | None:
    offered = contract.engine.sampling if contract.engine is not None else ()
    return (
        None
        if any(not option.penalty for option in offered)
        else "the engine declares neither top-p nor top-k nor min-p (sampling)"
    )


_NEEDS = (
    "replies, and the independent forward pass of each version that was served (Reference events)"
)
engine_routes: Check = trace_check(
    "engine.routes",
    promise=(
        "Every row that an engine returns is the choice of its weights for that token, as an"
        " independent forward pass computes it."
    ),
    needs=_NEEDS,
    exercised_by=("rows compared", "rows of cached tokens"),
    applies=has_routes,
    about="engines",
)(EngineRoutes)
engine_order: Check = trace_check(
    "engine.order",
    promise="The experts of a row are in the order of their scores.",
    needs=_NEEDS,
    exercised_by="choices compared in order",
    applies=has_routes,
    about="engines",
)(EngineOrder)
engine_logprobs: Check = trace_check(
    "engine.logprobs",
    promise=(
        "Every logprob that an engine returns is that of its weights for that token, as an"
        " independent forward pass computes it."
    ),
    needs=_NEEDS,
    exercised_by="logprobs compared",
    applies=_has_logprobs,
    about="engines",
)(EngineLogprobs)
engine_logprob_mode: Check = trace_check(
    "engine.logprob-mode",
    promise=(
        "At a temperature, and under top-p, top-k, min-p and penalties, logprobs are of the"
        " declared mode: of the model's distribution, or of the one that was sampled from."
    ),
    needs=_NEEDS + ", of calls at a temperature other than 1",
    exercised_by="replies whose logprobs differ between modes",
    applies=_has_logprobs,
    about="engines",
)(EngineLogprobMode)
engine_sampling: Check = trace_check(
    "engine.sampling",
    promise="Only tokens that a call's top-p, top-k and min-p leave are sampled.",
    needs=_NEEDS + ", of calls with top-p, top-k or min-p",
    exercised_by="tokens sampled under top-p, top-k or min-p",
    applies=_has_filters,
    about="engines",
)(EngineSampling)
