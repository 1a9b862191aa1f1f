"""Resuming: how a correct client of rollout engines turns aborted calls into one sample.

It is written to be read and to be broken: every step that a published fault got wrong is a method
of its own, so that a known bug is a few lines on top of it
(``rollproof.fakes.clients.reference_clients`` has the other ways of the field). A manager's
``contract`` is complete after ``start``, where the flavour of the engines becomes known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    Sampling,
    Versions,
)
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Observation
from rollproof.core.records import (
    EngineOutput,
    FinishReason,
    IntArray,
    Request,
    Rollout,
    Scalar,
    Version,
    spread,
)
from rollproof.fakes.clients.version_tags import finest_tag, tags
from rollproof.fakes.engine.exceptions import EnginePaused
from rollproof.fakes.engine.flavours import ReprefillRows
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.engine.replies import filler_rows

__all__ = ["FROZEN", "AsSampled", "ClientOptions", "PartialSample"]

FROZEN = (PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE)
"""Pauses after which the engine goes on with the calls that it ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """What a manager declares of its samples.

    ``versions`` is the finest tag that it gives where the engine's own tags allow it;
    ``layer_axis`` ``None`` is that of the engine. ``patience`` bounds consecutive attempts that
    bring no token, ``back_off`` is the pause between attempts in virtual seconds. ``multi_turn``
    declares the turns of the environment, and a loss mask with them, also where a case has none;
    every manager drives those that a request has.
    """

    versions: Versions = Versions.MIN_MAX
    rows: Rows = Rows.FORWARDED
    final_row: Filler = Filler.MINUS_ONE
    layer_axis: LayerAxis | None = None
    partial_off: PartialOff = PartialOff.DROPPED
    patience: int = 1000
    back_off: float = 1.0
    multi_turn: bool = False


@dataclass(slots=True, eq=False)
class PartialSample:
    """A rollout in the making. Lists are over response tokens; ``rows`` ``(captured, layers,
    top_k)`` from position 0.

    ``labels`` are the version tags of the tokens as the engine showed them, ``calls`` those of the
    replies.
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
    attempts: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and response so far."""
        return (*self.request.prompt_ids, *self.response)


class AsSampled:
    """Resumes on the client's side; a row stays that of the forward that first computed it.

    With partial rollout off, an aborted sample is dropped or surfaced as ``options.partial_off``
    says.
    """

    options: ClassVar[ClientOptions] = ClientOptions()
    resume: ClassVar[ResumeBy] = ResumeBy.CLIENT
    contract: Contract
    fleet: Fleet

    def __init__(self, options: ClientOptions | None = None) -> None:
        self.chosen: ClientOptions = options if options is not None else type(self).options
        self._open = 0

    # The protocol of a rollout subject

    def start(self, fleet: Fleet) -> None:
        """Take the fleet, and declare the contract that holds on its flavour."""
        self.fleet = fleet
        fleet.pause_mode = self.pause_mode(fleet)
        self.contract = self.declared(fleet)

    async def rollout(self, request: Request) -> Rollout | None:
        """One sample; ``None`` where it was dropped."""
        self._open += 1
        try:
            sample = PartialSample(request=request)
            return self.finished(sample) if await self.run(sample) else None
        finally:
            self._open -= 1

    async def update_weights(self, version: int | None) -> None:
        """The fleet's default procedure, with this manager's way to pause."""
        await self.fleet.sync(version)

    def to_record(self, native: Rollout) -> Rollout:
        """The native form is the record."""
        return native

    def stop(self) -> None:
        """Nothing to free."""

    def gauges(self) -> Mapping[str, float]:
        """Rollouts that have not ended."""
        return {"rollouts": float(self._open)}

    # What is declared

    def pause_mode(self, fleet: Fleet) -> PauseMode:
        """How weight updates pause the servers: as the case says, where the provenance of the rows
        survives that.
        """
        overwritten = fleet.flavour.recompute is ReprefillRows.OVERWRITTEN
        return PauseMode.ABORT if overwritten and fleet.pause_mode in FROZEN else fleet.pause_mode

    def provenance(self, fleet: Fleet) -> Provenance:
        """Which forward a row of a resumed sample comes from."""
        return Provenance.AS_SAMPLED

    def declared(self, fleet: Fleet) -> Contract:
        """The contract on this fleet."""
        engine, chosen, model = fleet.engine_contract, self.chosen, fleet.case.model
        multi_turn = chosen.multi_turn or any(request.turns for request in fleet.case.requests)
        all_rows = chosen.rows is Rows.ALL
        return _contract(
            rows=chosen.rows,
            final_row=chosen.final_row if all_rows else None,
            filler=Filler.NONE,
            layer_axis=chosen.layer_axis or engine.layer_axis,
            **model.sizes,
            dtype=_wide_enough(np.dtype(engine.dtype), chosen.final_row if all_rows else None).name,
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
        )

    def aborts_surface(self, fleet: Fleet) -> bool:
        """Whether a caller may be handed an aborted sample."""
        return not fleet.case.partial and self.chosen.partial_off is PartialOff.SURFACED

    # How a sample comes about

    async def run(self, sample: PartialSample) -> bool:
        """Call engines until the sample has ended. False: it is to be dropped. Raises
        ``RuntimeError`` out of patience.
        """
        idle = 0
        while idle < self.chosen.patience:
            sent, budget = self.resume_prompt(sample), self.next_budget(sample)
            output = await self.attempt(sample, sent, budget)
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
        """One reply. A server that died, lost the reply or is paused is tried again, elsewhere
        where there is another.
        """
        avoid: list[str] = []
        for left in reversed(range(self.chosen.patience)):
            server_id = self.acquire(sample, avoid)
            try:
                return await self.call(server_id, sample, sent, budget)
            except (ConnectionError, EnginePaused):
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
        """One call to one server. Each has a handle of its own, of which none is the beginning of
        another.
        """
        request = sample.request
        sample.attempts += 1
        return await self.fleet.servers[server_id].generate(
            prompt_ids=list(sent),
            max_tokens=budget,
            request_id=f"{request.request_id}#{sample.attempts}#",
            sampling=self.sampling_for(sample),
            media=request.media,
            want_routes=request.want_routes,
            want_logprobs=request.want_logprobs,
            routes_start=self.routes_start(sample),
        )

    def acquire(self, sample: PartialSample, avoid: list[str]) -> str:
        """The server for the next call."""
        return self.fleet.balancer.acquire(avoid)

    def release(self, server_id: str) -> None:
        """The call is over, however it ended."""
        self.fleet.balancer.release(server_id)

    async def wait(self) -> None:
        """Between two attempts."""
        await asyncio.sleep(self.chosen.back_off)

    def resumes(self, sample: PartialSample) -> bool:
        """Whether an aborted sample goes on."""
        return self.fleet.case.partial

    # What a call is sent

    def resume_prompt(self, sample: PartialSample) -> tuple[int, ...]:
        """The prompt and everything after it so far."""
        return sample.ids

    def next_budget(self, sample: PartialSample) -> int | None:
        """What is left of the caller's budget, in tokens."""
        budget = sample.request.budget
        return None if budget is None else budget - len(sample.response)

    def sampling_for(self, sample: PartialSample) -> dict[str, Scalar]:
        """The caller's sampling parameters, in a dictionary of our own."""
        return dict(sample.request.sampling)

    def routes_start(self, sample: PartialSample) -> int:
        """The first row that is missing; engines that do not know the option return all of them."""
        return 0 if sample.rows is None else len(sample.rows)

    # What a reply adds

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        """Add a reply to a call of ``sent`` prompt tokens. One without tokens adds nothing."""
        if not output.token_ids:
            return
        self.merge_routes(sample, sent, output)
        self.merge_tokens(sample, output)
        self.merge_logprobs(sample, output)
        self.merge_versions(sample, output)

    def merge_tokens(self, sample: PartialSample, output: EngineOutput) -> None:
        """The reply's tokens continue the response."""
        sample.response.extend(output.token_ids)
        sample.mask.extend([1] * len(output.token_ids))

    def merge_logprobs(self, sample: PartialSample, output: EngineOutput) -> None:
        """One per token, missing ones marked."""
        count = len(output.token_ids)
        sample.logprobs.extend(
            [float("nan")] * count if output.logprobs is None else output.logprobs.tolist()
        )

    def merge_versions(self, sample: PartialSample, output: EngineOutput) -> None:
        """One tag per token, and one for the call: that of its last token."""
        count = len(output.token_ids)
        labels = spread(output.spans, count) if output.spans else [output.version] * count
        sample.labels.extend(labels)
        sample.calls.append(labels[-1])

    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        """Append the rows that are missing. The row of the reply's last token is none: that token
        was not forwarded.
        """
        if output.routes is None:
            return
        have = 0 if sample.rows is None else len(sample.rows)
        new = output.routes[: sent + len(output.token_ids) - 1 - output.routes_start][
            have - output.routes_start :
        ]
        sample.rows = new.copy() if sample.rows is None else np.concatenate([sample.rows, new])

    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        """The engine's own, except that an abort after the last token cut nothing off."""
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

    def next_turn(self, sample: PartialSample) -> bool:
        """Append the environment's answer, if there is one and room for a token after it."""
        turns = sample.request.turns
        if sample.turn >= len(turns):
            return False
        answer, budget = turns[sample.turn], self.next_budget(sample)
        if budget is not None and budget <= len(answer):
            return False
        sample.turn += 1
        self.observe(sample, answer)
        return True

    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        """Add tokens that the policy did not sample; they are not trained on."""
        self.fleet.recorder.record(
            Observation(request_id=sample.request.request_id, token_ids=answer)
        )
        sample.response.extend(answer)
        sample.mask.extend([0] * len(answer))
        sample.logprobs.extend([float("nan")] * len(answer))
        sample.labels.extend([None] * len(answer))

    # What is handed over

    def finished(self, sample: PartialSample) -> Rollout:
        """The sample as it is handed over."""
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
        """1 for sampled tokens, 0 for the environment's, where the contract declares a mask."""
        return np.array(sample.mask, dtype=np.int64) if self.contract.loss_mask else None

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        """The fields of the tag that the contract declares."""
        return tags(self.contract.versions, sample.labels, sample.mask, sample.calls)

    def final_routes(self, sample: PartialSample) -> IntArray | None:
        """``(rows, layers, top_k)`` in the declared layout; ``None`` where an abort that nobody
        resumes came without them.
        """
        if sample.rows is None or not sample.request.want_routes or self.lacks_rows(sample):
            return None
        rows = self.on_declared_layers(sample.rows).astype(self.contract.dtype)
        if self.contract.rows is not Rows.ALL:
            return rows
        return np.concatenate(
            [rows, filler_rows(self.contract.final_row, len(sample.ids) - len(rows), rows)]
        )

    def lacks_rows(self, sample: PartialSample) -> bool:
        """Whether an aborted sample has tokens that were forwarded and no row: too few rows would
        be taken for all of them.

        The environment's last word was never forwarded.
        """
        if sample.finish is not FinishReason.ABORT or sample.rows is None:
            return False
        forwarded = len(sample.ids) - 1
        for own in reversed(sample.mask):
            if own:
                break
            forwarded -= 1
        return len(sample.rows) < forwarded

    def on_declared_layers(self, rows: IntArray) -> IntArray:
        """Rows of the engine's layer axis, on the declared one; dense layers, which have no router,
        hold zeros.
        """
        engine, own = self.fleet.flavour.layer_axis, self.contract.layer_axis
        moe = list(self.contract.moe_layers or ())
        if engine is own:
            return rows
        if own is LayerAxis.MOE:
            return rows[:, moe]
        out = np.zeros((len(rows), self.contract.route_layers, rows.shape[2]), dtype=rows.dtype)
        out[:, moe] = rows
        return out


@lru_cache(maxsize=256)
def _contract(**fields: Any) -> Contract:
    """Thousands of cases declare the same: making and validating a contract costs a tenth of
    running a small one.
    """
    return Contract(**fields)


def _wide_enough(dtype: np.dtype[Any], filler: Filler | None) -> np.dtype[Any]:
    """An unsigned type cannot hold -1: the next signed one that holds every expert as well."""
    if filler is Filler.MINUS_ONE and dtype.kind == "u":
        return np.promote_types(dtype, np.int8)
    return dtype
