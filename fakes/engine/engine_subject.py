"""The fake engine as an ``EngineSubject``, judged by the same conformance run as real engines.

It runs on a virtual clock, in milliseconds, and shows only what a real engine shows: the ground
truth that the fake records stays in a recorder of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rollproof.core.case import EngineOptions, Model
from rollproof.core.contract import Contract, KvPolicy, Logprobs
from rollproof.core.engine_contract import (
    EngineTerms,
    PauseMode,
    Refusal,
    RoutesSwitch,
    SamplingOption,
    StopShown,
    StreamMode,
)
from rollproof.core.engine_protocol import EngineSettings, Piece, Query, Watch, WeightUpdate
from rollproof.core.events.rollout import Admit
from rollproof.core.records import EngineOutput, FinishReason, IntArray, LogprobArray, Scalar
from rollproof.core.trace import Recorder
from rollproof.errors import EngineRefused
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.exceptions import BadCall, EnginePaused
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.flavours import Flavour, engine_contract, engine_terms, flavour_named
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.engine.scheduler import EngineHooks

__all__ = ["MODEL", "TOKEN_TEXT", "VERSIONS", "CodedReference", "FakeEngineSubject"]

MODEL = Model(num_layers=5, moe_layers=(1, 2, 3, 4), num_experts=8, top_k=2, eos_every=12)
"""The model of fake engines; its first layer is dense, so that a wrong layer axis shows."""
TOKEN_TEXT = "t{:03d}"
"""The text of a token."""
VERSIONS: Mapping[str, int] = {"A": 0, "B": 1}
"""The version number of each checkpoint's weights."""


class FakeEngineSubject:
    """The fake engine of ``flavour`` as an engine adapter; its model is ``MODEL``, whatever
    ``settings.model`` is.

    ``settings.logprobs_mode`` is one of ``Logprobs``; ``None``: the flavour's.
    """

    contract: Contract

    def __init__(
        self, settings: EngineSettings, flavour: str | Flavour = "vllm", seed: int = 0
    ) -> None:
        self.settings = settings
        self.flavour: Flavour = flavour_named(flavour) if isinstance(flavour, str) else flavour
        self.policy: CodedPolicy = CodedPolicy.from_model(MODEL, seed)
        self.terms: EngineTerms = engine_terms(
            self.flavour,
            settings.max_length,
            end_tokens=(self.policy.eos_id,),
            token_text=TOKEN_TEXT,
        )
        contract = engine_contract(self.flavour, MODEL, KvPolicy.RECOMPUTE)
        self.contract = replace(
            contract,
            engine=self.terms,
            logprobs=Logprobs(settings.logprobs_mode or contract.logprobs),
        )
        self._watching: dict[str, tuple[Query, Watch]] = {}
        self._recorder: Recorder | None = None
        self._engine: FakeEngine | None = None

    @property
    def engine(self) -> FakeEngine:
        """Return the fake engine; it exists after ``start``."""
        assert self._engine is not None
        return self._engine

    async def start(self) -> None:
        """Make the engine on the running loop."""
        loop = asyncio.get_running_loop()
        self._recorder = Recorder(loop.time)
        self._engine = self.make_engine(
            EngineOptions(
                max_batch=self.settings.max_batch,
                prefill_chunk=self.settings.prefill_chunk,
                prefix_cache=self.settings.prefix_cache,
                kv_tokens=self.settings.kv_tokens,
            ),
            self._recorder,
        )

    def make_engine(self, options: EngineOptions, recorder: Recorder) -> FakeEngine:
        """Return the fake engine; known bugs return a faulty one."""
        return FakeEngine(
            "e0",
            self.policy,
            self.flavour,
            options,
            recorder,
            version=VERSIONS[self.settings.version],
            label=self.settings.label,
            hooks=_Progress(self),
            max_length=self.settings.max_length,
        )

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        """Run a call. Raises ``EngineRefused`` for what the flavour refuses."""
        self._watching[query.handle] = (query, watch)
        budget = self.granted(query)
        empty = _empty_prompt_reply(self.flavour, query)
        if empty is not None:
            watch(Piece(token_ids=(), sampled=0, finished=True))
            return [empty]
        # some engines have no option per call: they return routes to every call
        always = self.flavour.routes_switch is RoutesSwitch.ENGINE
        try:
            outputs = await asyncio.gather(
                *(
                    self.engine.generate(
                        prompt_ids=query.prompt_ids,
                        max_tokens=budget,
                        request_id=query.handle,
                        sampling={"temperature": query.temperature},
                        ends=self.ends(query),
                        draw=draw,
                        want_routes=query.want_routes or always,
                        want_logprobs=query.want_logprobs,
                        routes_start=query.routes_start or 0,
                    )
                    for draw in self.draws(query)
                )
            )
        except (BadCall, EnginePaused) as error:
            raise EngineRefused(str(error), kind=type(error).__name__) from error
        shown = [self.shown(self.without_end(output, query), query) for output in outputs]
        for sample, output in enumerate(shown):
            self._stream_end(output, query, watch, sample)
        return shown

    def granted(self, query: Query) -> int:
        """Return the budget that a call gets near the model's length.

        Raises ``EngineRefused`` for a prompt or a budget that the flavour refuses.
        """
        terms, length = self.terms, len(query.prompt_ids)
        if length > terms.longest_prompt:
            raise EngineRefused(
                f"A prompt must have at most {terms.longest_prompt} tokens, not {length}.",
                kind="BadCall",
            )
        if (
            length + query.max_tokens > terms.max_length
            and terms.excess_budget is Refusal.ERROR
            and length
        ):
            raise EngineRefused(
                f"{length} tokens of prompt and a budget of {query.max_tokens} exceed"
                f" {terms.max_length}.",
                kind="BadCall",
            )
        room = terms.room_after(length)
        return query.max_tokens if room is None else min(query.max_tokens, room)

    def draws(self, query: Query) -> Sequence[int]:
        """Return the number of the draw of each sample; known bugs change them."""
        return range(query.samples)

    def ends(self, query: Query) -> frozenset[int]:
        """Return the tokens that end a call; known bugs change them."""
        own = () if query.ignore_end else self.terms.end_tokens
        return frozenset((*own, *query.stop_token_ids, *map(_token_of, query.stop)))

    def without_end(self, output: EngineOutput, query: Query) -> EngineOutput:
        """Return the reply without the token that ended its call, if the flavour strips it."""
        if output.finish_reason is not FinishReason.STOP or not output.token_ids:
            return output
        last, terms = output.token_ids[-1], self.terms
        how = {
            **dict.fromkeys(map(_token_of, query.stop), terms.stop_string),
            **dict.fromkeys(query.stop_token_ids, terms.stop_token),
            **dict.fromkeys(terms.end_tokens, terms.end_token),
        }
        return stripped(output) if how.get(last) is StopShown.STRIPPED else output

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        """Return what the engine shows of a finished call; known bugs change it."""
        if output.logprobs is None:
            return output
        modes = coded_modes(
            output.logprobs,
            query.temperature,
            query.sampling,
            penalised=bool(self.terms.penalised_logprobs),
        )
        return replace(output, logprobs=modes[self.contract.logprobs])

    async def abort(self, handle: str) -> None:
        await self.engine.abort(handle)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self.engine.pause(mode, clear_cache)

    async def resume(self) -> None:
        await self.engine.resume()

    async def update_weights(self, update: WeightUpdate) -> None:
        await self.engine.load(VERSIONS[update.version], update.label, identity=update.identity)
        if update.clear_cache:
            self.engine.reset_prefix_cache()

    async def clear_cache(self) -> None:
        self.engine.reset_prefix_cache()

    async def counters(self) -> Mapping[str, float]:
        assert self._recorder is not None
        admitted = [event.call_id for event in self._recorder.events if isinstance(event, Admit)]
        return {"preemptions": float(len(admitted) - len(set(admitted)))}

    async def stop(self) -> None:
        """Do nothing: the engine ends with its loop."""

    def stream_token(self, call: InflightCall) -> None:
        """Stream a sampled token of a running call."""
        query, watch = self._watching[call.rid]
        if query.stream is StreamMode.FINAL or query.samples > 1:
            return
        tokens = tuple(call.ids[call.prompt_len :])
        shown = tokens if query.stream is StreamMode.CUMULATIVE else tokens[-1:]
        # the last token of a call is streamed with its end
        if len(call.ids) < call.limit and call.ids[-1] not in call.ends:
            watch(self.piece(Piece(token_ids=shown, sampled=len(tokens)), query))

    def piece(self, piece: Piece, query: Query) -> Piece:
        """Return the piece as it is streamed; known bugs change it."""
        return piece

    def _stream_end(self, output: EngineOutput, query: Query, watch: Watch, sample: int) -> None:
        tokens = output.token_ids
        if query.stream is StreamMode.DELTA and query.samples == 1:
            tokens = tokens[-1:] if output.finish_reason is not FinishReason.ABORT else ()
        rows = None if output.routes is None else len(output.routes)
        last = Piece(
            token_ids=tokens, sampled=len(output.token_ids), rows=rows, finished=True, sample=sample
        )
        watch(self.piece(last, query))


class _Progress(EngineHooks):
    """Passes every token to the subject."""

    def __init__(self, subject: FakeEngineSubject) -> None:
        super().__init__()
        self._subject = subject

    def watches(self, request_id: str) -> bool:
        """Watch every call."""
        return True

    def sampled(self, call: InflightCall) -> bool:
        """Stream the token; the engine checks the call's end in the same step."""
        self._subject.stream_token(call)
        return False


class CodedReference:
    """The coded policy as an independent forward, a
    ``rollproof.engines.reference_model.Reference``.

    It is exact, so no margin is small.
    """

    def __init__(self, policy: CodedPolicy) -> None:
        self._policy = policy

    def forward(
        self, version: str, ids: Sequence[int], temperature: float
    ) -> tuple[LogprobArray, LogprobArray, IntArray, LogprobArray, LogprobArray]:
        """Return logprobs at 1 and at ``temperature``, routes, margins and orders, as
        ``rollproof.core.events.rollout.Reference`` has them.
        """
        number = VERSIONS[version]
        raw = self._raw(number, ids)
        routes = self._policy.routes(number, ids)
        wide = np.full(routes.shape[:2], np.inf)
        return raw, scaled(raw, temperature), routes, wide, wide

    def sampled(
        self, version: str, ids: Sequence[int], sampling: Mapping[str, Scalar], start: int
    ) -> tuple[LogprobArray, LogprobArray, LogprobArray]:
        """Return the fields ``penalised``, ``penalised_scaled`` and ``processed`` of a
        ``Reference``.

        The coded policy has no distribution to cut: the token that it chooses is left, and no
        other.
        """
        number, temperature = VERSIONS[version], float(sampling.get("temperature") or 0.0)
        options = {option: 1.0 for option in SamplingOption if option in sampling}
        modes = coded_modes(self._raw(number, ids), temperature, options, penalised=True)
        processed = modes[Logprobs.PROCESSED]
        if any(not option.penalty for option in options):
            chosen = self._policy.choices(number, ids, 0)
            processed = np.where(chosen == np.asarray(ids), processed, -np.inf)
        return modes[Logprobs.RAW], modes[Logprobs.TEMPERATURE_SCALED], processed

    def _raw(self, number: int, ids: Sequence[int]) -> LogprobArray:
        raw = self._policy.logprobs(number, ids, 0)
        raw[:1] = np.nan
        return raw


def coded_modes(
    raw: LogprobArray,
    temperature: float,
    sampling: Mapping[SamplingOption, float],
    *,
    penalised: bool,
) -> Mapping[Logprobs, LogprobArray]:
    """Return coded logprobs in each mode; ``penalised``: also the first two are after penalties.

    The coded policy has no distribution to change, so a penalty and a filter are functions that
    differ from all others.
    """
    after = raw - 0.5 if any(option.penalty for option in sampling) else raw
    cut = any(not option.penalty for option in sampling)
    shown = after if penalised else raw
    processed = scaled(after, temperature)
    return {
        Logprobs.RAW: shown,
        Logprobs.TEMPERATURE_SCALED: scaled(shown, temperature),
        Logprobs.PROCESSED: processed * 0.5 if cut else processed,
        Logprobs.NONE: shown,
    }


def stripped(output: EngineOutput) -> EngineOutput:
    """Return a reply without its last token, and without the logprob and the row of it."""
    return replace(
        output,
        token_ids=output.token_ids[:-1],
        logprobs=None if output.logprobs is None else output.logprobs[:-1],
        routes=None if output.routes is None else output.routes[:-1],
        spans=tuple(
            replace(span, end=min(span.end, len(output.token_ids) - 1))
            for span in output.spans
            if span.start < len(output.token_ids) - 1
        ),
    )


def _token_of(text: str) -> int:
    """Return the token of a text; ``TOKEN_TEXT`` makes it."""
    return int(text.strip()[1:])


def scaled(logprobs: LogprobArray, temperature: float) -> LogprobArray:
    """Return logprobs at a temperature.

    The coded policy has no distribution to rescale, so this is any function that differs.
    """
    return logprobs if temperature in (0.0, 1.0) else logprobs / temperature


def _empty_prompt_reply(flavour: Flavour, query: Query) -> EngineOutput | None:
    """Return the reply to a call without a prompt, if the flavour answers such calls."""
    refusal = None if query.prompt_ids else flavour.empty_prompt
    if refusal not in (Refusal.EMPTY, Refusal.ABORT):
        return None
    reason = FinishReason.LENGTH if refusal is Refusal.EMPTY else FinishReason.ABORT
    return EngineOutput(
        token_ids=(),
        logprobs=None,
        routes=None,
        finish_reason=reason,
        native=flavour.native[reason],
    )
