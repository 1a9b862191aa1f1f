"""The family ``engine``: rounding is no fault, kept KV is not judged, and what an engine cannot
have is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rollproof.core.contract import KvPolicy, Logprobs
from rollproof.core.engine_contract import PausedCalls, Refusal, SamplingOption
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Reference, Reply, Weights
from rollproof.core.records import EngineOutput
from rollproof.core.trace import Trace
from rollproof.engines.engine_targets import fake_target
from rollproof.invariants import default_registry
from rollproof.invariants.engine.engine_replies import refusal_of
from rollproof.invariants.engine.independent_forward import NEAR_TIE
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.judging.judge import Tally
from rollproof.judging.registry import Registry
from rollproof.verification.engines import run_experiments
from rollproof.verification.traces import judge_events


@pytest.fixture(scope="module")
def plain() -> Trace:
    """Calls of several lengths on a correct engine."""
    return run_experiments(fake_target("vllm"), only=["plain"]).traces[0]


def _judged(trace: Trace, check: str) -> CheckResult:
    tally = Tally(Registry([default_registry()[check]]))
    judge_events(trace.header, trace.events, tally)
    return tally.judgement().results[0]


def _changed(trace: Trace, change: Callable[[Event], Event]) -> Trace:
    return replace(trace, events=tuple(change(event) for event in trace.events))


def _call_with_rows(trace: Trace, rows: int = 6) -> int:
    return next(
        event.call_id
        for event in trace.events
        if isinstance(event, Reply)
        and event.output.routes is not None
        and len(event.output.routes) >= rows
    )


def _other_expert(trace: Trace, call: int, row: int, column: int) -> Trace:
    """One expert of one cell of a reply is another one."""

    def spoil(output: EngineOutput) -> EngineOutput:
        assert output.routes is not None
        routes = output.routes.copy()
        free = sorted(set(range(8)) - set(routes[row, column].tolist()))
        routes[row, column, -1] = free[0]
        return replace(output, routes=routes)

    return _changed(
        trace,
        lambda e: (
            replace(e, output=spoil(e.output)) if isinstance(e, Reply) and e.call_id == call else e
        ),
    )


def _turned(trace: Trace, call: int, row: int, column: int) -> Trace:
    """One cell of a reply has its experts in the opposite order."""

    def turn(event: Event) -> Event:
        if not isinstance(event, Reply) or event.call_id != call:
            return event
        assert event.output.routes is not None
        routes = event.output.routes.copy()
        routes[row, column] = routes[row, column][::-1]
        return replace(event, output=replace(event.output, routes=routes))

    return _changed(trace, turn)


def _near_tie(trace: Trace, call: int, position: int, layer: int, margin: float = 1e-6) -> Trace:
    """The reference says that two experts' scores are all but equal there."""

    def close(event: Reference) -> Reference:
        margins = event.margins.copy()
        margins[position, layer] = margin
        return replace(event, margins=margins)

    return _changed(
        trace, lambda e: close(e) if isinstance(e, Reference) and e.call_id == call else e
    )


def test_one_wrong_expert_is_a_fault(plain: Trace) -> None:
    """The finding names the call, the position and the layer."""
    call = _call_with_rows(plain)
    result = _judged(_other_expert(plain, call, 3, 2), "engine.routes")
    assert Verdict.FAIL is result.verdict
    assert {"call": call, "position": 3, "layer": 2, "server": "e0"} == dict(
        result.findings[0].where
    )


def test_a_flip_within_rounding_is_none_and_what_follows_is_not_judged(plain: Trace) -> None:
    """At a near-tie either expert is right, and later rows and logprobs may differ for that
    reason.
    """
    call = _call_with_rows(plain)
    tied = _near_tie(_other_expert(plain, call, 3, 2), call, 3, 2)
    result = _judged(tied, "engine.routes")
    assert Verdict.PASS is result.verdict
    clean = _judged(plain, "engine.routes")
    assert result.exercised["rows compared"] < clean.exercised["rows compared"]
    assert Verdict.PASS is _judged(_other_expert(tied, call, 4, 1), "engine.routes").verdict


def test_a_fault_before_a_near_tie_is_still_one(plain: Trace) -> None:
    """Only values after the flip are in doubt."""
    call = _call_with_rows(plain)
    tied = _near_tie(_other_expert(plain, call, 3, 2), call, 3, 2)
    assert Verdict.FAIL is _judged(_other_expert(tied, call, 1, 1), "engine.routes").verdict


def test_a_near_tie_elsewhere_excuses_nothing(plain: Trace) -> None:
    """A small margin is no excuse where the routers agree, nor for another cell before it."""
    call = _call_with_rows(plain)
    assert (
        Verdict.FAIL
        is _judged(_near_tie(_other_expert(plain, call, 3, 2), call, 1, 3), "engine.routes").verdict
    )


def test_logprobs_within_tolerance_are_right_and_beyond_it_wrong(plain: Trace) -> None:
    """1e-5 is rounding, 1e-3 is not."""

    def shifted(by: float) -> Trace:
        def shift(event: Event) -> Event:
            if not isinstance(event, Reply) or event.output.logprobs is None:
                return event
            return replace(event, output=replace(event.output, logprobs=event.output.logprobs - by))

        return _changed(plain, shift)

    assert Verdict.PASS is _judged(shifted(1e-5), "engine.logprobs").verdict
    result = _judged(shifted(1e-3), "engine.logprobs")
    assert Verdict.FAIL is result.verdict
    assert "within 0.0001" in result.findings[0].expected


def test_order_is_not_judged_where_scores_are_close(plain: Trace) -> None:
    """The order of two experts with nearly equal scores is no fault."""
    call = _call_with_rows(plain)
    wrong = _turned(plain, call, 2, 3)
    assert Verdict.FAIL is _judged(wrong, "engine.order").verdict
    assert Verdict.PASS is _judged(wrong, "engine.routes").verdict

    def close(event: Event) -> Event:
        if not isinstance(event, Reference) or event.call_id != call:
            return event
        orders = event.orders.copy()
        orders[2, 3] = 1e-6
        return replace(event, orders=orders)

    assert Verdict.PASS is _judged(_changed(wrong, close), "engine.order").verdict


def test_order_is_judged_in_the_rows_before_a_filler() -> None:
    """An engine that adds a row for the final token computed all others."""
    trace = run_experiments(fake_target("rows-T"), only=["plain"]).traces[0]
    assert Verdict.PASS is _judged(trace, "engine.order").verdict
    call = _call_with_rows(trace)
    (finding,) = _judged(_turned(trace, call, 2, 3), "engine.order").findings
    assert {"call": call, "position": 2, "layer": 3} == {
        name: finding.where[name] for name in ("call", "position", "layer")
    }


@pytest.mark.parametrize("second", ["turned", "other experts", "elsewhere"])
def test_a_row_of_another_version_is_in_that_versions_order(plain: Trace, second: str) -> None:
    """If that version chooses the same experts for the row, whatever it chooses for others."""
    call = _call_with_rows(plain)
    events: list[Event] = []
    for event in plain.events:
        if isinstance(event, Reply) and event.call_id == call:
            assert event.output.routes is not None
            routes = event.output.routes.copy()
            routes[2, 3] = routes[2, 3][::-1]
            events.append(replace(event, output=replace(event.output, routes=routes)))
            continue
        events.append(event)
        if isinstance(event, Reference) and event.call_id == call:
            routes = event.routes.copy()
            routes[2, 3] = routes[2, 3][::-1]
            if second != "turned":
                row = 2 if second == "other experts" else 1
                free = sorted(set(range(8)) - set(routes[row, 3].tolist()))
                routes[row, 3, -1] = free[0]
            events.append(replace(event, version="other", routes=routes))
    result = _judged(plain.with_events(events), "engine.order")
    if second != "other experts":
        assert Verdict.PASS is result.verdict, result
        return
    (finding,) = result.findings
    assert "the chosen experts are not in the order of their scores" == finding.title
    assert (call, 2, 3) == tuple(finding.where[name] for name in ("call", "position", "layer"))
    assert "other" != finding.where["version"]
    assert "; so in 1 of " in finding.observed


@pytest.mark.parametrize("repaired", [False, True])
def test_versions_do_not_excuse_each_other(plain: Trace, repaired: bool) -> None:
    """Two versions choose the same experts for a row: it must be in the order of one of them. A
    row that is leaves another one to be found.
    """
    call = _call_with_rows(plain)
    events: list[Event] = []
    for event in plain.events:
        if isinstance(event, Reply) and event.call_id == call:
            assert event.output.routes is not None
            routes = event.output.routes.copy()
            routes[2, 3] = routes[2, 3][::-1]
            if not repaired:
                routes[3, 3] = routes[3, 3][::-1]
            events.append(replace(event, output=replace(event.output, routes=routes)))
            continue
        events.append(event)
        if isinstance(event, Reference) and event.call_id == call:
            routes = event.routes.copy()
            routes[2, 3] = routes[2, 3][::-1]
            events.append(replace(event, version="other", routes=routes))
    result = _judged(plain.with_events(events), "engine.order")
    places = [finding.where["position"] for finding in result.findings]
    assert ([] if repaired else [3]) == places


@pytest.mark.parametrize(
    ("updates", "outlived"),
    [
        ((), False),
        (("loaded",), True),
        (("failed",), False),
        (("identity", "failed"), False),
        (("identity", "loaded"), True),
    ],
)
def test_kept_kv_outlives_an_update_to_other_weights(
    plain: Trace, updates: tuple[str, ...], outlived: bool
) -> None:
    """Not the load at the start, nor one of equal weights or of none; and only if KV is kept."""
    assert plain.header.engine is not None
    load = next(event for event in plain.events if isinstance(event, Weights))
    later = [
        replace(load, loaded=update != "failed", identity=update == "identity")
        for update in updates
    ]
    events = [event for event in plain.events if not isinstance(event, Weights)]
    trace = plain.with_events([load, *later, *events])
    for policy in KvPolicy:
        engine = replace(plain.header.engine, kv_policy=policy)
        keeping = replace(trace, header=replace(trace.header, engine=engine))
        expected = Verdict.UNKNOWN if outlived and policy is KvPolicy.KEEP else Verdict.PASS
        assert expected is _judged(keeping, "engine.logprobs").verdict


def test_values_over_kept_kv_are_nobodys() -> None:
    """Where KV of old weights is kept by declaration, no weights explain what follows, and nothing
    is compared.
    """
    trace = run_experiments(fake_target("vllm"), only=["update-keep"]).traces[0]
    assert KvPolicy.KEEP is trace.header.engine.kv_policy  # type: ignore[union-attr]
    assert "mixed" in {
        span.version
        for event in trace.events
        if isinstance(event, Reply)
        for span in event.true_tokens or ()
    }
    assert Verdict.UNKNOWN is _judged(trace, "engine.logprobs").verdict
    updates = [event for event in trace.events if isinstance(event, Weights)]
    assert 2 == len(updates)


def test_the_other_mode_is_one_finding_not_two() -> None:
    """The check of modes reports logprobs of the undeclared mode; that of values does not."""
    trace = run_experiments(fake_target("vllm"), only=["temperature"]).traces[0]
    assert trace.header.engine is not None
    other = replace(trace.header.engine, logprobs=Logprobs.TEMPERATURE_SCALED)
    wrong = replace(
        trace,
        header=replace(
            trace.header,
            contract=replace(trace.header.contract, logprobs=other.logprobs),
            engine=other,
        ),
    )
    assert Verdict.FAIL is _judged(wrong, "engine.logprob-mode").verdict
    assert Verdict.PASS is _judged(wrong, "engine.logprobs").verdict


def test_which_calls_cannot_be_served() -> None:
    """No prompt, no budget, no room, an offset beyond the prompt; all else must be served."""
    trace = run_experiments(fake_target("sglang"), only=["plain"]).traces[0]
    terms = trace.header.engine.engine  # type: ignore[union-attr]
    assert terms is not None
    call = next(event for event in trace.events if isinstance(event, Call))
    assert refusal_of(terms, call) is None
    assert Refusal.ERROR is refusal_of(terms, replace(call, prompt_ids=(3,) * terms.max_length))
    assert terms.empty_prompt is refusal_of(terms, replace(call, prompt_ids=()))
    assert terms.zero_budget is refusal_of(terms, replace(call, max_tokens=0))
    assert terms.bad_start is refusal_of(terms, replace(call, prompt_ids=(3, 4), routes_start=3))
    assert refusal_of(terms, replace(call, prompt_ids=(3, 4), routes_start=2)) is None
    assert PausedCalls.PARK is terms.paused_calls


def test_a_row_that_was_never_forwarded_is_no_row(plain: Trace) -> None:
    """A surplus row is one too many, and its values are those of no forward that the engine did."""
    call = _call_with_rows(plain)

    def longer(event: Event) -> Event:
        if not isinstance(event, Reply) or event.call_id != call or event.output.routes is None:
            return event
        return replace(
            event,
            output=replace(
                event.output, routes=np.concatenate([event.output.routes, event.output.routes[-1:]])
            ),
        )

    result = _judged(_changed(plain, longer), "engine.rows")
    assert Verdict.FAIL is result.verdict
    assert "prompt" in result.findings[0].expected


def test_scores_as_far_apart_as_a_near_tie_are_none(plain: Trace) -> None:
    """Only a smaller margin leaves it to rounding which expert is chosen."""
    call = _call_with_rows(plain)
    faulty = _other_expert(plain, call, 3, 2)
    for margin, verdict in ((NEAR_TIE, Verdict.FAIL), (NEAR_TIE / 2, Verdict.PASS)):
        tied = _near_tie(faulty, call, 3, 2, margin)
        assert verdict is _judged(tied, "engine.routes").verdict


@pytest.mark.parametrize(
    ("offered", "applies"), [((), False), (("repetition_penalty",), False), (("top_p",), True)]
)
def test_filters_are_judged_of_engines_that_offer_one(
    plain: Trace, offered: tuple[str, ...], applies: bool
) -> None:
    """A penalty leaves every token in the distribution."""
    declared = plain.header.contract
    assert declared.engine is not None
    options = tuple(SamplingOption(name) for name in offered)
    engine = replace(declared.engine, sampling=options)
    reason = default_registry()["engine.sampling"].inapplicable(replace(declared, engine=engine))
    assert applies is (reason is None)
