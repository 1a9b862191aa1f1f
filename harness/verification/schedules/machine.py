"""State machine: a case built step by step, run and judged after every step.

Each rule adds one thing that can still happen: a request, or an action on a request at a token that
it has sampled or is yet to sample. After each rule the case so far is run afresh on the virtual
clock (a few milliseconds) and judged, so a fault is seen at the first step that shows it, and what
Hypothesis reports is a case that ``rollproof replay`` can run. Every kind of action is a rule of
its own: Hypothesis leaves rules out at random, which is swarm testing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from rollproof.core.case import Action, ActionKind, Case, EngineOptions, Model, Trigger
from rollproof.core.contract import Contract, KvPolicy
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Call, Reply
from rollproof.core.records import Request
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Trace
from rollproof.invariants import default_registry
from rollproof.judging.checks import Finding
from rollproof.judging.judge import Tally
from rollproof.judging.registry import Registry
from rollproof.verification.contract_probe import probe
from rollproof.verification.runner import run_case
from rollproof.verification.schedules.drawing import AT_SERVER, Limits, is_allowed
from rollproof.verification.schedules.exhaustive import modes_for
from rollproof.verification.schedules.limit_cases import within_limits
from rollproof.verification.schedules.profiles import profile_named
from rollproof.verification.schedules.weight_cases import fitting_kind
from rollproof.verification.traces import judge_events

__all__ = ["machine_for"]


def machine_for(
    factory: SubjectFactory,
    *,
    flavour: str | None = None,
    only: Iterable[str] = (),
    registry: Registry | None = None,
    kinds: Iterable[ActionKind] | None = None,
    limits: Limits | None = None,
    profile: str = "pr",
) -> type[RuleBasedStateMachine]:
    """A Hypothesis state machine for the subject that ``factory`` makes.

    Run it with ``hypothesis.stateful.run_state_machine_as_test(machine)``, or give its ``TestCase``
    to pytest. ``flavour`` defaults to the first that fits the subject, ``registry`` to all checks,
    of which ``only`` selects some; ``kinds`` are the kinds of action that may occur. The settings
    come from ``profile``. A finding raises ``AssertionError`` with its text and the case as JSON.
    Raises ``UsageError`` for names that do not exist and where no flavour fits.
    """
    found = probe(factory, None if flavour is None else (flavour,))
    name, contract, model = found[0]
    checks = registry if registry is not None else default_registry()
    body: dict[str, Any] = {
        "__doc__": f"Cases for {getattr(factory, '__qualname__', factory)} on {name}.",
        "contract": contract,
        "outcome": staticmethod(
            _outcomes(factory, checks.select(only) if (only := tuple(only)) else checks)
        ),
        **_start(name, contract, model, limits or Limits()),
    }
    for kind in _kinds_for(contract) if kinds is None else kinds:
        body[kind.name.lower()] = _act(kind, limits or Limits())
    machine: type[_Machine] = type("RolloutMachine", (_Machine,), body)
    chosen = profile_named(profile)
    machine.TestCase.settings = settings(
        max_examples=chosen.max_examples,
        stateful_step_count=chosen.steps,
        # each step runs the whole case so far: that it takes longer and longer is no fault
        deadline=None,
        derandomize=chosen.seed is not None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return machine


def _kinds_for(contract: Contract) -> Iterator[ActionKind]:
    """Yield the kinds of action that the contract allows, each once."""
    allowed = (kind for kind in ActionKind if is_allowed(kind, contract))
    # several kinds may have one that takes their place
    yield from dict.fromkeys(fitting_kind(kind, contract) for kind in allowed)


_REQUESTS: Bundle[str] = Bundle("requests")
_Outcome: TypeAlias = tuple[Counter[str], tuple[str, ...]]
"""How many tokens each request sampled, and the texts of the findings."""


class _Machine(RuleBasedStateMachine):
    """The case so far, and how many tokens each request sampled when it was last run."""

    contract: Contract
    outcome: Callable[[Case], _Outcome]

    def __init__(self) -> None:
        super().__init__()
        self.base: Case | None = None
        self.requests: list[Request] = []
        self.arrivals: list[float] = []
        self.actions: list[Action] = []
        self.sampled: Counter[str] = Counter()
        self.judged: Case | None = None

    @property
    def case(self) -> Case | None:
        """The case so far, within the contract's limits; ``None`` before its first request."""
        if self.base is None or not self.requests:
            return None
        case = replace(
            self.base,
            requests=tuple(self.requests),
            arrivals=tuple(self.arrivals),
            actions=tuple(self.actions),
        )
        return within_limits(case, self.contract)

    @invariant()
    def nothing_is_found(self) -> None:
        """The case so far, run and judged."""
        case = self.case
        if case is None or case == self.judged:
            return
        self.sampled, findings = self.outcome(case)
        self.judged = case
        if findings:
            raise AssertionError("\n".join([*findings, f"The case: {json.dumps(case.to_dict())}"]))


def _outcomes(factory: SubjectFactory, checks: Registry) -> Callable[[Case], _Outcome]:
    """Return a function that runs and judges a case."""
    # Cached, because Hypothesis shrinks by trying cases with the same beginning, and a case has
    # one outcome.

    @lru_cache(maxsize=4096)
    def outcome(text: str) -> _Outcome:
        trace = run_case(factory, Case.from_dict(json.loads(text)))
        tally = Tally(checks)
        judge_events(trace.header, trace.events, tally)
        return _sampled(trace), tuple(
            _text(finding) for result in tally.judgement().results for finding in result.findings
        )

    return lambda case: outcome(json.dumps(case.to_dict()))


def _start(
    flavour: str, contract: Contract, model: Model | None, limits: Limits
) -> Mapping[str, Any]:
    """The rules that make the fleet and the requests."""
    modes = [
        mode
        for mode in modes_for(flavour, contract)
        if contract.kv_policy is KvPolicy.KEEP or mode is not PauseMode.IN_PLACE
    ]

    @initialize(
        servers=st.integers(1, limits.servers),
        mode=st.sampled_from(modes or modes_for(flavour, contract)),
        batch=st.sampled_from((8, 1, 2)),
        chunk=st.none() | st.integers(1, 4),
        cached=st.booleans(),
        seed=st.integers(0, 2**31 - 1),
    )
    def fleet(
        self: _Machine,
        servers: int,
        mode: PauseMode,
        batch: int,
        chunk: int | None,
        cached: bool,
        seed: int,
    ) -> None:
        placeholder = Request(request_id="r0", prompt_ids=(1,), max_tokens=1)
        self.base = Case(
            flavour=flavour,
            requests=(placeholder,),
            servers=servers,
            seed=seed,
            pause_mode=mode,
            clear_cache=mode is not PauseMode.IN_PLACE,
            model=model or Model(),
            engine=EngineOptions(max_batch=batch, prefill_chunk=chunk, prefix_cache=cached),
        )

    @rule(
        target=_REQUESTS,
        prompt=st.integers(1, limits.prompt),
        budget=st.integers(1, limits.response),
        steps=st.integers(0, 20),
    )
    def submit(self: _Machine, prompt: int, budget: int, steps: int) -> str:
        number = len(self.requests)
        # a rule must give its bundle something: one that is there already changes nothing
        if number == limits.requests:
            return f"r{number - 1}"
        # the first token differs, so that a call shows by its prompt whose it is
        ids = (2 + number, *range(100, 99 + prompt))
        self.requests.append(Request(request_id=f"r{number}", prompt_ids=ids, max_tokens=budget))
        self.arrivals.append(float(steps))
        return f"r{number}"

    return {"fleet": fleet, "submit": submit}


def _act(kind: ActionKind, limits: Limits) -> Any:
    """The rule that adds an action of one kind: ``ahead`` tokens after the last action on the
    request, within what it samples.
    """

    def act(
        self: _Machine, request: str, ahead: int, queued: bool, race: bool, server: int, steps: int
    ) -> None:
        if len(self.actions) >= limits.actions:
            return
        past = max(
            (action.when.tokens for action in self.actions if action.when.request == request),
            default=0,
        )
        place = min(past + ahead, self.sampled[request])
        assert self.base is not None
        named = f"s{server % self.base.servers}" if kind in AT_SERVER else None
        when = Trigger(request=request, tokens=place, queued=queued, race=race)
        self.actions.append(Action(when=when, do=kind, server=named, steps=steps))

    act.__name__ = kind.name.lower()
    return rule(
        request=_REQUESTS,
        ahead=st.integers(0, limits.response),
        queued=st.booleans(),
        race=st.booleans(),
        server=st.integers(0, limits.servers - 1),
        steps=st.integers(1, 12),
    )(act)


def _sampled(trace: Trace) -> Counter[str]:
    """Return how many tokens each request got, over all its calls."""
    owner = {event.call_id: event.request_id for event in trace.events if isinstance(event, Call)}
    out: Counter[str] = Counter()
    for event in trace.events:
        if isinstance(event, Reply) and not event.duplicate and event.call_id in owner:
            out[owner[event.call_id]] += len(event.output.token_ids)
    return out


def _text(finding: Finding) -> str:
    where = ", ".join(f"{name} {value}" for name, value in finding.where.items())
    return (
        f"{finding.check_id}: {finding.title} ({where})\n  expected: {finding.expected}\n "
        f" observed: {finding.observed}"
    )
