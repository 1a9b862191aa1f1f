"""Drawing a case: one description of the random schedules, fed by a seed or by Hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from rollproof.core.case import Action, ActionKind, Case, EngineOptions, Model, Trigger
from rollproof.core.contract import Contract, Filler
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request, Scalar
from rollproof.errors import UsageError
from rollproof.verification.schedules.corner import vocab_with, with_stop
from rollproof.verification.schedules.exhaustive import modes_for
from rollproof.verification.schedules.limit_cases import within_limits
from rollproof.verification.schedules.weight_cases import with_fitting_updates

__all__ = [
    "AT_SERVER",
    "Draws",
    "Limits",
    "SeededDraws",
    "draw_case",
    "draw_model",
    "is_allowed",
    "random_cases",
]

_T = TypeVar("_T")
_EXPERTS = (8, 2, 4, 16, 64, 128, 256, 512, 1024)
"""Sizes around the limit of one byte and of published models; shrinking aims at the first."""


class Draws(Protocol):
    """A source of choices. Earlier and smaller choices are the simpler ones, and ``False``."""

    def integer(self, low: int, high: int) -> int:
        """Draw an integer in ``low`` .. ``high``, both included."""
        ...

    def pick(self, options: Sequence[_T]) -> _T:
        """Draw one of ``options``, which are not empty."""
        ...

    def chance(self, percent: int) -> bool:
        """Return ``True`` in about ``percent`` of 100 draws."""
        ...

    def several(self, low: int, high: int, item: Callable[[Draws], _T]) -> list[_T]:
        """Draw ``low`` to ``high`` items, each by ``item`` from this source."""
        ...


class SeededDraws:
    """Choices from a seed, the same on every version of Python."""

    # Only ``random()`` is used: Python promises for it alone that a seed gives the same sequence.

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        """Draw an integer in ``low`` .. ``high``, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, options: Sequence[_T]) -> _T:
        """Draw one of ``options``."""
        return options[self.integer(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        """Return ``True`` in about ``percent`` of 100 draws."""
        return self._random.random() * 100 < percent

    def several(self, low: int, high: int, item: Callable[[Draws], _T]) -> list[_T]:
        """Draw ``low`` to ``high`` items."""
        return [item(self) for _ in range(self.integer(low, high))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Largest sizes of a drawn case.

    ``turns``: the most answers of the environment that a request gets, where the contract is
    multi-turn (0: single turn).
    """

    requests: int = 5
    prompt: int = 12
    response: int = 16
    actions: int = 8
    servers: int = 4
    turns: int = 2
    layers: int = 6

    def __post_init__(self) -> None:
        low = {
            "requests": 1,
            "prompt": 1,
            "response": 1,
            "servers": 1,
            "layers": 1,
            "actions": 0,
            "turns": 0,
        }
        wrong = [
            f"{name}={getattr(self, name)!r} must be at least {minimum}"
            for name, minimum in low.items()
            if getattr(self, name) < minimum
        ]
        if wrong:
            raise UsageError(f"No case fits these limits: {'; '.join(wrong)}.")


def random_cases(
    seed: int,
    count: int,
    *,
    flavour: str,
    contract: Contract,
    kinds: Sequence[ActionKind] | None = None,
    model: Model | None = None,
    modes: Sequence[PauseMode] | None = None,
    limits: Limits | None = None,
) -> Iterator[Case]:
    """Draw ``count`` cases; case i depends on ``seed`` and i alone, on every version of Python.

    Same distribution as ``rollproof.verification.schedules.strategies.cases``, without Hypothesis:
    for speed, and to name a case by two numbers. ``kinds`` are the kinds of action that may occur
    (default: all), ``model`` fixes the model instead of drawing one, ``modes`` the pause modes
    (default: ``modes_for``).
    """
    for i in range(count):
        yield draw_case(
            # far apart, so that the runs of two small seeds have no case in common
            SeededDraws(seed * 0x9E3779B1 + i),
            flavour=flavour,
            contract=contract,
            kinds=kinds,
            model=model,
            modes=modes,
            limits=limits,
        )


def draw_case(
    draws: Draws,
    *,
    flavour: str,
    contract: Contract,
    kinds: Sequence[ActionKind] | None = None,
    model: Model | None = None,
    modes: Sequence[PauseMode] | None = None,
    limits: Limits | None = None,
) -> Case:
    """Draw one case, within the limits that the contract declares.

    The kinds of action that the case may use are drawn first, then actions of these kinds (swarm
    testing).
    """
    limits = limits or Limits()
    if not contract.multi_turn:
        limits = replace(limits, turns=0)
    servers = draws.integer(1, limits.servers)
    requests = _requests(draws, limits)
    if not contract.multimodal:
        requests = tuple(replace(request, media=None) for request in requests)
    allowed = tuple(_DRAWN if kinds is None else kinds)
    enabled = _subset(draws, tuple(kind for kind in allowed if kind not in _RARE))
    actions = (
        draws.several(
            0, limits.actions, lambda source: _action(source, requests, enabled, servers, limits)
        )
        if enabled
        else []
    )
    mode = draws.pick(modes_for(flavour, contract) if modes is None else modes)
    together = draws.chance(50)
    case = Case(
        flavour=flavour,
        requests=requests,
        arrivals=tuple(0.0 if together else draws.integer(0, 40) / 2 for _ in requests),
        servers=servers,
        seed=draws.integer(0, 2**31 - 1),
        pause_mode=mode,
        clear_cache=mode is not PauseMode.IN_PLACE and not draws.chance(20),
        partial=not (contract.partial_off is not None and draws.chance(15)),
        model=_with_ends(
            draws,
            draw_model(draws, limits.layers) if model is None else model,
            80 if any(request.turns for request in requests) else 30,
        ),
        engine=_engine(draws, requests),
    )
    # Drawn last, so that the cases of a seed stay what they were before these existed, and differ
    # by what is added here alone.
    rare = [kind for kind in allowed if kind in _RARE and is_allowed(kind, contract)]
    if rare and limits.actions and draws.chance(20):
        actions = [
            *actions[: limits.actions - 1],
            _action(draws, requests, rare, servers, limits),
        ]
    order = {request.request_id: i for i, request in enumerate(requests)}
    actions.sort(key=lambda action: (action.when.tokens, order[action.when.request]))
    case = _with_rare_options(draws, replace(case, actions=tuple(actions)), contract)
    return within_limits(with_fitting_updates(case, contract), contract)


def _with_rare_options(draws: Draws, case: Case, contract: Contract) -> Case:
    """Return the case, in some draws with options that most cases do without."""
    model, engine = case.model, case.engine
    if draws.chance(10):
        case = replace(case, first_version=17)
    if draws.chance(10):
        model = replace(model, wide_logprobs=True)
    if draws.chance(10):
        end = contract.pad_id or 0
        inside = case.requests[0].prompt_ids
        model = replace(
            model, eos_id=end, vocab=vocab_with(model, end), eos_every=model.eos_every or 4
        )
        # in the first prompt, and in those that share it
        case = replace(
            case,
            requests=tuple(
                replace(request, prompt_ids=(*inside, end))
                if request.prompt_ids == inside
                else request
                for request in case.requests
            ),
        )
        # the prompt has one token more now, and the longest request must still fit
        if engine.kv_tokens is not None:
            engine = replace(engine, kv_tokens=engine.kv_tokens + 1)
    if draws.chance(15):
        engine = replace(engine, transfer_steps=draws.integer(2, 6))
    if draws.chance(10):
        engine = replace(engine, pause_steps=draws.integer(1, 3))
    if draws.chance(5):
        engine = replace(engine, empty_text=True)
    if contract.own_stops is not None and draws.chance(60):
        model = with_stop(model, draws.pick(contract.own_stops.sequences))
    return replace(case, model=model, engine=engine)


def is_allowed(kind: ActionKind, contract: Contract) -> bool:
    """Return whether the contract allows an action of a rare kind, or of one of adapters."""
    if kind in _OF_ADAPTERS:
        return contract.adapters is not None
    if kind is ActionKind.DROP_ROUTES:
        # nothing precedes the first row, and a drawn reply may be the only one
        return contract.may_lack_routes and contract.filler is not Filler.PREVIOUS
    if kind is ActionKind.DROP_LOGPROBS:
        return contract.may_lack_logprobs
    # weights that a stack did not ask for may exceed the staleness that it bounds
    return kind is not ActionKind.LAG or contract.max_staleness is None


def draw_model(draws: Draws, layers: int = 6) -> Model:
    """Draw a model of up to ``layers`` layers, 2 to 1024 experts and top-k 1 to 16."""
    experts = draws.pick(_EXPERTS) if draws.chance(70) else draws.integer(2, 1024)
    depth = draws.integer(1, layers)
    dense = draws.integer(0, depth - 1) if draws.chance(40) else 0
    return Model(
        num_layers=depth,
        moe_layers=tuple(range(dense, depth)),
        num_experts=experts,
        top_k=draws.integer(1, min(16, experts)),
    )


def _with_ends(draws: Draws, model: Model, percent: int) -> Model:
    """Return the model, in ``percent`` of the cases with ends of sequence."""
    # without a natural end the environment never gets its turn
    return replace(model, eos_every=draws.integer(2, 20)) if draws.chance(percent) else model


def _subset(draws: Draws, options: Sequence[_T]) -> list[_T]:
    """Draw each option with probability one half, in one draw."""
    bits = draws.integer(0, 2 ** len(options) - 1)
    return [option for i, option in enumerate(options) if bits >> i & 1]


def _requests(draws: Draws, limits: Limits) -> tuple[Request, ...]:
    """Draw requests whose prompts share a beginning or not, and then differ in one token."""
    # No prompt is a prefix of another, so that an engine call can be attributed to its request.
    shared = draws.integer(1, limits.prompt - 1) if limits.prompt > 1 and draws.chance(40) else 0
    requests: list[Request] = []
    for i, (request, tail, twin) in enumerate(
        draws.several(1, limits.requests, lambda source: _request(source, limits))
    ):
        rest = min(tail, limits.prompt - shared - 1)
        prompt = (
            *(_token(-1, j) for j in range(shared)),
            2 + i,
            *(_token(i, j) for j in range(rest)),
        )
        group = None
        if twin is not None and requests:
            other = twin % len(requests)
            prompt, group = requests[other].prompt_ids, requests[other].group or f"g{other}"
            requests[other] = replace(requests[other], group=group)
        media = None if request.media is None else f"media-{i}"
        requests.append(
            replace(request, request_id=f"r{i}", prompt_ids=prompt, group=group, media=media)
        )
    return tuple(requests)


def _token(prompt: int, place: int) -> int:
    """Return a token that is neither the end of sequence (0) nor one that distinguishes prompts."""
    return 100 + (prompt * 131 + place * 17) % 300


def _request(draws: Draws, limits: Limits) -> tuple[Request, int, int | None]:
    """Draw a request without id and prompt, the length of its prompt, and the number of the request
    whose prompt it repeats, if it repeats one.
    """
    budget = draws.integer(1, limits.response)
    stated = not draws.chance(20)
    limit = budget + draws.integer(0, 3) if stated and draws.chance(20) else None
    sampling: dict[str, Scalar] = (
        {"temperature": draws.pick((1.0, 0.7))} if draws.chance(50) else {}
    )
    request = Request(
        request_id="",
        prompt_ids=(),
        max_tokens=budget if stated else None,
        limit=limit if stated else budget,
        sampling=sampling,
        media="media" if draws.chance(10) else None,
        turns=tuple(
            draws.several(
                0,
                limits.turns,
                lambda source: tuple(_token(7, j) for j in range(source.integer(1, 3))),
            )
        ),
    )
    return (
        request,
        draws.integer(0, limits.prompt - 1),
        draws.integer(0, limits.requests - 1) if draws.chance(15) else None,
    )


def _action(
    draws: Draws,
    requests: Sequence[Request],
    enabled: Sequence[ActionKind],
    servers: int,
    limits: Limits,
) -> Action:
    # Folded into the range rather than drawn from it, so that the action survives when a shrinker
    # drops a request or a server.
    request = requests[draws.integer(0, limits.requests - 1) % len(requests)]
    kind = draws.pick(enabled)
    budget = request.budget or 1
    # resumes go wrong at the ends: before the first token, and at the last of the budget
    tokens = draws.pick((0, budget, draws.integer(0, budget)))
    return Action(
        when=Trigger(
            request=request.request_id,
            tokens=tokens,
            queued=draws.chance(10),
            race=draws.chance(20),
        ),
        do=kind,
        server=(
            f"s{draws.integer(0, limits.servers - 1) % servers}"
            if kind in AT_SERVER and draws.chance(70)
            else None
        ),
        steps=draws.integer(1, 12),
    )


AT_SERVER = frozenset({ActionKind.KILL, ActionKind.SKEW, ActionKind.LAG, ActionKind.LEAVE})
"""Kinds of action that may name a server."""
_OF_ADAPTERS = frozenset({ActionKind.SYNC_MERGED, ActionKind.EVICT_ADAPTERS})
_NOT_DRAWN = frozenset({ActionKind.ABORT_HANDLE, *_OF_ADAPTERS})
_DRAWN = tuple(kind for kind in ActionKind if kind not in _NOT_DRAWN)
"""Kinds of action that are drawn. An abort by a handle differs from one of a call only if calls
share handles, which the corner cases of groups try; those of adapters take the place of others
(``weight_cases``).
"""
_RARE = frozenset(
    {ActionKind.LAG, ActionKind.LEAVE, ActionKind.DROP_ROUTES, ActionKind.DROP_LOGPROBS}
)


def _engine(draws: Draws, requests: Sequence[Request]) -> EngineOptions:
    longest = max(
        len(request.prompt_ids) + (request.budget or 0) + sum(map(len, request.turns))
        for request in requests
    )
    return EngineOptions(
        max_batch=draws.pick((8, 1, 2, 3)),
        prefill_chunk=draws.integer(1, 8) if draws.chance(40) else None,
        prefix_cache=draws.chance(40),
        # small enough for preemptions, and room for each request alone: else none could end
        kv_tokens=longest + 1 + draws.integer(0, longest) if draws.chance(25) else None,
    )
