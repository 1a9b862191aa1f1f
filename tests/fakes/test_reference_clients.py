"""The reference clients return what their contracts declare, on every flavour, through every
interruption.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import ActionKind, Case, EngineOptions
from rollproof.core.contract import (
    Contract,
    Filler,
    LayerAxis,
    MissingLogprobs,
    PartialOff,
    Provenance,
    ResumeBy,
    Rows,
)
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Call, Observation, Reply
from rollproof.core.records import FinishReason, IntArray, Rollout, Version
from rollproof.core.subjects import RolloutSubject
from rollproof.core.trace import Recorder, Trace
from rollproof.fakes.clients.reference_clients import (
    REFERENCES,
    AsSampled,
    ClientOptions,
    EngineKeep,
    LatestPrefill,
    PartialOffClient,
    PartialOffSurfaced,
)
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.exceptions import ServerDied
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.fakes.engine.fleet import Fleet
from rollproof.verification.schedules.drawing import is_allowed
from rollproof.verification.traces import judge
from tests.support.client_cases import ABORT, MODEL, R0, SYNC, act, delivered, ran, rollout_of
from tests.support.engine_driver import on_clock


def samplers(trace: Trace) -> list[Version]:
    """Return the true version of every delivered token, in order."""
    out: list[Version] = []
    for event in trace:
        if isinstance(event, Reply) and event.delivered:
            out += [
                span.version
                for span in event.true_tokens or ()
                for _ in range(span.end - span.start)
            ]
    return out


def expected_rows(trace: Trace, rollout: Rollout, *, latest: bool) -> IntArray:
    """Return rows by the contract alone: row i is computed by the sampler of token i + 1, or all
    rows by the last call.
    """
    policy = CodedPolicy.from_model(MODEL, 0)
    ids = (*rollout.prompt_ids, *rollout.response_ids)
    versions = samplers(trace)
    before = len(rollout.prompt_ids) - 1
    owners = [versions[-1]] * (len(ids) - 1) if latest else [versions[0]] * before + versions
    rows = [policy.routes(version, ids[: i + 1], i)[0] for i, version in enumerate(owners)]
    return np.stack(rows)


def columns(contract: Contract, rows: IntArray) -> IntArray:
    """Return the declared layers of ``rows``."""
    return rows[:, list(MODEL.moe_layers)] if contract.layer_axis is LayerAxis.MOE else rows


HIT = (ABORT(0), ABORT(2), SYNC(3), ABORT(3), SYNC(5))


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(
    "name", [name for name, made in REFERENCES.items() if made().resume is ResumeBy.CLIENT]
)  # type: ignore[attr-defined]
def test_a_resumed_sample_is_what_the_contract_says(name: str, flavour: str) -> None:
    """Through aborts before and between tokens and two weight updates: tokens, logprobs, rows,
    filler, tags and reason.
    """
    trace = ran(REFERENCES[name], *HIT, flavour=flavour)
    rollout, contract = delivered(trace), trace.header.contract
    assert samplers(trace) == [0, 0, 0, 1, 1, 2]
    assert (len(rollout.response_ids), rollout.finish_reason) == (6, FinishReason.LENGTH)
    outputs = [event.output for event in trace if isinstance(event, Reply) and event.delivered]
    assert rollout.response_ids == tuple(token for output in outputs for token in output.token_ids)
    assert rollout.logprobs is not None
    np.testing.assert_array_equal(
        rollout.logprobs,
        np.concatenate([output.logprobs for output in outputs if output.logprobs is not None]),
    )
    assert rollout.routes is not None
    want = columns(
        contract,
        expected_rows(trace, rollout, latest=contract.provenance is Provenance.LATEST_PREFILL),
    )
    captured = rollout.routes[: rollout.total - 1]
    np.testing.assert_array_equal(captured, want)
    assert (len(rollout.routes), rollout.routes.dtype.name) == (
        rollout.total - (contract.rows is Rows.FORWARDED),
        contract.dtype,
    )
    fillers = {Filler.MINUS_ONE: [-1] * 4, Filler.ARANGE: [0, 1, 2, 3], Filler.ZEROS: [0] * 4}
    for row in rollout.routes[rollout.total - 1 :]:
        assert contract.final_row is not None
        assert row.tolist() == [fillers[contract.final_row]] * contract.route_layers


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"engine": EngineOptions(prefix_cache=True, prefill_chunk=2)},
        {"partial": False},
        {"pause_mode": PauseMode.KEEP},
        {"pause_mode": PauseMode.RETRACT},
        {"pause_mode": PauseMode.IN_PLACE, "clear_cache": False},
        {"pause_mode": PauseMode.WAIT},
        {
            "request": replace(R0, turns=((7, 8), (9,)), max_tokens=20),
            "model": replace(MODEL, eos_every=4),
        },
        {"request": replace(R0, max_tokens=None, limit=6)},
        {"request": replace(R0, want_logprobs=False, want_routes=False)},
    ],
    ids=lambda changes: "-".join(changes) + str(changes.get("pause_mode", "")) or "plain",
)
def test_no_check_finds_anything(name: str, flavour: str, changes: dict[str, Any]) -> None:
    """No check fails on a reference, for every way to pause, cache, chunk and limit."""
    limits = getattr(REFERENCES[name], "options", ClientOptions()).limits
    if limits is not None:
        request = changes.get("request", R0)
        bounded = replace(request, max_length=limits.total, limit=limits.response)
        changes = {**changes, "request": bounded}
    judgement = judge(ran(REFERENCES[name], SYNC(1), ABORT(3), SYNC(4), flavour=flavour, **changes))
    assert judgement.failed == ()
    assert [result.reason for result in judgement.results if "crashed" in result.reason] == []


@pytest.mark.parametrize("kind", list(ActionKind))
@pytest.mark.parametrize("name", REFERENCES)
def test_no_check_finds_anything_whatever_happens(name: str, kind: ActionKind) -> None:
    """No check fails under each kind of action that the contract allows, on two servers."""
    for flavour in ("vllm", "sglang"):
        trace = ran(REFERENCES[name], act(kind, 2), ABORT(4), flavour=flavour, servers=2)
        if is_allowed(kind, trace.header.contract):
            assert judge(trace).failed == ()


def test_references_are_rollout_subjects_made_without_arguments() -> None:
    """Each factory makes a new subject of the protocol."""
    for make in REFERENCES.values():
        assert isinstance(make(), AsSampled)
        assert all(
            callable(getattr(make(), method))
            for method in ("start", "rollout", "update_weights", "to_record", "stop")
        )
    assert RolloutSubject


# Budgets, reasons, turns


def test_each_call_gets_the_rest_of_the_budget() -> None:
    """Every call gets the rest of the caller's budget, and everything so far as its prompt."""
    trace = ran(AsSampled, ABORT(2), ABORT(2), ABORT(5))
    calls = [event for event in trace if isinstance(event, Call)]
    assert [call.max_tokens for call in calls] == [6, 4, 4, 1]
    ids = (*R0.prompt_ids, *delivered(trace).response_ids)
    assert [call.prompt_ids for call in calls] == [ids[:3], ids[:5], ids[:5], ids[:8]]
    assert len({call.sampling["temperature"] for call in calls}) == 1


def test_an_abort_on_the_last_token_needs_no_further_call() -> None:
    """The budget is used up: the sample ends with ``length``, without a call for zero tokens."""
    trace = ran(AsSampled, ABORT(6, race=True))
    assert delivered(trace).finish_reason is FinishReason.LENGTH
    assert sum(isinstance(event, Call) for event in trace) == 1


def test_an_abort_on_the_end_of_sequence_ends_the_sample() -> None:
    """A client that knows the stop token does not sample past it."""
    for seed in range(40):
        plain = delivered(ran(AsSampled, model=replace(MODEL, eos_every=4), seed=seed))
        if plain.finish_reason is FinishReason.STOP:
            break
    trace = ran(
        AsSampled,
        ABORT(len(plain.response_ids), race=True),
        model=replace(MODEL, eos_every=4),
        seed=seed,
    )
    assert (delivered(trace).response_ids, delivered(trace).finish_reason) == (
        plain.response_ids,
        FinishReason.STOP,
    )


def test_turns() -> None:
    """After a natural end the environment's tokens follow, masked out; budget and rows count
    them.
    """
    request = replace(R0, turns=((7, 8), (9,)), max_tokens=30)
    for seed in range(40):
        trace = ran(
            AsSampled, ABORT(1), request=request, model=replace(MODEL, eos_every=4), seed=seed
        )
        observed = [event.token_ids for event in trace if isinstance(event, Observation)]
        if len(observed) == 2:
            break
    rollout, contract = delivered(trace), trace.header.contract
    assert observed == [(7, 8), (9,)]
    assert rollout.loss_mask is not None
    assert rollout.logprobs is not None
    own = [int(bit) for bit in rollout.loss_mask]
    assert [token for token, mine in zip(rollout.response_ids, own, strict=True) if not mine] == [
        7,
        8,
        9,
    ]
    assert np.isnan(rollout.logprobs).tolist() == [not mine for mine in own]
    assert rollout.routes is not None
    assert len(rollout.routes) == rollout.total - 1
    assert (contract.loss_mask, contract.missing_logprobs) == (True, MissingLogprobs.MASKED)
    assert rollout.total - len(R0.prompt_ids) <= 30


def test_no_turn_begins_that_has_no_room() -> None:
    """An answer after which no token would be left is not appended."""
    request = replace(R0, turns=((7, 8, 9),), max_tokens=4)
    for seed in range(40):
        trace = ran(AsSampled, request=request, model=replace(MODEL, eos_every=2), seed=seed)
        rollout = delivered(trace)
        room = 4 - next(len(event.output.token_ids) for event in trace if isinstance(event, Reply))
        assert any(isinstance(event, Observation) for event in trace) is (room > 3)
        assert len(rollout.response_ids) <= 4


# Who resumes


@pytest.mark.parametrize(
    ("factory", "reason"), [(PartialOffClient, None), (PartialOffSurfaced, FinishReason.ABORT)]
)
def test_partial_off(factory: Any, reason: FinishReason | None) -> None:
    """An aborted sample is dropped or returned as aborted, after one call."""
    trace = ran(factory, ABORT(2))
    rollout = rollout_of(trace)
    assert (rollout and rollout.finish_reason) == reason
    assert sum(isinstance(event, Call) for event in trace) == 1
    assert trace.header.contract.partial_off is (
        PartialOff.DROPPED if reason is None else PartialOff.SURFACED
    )


def test_partial_rollout_switched_off() -> None:
    """The flag of the case turns a client that resumes into one that does not."""
    assert rollout_of(ran(AsSampled, ABORT(2), partial=False)) is None
    assert rollout_of(ran(AsSampled, ABORT(2), partial=True)) is not None


@pytest.mark.parametrize(
    "mode", [PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE, PauseMode.ABORT]
)
@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_engine_keep_makes_one_call(mode: PauseMode, flavour: str) -> None:
    """The engine carries the call over the update, and the declared provenance is that of its
    rows.
    """
    trace = ran(
        EngineKeep,
        SYNC(2),
        flavour=flavour,
        pause_mode=mode,
        clear_cache=mode is not PauseMode.IN_PLACE,
    )
    rollout = delivered(trace)
    assert sum(isinstance(event, Call) for event in trace) == 1
    assert len(rollout.response_ids) == 6
    again = flavour == "sglang" and mode is not PauseMode.IN_PLACE
    assert trace.header.contract.provenance is (
        Provenance.LATEST_PREFILL if again else Provenance.AS_SAMPLED
    )
    if mode is not PauseMode.IN_PLACE:
        np.testing.assert_array_equal(rollout.routes, expected_rows(trace, rollout, latest=again))


@pytest.mark.parametrize(
    ("factory", "flavour", "configured", "used"),
    [
        (AsSampled, "vllm", PauseMode.KEEP, PauseMode.KEEP),
        (AsSampled, "sglang", PauseMode.RETRACT, PauseMode.ABORT),
        (AsSampled, "sglang", PauseMode.WAIT, PauseMode.WAIT),
        (LatestPrefill, "sglang", PauseMode.RETRACT, PauseMode.RETRACT),
        (LatestPrefill, "vllm", PauseMode.KEEP, PauseMode.ABORT),
        (EngineKeep, "vllm", PauseMode.ABORT, PauseMode.KEEP),
    ],
)
def test_updates_pause_in_a_way_that_the_contract_survives(
    factory: Any, flavour: str, configured: PauseMode, used: PauseMode
) -> None:
    """If the configured pause would change the provenance of rows, the client's own procedure uses
    another.
    """

    async def main() -> None:
        fleet = Fleet(
            Case(flavour=flavour, requests=(R0,), pause_mode=configured), Recorder(lambda: 0.0)
        )
        factory().start(fleet)
        assert fleet.pause_mode is used

    on_clock(main)


# What servers do to it


def test_a_dead_server_is_left_for_another() -> None:
    """Delivered tokens stay; the call is made again on another server."""
    trace = ran(AsSampled, ABORT(2), act(ActionKind.KILL, 4, steps=50), servers=2)
    calls = [event for event in trace if isinstance(event, Call)]
    assert [call.server_id for call in calls] == ["s0", "s0", "s1"]
    assert [len(call.prompt_ids) for call in calls] == [3, 5, 5]
    assert len(delivered(trace).response_ids) == 6


def test_a_lost_reply_is_requested_again() -> None:
    """The call is repeated from the same prefix with the same budget: tokens of the lost reply do
    not count.
    """
    calls = [
        event for event in ran(AsSampled, act(ActionKind.LOSE_REPLY, 3)) if isinstance(event, Call)
    ]
    assert [(len(call.prompt_ids), call.max_tokens) for call in calls] == [(3, 6), (3, 6)]


@pytest.mark.parametrize("flavour", ["vllm-gated", "trtllm"])
def test_a_paused_server_is_tried_again(flavour: str) -> None:
    """Calls that a paused server rejects or refuses are made again after a pause of the client's
    own.
    """
    trace = ran(AsSampled, SYNC(2), flavour=flavour, engine=EngineOptions(step=4.0))
    assert len(delivered(trace).response_ids) == 6
    assert sum(isinstance(event, Call) for event in trace) > 2


def test_patience_ends() -> None:
    """A server that never comes back ends the rollout with its error, one that always rejects with
    ours; no sample is called ``length``.
    """

    class Short(AsSampled):
        options = ClientOptions(patience=5)

    async def main() -> None:
        fleet = Fleet(Case(flavour="vllm-gated", requests=(R0,)), Recorder(lambda: 0.0))
        client = Short()
        client.start(fleet)
        await fleet.servers["s0"].pause()
        with pytest.raises(RuntimeError, match="r0 brought no token in 5 attempts"):
            await client.rollout(R0)
        fleet.servers["s0"].kill()
        with pytest.raises(ServerDied):
            await client.rollout(R0)
        assert (client.gauges(), set(fleet.balancer.load.values())) == ({"rollouts": 0.0}, {0})

    on_clock(main)


def test_a_cancelled_rollout_leaves_nothing_behind() -> None:
    """Counters of client, balancer and server return to zero."""

    async def main() -> None:
        fleet = Fleet(Case(flavour="vllm", requests=(R0,)), Recorder(lambda: 0.0))
        client = AsSampled()
        client.start(fleet)
        task = asyncio.ensure_future(client.rollout(R0))
        await asyncio.sleep(2.5)
        assert sum(fleet.gauges().values()) > 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert {**client.gauges(), **fleet.gauges()} == dict.fromkeys(
            {**client.gauges(), **fleet.gauges()}, 0.0
        )

    on_clock(main)
