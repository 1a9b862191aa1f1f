"""Exhaustive schedules: every abort and weight sync that can hit one short request.

Faults of resuming are faults of small numbers: an abort before the first token, on the last one,
twice at the same place, across a weight version. So the small scope is exhausted first, and only
beyond it schedules are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from typing import TypeAlias

from rollproof.core.case import Action, ActionKind, Case, EngineOptions, Model, Trigger
from rollproof.core.contract import Contract, ResumeBy
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request
from rollproof.errors import UsageError
from rollproof.fakes.engine.flavours import flavour_named
from rollproof.verification.schedules.limit_cases import within_limits

__all__ = [
    "LATER_REQUEST",
    "PAUSE_MODES",
    "Scope",
    "modes_for",
    "scope_families",
    "scope_size",
    "small_scope",
]

PAUSE_MODES: Mapping[ResumeBy, tuple[PauseMode, ...]] = {
    ResumeBy.CLIENT: (PauseMode.ABORT, PauseMode.WAIT),
    ResumeBy.ENGINE: (PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE, PauseMode.WAIT),
    ResumeBy.NONE: (PauseMode.WAIT, PauseMode.ABORT),
}
"""The pauses under which a subject can keep its promises, by who resumes."""

_PROMPT = (11, 12, 13, 14)
_LATER = 10
"""The first token of a second prompt, which is no continuation of the first one's."""
_ANSWERS = ((201, 202), (203,))
_UPDATES = (
    ActionKind.SYNC,
    ActionKind.SYNC_UNLABELLED,
    ActionKind.SYNC_IDENTITY,
    ActionKind.RELABEL,
)
_COVERED_ELSEWHERE = frozenset(
    {
        ActionKind.ABORT,
        ActionKind.ABORT_HANDLE,
        ActionKind.SYNC,
        ActionKind.LAG,
        ActionKind.LEAVE,
        ActionKind.DROP_ROUTES,
        ActionKind.DROP_LOGPROBS,
        ActionKind.SYNC_MERGED,
        ActionKind.EVICT_ADAPTERS,
    }
)
"""Kinds of action that other families or the corner cases cover."""
_REQUEST = "r0"
_SERVERS = ("s0", "s1")
LATER_REQUEST = "a later request"
"""The name of the family in which a second request waits while the weights change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Bounds of the exhaustive enumeration.

    ``prompt`` and ``response`` are the longest prompt and budget in tokens, ``actions`` the most
    aborts and syncs of a schedule, ``versions`` the most weight versions that it can see (one more
    than its syncs). ``side_actions`` and ``side_response`` bound the pause modes after the first
    and the side families. Raises ``UsageError`` on bounds outside what enumerates in memory and
    time.
    """

    prompt: int = 2
    response: int = 6
    actions: int = 3
    versions: int = 3
    side_actions: int = 2
    side_response: int = 4

    def __post_init__(self) -> None:
        limits = {
            "prompt": (1, len(_PROMPT)),
            "response": (1, 12),
            "actions": (0, 5),
            "versions": (1, 6),
            "side_actions": (0, 5),
            "side_response": (1, 12),
        }
        wrong = [
            f"{name}={getattr(self, name)!r} must be between {low} and {high}"
            for name, (low, high) in limits.items()
            if not low <= getattr(self, name) <= high
        ]
        if wrong:
            raise UsageError(f"This scope cannot be enumerated: {'; '.join(wrong)}.")


@dataclass(frozen=True, slots=True)
class _Ends:
    """Which actions end a request for good under a contract and a pause mode."""

    abort: bool
    sync: bool

    def last_only(self, kind: ActionKind) -> bool:
        return self.abort if kind is ActionKind.ABORT else self.sync


Family: TypeAlias = "Callable[[_Plan], Iterator[Case]]"


@dataclass(frozen=True, slots=True)
class _Plan:
    """The inputs of every family of the scope."""

    flavour: str
    contract: Contract
    scope: Scope
    model: Model
    seed: int
    modes: tuple[PauseMode, ...]

    def ends(self, mode: PauseMode) -> _Ends:
        resume = self.contract.resume
        dead = resume is ResumeBy.NONE or (
            resume is ResumeBy.ENGINE and self.contract.abort_surfaces
        )
        return _Ends(abort=dead, sync=dead and mode is PauseMode.ABORT)

    def case(
        self,
        prompt: int,
        budget: int,
        actions: tuple[Action, ...],
        mode: PauseMode,
        **changes: object,
    ) -> Case:
        case = Case(
            flavour=self.flavour,
            requests=(
                Request(request_id=_REQUEST, prompt_ids=_PROMPT[:prompt], max_tokens=budget),
            ),
            actions=actions,
            seed=self.seed,
            pause_mode=mode,
            clear_cache=mode is not PauseMode.IN_PLACE,
            model=self.model,
        )
        return replace(case, **changes) if changes else case  # type: ignore[arg-type]

    @property
    def side(self) -> tuple[int, int]:
        """Prompt length and budget of the side families, in tokens."""
        return self.scope.prompt, min(self.scope.response, self.scope.side_response)

    def side_schedules(self, budget: int, mode: PauseMode) -> Iterator[tuple[Action, ...]]:
        return _schedules(
            budget,
            min(self.scope.actions, self.scope.side_actions),
            self.scope.versions - 1,
            self.ends(mode),
        )


def modes_for(flavour: str, contract: Contract) -> tuple[PauseMode, ...]:
    """Return the pause modes to try: those of ``PAUSE_MODES`` that the engine offers.

    The first is enumerated in full. If the engine offers none, it is the first of ``PAUSE_MODES``,
    which the fake engine has all the same.
    """
    modes = PAUSE_MODES[contract.resume]
    return tuple(mode for mode in modes if mode in flavour_named(flavour).pause_modes) or modes[:1]


def small_scope(
    flavour: str,
    contract: Contract,
    *,
    scope: Scope | None = None,
    model: Model | None = None,
    seed: int = 0,
    modes: tuple[PauseMode, ...] | None = None,
) -> Iterator[Case]:
    """Yield every schedule of the small scope for one request, small ones first, each once.

    The scope is complete for the first pause mode (of ``modes``, by default ``modes_for``): prompts
    of 1 to ``scope.prompt`` tokens, budgets of 1 to ``scope.response``, and every *sequence* of up
    to ``scope.actions`` aborts and weight syncs (at most ``scope.versions`` - 1 syncs) at every
    multiset of token counts from 0 (before the first token) to the budget; on the last token both
    before the engine ends the call (a race) and after. Each further mode gets the same with at
    least one sync and at most ``scope.side_actions`` actions.

    Side families follow, with up to ``scope.side_actions`` actions and one budget: prefix cache,
    chunked prefill, an end of sequence before the budget, the budget as a limit, several servers,
    actions on queued calls, every other kind of action at every token, partial rollout off, a later
    request that waits during an update and, for multi-turn contracts, turns of the environment.
    ``scope_size`` counts the cases of each family.
    """
    for _, cases in scope_families(
        flavour, contract, scope=scope, model=model, seed=seed, modes=modes
    ):
        yield from cases


def scope_families(
    flavour: str,
    contract: Contract,
    *,
    scope: Scope | None = None,
    model: Model | None = None,
    seed: int = 0,
    modes: tuple[PauseMode, ...] | None = None,
) -> Iterator[tuple[str, Iterator[Case]]]:
    """Yield the families of ``small_scope`` by name, each with its cases, within the contract's
    limits.

    Raises ``UsageError`` without a pause mode.
    """
    chosen = modes_for(flavour, contract) if modes is None else modes
    if not chosen:
        raise UsageError(
            f"No pause mode to enumerate for {flavour!r}: give at least one of"
            f" {[str(mode) for mode in PauseMode]}."
        )
    plan = _Plan(flavour, contract, scope or Scope(), model or Model(), seed, chosen)
    for name, family in _FAMILIES.items():
        yield name, (within_limits(case, contract) for case in family(plan))


def scope_size(
    flavour: str,
    contract: Contract,
    *,
    scope: Scope | None = None,
    modes: tuple[PauseMode, ...] | None = None,
) -> dict[str, int]:
    """Return how many cases each family of ``small_scope`` holds, and their ``total``."""
    counts = Counter(
        {
            name: sum(1 for _ in cases)
            for name, cases in scope_families(flavour, contract, scope=scope, modes=modes)
        }
    )
    return {**counts, "total": counts.total()}


def _schedules(budget: int, longest: int, syncs: int, ends: _Ends) -> Iterator[tuple[Action, ...]]:
    """Yield every sequence of at most ``longest`` aborts and syncs within ``budget`` tokens.

    Shorter sequences come first, then those with earlier places.
    """
    # At most one action is on the last token: after it no call remains for another to hit. Whether
    # it arrives before or after the engine ends the call is a race, and both orders are tried.
    last = [
        _act(kind, budget, race=race)
        for race in (True, False)
        for kind in (ActionKind.ABORT, ActionKind.SYNC)
    ]
    for count in range(longest + 1):
        for head in _heads(budget, count, syncs, ends):
            yield head
        if count:
            for head in _heads(budget, count - 1, syncs, ends):
                # an action that ends the request for good (an abort that no client resumes) is
                # followed by nothing that another action could hit
                if head and ends.last_only(head[-1].do):
                    continue
                yield from (
                    (*head, action)
                    for action in last
                    if _syncs(head) + (action.do is ActionKind.SYNC) <= syncs
                )


def _heads(budget: int, count: int, syncs: int, ends: _Ends) -> Iterator[tuple[Action, ...]]:
    """Yield sequences of exactly ``count`` actions, all before the last token."""
    for places in combinations_with_replacement(range(budget), count):
        for kinds in product((ActionKind.ABORT, ActionKind.SYNC), repeat=count):
            if kinds.count(ActionKind.SYNC) <= syncs and not any(
                ends.last_only(kind) for kind in kinds[:-1]
            ):
                yield tuple(_act(kind, place) for kind, place in zip(kinds, places, strict=True))


def _act(
    kind: ActionKind,
    tokens: int,
    *,
    race: bool = False,
    queued: bool = False,
    server: str | None = None,
) -> Action:
    return Action(
        when=Trigger(request=_REQUEST, tokens=tokens, race=race, queued=queued),
        do=kind,
        server=server,
    )


def _syncs(actions: tuple[Action, ...]) -> int:
    return sum(action.do is ActionKind.SYNC for action in actions)


def _core(plan: _Plan) -> Iterator[Case]:
    mode = plan.modes[0]
    for budget in range(1, plan.scope.response + 1):
        for prompt in range(1, plan.scope.prompt + 1):
            for actions in _schedules(
                budget, plan.scope.actions, plan.scope.versions - 1, plan.ends(mode)
            ):
                yield plan.case(prompt, budget, actions, mode)


def _other_modes(plan: _Plan) -> Iterator[Case]:
    # a pause mode only shows in a sync: schedules without one are those of the first mode
    for mode in plan.modes[1:]:
        for budget in range(1, plan.scope.response + 1):
            for prompt in range(1, plan.scope.prompt + 1):
                for actions in plan.side_schedules(budget, mode):
                    if _syncs(actions):
                        yield plan.case(prompt, budget, actions, mode)


def _prefix_cache(plan: _Plan) -> Iterator[Case]:
    prompt, budget = plan.side
    # without a flush, KV of older weights stays in the cache and serves later calls
    cached = EngineOptions(prefix_cache=True)
    for mode in plan.modes:
        for clear in (True, False):
            for actions in plan.side_schedules(budget, mode):
                if actions and (clear or _syncs(actions)):
                    yield plan.case(prompt, budget, actions, mode, engine=cached, clear_cache=clear)


def _chunked(plan: _Plan) -> Iterator[Case]:
    prompt, budget = plan.side
    # a resumed prompt is prefilled in pieces, and an abort can hit between two of them
    chunked = EngineOptions(prefill_chunk=1)
    for actions in plan.side_schedules(budget, plan.modes[0]):
        yield plan.case(prompt, budget, actions, plan.modes[0], engine=chunked)


def _early_end(plan: _Plan) -> Iterator[Case]:
    prompt, budget = plan.side
    ending = replace(plan.model, eos_every=2)
    kinds = (ActionKind.ABORT, ActionKind.SYNC)
    actions_once = [
        (_act(kind, tokens, race=race),)
        for tokens in range(1, budget)
        for race in (True, False)
        for kind in kinds
    ]
    # where the policy ends depends on the seed: eight of them end a response at every place
    for seed in range(8):
        for actions in [(), *actions_once]:
            yield plan.case(
                prompt, budget, actions, plan.modes[0], model=ending, seed=plan.seed + seed
            )


def _limited(plan: _Plan) -> Iterator[Case]:
    prompt, budget = plan.side
    # a stack may limit the response by its configuration: the request then has no max_tokens of
    # its own, or a larger one
    for stated in (None, budget + 3):
        request = Request(
            request_id=_REQUEST, prompt_ids=_PROMPT[:prompt], max_tokens=stated, limit=budget
        )
        for actions in plan.side_schedules(budget, plan.modes[0]):
            yield plan.case(prompt, budget, actions, plan.modes[0], requests=(request,))


def _servers(plan: _Plan) -> Iterator[Case]:
    prompt, budget = plan.side
    for servers in (2, 3):
        for actions in plan.side_schedules(budget, plan.modes[0]):
            if actions:
                yield plan.case(prompt, budget, actions, plan.modes[0], servers=servers)


def _queued(plan: _Plan) -> Iterator[Case]:
    """Hit the first call while it queues, or abort a call and hit the next one while it queues."""
    prompt, budget = plan.side
    mode = plan.modes[0]
    for kind in (ActionKind.ABORT, ActionKind.SYNC):
        yield plan.case(prompt, budget, (_act(kind, 0, queued=True),), mode)
        if not plan.ends(mode).abort:
            for tokens in range(1, budget):
                yield plan.case(
                    prompt,
                    budget,
                    (_act(ActionKind.ABORT, tokens), _act(kind, tokens, queued=True)),
                    mode,
                )


def _kinds(plan: _Plan) -> Iterator[Case]:
    prompt, budget = plan.side
    for kind in ActionKind:
        if kind in _COVERED_ELSEWHERE:
            continue
        # which server lags matters only for a skew: each server in turn
        servers = _SERVERS if kind is ActionKind.SKEW else (None,)
        for server, tokens in product(servers, range(budget)):
            yield plan.case(
                prompt,
                budget,
                (_act(kind, tokens, server=server),),
                plan.modes[0],
                servers=len(_SERVERS),
            )


def _partial_off(plan: _Plan) -> Iterator[Case]:
    if plan.contract.partial_off is None:
        return
    prompt, budget = plan.side
    for actions in _schedules(
        budget, min(1, plan.scope.actions), plan.scope.versions - 1, _Ends(abort=True, sync=True)
    ):
        yield plan.case(prompt, budget, actions, plan.modes[0], partial=False)


def _later_request(plan: _Plan) -> Iterator[Case]:
    """Let a second request wait while the weights change.

    So even a stack that resumes nothing is served by the new weights. The second request queues
    after the first if the pause drains; if the pause aborts what queues, it arrives during the
    update.
    """
    prompt, budget = plan.side
    first = Request(request_id=_REQUEST, prompt_ids=_PROMPT[:prompt], max_tokens=budget)
    requests = (first, Request(request_id="r1", prompt_ids=(_LATER, *_PROMPT), max_tokens=budget))
    narrow_engine = EngineOptions(max_batch=1)
    for mode in plan.modes[:2]:
        for kind, tokens in product(_UPDATES, range(budget)):
            arrival = tokens + 0.5 if mode is PauseMode.ABORT else 0.0
            changes = {"requests": requests, "arrivals": (0.0, arrival), "engine": narrow_engine}
            yield plan.case(prompt, budget, (_act(kind, tokens),), mode, **changes)


def _turns(plan: _Plan) -> Iterator[Case]:
    """Let the policy end its turns early and the environment answer twice.

    One abort or sync hits any turn, running or queued. The last cases leave ample room: whatever a
    stack puts around an answer, the budget is no reason to end there.
    """
    if not plan.contract.multi_turn:
        return
    prompt, budget = plan.side
    room = budget + sum(map(len, _ANSWERS))
    request = Request(
        request_id=_REQUEST, prompt_ids=_PROMPT[:prompt], max_tokens=room, turns=_ANSWERS
    )
    ending = replace(plan.model, eos_every=2)
    kinds = (ActionKind.ABORT, ActionKind.SYNC)
    hits = product(kinds, range(1, budget + 1), ((False, False), (True, False), (False, True)))
    actions_once = [
        (_act(kind, tokens, race=race, queued=queued),) for kind, tokens, (race, queued) in hits
    ]
    for seed in range(8):
        for actions in [(), *actions_once]:
            yield plan.case(
                prompt,
                room,
                actions,
                plan.modes[0],
                requests=(request,),
                model=ending,
                seed=plan.seed + seed,
            )
    ample = replace(request, max_tokens=room + 128)
    for actions in [(), (_act(ActionKind.ABORT, 1),)]:
        yield plan.case(
            prompt, room, actions, plan.modes[0], requests=(ample,), model=ending, seed=plan.seed
        )


_FAMILIES: Mapping[str, Family] = {
    "aborts and syncs": _core,
    "other pause modes": _other_modes,
    "prefix cache": _prefix_cache,
    "chunked prefill": _chunked,
    "early end": _early_end,
    "budget as a limit": _limited,
    "several servers": _servers,
    "queued calls": _queued,
    "every kind of action": _kinds,
    "partial rollout off": _partial_off,
    LATER_REQUEST: _later_request,
    "turns of the environment": _turns,
}
