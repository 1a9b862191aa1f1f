"""Corner cases: each situation is met by every run, and a fault that only shows there is found."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.contract import Contract, Filler
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Fault, Result
from rollproof.core.limits import RolloutLimits
from rollproof.core.records import EngineOutput, FinishReason, IntArray, Request, Rollout
from rollproof.core.subjects import SubjectFactory
from rollproof.fakes.clients.reference_clients import (
    AsSampled,
    AsSampledLimits,
    AsSampledTurns,
    ClientOptions,
    PartialSample,
)
from rollproof.invariants import default_registry
from rollproof.verification.contract_probe import probe
from rollproof.verification.reports import situations
from rollproof.verification.rollouts import cases_for
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import (
    Scope,
    corner_families,
    random_cases,
    small_scope,
    within_limits,
)
from rollproof.verification.traces import judge
from tests.verification.schedules.test_exhaustive import contract

_REGISTRY = default_registry()
_PLAIN = {
    "starts from a later weight version",
    "logprobs below -32",
    "logprobs of exactly 0",
    "prompts with the end token inside",
    "64 requests at once",
    "requests aborted more than ten times",
    "requests aborted three times in a row without a token",
    "weight transfers of several steps",
    "pauses that take effect later",
    "replicas that left the balancer",
    "replicas that joined the balancer again",
    "calls on a replica with older weights",
    "resumes under older weights",
    "replies without text over HTTP",
    "requests with top-p, top-k, min-p or penalties",
    "equal requests of a group",
}
_TURNS = {
    "responses with the end token inside",
    "turns cut with answers left",
    "aborts before the first token of a later turn",
}
_LIMITED = {
    "answers of the environment after a cut turn",
    "replies without routes",
    "replies without logprobs",
    "calls after a reply without routes",
    "calls after a reply without logprobs",
    "replies with a stop sequence of the stack's own",
    *(
        f"{name} limit, {place}"
        for name in ("response", "length", "context", "turns", "turn_tokens", "answer")
        for place in ("one below", "at", "one above")
    ),
}


def _probed(factory: SubjectFactory, flavour: str = "vllm") -> tuple[Contract, Any]:
    ((_, declared, model),) = probe(factory, (flavour,))
    return declared, model


def _corners(factory: SubjectFactory, seed: int = 0) -> dict[str, list[Case]]:
    declared, model = _probed(factory)
    families = corner_families("vllm", declared, model=model, seed=seed)
    return {name: list(cases) for name, cases in families}


@pytest.mark.parametrize("seed", [0, 5, 1234567])
@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (AsSampled, _PLAIN),
        (AsSampledTurns, _PLAIN | _TURNS),
        (AsSampledLimits, _PLAIN | _TURNS | _LIMITED),
    ],
)
def test_every_seed_meets_every_situation(
    factory: SubjectFactory, expected: set[str], seed: int
) -> None:
    """Whatever the seed, the corner cases meet each situation that the contract allows, and no
    check blames the reference.
    """
    met: Counter[str] = Counter()
    for cases in _corners(factory, seed).values():
        for case in cases:
            trace = run_case(factory, case)
            met.update(situations(trace.events, "rollouts", trace.header))
            assert () == judge(trace, _REGISTRY).failed, case
    assert set() == expected - set(met)


def test_the_profile_pr_holds_every_corner_case() -> None:
    """A run of ``pr`` has all of them, fitted to the contract, on each flavour."""
    declared, model = _probed(AsSampled, "sglang")
    held = {repr(case) for case in cases_for(AsSampled, profile="pr", seed=0, flavours=("sglang",))}
    corners = [
        case
        for _, cases in corner_families("sglang", declared, model=model)
        for case in cases
        if case.clear_cache
    ]
    assert len(corners) > 30
    assert [] == [case for case in corners if repr(case) not in held]


def _actions(declared: Contract) -> set[ActionKind]:
    return {
        action.do
        for _, cases in corner_families("vllm", declared)
        for case in cases
        for action in case.actions
    }


def test_a_turn_is_cut_where_the_environment_has_room_for_an_answer() -> None:
    """After an abort that leaves tokens of the turn behind: a stack that answers a fragment is seen
    to do so.
    """
    families = dict(corner_families("vllm", contract(multi_turn=True, loss_mask=True)))
    assert [12] == [
        request.budget
        for case in families["cut turns"]
        for request in case.requests
        for action in case.actions
        if action.do is ActionKind.ABORT
        and action.when.tokens
        and not action.when.queued
        and (request.budget or 0) > action.when.tokens + len(request.turns[0])
    ]


@pytest.mark.parametrize("seed", [0, 5, 1234567])
def test_samples_are_longer_than_a_block_and_need_no_budget(seed: int) -> None:
    """A long prompt with a long response, and a response that the model itself ends beyond the 16
    tokens at which a default would cut it.
    """
    bounded, free = _corners(AsSampled, seed)["long samples"]
    (request,) = bounded.requests
    assert (40, 30) == (len(request.prompt_ids), request.max_tokens)
    assert free.requests[0].budget is None
    (result,) = (event for event in run_case(AsSampled, free).events if isinstance(event, Result))
    assert result.rollout is not None
    assert FinishReason.STOP is result.rollout.finish_reason
    assert len(result.rollout.response_ids) > 16


def test_a_server_that_stays_dead_holds_nothing_up() -> None:
    """The run ends with its requests: nobody waits for a server that does not come back."""
    for_good = _corners(AsSampled)["deaths"][-1]
    events = run_case(AsSampled, for_good).events
    assert ["death"] == [event.what for event in events if isinstance(event, Fault)]
    assert events[-1].time < 100


def test_what_a_contract_rules_out_is_not_made() -> None:
    """No reply has gaps that a contract does not speak of, no replica lags behind a bound on
    staleness, no request without turns gets answers, and no aborted request is aborted again where
    nobody resumes it.
    """
    gaps = {ActionKind.DROP_LOGPROBS, ActionKind.DROP_ROUTES}
    assert set() == gaps & _actions(contract(missing_logprobs="nan"))
    assert {ActionKind.DROP_LOGPROBS} == gaps & _actions(
        contract(missing_logprobs="nan", reply_gaps=True)
    )
    assert ActionKind.LAG in _actions(contract())
    assert ActionKind.LAG not in _actions(contract(max_staleness=1))
    families = dict(corner_families("vllm", contract("none")))
    assert [] == list(families["cut turns"])
    assert [] == [
        case
        for case in families["many aborts"]
        if any(action.do is ActionKind.ABORT for action in case.actions)
    ]


def test_a_prompt_beyond_the_limits_is_cut() -> None:
    """Every case gets the declared limits; a prompt that leaves no room is cut, and prompts that
    differ go on differing.
    """
    declared = contract(limits=RolloutLimits(response=4, length=9, context=8))
    short, long = (
        Case(flavour="vllm", requests=(Request(request_id="r0", prompt_ids=tuple(range(1, n))),))
        for n in (5, 9)
    )
    fitted = within_limits(short, declared)

    assert (4, 8, 4) == (
        fitted.requests[0].limit,
        fitted.requests[0].max_length,
        fitted.requests[0].budget,
    )
    assert 8 == fitted.engine.max_length
    cut = within_limits(long, declared)
    assert (1, 2, 3, 4, 5, 6, 7) == cut.requests[0].prompt_ids
    assert 1 == cut.requests[0].budget
    assert short == within_limits(short, contract())


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (((1, 2, 3), (4, 2, 3)), ((1, 2), (4, 2))),
        (((1, 2, 3), (1, 2, 4)), ((2, 3), (2, 4))),
        (((1, 2, 3), (1, 2, 3)), ((1, 2), (1, 2))),
        (((1,), (2, 3, 4)), ((1,), (2, 3))),
        (((1,), (2, 1, 3), (2, 1, 4)), ((1,), (2, 1))),
        (((1, 2, 3, 9, 9), (1, 2, 4, 9, 9), (5, 6, 7)), ((1, 2), (5, 6))),
    ],
    ids=str,
)
def test_cut_prompts_tell_requests_apart(
    prompts: tuple[tuple[int, ...], ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    """Beginnings are kept if they differ, or else ends; without either, requests are left out."""
    case = Case(
        flavour="vllm",
        requests=tuple(
            Request(request_id=f"r{i}", prompt_ids=prompt, group="g")
            for i, prompt in enumerate(prompts)
        ),
    )
    fitted = within_limits(case, contract(limits=RolloutLimits(length=3)))
    assert expected == tuple(request.prompt_ids for request in fitted.requests)


def test_a_request_is_left_out_with_its_actions() -> None:
    """The others keep their arrivals and their actions."""
    prompts = {"r0": (1, 2, 3, 9, 9), "r1": (1, 2, 4, 9, 9), "r2": (5,)}
    case = Case(
        flavour="vllm",
        requests=tuple(Request(request_id=name, prompt_ids=ids) for name, ids in prompts.items()),
        arrivals=(0.0, 1.0, 2.0),
        actions=tuple(
            Action(when=Trigger(request=name, tokens=1), do=ActionKind.ABORT) for name in prompts
        ),
    )
    fitted = within_limits(case, contract(limits=RolloutLimits(length=3)))
    assert [("r0", (1, 2)), ("r2", (5,))] == [
        (request.request_id, request.prompt_ids) for request in fitted.requests
    ]
    assert (0.0, 2.0) == fitted.arrivals
    assert ["r0", "r2"] == [action.when.request for action in fitted.actions]


def _limited(**limits: Any) -> type[AsSampled]:
    class Limited(AsSampledTurns):
        options = ClientOptions(multi_turn=True, limits=RolloutLimits(**limits))

    return Limited


@pytest.mark.parametrize(
    "limits",
    [
        {"response": 1},
        {"response": 5000},
        {"response": 100_000},
        {"length": 2},
        {"length": 20_000},
        {"context": 30_000},
        {"length": 40, "context": 40, "response": 10},
        {"turns": 1},
        {"turns": 200},
        {"turn_tokens": 1},
        {"turn_tokens": 3, "answers_cut_turns": True},
        {"answer": 1},
        {"answer": 9000, "answer_keeps": "both"},
        {"response": 7, "length": 11, "turns": 2, "turn_tokens": 3, "answer": 2},
    ],
    ids=str,
)
def test_limits_of_any_size_are_met(limits: dict[str, Any]) -> None:
    """A correct client is clean around limits of any size, and each is met from below, at the limit
    and from above where it is above one.
    """
    factory = _limited(**limits)
    met: Counter[str] = Counter()
    for case in _corners(factory)["declared limits"]:
        trace = run_case(factory, case)
        met.update(situations(trace.events, "rollouts", trace.header))
        assert () == judge(trace, _REGISTRY).failed, case
    assert met


@pytest.mark.parametrize(
    "name", ["response", "length", "context", "turns", "turn_tokens", "answer"]
)
def test_no_case_is_longer_than_it_may_take(name: str) -> None:
    """A limit that no case can reach in reasonable time makes none of its size."""
    declared = contract(multi_turn=True, limits={name: 2**31 - 1})
    tokens = [
        len(request.prompt_ids) + sum(map(len, request.turns)) + len(request.turns)
        for _, cases in corner_families("vllm", declared)
        for case in cases
        for request in case.requests
    ]
    assert max(tokens) < 1000


@pytest.mark.parametrize("pad_id", [2**31 - 1, 151_643])
def test_any_padding_token_can_be_the_end_token(pad_id: int) -> None:
    """Each padding token that a contract takes ends turns in a case."""
    families = dict(corner_families("vllm", contract(pad_id=pad_id)))
    cases = list(families["end token inside"])
    assert {pad_id} == {case.model.eos_id for case in cases}
    assert () == judge(run_case(AsSampled, cases[0]), _REGISTRY).failed
    drawn = [
        case.model.eos_id
        for case in random_cases(0, 300, flavour="vllm", contract=contract(pad_id=pad_id))
    ]
    assert pad_id in drawn


class _RepeatsRows(AsSampledTurns):
    """Repeats the row before where a reply has none."""

    options = ClientOptions(multi_turn=True, filler=Filler.PREVIOUS, reply_gaps=True)


class _RaisesWithoutRows(_RepeatsRows):
    """Gives up where there is no row to repeat."""

    def with_filler(self, sample: PartialSample) -> IntArray | None:
        if sample.rows is None or not len(sample.rows):
            raise RuntimeError("the engine returned no routes")
        return super().with_filler(sample)


@pytest.mark.parametrize("flavour", ["vllm", "sglang", "rows-T", "vllm-gated"])
@pytest.mark.parametrize("factory", [_RepeatsRows, _RaisesWithoutRows])
def test_a_row_to_repeat_precedes_every_gap(factory: SubjectFactory, flavour: str) -> None:
    """``previous`` says nothing of the first row: no reply lacks routes unless a later one brings
    all rows, so that no correct stack is asked for what its contract does not say.
    """
    declared, model = _probed(factory, flavour)
    corners = dict(corner_families(flavour, declared, model=model))["replies with gaps"]
    drawn = random_cases(0, 400, flavour=flavour, contract=declared, model=model)
    cases = [
        case
        for case in (*corners, *drawn)
        if any(action.do is ActionKind.DROP_ROUTES for action in case.actions)
    ]
    assert cases
    assert [] == [case for case in cases if judge(run_case(factory, case), _REGISTRY).failed]


# Faults that show in one family alone


class _CountsFromZero(AsSampled):
    """Numbers the weights itself, from 0."""

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        first = self.fleet.case.first_version
        sample.labels = [
            label - first if isinstance(label, int) else label for label in sample.labels
        ]
        return super().version_tags(sample)


class _ClampsLogprobs(AsSampled):
    def merge_logprobs(self, sample: PartialSample, output: EngineOutput) -> None:
        logprobs = None if output.logprobs is None else np.maximum(output.logprobs, -20.0)
        super().merge_logprobs(sample, replace(output, logprobs=logprobs))


class _TakesZeroForMissing(AsSampled):
    def merge_logprobs(self, sample: PartialSample, output: EngineOutput) -> None:
        assert output.logprobs is not None
        logprobs = np.where(output.logprobs == 0.0, np.nan, output.logprobs)
        super().merge_logprobs(sample, replace(output, logprobs=logprobs))


class _StripsPadding(AsSampled):
    """Pads prompts with 0, and strips every 0 again."""

    def resume_prompt(self, sample: PartialSample) -> tuple[int, ...]:
        prompt = tuple(token for token in sample.request.prompt_ids if token != 0)
        return (*prompt, *sample.response)


class _HasFewSlots(AsSampled):
    """Numbers its running samples modulo 32."""

    def start(self, fleet: Any) -> None:
        super().start(fleet)
        self.slots: dict[int, PartialSample] = {}

    def finished(self, sample: PartialSample) -> Rollout:
        done = super().finished(sample)
        number = int(sample.request.request_id[1:])
        other = self.slots.setdefault(number % 32, sample)
        return done if other is sample else replace(done, response_ids=tuple(other.response))


class _GivesUpAfterTen(AsSampled):
    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        reason = super().finish_reason(sample, output)
        return FinishReason.LENGTH if sample.attempts > 10 else reason


class _ResetsBeforeThePause(AsSampled):
    async def update_weights(self, version: int | None) -> None:
        true = self.fleet.weights_of(version)
        for server in self.fleet.servers.values():
            if server.alive:
                server.reset_prefix_cache()
                await server.pause(self.fleet.pause_mode, False)
                await server.load(true, version)
                await server.resume()


class _WaitsOneStep(AsSampled):
    """Gives a transfer one step, whatever it takes."""

    async def update_weights(self, version: int | None) -> None:
        true = self.fleet.weights_of(version)
        live = [server for server in self.fleet.servers.values() if server.alive]
        for server in live:
            await server.pause(PauseMode.ABORT)
        loads = [asyncio.ensure_future(server.load(true, version)) for server in live]
        await asyncio.wait(loads, timeout=1.5)
        for server in live:
            await server.resume()
        await asyncio.gather(*loads)


class _TakesVersionsForSorted(AsSampled):
    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        labels = [label for label in sample.labels if label is not None]
        if not labels:
            return super().version_tags(sample)
        return {"min_version": labels[0], "max_version": labels[-1]}


class _FailsWithoutItsReplica(AsSampled):
    def acquire(self, sample: PartialSample, avoid: list[str]) -> str:
        if self.fleet.balancer.left:
            raise LookupError("a replica is gone")
        return super().acquire(sample, avoid)


class _FillsZeros(AsSampledLimits):
    """Fills 0.0 where the engine returned no logprob, and trains on it."""

    def merge_logprobs(self, sample: PartialSample, output: EngineOutput) -> None:
        if output.logprobs is None:
            output = replace(output, logprobs=np.zeros(len(output.token_ids)))
        super().merge_logprobs(sample, output)


class _DropsRows(AsSampledLimits):
    """Has no rows where a reply has none."""

    def with_filler(self, sample: PartialSample) -> Any:
        return sample.rows


class _ForgetsTheLength(AsSampledLimits):
    """Counts a limit of prompt and response together as one of the response."""

    def next_budget(self, sample: PartialSample) -> int | None:
        request = replace(sample.request, max_length=None)
        left = (request.budget or 9) - len(sample.response)
        return min(left, 6 - sample.turn_sampled)


class _CutsTheOtherSide(AsSampledLimits):
    """Keeps the beginning of a long answer, where the contract says the end."""

    def next_turn(self, sample: PartialSample) -> bool:
        answers = tuple(answer[:4] for answer in sample.request.turns)
        sample.request = replace(sample.request, turns=answers)
        return super().next_turn(sample)


class _TakesAnotherTurn(AsSampledLimits):
    """Counts answers where the limit counts turns of the model."""

    @property
    def limits(self) -> RolloutLimits:
        return replace(super().limits, turns=4)


class _KnowsTwoNames(AsSampled):
    """Passes on the temperature and top-p, and drops what it does not know."""

    def sampling_for(self, sample: PartialSample) -> dict[str, Any]:
        given = super().sampling_for(sample)
        return {name: value for name, value in given.items() if name in ("temperature", "top_p")}


class _OneReplyForAGroup(AsSampled):
    """Makes one call for equal requests of a group, and copies its sample."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[tuple[Any, ...], asyncio.Future[Rollout | None]] = {}

    async def rollout(self, request: Request) -> Rollout | None:
        key = (request.group, request.prompt_ids, request.budget)
        if request.group is None:
            return await super().rollout(request)
        if key not in self.made:
            self.made[key] = asyncio.ensure_future(super().rollout(request))
        done = await self.made[key]
        return None if done is None else replace(done, request_id=request.request_id)


class _GivesUpAfterThree(AsSampled):
    """Takes three replies without tokens in a row for the end."""

    async def run(self, sample: PartialSample) -> bool:
        self.chosen = replace(self.chosen, patience=3)
        try:
            return await super().run(sample)
        except RuntimeError:
            sample.finish = FinishReason.LENGTH
            return True


class _EndsAtAnEmptyTurn(AsSampledTurns):
    """Takes two aborts before the first token of a later turn for an empty turn."""

    empty = 0

    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        self.empty = self.empty + 1 if sample.turn and not sample.turn_sampled else 0
        return FinishReason.STOP if self.empty > 1 else super().finish_reason(sample, output)


class _CutsLaterTurns(AsSampledTurns):
    """Requests at most 48 tokens after an answer of the environment."""

    def next_budget(self, sample: PartialSample) -> int | None:
        left = super().next_budget(sample)
        return left if left is None or not sample.turn else min(left, 48 - sample.turn_sampled)


class _SharesHandles(AsSampled):
    """Names the calls of a group by the group."""

    def handle(self, sample: PartialSample) -> str:
        return sample.request.group or super().handle(sample)


class _ForgetsDeadServers(AsSampled):
    """Takes a server that is down at an update off the list, for good."""

    async def update_weights(self, version: int | None) -> None:
        gone: set[str] = self.__dict__.setdefault("gone", set())
        gone.update(name for name, server in self.fleet.servers.items() if not server.alive)
        await self.fleet.sync(version, servers=set(self.fleet.servers) - gone)


def _blamed(factory: SubjectFactory, cases: Iterator[Case]) -> set[str]:
    return {check for case in cases for check in judge(run_case(factory, case), _REGISTRY).failed}


@pytest.mark.parametrize(
    ("factory", "family", "check"),
    [
        (_CountsFromZero, "a later first version", "versions.published"),
        (_ClampsLogprobs, "wide logprobs", "stitch.logprobs-paired"),
        (_TakesZeroForMissing, "wide logprobs", "stitch.logprobs-present"),
        (_StripsPadding, "end token inside", "stitch.resume-prompt"),
        (_HasFewSlots, "many requests", "stitch.tokens"),
        (_GivesUpAfterTen, "many aborts", "stitch.finish-length"),
        (_GivesUpAfterThree, "many aborts", "stitch.finish-length"),
        (_EndsAtAnEmptyTurn, "cut turns", "stitch.finish-reason"),
        (_CutsLaterTurns, "long turns", "stitch.turn-budget"),
        (_SharesHandles, "groups", "lifecycle.abort-hits-target"),
        (_ForgetsDeadServers, "missed update", "weights.update-loads"),
        (_ResetsBeforeThePause, "slow updates", "weights.no-stale-cache"),
        (_WaitsOneStep, "slow updates", "weights.no-stale-cache"),
        (_TakesVersionsForSorted, "balancing", "versions.min-max"),
        (_FailsWithoutItsReplica, "balancing", "lifecycle.no-error-without-fault"),
        (_FillsZeros, "replies with gaps", "stitch.logprobs-missing"),
        (_DropsRows, "replies with gaps", "routes.rows"),
        (_ForgetsTheLength, "declared limits", "stitch.budget-granted"),
        (_CutsTheOtherSide, "declared limits", "stitch.environment-tokens"),
        (_TakesAnotherTurn, "declared limits", "stitch.limits-kept"),
        (_KnowsTwoNames, "sampling parameters", "stitch.sampling-forwarded"),
        (_OneReplyForAGroup, "groups", "stitch.sampled-by-engine"),
    ],
)
def test_a_fault_that_shows_in_one_situation_is_found(
    factory: SubjectFactory, family: str, check: str
) -> None:
    """The family finds the fault, and the small scope does not."""
    declared, model = _probed(factory)
    scope = Scope(response=3, actions=1, side_actions=1, side_response=3)
    small = (
        case for case in small_scope("vllm", declared, scope=scope, model=model) if case.clear_cache
    )
    assert check in _blamed(factory, iter(_corners(factory)[family]))
    assert check not in _blamed(factory, small)
