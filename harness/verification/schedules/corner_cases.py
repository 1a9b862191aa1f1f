"""Corner cases: situations that neither the small scope nor a random draw meets for certain.

Each family forces one situation, on the flavour and under the contract at hand; one that the
contract rules out is not made. Where a situation depends on what the policy samples, the seed is
searched for and not left to chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, TypeAlias

from rollproof.core.case import Action, ActionKind, Case, EngineOptions, Model, Trigger
from rollproof.core.contract import Contract, Filler, Logprobs, ResumeBy
from rollproof.core.engine_contract import LARGEST_TOKEN, PauseMode
from rollproof.core.limits import RolloutLimits
from rollproof.core.records import Request, Scalar
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.verification.schedules.exhaustive import modes_for

__all__ = ["corner_families", "vocab_with", "within_limits"]

_PROMPT = (11, 12)
_ANSWERS = ((201, 202), (203,))
_MANY_REQUESTS = 64
_MANY_ABORTS = 12
_EMPTY_ABORTS = 4
_LONG_TURN = 64
"""The tokens of a turn that only its budget ends."""
_SLOW = EngineOptions(transfer_steps=4)
_GROUPS = (2, 3, 5, 8)
_PARAMETERS: tuple[Mapping[str, Scalar], ...] = (
    {"temperature": 0.7, "top_p": 0.95, "top_k": 50},
    {
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
    },
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "min_p": 0.1},
)
"""What callers of reasoning models set, between them every parameter that engines share. Not seeds
and stop strings: a stack may give each call a seed of its own, or stop by itself.
"""
_LONG_RUN = 4096
"""The most tokens that a case samples to meet a limit: about a quarter of a second."""
_MANY_TURNS = 512
"""The most turns of a case that meets a limit: each call sends everything before it."""
_LONG_TEXT = 1 << 18
"""The most tokens of a prompt, or of the environment, with which a case meets a limit: some tenths
of a second. Limits above it are kept, and no case reaches them.
"""
_SMALL = 64
"""Limits up to this many tokens are also met after an abort."""


@dataclass(frozen=True, slots=True)
class _Corner:
    """The inputs of every family."""

    flavour: str
    contract: Contract
    model: Model
    seed: int
    mode: PauseMode

    @property
    def limits(self) -> RolloutLimits:
        return self.contract.limits or RolloutLimits()

    @property
    def aborts_end(self) -> bool:
        """Whether an aborted call ends its request for good."""
        resume = self.contract.resume
        return resume is ResumeBy.NONE or (
            resume is ResumeBy.ENGINE and self.contract.abort_surfaces
        )

    @property
    def budget(self) -> int:
        """Tokens that a request samples, unless its family says otherwise."""
        limits, total = self.limits, self.limits.total
        room = None if total is None else total - len(_PROMPT)
        bounds = (6, limits.response, limits.turn_tokens, room)
        return max(1, min(bound for bound in bounds if bound is not None))

    def case(
        self,
        *actions: Action,
        prompt: tuple[int, ...] = _PROMPT,
        budget: int | None = None,
        turns: tuple[tuple[int, ...], ...] = (),
        **changes: Any,
    ) -> Case:
        """Return a case of one request, unless ``changes`` replaces the requests."""
        request = Request(
            request_id="r0", prompt_ids=prompt, max_tokens=budget or self.budget, turns=turns
        )
        fields: dict[str, Any] = {
            "flavour": self.flavour,
            "requests": (request,),
            "actions": actions,
            "seed": self.seed,
            "pause_mode": self.mode,
            "clear_cache": self.mode is not PauseMode.IN_PLACE,
            "model": self.model,
        }
        return Case(**{**fields, **changes})

    def seed_where(
        self,
        model: Model,
        fits: Callable[[tuple[int, ...], tuple[float, ...]], bool],
        prompt: tuple[int, ...] = _PROMPT,
    ) -> int | None:
        """Return the first seed under which a request that nothing interrupts fits, given its
        tokens and their logprobs; ``None`` if a thousand seeds have none.
        """
        for seed in range(self.seed, self.seed + 1000):
            policy = CodedPolicy.from_model(model, seed)
            state = policy.start_state(prompt)
            tokens: list[int] = []
            while len(tokens) < self.budget and (
                policy.eos_every is None or policy.eos_id not in tokens
            ):
                tokens.append(policy.next_token(0, state))
                state = policy.extend(state, tokens[-1])
            logprobs = policy.logprobs(0, (*prompt, *tokens), len(prompt)).tolist()
            if fits(tuple(tokens), tuple(logprobs)):
                return seed
        return None


_Family: TypeAlias = "Callable[[_Corner], Iterator[Case]]"


def corner_families(
    flavour: str,
    contract: Contract,
    *,
    model: Model | None = None,
    seed: int = 0,
    modes: tuple[PauseMode, ...] | None = None,
) -> Iterator[tuple[str, Iterator[Case]]]:
    """Yield each family by name, with its cases: a few dozen in all, each within the contract's
    limits. The pause mode is the first of ``modes`` (default: ``modes_for``).
    """
    mode = (modes or modes_for(flavour, contract))[0]
    corner = _Corner(flavour, contract, model or Model(), seed, mode)
    for name, family in _FAMILIES.items():
        yield name, _within(family(corner), contract)


def _within(cases: Iterator[Case], contract: Contract) -> Iterator[Case]:
    for case in cases:
        fitting = within_limits(case, contract)
        if fitting is not None:
            yield fitting


def within_limits(case: Case, contract: Contract) -> Case | None:
    """Return the case with the limits that the contract declares, its prompts cut so that each
    leaves room for a token; ``None`` if calls could then not be told apart by their prompts.
    """
    limits = contract.limits
    if limits is None or (limits.response is None and limits.total is None):
        return case
    requests = []
    prompts = _cut_prompts(case, limits.total)
    if prompts is None:
        return None
    for request in case.requests:
        own = replace(
            request,
            prompt_ids=prompts[request.prompt_ids],
            limit=min(
                (bound for bound in (request.limit, limits.response) if bound is not None),
                default=None,
            ),
            max_length=limits.total,
        )
        requests.append(own)
    engine = replace(case.engine, max_length=limits.context or case.engine.max_length)
    return replace(case, requests=tuple(requests), engine=engine)


def _cut_prompts(case: Case, total: int | None) -> Mapping[tuple[int, ...], tuple[int, ...]] | None:
    """Return each prompt of the case with what is left of it if it and one token are at most
    ``total``: their beginnings, or their ends if those differ and the beginnings do not.
    """
    prompts = {request.prompt_ids for request in case.requests}
    if total is None or max(map(len, prompts)) < total:
        return {prompt: prompt for prompt in prompts}
    for kept in (slice(total - 1), slice(1 - total, None)):
        cut = {prompt: prompt[kept] for prompt in prompts}
        left = sorted(cut.values())
        # in order, a prompt is right before one that continues it
        if not any(right[: len(one)] == one for one, right in pairwise(left)):
            return cut
    return None


def vocab_with(model: Model, end: int) -> int:
    """Return the size of a vocabulary with the end token ``end`` and many others."""
    return max(model.vocab, min(end + 512, LARGEST_TOKEN + 1))


def _act(kind: ActionKind, tokens: int, request: str = "r0", **fields: Any) -> Action:
    queued = fields.pop("queued", False)
    return Action(when=Trigger(request=request, tokens=tokens, queued=queued), do=kind, **fields)


def _later_start(corner: _Corner) -> Iterator[Case]:
    """Begin at version 17, as after a restart from a checkpoint."""
    half = corner.budget // 2
    yield corner.case(first_version=17)
    for kind in (
        ActionKind.ABORT,
        ActionKind.SYNC,
        ActionKind.SYNC_UNLABELLED,
        ActionKind.SYNC_IDENTITY,
        ActionKind.SYNC_FAILS,
    ):
        yield corner.case(_act(kind, half), first_version=17)
    yield corner.case(_act(ActionKind.KILL, half), first_version=17, servers=2)


def _deaths(corner: _Corner) -> Iterator[Case]:
    """End a server while requests are on it: of four, some are on either of two servers."""
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(31 + i, *_PROMPT), max_tokens=corner.budget)
        for i in range(4)
    )
    for server in ("s0", "s1"):
        kill = _act(ActionKind.KILL, corner.budget // 2, server=server)
        yield corner.case(kill, requests=requests, servers=2)


def _wide_logprobs(corner: _Corner) -> Iterator[Case]:
    if corner.contract.logprobs is Logprobs.NONE:
        return
    model = replace(corner.model, wide_logprobs=True)
    # a budget of one token cannot hold both
    deep = corner.seed_where(model, lambda _, logprobs: min(logprobs) < -32)
    zero = corner.seed_where(model, lambda _, logprobs: 0.0 in logprobs)
    both = corner.seed_where(model, lambda _, logprobs: 0.0 in logprobs and min(logprobs) < -32)
    half = corner.budget // 2
    schedules = ((), (_act(ActionKind.ABORT, half),), (_act(ActionKind.SYNC, half),))
    for seed in (deep, zero) if both is None else (both,):
        if seed is not None:
            for actions in schedules:
                yield corner.case(*actions, model=model, seed=seed)


def _end_token_inside(corner: _Corner) -> Iterator[Case]:
    """Let the end-of-sequence token, which is the padding token too, occur inside a sample."""
    end = corner.contract.pad_id or 0
    model = replace(corner.model, eos_id=end, eos_every=2, vocab=vocab_with(corner.model, end))
    for prompt in ((11, end, 12), (end, 11), (11, end)):
        seed = corner.seed_where(
            model, lambda tokens, _: end in tokens and len(tokens) in (2, 3), prompt
        )
        if seed is None:
            seed = corner.seed
        for actions in ((), (_act(ActionKind.ABORT, 1),)):
            yield corner.case(*actions, prompt=prompt, model=model, seed=seed)
    if not corner.contract.multi_turn:
        return
    seed = corner.seed_where(model, lambda tokens, _: tokens[-1] == end and len(tokens) <= 3)
    if seed is not None:
        for answers in (_ANSWERS, ((201, end, 202), (end,))):
            for actions in ((), (_act(ActionKind.ABORT, 2),)):
                yield corner.case(*actions, budget=16, turns=answers, model=model, seed=seed)


def _many_requests(corner: _Corner) -> Iterator[Case]:
    requests = tuple(
        Request(
            request_id=f"r{i}", prompt_ids=(100 + i, *_PROMPT), max_tokens=min(3, corner.budget)
        )
        for i in range(_MANY_REQUESTS)
    )
    yield corner.case(
        _act(ActionKind.ABORT, 1, "r7"),
        _act(ActionKind.SYNC, 1, "r40"),
        requests=requests,
        servers=2,
    )


def _many_aborts(corner: _Corner) -> Iterator[Case]:
    places = sorted(i % corner.budget for i in range(_MANY_ABORTS))
    if not corner.aborts_end:
        yield corner.case(*(_act(ActionKind.ABORT, place) for place in places))
        # in a row, all but the first before the next token: only tries without a token count then
        for place in (0, corner.budget // 2):
            yield corner.case(*(_act(ActionKind.ABORT, place) for _ in range(_EMPTY_ABORTS)))
    # a bound on staleness may well end a request that outlives so many updates
    if corner.contract.max_staleness is None and not (
        corner.aborts_end and corner.mode is PauseMode.ABORT
    ):
        yield corner.case(*(_act(ActionKind.SYNC, place) for place in places))


def _unlabelled_updates(corner: _Corner) -> Iterator[Case]:
    """Update twice without a label, with a request after both: nothing but the weights differs."""
    if corner.contract.max_staleness is not None:
        return
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(31 + i, *_PROMPT), max_tokens=corner.budget)
        for i in range(3)
    )
    yield corner.case(
        _act(ActionKind.SYNC_UNLABELLED, 1, "r0"),
        _act(ActionKind.SYNC_UNLABELLED, 1, "r1"),
        requests=requests,
        arrivals=(0.0, 30.0, 60.0),
    )


def _slow_updates(corner: _Corner) -> Iterator[Case]:
    """Transfers of several steps, and pauses that take effect some steps after they are requested,
    so that a call is admitted between a reset of the cache and the pause.
    """
    half = corner.budget // 2
    arriving = (
        Request(request_id="r0", prompt_ids=_PROMPT, max_tokens=corner.budget),
        Request(request_id="r1", prompt_ids=(31, 32, 33), max_tokens=corner.budget),
    )
    during: dict[str, Any] = {
        "requests": arriving,
        "arrivals": (0.0, half + 2.5),
        "engine": _SLOW,
        "servers": 2,
    }
    for kind in (
        ActionKind.SYNC,
        ActionKind.SYNC_UNLABELLED,
        ActionKind.SYNC_TWICE,
        ActionKind.SYNC_FAILS,
    ):
        yield corner.case(_act(kind, half), **during)
    # r1 is admitted between a reset of the cache and the pause, and r2 has its prefix
    shared = (11, 12, 13, 14)
    requests = (
        arriving[1],
        Request(request_id="r0", prompt_ids=(*shared, 15), max_tokens=corner.budget),
        Request(request_id="r2", prompt_ids=(*shared, 16), max_tokens=corner.budget),
    )
    for transfer in (1, 4):
        yield corner.case(
            _act(ActionKind.SYNC, half, "r1"),
            requests=requests,
            arrivals=(0.0, half + 0.5, 60.0),
            engine=EngineOptions(prefix_cache=True, pause_steps=3, transfer_steps=transfer),
        )


def _balancing(corner: _Corner) -> Iterator[Case]:
    """A replica leaves the balancer and joins again; one keeps older weights than the others."""
    half = corner.budget // 2
    later = Request(request_id="r1", prompt_ids=(31, 32, 33), max_tokens=corner.budget)
    both = (
        Request(request_id="r0", prompt_ids=_PROMPT, max_tokens=corner.budget),
        later,
    )
    pair: dict[str, Any] = {"requests": both, "arrivals": (0.0, 15.0), "servers": 2}
    leaves = _act(ActionKind.LEAVE, half, server="s0", steps=30)
    yield corner.case(leaves, _act(ActionKind.ABORT, half), **pair)
    yield corner.case(replace(leaves, steps=2), _act(ActionKind.ABORT, corner.budget - 1), **pair)
    yield corner.case(leaves, _act(ActionKind.SYNC, half), **pair)
    # weights that a stack did not ask for may exceed the staleness that it bounds
    if corner.contract.max_staleness is not None:
        return
    lags = _act(ActionKind.LAG, 1, server="s1")
    yield corner.case(lags, **pair)
    yield corner.case(lags, leaves, _act(ActionKind.ABORT, half), **pair)
    yield corner.case(lags, _act(ActionKind.KILL, half, server="s0", steps=40), **pair)
    yield corner.case(lags, leaves, _act(ActionKind.SYNC, 1, "r1"), **pair)
    # wherever r0 runs: its server has newer weights than the one that it moves to
    moves = replace(leaves, server=None), _act(ActionKind.ABORT, half)
    yield corner.case(_act(ActionKind.SKEW, 1), *moves, **pair)


def _missed_update(corner: _Corner) -> Iterator[Case]:
    """A server is down during an update, comes back with older weights, and is there at the next
    update and at the calls after it.
    """
    # a server that is back has older weights than a bound on staleness may allow
    if corner.contract.max_staleness is not None or corner.aborts_end:
        return
    # Which server a stack calls may depend on the prompt and on what came before.
    arrivals = (0.0, 30.0, 60.0, 61.0, 62.0, 63.0)
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(31 + i, *_tokens(1 + i)), max_tokens=corner.budget)
        for i in range(len(arrivals))
    )
    yield corner.case(
        _act(ActionKind.KILL, 1, server="s0", steps=12),
        _act(ActionKind.SYNC, 1),
        _act(ActionKind.SYNC, 1, "r1"),
        requests=requests,
        arrivals=arrivals,
        servers=2,
    )


def _preempted_aborts(corner: _Corner) -> Iterator[Case]:
    """Preempt a call that has sampled, and abort it while it waits again, next to complete replies:
    SGLang then answers without routes.
    """
    half = corner.budget // 2
    if corner.aborts_end or half < 2:
        return
    preempted = _act(ActionKind.EVICT, half), _act(ActionKind.ABORT, half)
    yield corner.case(_act(ActionKind.ABORT, 1), *preempted)


def _gaps(corner: _Corner) -> Iterator[Case]:
    """Replies without routes or without logprobs: the only one, one in the middle, the last."""
    kinds = []
    if corner.contract.may_lack_logprobs:
        kinds.append(ActionKind.DROP_LOGPROBS)
    if corner.contract.may_lack_routes:
        kinds.append(ActionKind.DROP_ROUTES)
    for kind in kinds:
        # "the row before" says nothing of the first row: a later reply has to bring all of them
        needs_later = kind is ActionKind.DROP_ROUTES and corner.contract.filler is Filler.PREVIOUS
        if needs_later and corner.budget < 4:
            continue
        if not needs_later:
            yield corner.case(_act(kind, 1))
        if not corner.aborts_end and corner.budget >= 3:
            yield corner.case(_act(kind, 1), _act(ActionKind.ABORT, 2), _act(ActionKind.ABORT, 3))
        if not corner.aborts_end and corner.budget >= 3 and not needs_later:
            yield corner.case(_act(ActionKind.ABORT, 1), _act(kind, 2))
            yield corner.case(_act(kind, 1), _act(ActionKind.SYNC, 2))
        if corner.contract.multi_turn and not (needs_later and corner.limits.turns == 1):
            model = replace(corner.model, eos_every=1)
            yield corner.case(_act(kind, 0), budget=12, turns=_ANSWERS, model=model)


def _cut_turns(corner: _Corner) -> Iterator[Case]:
    """Cut the first turn at the budget, and the second one, while answers are left. Abort the first
    one where room is left for an answer, and later ones before their first token.
    """
    if not corner.contract.multi_turn:
        return
    yield corner.case(_act(ActionKind.ABORT, 2), budget=12, turns=_ANSWERS)
    for actions in ((), (_act(ActionKind.ABORT, 1),)):
        yield corner.case(*actions, budget=3, turns=_ANSWERS)
    # every turn is one token, and one more is the budget after the first answer
    ending = replace(corner.model, eos_every=1)
    for budget in (3, 4, 5):
        yield corner.case(budget=budget, turns=_ANSWERS, model=ending)
    # before the second turn and before the last one, also twice
    for places in ((1,), (1, 1), (2, 2)):
        empty = (_act(ActionKind.ABORT, place, queued=True) for place in places)
        yield corner.case(*empty, budget=12, turns=_ANSWERS, model=ending)


def _long_turns(corner: _Corner) -> Iterator[Case]:
    """Let the second turn be much longer than the first one, so that only its budget ends it."""
    if not corner.contract.multi_turn or not corner.limits.allow_answers:
        return
    model = replace(corner.model, eos_every=_LONG_TURN // 2)
    answer = _ANSWERS[0]
    for seed in range(corner.seed, corner.seed + 1000):
        policy = CodedPolicy.from_model(model, seed)
        first = _until_end(policy, _PROMPT, 3)
        if first is None:
            continue
        if _until_end(policy, (*_PROMPT, *first, *answer), _LONG_TURN) is None:
            budget = len(first) + len(answer) + _LONG_TURN
            yield corner.case(budget=budget, turns=(answer,), model=model, seed=seed)
            return


def _until_end(policy: CodedPolicy, context: tuple[int, ...], most: int) -> tuple[int, ...] | None:
    """Return the turn that follows ``context``; ``None`` if it has more than ``most`` tokens."""
    state = policy.start_state(context)
    tokens: list[int] = []
    while len(tokens) < most:
        tokens.append(policy.next_token(0, state))
        if tokens[-1] == policy.eos_id:
            return tuple(tokens)
        state = policy.extend(state, tokens[-1])
    return None


def _empty_text(corner: _Corner) -> Iterator[Case]:
    engine = EngineOptions(empty_text=True)
    yield corner.case(engine=engine)
    yield corner.case(_act(ActionKind.ABORT, corner.budget // 2), engine=engine)


def _declared_limits(corner: _Corner) -> Iterator[Case]:
    """One token or turn below each declared limit, at it, above it, and without a request's own."""
    if corner.contract.limits is not None:
        yield from chain(
            _response_limit(corner),
            _total_limit(corner),
            _turn_limit(corner),
            _turn_tokens_limit(corner),
            _answer_limit(corner),
        )


def _around(limit: int) -> tuple[int, ...]:
    return tuple(size for size in (limit - 1, limit, limit + 1) if size > 0)


def _response_limit(corner: _Corner) -> Iterator[Case]:
    limits, response = corner.limits, corner.limits.response
    if response is None:
        return
    sampled = min(response, limits.turn_tokens or response)
    if sampled == response <= _LONG_RUN:
        for budget in _around(response):
            yield corner.case(budget=budget)
        request = Request(request_id="r0", prompt_ids=_PROMPT)
        yield corner.case(requests=(request,))
        if response <= _SMALL:
            yield corner.case(_act(ActionKind.ABORT, response // 2), requests=(request,))
    if response > _LONG_TEXT:
        return
    # every turn is one token, and the answers bring the last turn to the limit
    model = replace(corner.model, eos_every=1)
    for size in _around(response):
        answers = _answers(corner, size)
        if answers:
            yield corner.case(budget=response + 4, turns=(*answers, (203,)), model=model)


def _answers(corner: _Corner, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the answers after which a response of turns of one token has ``size`` tokens with its
    last turn; empty if the limits allow none.
    """
    limits = corner.limits
    most = min((limits.turns or _SMALL) - 1, _SMALL) if corner.contract.multi_turn else 0
    for count in range(1, most + 1):
        tokens = size - count - 1
        if count <= tokens <= count * (limits.answer or tokens):
            share, rest = divmod(tokens, count)
            return tuple(_tokens(share + (i < rest)) for i in range(count))
    return ()


def _total_limit(corner: _Corner) -> Iterator[Case]:
    limits, total = corner.limits, corner.limits.total
    if total is None or total > _LONG_TEXT:
        return
    room = max(1, min(3, total - 1, limits.response or 3, limits.turn_tokens or 3))
    prompt = _tokens(total - room)
    for budget in _around(room):
        yield corner.case(prompt=prompt, budget=budget)
    unbounded = Request(request_id="r0", prompt_ids=prompt)
    yield corner.case(requests=(unbounded,))
    yield corner.case(_act(ActionKind.ABORT, 1), requests=(unbounded,))
    yield corner.case(prompt=_tokens(total - 1), budget=2)
    model = replace(corner.model, eos_every=1)
    if corner.contract.multi_turn and limits.allow_answers and total <= len(_PROMPT) + 3:
        # the shortest conversation fits behind the shortest prompt only
        yield corner.case(prompt=_PROMPT[:1], budget=3, turns=((203,),), model=model)
    if corner.contract.partial_off is not None and limits.allow_fragments:
        # with a small total, a part of a turn fits behind the shortest prompt only
        abort = _act(ActionKind.ABORT, 1)
        yield corner.case(abort, prompt=_PROMPT[:1], budget=2, partial=False)
    for size in _around(total - len(_PROMPT)):
        answers = _answers(corner, size)
        if answers and size <= (limits.response or size):
            yield corner.case(budget=total, turns=(*answers, (203,)), model=model)


def _turn_limit(corner: _Corner) -> Iterator[Case]:
    turns = corner.limits.turns
    if turns is None or not corner.contract.multi_turn:
        return
    model = replace(corner.model, eos_every=1)
    for count in (turns - 1, turns, turns + 1):
        if 0 < count <= _MANY_TURNS:
            answers = ((203,),) * (count - 1)
            yield corner.case(budget=2 * count + 4, turns=answers, model=model)
    if 1 < turns <= _SMALL:
        answers = ((203,),) * turns
        yield corner.case(
            _act(ActionKind.ABORT, 1), budget=2 * turns + 4, turns=answers, model=model
        )


def _turn_tokens_limit(corner: _Corner) -> Iterator[Case]:
    size = corner.limits.turn_tokens
    if size is None or size > _LONG_RUN:
        return
    for budget in _around(size):
        yield corner.case(budget=budget)
    if corner.contract.multi_turn:
        for actions in ((), (_act(ActionKind.ABORT, 1),)):
            yield corner.case(*actions, budget=3 * size + 3, turns=_ANSWERS)


def _answer_limit(corner: _Corner) -> Iterator[Case]:
    answer = corner.limits.answer
    if answer is None or answer > _LONG_TEXT or not corner.contract.multi_turn:
        return
    model = replace(corner.model, eos_every=1)
    for size in (*_around(answer), 2 * answer + 1):
        yield corner.case(budget=answer + 8, turns=(_tokens(size), (203,)), model=model)


def _tokens(count: int) -> tuple[int, ...]:
    """Return tokens that differ from their neighbours, none of them a usual padding token."""
    return tuple(11 + 7 * i % 389 for i in range(count))


def _sampling(corner: _Corner) -> Iterator[Case]:
    """Requests with every parameter that changes the distribution, and with others each."""
    half = corner.budget // 2
    requests = tuple(
        Request(
            request_id=f"r{i}",
            prompt_ids=(31 + i, *_PROMPT),
            max_tokens=corner.budget,
            sampling=dict(parameters),
        )
        for i, parameters in enumerate(_PARAMETERS)
    )
    yield corner.case(requests=requests)
    yield corner.case(
        *(_act(ActionKind.ABORT, half, request.request_id) for request in requests),
        requests=requests,
        servers=2,
    )


def _groups(corner: _Corner) -> Iterator[Case]:
    """Samples of one prompt that are requested together, as callers do for group advantages."""
    half = corner.budget // 2
    for size in _GROUPS:
        requests = tuple(
            Request(
                request_id=f"r{i}",
                prompt_ids=_PROMPT,
                max_tokens=corner.budget,
                sampling={"temperature": 0.7},
                group="g0",
            )
            for i in range(size)
        )
        last = requests[-1].request_id
        for actions in (
            (),
            (_act(ActionKind.ABORT, half, last),),
            (_act(ActionKind.ABORT_HANDLE, half, last),),
            (_act(ActionKind.SYNC, half),),
        ):
            yield corner.case(*actions, requests=requests, servers=1 + size % 2)


_FAMILIES: Mapping[str, _Family] = {
    "a later first version": _later_start,
    "deaths": _deaths,
    "wide logprobs": _wide_logprobs,
    "end token inside": _end_token_inside,
    "many requests": _many_requests,
    "many aborts": _many_aborts,
    "unlabelled updates": _unlabelled_updates,
    "slow updates": _slow_updates,
    "balancing": _balancing,
    "missed update": _missed_update,
    "preempted aborts": _preempted_aborts,
    "replies with gaps": _gaps,
    "cut turns": _cut_turns,
    "long turns": _long_turns,
    "empty text": _empty_text,
    "declared limits": _declared_limits,
    "sampling parameters": _sampling,
    "groups": _groups,
}
