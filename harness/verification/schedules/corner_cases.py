"""Corner cases: situations that neither the small scope nor a random draw meets for certain.

Each family forces one situation, on the flavour and under the contract at hand; one that the
contract rules out is not made. Where a situation depends on what the policy samples, the seed is
searched for and not left to chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rollproof.core.case import ActionKind, Case, EngineOptions, Model
from rollproof.core.contract import Contract, Filler, Logprobs
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request, Scalar
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.verification.schedules.conversation_cases import cut_turns, long_turns
from rollproof.verification.schedules.corner import (
    ANSWERS,
    PROMPT,
    Corner,
    Family,
    act,
    some_tokens,
    until_end,
    vocab_with,
)
from rollproof.verification.schedules.exhaustive import modes_for
from rollproof.verification.schedules.limit_cases import declared_limits, within_limits
from rollproof.verification.schedules.stop_cases import own_stops
from rollproof.verification.schedules.weight_cases import adapter_updates, delta_updates

__all__ = ["corner_families"]

_MANY_REQUESTS = 64
_MANY_ABORTS = 12
_EMPTY_ABORTS = 4
_LONG = 30
"""Tokens of a long response: more than 16, which is a block of vLLM's KV cache, and the default of
its ``max_tokens``.
"""
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
    # greedy, as evaluations are: a value of 0 is a value
    {"temperature": 0.0},
)
"""What callers of reasoning models set, between them every parameter that engines share. Not seeds
and stop strings: engines name seeds differently, and a stack may give each call a seed of its own,
or stop by itself.
"""


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
    corner = Corner(flavour, contract, model or Model(), seed, mode)
    for name, family in _FAMILIES.items():
        yield name, (within_limits(case, contract) for case in family(corner))


def _later_start(corner: Corner) -> Iterator[Case]:
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
        yield corner.case(act(kind, half), first_version=17)
    yield corner.case(act(ActionKind.KILL, half), first_version=17, servers=2)


def _deaths(corner: Corner) -> Iterator[Case]:
    """End a server while requests are on it: of four, some are on either of two servers."""
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(31 + i, *PROMPT), max_tokens=corner.budget)
        for i in range(4)
    )
    for server in ("s0", "s1"):
        kill = act(ActionKind.KILL, corner.budget // 2, server=server)
        yield corner.case(kill, requests=requests, servers=2)
    # Whichever server has r0 is gone for good, and others live: one of four is not the only one of
    # its role where prefill and decode have servers of their own.
    for_good = act(ActionKind.KILL, corner.budget // 2, steps=0)
    # a stack that calls it again every second, for ever, makes a trace that takes long to judge
    yield corner.case(for_good, requests=requests[:2], servers=4, deadline=1_000.0)


def _wide_logprobs(corner: Corner) -> Iterator[Case]:
    if corner.contract.logprobs is Logprobs.NONE:
        return
    model = replace(corner.model, wide_logprobs=True)
    # a budget of one token cannot hold both
    deep = corner.seed_where(model, lambda _, logprobs: min(logprobs) < -32)
    zero = corner.seed_where(model, lambda _, logprobs: 0.0 in logprobs)
    both = corner.seed_where(model, lambda _, logprobs: 0.0 in logprobs and min(logprobs) < -32)
    half = corner.budget // 2
    schedules = ((), (act(ActionKind.ABORT, half),), (act(ActionKind.SYNC, half),))
    for seed in (deep, zero) if both is None else (both,):
        if seed is not None:
            for actions in schedules:
                yield corner.case(*actions, model=model, seed=seed)


def _end_token_inside(corner: Corner) -> Iterator[Case]:
    """Let the end-of-sequence token, which is the padding token too, occur inside a sample."""
    end = corner.contract.pad_id or 0
    model = replace(corner.model, eos_id=end, eos_every=2, vocab=vocab_with(corner.model, end))
    for prompt in ((11, end, 12), (end, 11), (11, end)):
        seed = corner.seed_where(
            model, lambda tokens, _: end in tokens and len(tokens) in (2, 3), prompt
        )
        if seed is None:
            seed = corner.seed
        for actions in ((), (act(ActionKind.ABORT, 1),)):
            yield corner.case(*actions, prompt=prompt, model=model, seed=seed)
    if not corner.contract.multi_turn:
        return
    seed = corner.seed_where(model, lambda tokens, _: tokens[-1] == end and len(tokens) <= 3)
    if seed is not None:
        for answers in (ANSWERS, ((201, end, 202), (end,))):
            for actions in ((), (act(ActionKind.ABORT, 2),)):
                yield corner.case(*actions, budget=16, turns=answers, model=model, seed=seed)


def _many_requests(corner: Corner) -> Iterator[Case]:
    requests = tuple(
        Request(
            request_id=f"r{i}",
            prompt_ids=(100 + i, *PROMPT),
            # most are short, which is quick, and some longer than a call under load may be cut to
            max_tokens=min(corner.budget, 6 if i % 16 == 3 else 3),
        )
        for i in range(_MANY_REQUESTS)
    )
    yield corner.case(
        act(ActionKind.ABORT, 1, "r7"),
        # late, so that calls that began under load have ended by themselves
        act(ActionKind.SYNC, 2, "r60"),
        requests=requests,
        servers=2,
    )


def _many_aborts(corner: Corner) -> Iterator[Case]:
    places = sorted(i % corner.budget for i in range(_MANY_ABORTS))
    if not corner.aborts_end:
        yield corner.case(*(act(ActionKind.ABORT, place) for place in places))
        # in a row, all but the first before the next token: only tries without a token count then
        for place in (0, corner.budget // 2):
            yield corner.case(*(act(ActionKind.ABORT, place) for _ in range(_EMPTY_ABORTS)))
    # a bound on staleness may well end a request that outlives so many updates
    if corner.contract.max_staleness is None and not (
        corner.aborts_end and corner.mode is PauseMode.ABORT
    ):
        yield corner.case(*(act(ActionKind.SYNC, place) for place in places))


def _unlabelled_updates(corner: Corner) -> Iterator[Case]:
    """Update twice without a label, with a request after both: nothing but the weights differs."""
    if corner.contract.max_staleness is not None:
        return
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(31 + i, *PROMPT), max_tokens=corner.budget)
        for i in range(3)
    )
    yield corner.case(
        act(ActionKind.SYNC_UNLABELLED, 1, "r0"),
        act(ActionKind.SYNC_UNLABELLED, 1, "r1"),
        requests=requests,
        arrivals=(0.0, 30.0, 60.0),
    )


def _updates_in_a_row(corner: Corner) -> Iterator[Case]:
    """Let the cache of each version have a prefix that a call under the next one has, too."""
    shared = (11, 12, 13, 14)
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(*shared, 15 + i), max_tokens=corner.budget)
        for i in range(4)
    )
    # the second update finds no call running: its servers have a cache all the same
    yield corner.case(
        *(
            act(ActionKind.SYNC, tokens, request.request_id)
            for tokens, request in zip((1, corner.budget, 1), requests, strict=False)
        ),
        requests=requests,
        arrivals=(0.0, 30.0, 60.0, 90.0),
        engine=EngineOptions(prefix_cache=True),
    )


def _long_samples(corner: Corner) -> Iterator[Case]:
    """Sample more than a block of the KV cache, or a default of a server, holds: from a long
    prompt, and without a stated budget, where the model ends by itself.
    """
    half = act(ActionKind.ABORT, _LONG // 2)
    actions = (half, act(ActionKind.SYNC, _LONG - 5))
    yield corner.case(*actions, prompt=some_tokens(_LONG + 10), budget=_LONG)
    model = replace(corner.model, eos_every=_LONG)
    # where a model ends follows from the seed alone, so one is searched that fits
    for seed in range(corner.seed, corner.seed + 1000):
        turn = until_end(CodedPolicy.from_model(model, seed), PROMPT, _LONG)
        if turn is not None and len(turn) > _LONG // 2 + 5:
            request = Request(request_id="r0", prompt_ids=PROMPT)
            aborts = () if corner.aborts_end else (half,)
            yield corner.case(*aborts, requests=(request,), model=model, seed=seed)
            return


def _slow_updates(corner: Corner) -> Iterator[Case]:
    """Transfers of several steps, and pauses that take effect some steps after they are requested,
    so that a call is admitted between a reset of the cache and the pause.
    """
    half = corner.budget // 2
    arriving = (
        Request(request_id="r0", prompt_ids=PROMPT, max_tokens=corner.budget),
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
        yield corner.case(act(kind, half), **during)
    # r1 is admitted between a reset of the cache and the pause, and r2 has its prefix
    shared = (11, 12, 13, 14)
    requests = (
        arriving[1],
        Request(request_id="r0", prompt_ids=(*shared, 15), max_tokens=corner.budget),
        Request(request_id="r2", prompt_ids=(*shared, 16), max_tokens=corner.budget),
    )
    for transfer in (1, 4):
        yield corner.case(
            act(ActionKind.SYNC, half, "r1"),
            requests=requests,
            arrivals=(0.0, half + 0.5, 60.0),
            engine=EngineOptions(prefix_cache=True, pause_steps=3, transfer_steps=transfer),
        )


def _balancing(corner: Corner) -> Iterator[Case]:
    """A replica leaves the balancer and joins again; one keeps older weights than the others."""
    half = corner.budget // 2
    later = Request(request_id="r1", prompt_ids=(31, 32, 33), max_tokens=corner.budget)
    both = (
        Request(request_id="r0", prompt_ids=PROMPT, max_tokens=corner.budget),
        later,
    )
    pair: dict[str, Any] = {"requests": both, "arrivals": (0.0, 15.0), "servers": 2}
    leaves = act(ActionKind.LEAVE, half, server="s0", steps=30)
    yield corner.case(leaves, act(ActionKind.ABORT, half), **pair)
    yield corner.case(replace(leaves, steps=2), act(ActionKind.ABORT, corner.budget - 1), **pair)
    yield corner.case(leaves, act(ActionKind.SYNC, half), **pair)
    # weights that a stack did not ask for may exceed the staleness that it bounds
    if corner.contract.max_staleness is not None:
        return
    lags = act(ActionKind.LAG, 1, server="s1")
    yield corner.case(lags, **pair)
    yield corner.case(lags, leaves, act(ActionKind.ABORT, half), **pair)
    yield corner.case(lags, act(ActionKind.KILL, half, server="s0", steps=40), **pair)
    yield corner.case(lags, leaves, act(ActionKind.SYNC, 1, "r1"), **pair)
    # Wherever r0 runs, its server has newer weights than the one that it moves to. A stack that
    # takes the next server after each abort has left it by then, and is there again in between.
    aborts = (act(ActionKind.ABORT, tokens) for tokens in (half, half + 2))
    moves = replace(leaves, server=None), *aborts
    yield corner.case(act(ActionKind.SKEW, 1), *moves, **pair)


def _missed_update(corner: Corner) -> Iterator[Case]:
    """A server is down during an update, comes back with older weights, and is there at the next
    update and at the calls after it.
    """
    # a server that is back has older weights than a bound on staleness may allow
    if corner.contract.max_staleness is not None or corner.aborts_end:
        return
    # Which server a stack calls may depend on the prompt and on what came before.
    arrivals = (0.0, 30.0, 60.0, 61.0, 62.0, 63.0)
    requests = tuple(
        Request(
            request_id=f"r{i}", prompt_ids=(31 + i, *some_tokens(1 + i)), max_tokens=corner.budget
        )
        for i in range(len(arrivals))
    )
    yield corner.case(
        act(ActionKind.KILL, 1, server="s0", steps=12),
        act(ActionKind.SYNC, 1),
        act(ActionKind.SYNC, 1, "r1"),
        requests=requests,
        arrivals=arrivals,
        servers=2,
    )


def _preempted_aborts(corner: Corner) -> Iterator[Case]:
    """Preempt a call that has sampled, and abort it while it waits again, next to complete replies:
    SGLang then answers without routes.
    """
    half = corner.budget // 2
    if corner.aborts_end or half < 2:
        return
    preempted = act(ActionKind.EVICT, half), act(ActionKind.ABORT, half)
    yield corner.case(act(ActionKind.ABORT, 1), *preempted)


def _gaps(corner: Corner) -> Iterator[Case]:
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
            yield corner.case(act(kind, 1))
        if not corner.aborts_end and corner.budget >= 3:
            yield corner.case(act(kind, 1), act(ActionKind.ABORT, 2), act(ActionKind.ABORT, 3))
        if not corner.aborts_end and corner.budget >= 3 and not needs_later:
            yield corner.case(act(ActionKind.ABORT, 1), act(kind, 2))
            yield corner.case(act(kind, 1), act(ActionKind.SYNC, 2))
        if corner.contract.multi_turn and not (needs_later and corner.limits.turns == 1):
            model = replace(corner.model, eos_every=1)
            yield corner.case(act(kind, 0), budget=12, turns=ANSWERS, model=model)


def _empty_text(corner: Corner) -> Iterator[Case]:
    engine = EngineOptions(empty_text=True)
    yield corner.case(engine=engine)
    yield corner.case(act(ActionKind.ABORT, corner.budget // 2), engine=engine)


def _sampling(corner: Corner) -> Iterator[Case]:
    """Requests with every parameter that changes the distribution, and with others each."""
    half = corner.budget // 2
    requests = tuple(
        Request(
            request_id=f"r{i}",
            prompt_ids=(31 + i, *PROMPT),
            max_tokens=corner.budget,
            sampling=dict(parameters),
        )
        for i, parameters in enumerate(_PARAMETERS)
    )
    yield corner.case(requests=requests)
    yield corner.case(
        *(act(ActionKind.ABORT, half, request.request_id) for request in requests),
        requests=requests,
        servers=2,
    )


def _groups(corner: Corner) -> Iterator[Case]:
    """Samples of one prompt that are requested together, as callers do for group advantages."""
    half = corner.budget // 2
    for size in _GROUPS:
        requests = tuple(
            Request(
                request_id=f"r{i}",
                prompt_ids=PROMPT,
                max_tokens=corner.budget,
                sampling={"temperature": 0.7},
                group="g0",
            )
            for i in range(size)
        )
        last = requests[-1].request_id
        for actions in (
            (),
            (act(ActionKind.ABORT, half, last),),
            (act(ActionKind.ABORT_HANDLE, half, last),),
            (act(ActionKind.SYNC, half),),
        ):
            yield corner.case(*actions, requests=requests, servers=1 + size % 2)


_FAMILIES: Mapping[str, Family] = {
    "a later first version": _later_start,
    "deaths": _deaths,
    "wide logprobs": _wide_logprobs,
    "end token inside": _end_token_inside,
    "many requests": _many_requests,
    "many aborts": _many_aborts,
    "unlabelled updates": _unlabelled_updates,
    "updates in a row": _updates_in_a_row,
    "slow updates": _slow_updates,
    "balancing": _balancing,
    "missed update": _missed_update,
    "preempted aborts": _preempted_aborts,
    "replies with gaps": _gaps,
    "cut turns": cut_turns,
    "long turns": long_turns,
    "empty text": _empty_text,
    "declared limits": declared_limits,
    "sampling parameters": _sampling,
    "groups": _groups,
    "own stops": own_stops,
    "long samples": _long_samples,
    "adapter updates": adapter_updates,
    "delta updates": delta_updates,
}
