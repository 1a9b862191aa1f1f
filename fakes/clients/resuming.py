"""The reference resume client: how a correct client turns aborted engine calls into one sample.

Every step that a published fault got wrong is a method of its own, so that a known bug is a few
lines on top of it. ``rollproof.fakes.clients.reference_clients`` has the variants that stacks use.
A client's ``contract`` is complete after ``start``, when the flavour of the engines is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from rollproof.core.contract import (
    Contract,
    Filler,
    LayerAxis,
    MissingLogprobs,
    PartialOff,
    Provenance,
    ResumeBy,
    Rows,
    Samples,
    Sampling,
    Versions,
)
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Observation
from rollproof.core.limits import RolloutLimits
from rollproof.core.own_stops import OwnStops
from rollproof.core.records import (
    EngineOutput,
    FinishReason,
    IntArray,
    Request,
    Rollout,
    Scalar,
    Span,
    Version,
    spread,
)
from rollproof.fakes.engine.exceptions import EnginePaused
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.flavours import ReprefillRows, VersionTag
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.engine.replies import filler_rows

__all__ = ["FROZEN", "AsSampled", "ClientOptions", "PartialSample", "finest_tag", "tag_fields"]

_NO_LIMITS = RolloutLimits()
FROZEN = (PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE)
"""Pauses after which the engine continues the calls that it ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """What a resume client promises about its samples, and how patient it is.

    versions: the finest tag that it returns if the engine's tags allow it.
    layer_axis: the axis of its routes; ``None`` for the engine's.
    partial_off: what happens to an aborted sample if partial rollout is off.
    patience: consecutive attempts without a token before the client gives up.
    back_off: virtual seconds between two attempts.
    multi_turn: declare turns and a loss mask even if a case has no turns. Every client runs the
        turns of its requests.
    limits: the limits that it is configured with.
    own_stops: the token sequences at which it cuts replies.
    filler: the content of rows that came with no reply; ``Filler.NONE``: every reply has rows.
    reply_gaps: whether replies may lack logprobs and, with a filler, routes.
    samples: how many samples a request delivers.
    """

    versions: Versions = Versions.MIN_MAX
    rows: Rows = Rows.FORWARDED
    final_row: Filler = Filler.MINUS_ONE
    layer_axis: LayerAxis | None = None
    partial_off: PartialOff = PartialOff.DROPPED
    patience: int = 1000
    back_off: float = 1.0
    multi_turn: bool = False
    limits: RolloutLimits | None = None
    own_stops: OwnStops | None = None
    filler: Filler = Filler.NONE
    reply_gaps: bool = False
    samples: Samples = Samples.REQUEST


@dataclass(slots=True, eq=False)
class PartialSample:
    """A rollout in the making; lists are over response tokens.

    labels: version tags of the tokens, as the engine showed them.
    calls: version tags of the replies.
    rows: ``(captured, layers, top_k)`` from position 0.
    turn_sampled: tokens that the policy sampled in this turn.
    """

    request: Request
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    labels: list[Version] = field(default_factory=list)
    calls: list[Version] = field(default_factory=list)
    rows: IntArray | None = None
    finish: FinishReason | None = None
    turn: int = 0
    turn_sampled: int = 0
    attempts: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and response so far."""
        return (*self.request.prompt_ids, *self.response)


class AsSampled:
    """Resumes by itself; keeps the row of the forward that first computed it.

    With partial rollout off, an aborted sample is dropped or surfaced, see ``options.partial_off``.
    """

    options: ClassVar[ClientOptions] = ClientOptions()
    resume: ClassVar[ResumeBy] = ResumeBy.CLIENT
    contract: Contract
    fleet: Fleet

    def __init__(self, options: ClientOptions | None = None) -> None:
        self.chosen: ClientOptions = options if options is not None else type(self).options
        self._open = 0

    # RolloutSubject

    def start(self, fleet: Fleet) -> None:
        """Take the fleet, and declare the contract for its flavour."""
        self.fleet = fleet
        fleet.pause_mode = self.pause_mode(fleet)
        self.contract = self.declared(fleet)

    async def rollout(self, request: Request) -> Rollout | None:
        """Return one sample; ``None`` if it was dropped."""
        self._open += 1
        try:
            sample = PartialSample(request=request)
            return self.finished(sample) if await self.run(sample) else None
        finally:
            self._open -= 1

    async def update_weights(self, version: int | None) -> None:
        """Run the fleet's default procedure, with this client's pause mode."""
        await self.fleet.sync(version)

    def to_record(self, native: Rollout) -> Rollout:
        """Return the sample: the native form is the record."""
        return native

    def stop(self) -> None:
        """Do nothing: there is nothing to free."""

    def gauges(self) -> Mapping[str, float]:
        """Return the number of rollouts that have not ended."""
        return {"rollouts": float(self._open)}

    # The contract

    def pause_mode(self, fleet: Fleet) -> PauseMode:
        """Return the pause mode of weight updates: the case's, unless rows would be recomputed."""
        overwritten = fleet.flavour.recompute is ReprefillRows.OVERWRITTEN
        return PauseMode.ABORT if overwritten and fleet.pause_mode in FROZEN else fleet.pause_mode

    def provenance(self, fleet: Fleet) -> Provenance:
        """Return which forward a row of a resumed sample comes from."""
        return Provenance.AS_SAMPLED

    def declared(self, fleet: Fleet) -> Contract:
        """Return the contract on this fleet."""
        engine, chosen, model = fleet.engine_contract, self.chosen, fleet.case.model
        multi_turn = chosen.multi_turn or any(request.turns for request in fleet.case.requests)
        all_rows = chosen.rows is Rows.ALL
        return _contract(
            rows=chosen.rows,
            final_row=chosen.final_row if all_rows else None,
            filler=chosen.filler,
            layer_axis=chosen.layer_axis or engine.layer_axis,
            **model.sizes,
            dtype=_wide_enough(
                np.dtype(engine.dtype), chosen.filler, chosen.final_row if all_rows else None
            ).name,
            provenance=self.provenance(fleet),
            resume=self.resume,
            versions=finest_tag(
                chosen.versions, fleet.flavour.version_tag, overtaken=fleet.pause_mode in FROZEN
            ),
            logprobs=engine.logprobs,
            missing_logprobs=MissingLogprobs.MASKED if multi_turn else MissingLogprobs.NEVER,
            loss_mask=multi_turn,
            multi_turn=multi_turn,
            multimodal=True,
            sampling=Sampling.FORWARDED,
            abort_surfaces=self.aborts_surface(fleet),
            partial_off=chosen.partial_off,
            kv_policy=fleet.kv_policy,
            updates_pause=True,
            limits=chosen.limits,
            own_stops=chosen.own_stops,
            reply_gaps=chosen.reply_gaps,
            samples=chosen.samples,
        )

    def aborts_surface(self, fleet: Fleet) -> bool:
        """Whether a caller may get an aborted sample."""
        return not fleet.case.partial and self.chosen.partial_off is PartialOff.SURFACED

    # The loop over calls

    async def run(self, sample: PartialSample) -> bool:
        """Call engines until the sample ends; return False if it is to be dropped.

        Raises ``RuntimeError`` when out of patience.
        """
        idle = 0
        while idle < self.chosen.patience:
            sent, budget = self.resume_prompt(sample), self.next_budget(sample)
            output = self.cut_at_stop(sample, await self.attempt(sample, sent, budget))
            idle = 0 if output.token_ids else idle + 1
            self.absorb(sample, len(sent), output)
            if output.finish_reason is FinishReason.ABORT and not self.resumes(sample):
                sample.finish = FinishReason.ABORT
                return self.aborts_surface(self.fleet)
            sample.finish = self.finish_reason(sample, output)
            if sample.finish is not FinishReason.ABORT and not self.next_turn(sample):
                return True
            if sample.finish is FinishReason.ABORT:
                await self.wait()
        raise RuntimeError(f"{sample.request.request_id} brought no token in {idle} attempts.")

    async def attempt(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        """Return one reply. After a server that died, lost the reply or is paused, try another one
        if there is any.
        """
        avoid: list[str] = []
        for left in reversed(range(self.chosen.patience)):
            server_id = self.acquire(sample, avoid)
            try:
                return await self.call(server_id, sample, sent, budget)
            except (ConnectionError, EnginePaused):
                # out of patience: the error of the server is more useful than our own
                if not left:
                    raise
                avoid = [server_id]
            finally:
                self.release(server_id)
            await self.wait()
        raise RuntimeError(f"{sample.request.request_id} was given no patience.")

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        """Call one server."""
        request, server = sample.request, self.fleet.servers[server_id]
        sample.attempts += 1
        return await server.generate(
            prompt_ids=list(sent),
            max_tokens=budget,
            request_id=self.handle(sample),
            sampling=self.sampling_for(sample),
            media=request.media,
            want_routes=request.want_routes,
            want_logprobs=request.want_logprobs,
            routes_start=self.routes_start(sample),
            adapter=self.adapter(sample, server),
            return_sampling_mask=self.wants_masks(sample),
        )

    def adapter(self, sample: PartialSample, server: FakeEngine) -> str | None:
        """Return the adapter that is to serve a call; ``None``: the base model."""
        return None

    def wants_masks(self, sample: PartialSample) -> bool:
        """Whether a call requests sampling masks."""
        return False

    def handle(self, sample: PartialSample) -> str:
        """Return the handle of a call; no handle is the beginning of another."""
        # SGLang aborts by prefix (abort_request, startswith): "r1" would abort "r10", too
        return f"{sample.request.request_id}#{sample.attempts}#"

    def acquire(self, sample: PartialSample, avoid: list[str]) -> str:
        """Return the server for the next call."""
        return self.fleet.balancer.acquire(avoid)

    def release(self, server_id: str) -> None:
        """Tell the balancer that a call is over, however it ended."""
        self.fleet.balancer.release(server_id)

    async def wait(self) -> None:
        """Wait between two attempts."""
        await asyncio.sleep(self.chosen.back_off)

    def resumes(self, sample: PartialSample) -> bool:
        """Whether an aborted sample is resumed."""
        return self.fleet.case.partial

    # Arguments of a call

    def resume_prompt(self, sample: PartialSample) -> tuple[int, ...]:
        """Return the prompt and the response so far."""
        return sample.ids

    def next_budget(self, sample: PartialSample) -> int | None:
        """Return how many tokens are left of the caller's budget, and of the turn."""
        budget = sample.request.budget
        left = None if budget is None else budget - len(sample.response)
        if self.limits.turn_tokens is None:
            return left
        turn = self.limits.turn_tokens - sample.turn_sampled
        return turn if left is None else min(left, turn)

    def sampling_for(self, sample: PartialSample) -> dict[str, Scalar]:
        """Return a copy of the caller's sampling parameters."""
        return dict(sample.request.sampling)

    def routes_start(self, sample: PartialSample) -> int:
        """Return the first missing row; engines without that option return all rows."""
        return 0 if sample.rows is None else len(sample.rows)

    # Merging a reply

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        """Add a reply to a call of ``sent`` prompt tokens; one without tokens adds nothing."""
        # an abort before the first token has no row for the boundary, and must not change tags
        if not output.token_ids:
            return
        # each merge is a method of its own, because each one has been wrong in some stack
        self.merge_routes(sample, sent, output)
        self.merge_tokens(sample, output)
        self.merge_logprobs(sample, output)
        self.merge_versions(sample, output)

    def cut_at_stop(self, sample: PartialSample, output: EngineOutput) -> EngineOutput:
        """Return the reply up to the first stop sequence of the client's own in this turn; one that
        began in earlier replies and is not kept is taken from them, too.
        """
        stops = self.chosen.own_stops
        turn = sample.response[len(sample.response) - sample.turn_sampled :]
        found = None if stops is None else stops.first_in(turn, output.token_ids)
        if stops is None or found is None:
            return output
        end, sequence = found
        count = end if stops.kept else end - len(sequence)
        if count < 0:
            self.take_back(sample, -count)
        count = max(0, count)
        return replace(
            output,
            token_ids=output.token_ids[:count],
            logprobs=None if output.logprobs is None else output.logprobs[:count],
            spans=tuple(
                replace(span, end=min(span.end, count))
                for span in output.spans
                if span.start < count
            ),
            finish_reason=FinishReason.STOP,
        )

    def take_back(self, sample: PartialSample, count: int) -> None:
        """Drop the last tokens of the response, which a stop sequence began with."""
        for values in (sample.response, sample.mask, sample.logprobs, sample.labels):
            del values[len(values) - count :]
        sample.turn_sampled -= count
        if sample.rows is not None:
            sample.rows = sample.rows[: len(sample.ids) - 1]

    def merge_tokens(self, sample: PartialSample, output: EngineOutput) -> None:
        """Append the reply's tokens."""
        sample.response.extend(output.token_ids)
        sample.mask.extend([1] * len(output.token_ids))
        sample.turn_sampled += len(output.token_ids)

    def merge_logprobs(self, sample: PartialSample, output: EngineOutput) -> None:
        """Append one logprob a token; NaN marks missing ones."""
        count = len(output.token_ids)
        sample.logprobs.extend(
            [float("nan")] * count if output.logprobs is None else output.logprobs.tolist()
        )

    def merge_versions(self, sample: PartialSample, output: EngineOutput) -> None:
        """Append one tag a token, and for the call the tag of its last token."""
        count = len(output.token_ids)
        labels = spread(output.spans, count) if output.spans else [output.version] * count
        sample.labels.extend(labels)
        sample.calls.append(labels[-1])

    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        """Append the missing rows; the reply's last token has none, it was never forwarded."""
        if output.routes is None:
            return
        captured = 0 if sample.rows is None else len(sample.rows)
        new = output.routes[: sent + len(output.token_ids) - 1 - output.routes_start][
            captured - output.routes_start :
        ]
        sample.rows = new.copy() if sample.rows is None else np.concatenate([sample.rows, new])

    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        """Return the engine's reason, unless an abort came after the last token and cut nothing."""
        if output.finish_reason is not FinishReason.ABORT:
            return output.finish_reason
        policy = self.fleet.policy
        if (
            output.token_ids
            and policy.eos_every is not None
            and output.token_ids[-1] == policy.eos_id
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.next_budget(sample) == 0 else FinishReason.ABORT

    @property
    def limits(self) -> RolloutLimits:
        """Return the limits that the client is configured with."""
        return self.chosen.limits or _NO_LIMITS

    def next_turn(self, sample: PartialSample) -> bool:
        """Append the environment's answer, if it gives one."""
        answer = self.next_answer(sample)
        if answer is None:
            return False
        sample.turn += 1
        sample.turn_sampled = 0
        self.observe(sample, answer)
        return True

    def next_answer(self, sample: PartialSample) -> tuple[int, ...] | None:
        """Return what the environment says if it has an answer, the model may have another turn,
        and the budget leaves room after it.
        """
        turns, limits = sample.request.turns, self.limits
        if sample.turn >= min(len(turns), (limits.turns or len(turns) + 1) - 1):
            return None
        if sample.finish is FinishReason.LENGTH and not limits.answers_cut_turns:
            return None
        answer, budget = limits.cut_answer(turns[sample.turn]), sample.request.budget
        if budget is not None and budget - len(sample.response) <= len(answer):
            return None
        return answer

    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        """Append tokens that the policy did not sample; they are not trained on."""
        self.fleet.recorder.record(
            Observation(request_id=sample.request.request_id, token_ids=answer)
        )
        sample.response.extend(answer)
        sample.mask.extend([0] * len(answer))
        sample.logprobs.extend([float("nan")] * len(answer))
        sample.labels.extend([None] * len(answer))

    # The finished sample

    def finished(self, sample: PartialSample) -> Rollout:
        """Return the sample as the trainer gets it."""
        return Rollout(
            request_id=sample.request.request_id,
            prompt_ids=sample.request.prompt_ids,
            response_ids=tuple(sample.response),
            finish_reason=sample.finish,
            logprobs=(
                np.array(sample.logprobs, dtype=np.float64)
                if sample.request.want_logprobs
                else None
            ),
            loss_mask=self.loss_mask(sample),
            routes=self.final_routes(sample),
            extra={"attempts": sample.attempts, "turns": sample.turn},
            **self.version_tags(sample),
        )

    def loss_mask(self, sample: PartialSample) -> IntArray | None:
        """Return 1 for sampled tokens with a logprob and 0 for the others, if the contract has a
        mask.
        """
        if not self.contract.loss_mask:
            return None
        mask = np.array(sample.mask, dtype=np.int64)
        if (
            sample.request.want_logprobs
            and self.contract.missing_logprobs is MissingLogprobs.MASKED
        ):
            # an engine may return none with an abort: those tokens cannot be trained on
            missing = np.isnan(np.array(sample.logprobs[: len(mask)], dtype=np.float64))
            mask[: len(missing)][missing] = 0
        return mask

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        """Return the fields of the tag that the contract declares."""
        return tag_fields(self.contract.versions, sample.labels, sample.mask, sample.calls)

    def final_routes(self, sample: PartialSample) -> IntArray | None:
        """Return ``(rows, layers, top_k)`` in the declared layout; ``None`` if an abort that is not
        resumed came without rows.
        """
        if not sample.request.want_routes or self.lacks_rows(sample):
            return None
        captured = self.with_filler(sample)
        if captured is None:
            return None
        rows = self.on_declared_layers(captured).astype(self.contract.dtype)
        if self.contract.rows is not Rows.ALL:
            return rows
        return np.concatenate(
            [rows, filler_rows(self.contract.final_row, len(sample.ids) - len(rows), rows)]
        )

    def with_filler(self, sample: PartialSample) -> IntArray | None:
        """Return the captured rows, and filler, if there is one, for those that no reply brought.

        A reply without routes leaves nothing behind if a later one brings all rows. ``None`` too if
        the filler is the row before, and there is none.
        """
        rows, filler = sample.rows, self.chosen.filler
        if filler is Filler.NONE or not sample.response:
            return rows
        if filler is Filler.PREVIOUS and (rows is None or not len(rows)):
            return None
        if rows is None:
            layers = (
                self.fleet.case.model.num_layers
                if self.fleet.flavour.layer_axis is LayerAxis.ALL
                else len(self.fleet.case.model.moe_layers)
            )
            rows = np.zeros((0, layers, self.fleet.case.model.top_k), dtype=np.int64)
        rows = rows.astype(self.contract.dtype)
        missing = max(0, len(sample.ids) - 1 - len(rows))
        return np.concatenate([rows, filler_rows(filler, missing, rows)])

    def lacks_rows(self, sample: PartialSample) -> bool:
        """Whether an aborted sample has fewer rows than forwarded tokens.

        The environment's tokens at the end were never forwarded.
        """
        if sample.finish is not FinishReason.ABORT or sample.rows is None:
            return False
        forwarded = len(sample.ids) - 1
        for sampled in reversed(sample.mask):
            if sampled:
                break
            forwarded -= 1
        return len(sample.rows) < forwarded

    def on_declared_layers(self, rows: IntArray) -> IntArray:
        """Return rows on the declared layer axis; dense layers, which have no router, get zeros."""
        engine, declared = self.fleet.flavour.layer_axis, self.contract.layer_axis
        moe = list(self.contract.moe_layers or ())
        if engine is declared:
            return rows
        if declared is LayerAxis.MOE:
            return rows[:, moe]
        out = np.zeros((len(rows), self.contract.route_layers, rows.shape[2]), dtype=rows.dtype)
        out[:, moe] = rows
        return out


# Thousands of cases declare the same contract, and making and validating one costs a tenth of
# running a small case.
@lru_cache(maxsize=256)
def _contract(**fields: Any) -> Contract:
    return Contract(**fields)


def _wide_enough(dtype: np.dtype[Any], *fillers: Filler | None) -> np.dtype[Any]:
    # an unsigned type has no -1: the next signed type has it, and every expert id
    if Filler.MINUS_ONE in fillers and dtype.kind == "u":
        return np.promote_types(dtype, np.int8)
    return dtype


def finest_tag(finest: Versions, shown: VersionTag, *, overtaken: bool) -> Versions:
    """Return the tag that a client can give truthfully, at most ``finest``.

    shown: how the engines label their replies.
    overtaken: updates may overtake running calls. One label a call then names weights that may not
        have sampled all of its tokens, so no tag is possible.
    """
    spans = shown in (VersionTag.SPANS, VersionTag.SPANS_AND_LAST)
    scalar = shown in (VersionTag.EMISSION, VersionTag.ADMISSION)
    return finest if spans or (scalar and not overtaken) else Versions.NONE


def tag_fields(
    kind: Versions, labels: Sequence[Version], mask: Sequence[int], calls: Sequence[Version]
) -> dict[str, Any]:
    """Return the fields of a ``Rollout`` for a tag of ``kind``.

    ``labels`` and ``mask`` are over response tokens, ``calls`` over the calls that sampled any.
    Tokens of the environment (mask 0) have no version. Minimum, maximum and the one version of a
    sample, which is that of its last token, are taken over the tokens with a version. Bounds are
    as narrow as possible.
    """
    versions = [
        label for label, sampled in zip(labels, mask, strict=True) if sampled and label is not None
    ]
    extremes = {
        "min_version": min(versions, default=None),
        "max_version": max(versions, default=None),
    }
    fields: Mapping[Versions, dict[str, Any]] = {
        Versions.NONE: {},
        Versions.SAMPLE: {"version": versions[-1] if versions else None},
        Versions.MIN_MAX: extremes,
        Versions.BOUNDS: extremes,
        Versions.CALL: {"call_versions": tuple(calls)},
        Versions.SPAN: {"spans": _spans(labels)},
        Versions.TOKEN: {"token_versions": tuple(labels)},
    }
    return fields[kind]


def _spans(labels: Sequence[Version]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for i, label in enumerate(labels):
        if spans and spans[-1].version == label:
            spans[-1] = Span(start=spans[-1].start, end=i + 1, version=label)
        else:
            spans.append(Span(start=i, end=i + 1, version=label))
    return tuple(spans)
