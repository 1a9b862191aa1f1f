"""Cases around the limits that a contract declares, and cases that are fitted to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, pairwise

from rollproof.core.case import ActionKind, Case
from rollproof.core.contract import Contract
from rollproof.core.records import Request
from rollproof.verification.schedules.corner import ANSWERS, PROMPT, Corner, act, some_tokens

__all__ = ["declared_limits", "within_limits"]

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


def within_limits(case: Case, contract: Contract) -> Case:
    """Return the case with the limits that the contract declares, its prompts cut so that each
    leaves room for a token. Requests that could then not be told apart from an earlier one by their
    prompts are left out, with their actions.
    """
    limits = contract.limits
    if limits is None or (limits.response is None and limits.total is None):
        return case
    prompts = _cut_prompts(case, limits.total)
    requests = [
        replace(
            request,
            prompt_ids=prompts[request.prompt_ids],
            limit=min(
                (bound for bound in (request.limit, limits.response) if bound is not None),
                default=None,
            ),
            max_length=limits.total,
        )
        for request in case.requests
        if request.prompt_ids in prompts
    ]
    names = {request.request_id for request in requests}
    return replace(
        case,
        requests=tuple(requests),
        arrivals=tuple(
            time
            for request, time in zip(case.requests, case.arrivals, strict=False)
            if request.request_id in names
        ),
        actions=tuple(action for action in case.actions if action.when.request in names),
        engine=replace(case.engine, max_length=limits.context or case.engine.max_length),
    )


def _cut_prompts(case: Case, total: int | None) -> Mapping[tuple[int, ...], tuple[int, ...]]:
    """Return each prompt of the case with what is left of it if it and one token are at most
    ``total``: their beginnings, or their ends if those differ and the beginnings do not. If neither
    differ, prompts whose beginnings do not are missing.
    """
    prompts = tuple(dict.fromkeys(request.prompt_ids for request in case.requests))
    if total is None or max(map(len, prompts)) < total:
        return {prompt: prompt for prompt in prompts}
    for kept in (slice(total - 1), slice(1 - total, None)):
        cut = {prompt: prompt[kept] for prompt in prompts}
        left = sorted(cut.values())
        # in order, a prompt is right before one that continues it
        if not any(right[: len(one)] == one for one, right in pairwise(left)):
            return cut
    distinct: dict[tuple[int, ...], tuple[int, ...]] = {}
    for prompt in prompts:
        beginning = prompt[: total - 1]
        if not any(_one_begins_the_other(beginning, other) for other in distinct.values()):
            distinct[prompt] = beginning
    return distinct


def _one_begins_the_other(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    common = min(len(first), len(second))
    return first[:common] == second[:common]


def declared_limits(corner: Corner) -> Iterator[Case]:
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


def _response_limit(corner: Corner) -> Iterator[Case]:
    limits, response = corner.limits, corner.limits.response
    if response is None:
        return
    sampled = min(response, limits.turn_tokens or response)
    if sampled == response <= _LONG_RUN:
        for budget in _around(response):
            yield corner.case(budget=budget)
        request = Request(request_id="r0", prompt_ids=PROMPT)
        yield corner.case(requests=(request,))
        if response <= _SMALL:
            yield corner.case(act(ActionKind.ABORT, response // 2), requests=(request,))
    if response > _LONG_TEXT:
        return
    # every turn is one token, and the answers bring the last turn to the limit
    model = replace(corner.model, eos_every=1)
    for size in _around(response):
        answers = _answers(corner, size)
        if answers:
            yield corner.case(budget=response + 4, turns=(*answers, (203,)), model=model)


def _answers(corner: Corner, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the answers after which a response of turns of one token has ``size`` tokens with its
    last turn; empty if the limits allow none.
    """
    limits = corner.limits
    most = min((limits.turns or _SMALL) - 1, _SMALL) if corner.contract.multi_turn else 0
    for count in range(1, most + 1):
        tokens = size - count - 1
        if count <= tokens <= count * (limits.answer or tokens):
            share, rest = divmod(tokens, count)
            return tuple(some_tokens(share + (i < rest)) for i in range(count))
    return ()


def _total_limit(corner: Corner) -> Iterator[Case]:
    limits, total = corner.limits, corner.limits.total
    if total is None or total > _LONG_TEXT:
        return
    room = max(1, min(3, total - 1, limits.response or 3, limits.turn_tokens or 3))
    prompt = some_tokens(total - room)
    for budget in _around(room):
        yield corner.case(prompt=prompt, budget=budget)
    unbounded = Request(request_id="r0", prompt_ids=prompt)
    yield corner.case(requests=(unbounded,))
    yield corner.case(act(ActionKind.ABORT, 1), requests=(unbounded,))
    yield corner.case(prompt=some_tokens(total - 1), budget=2)
    model = replace(corner.model, eos_every=1)
    if corner.contract.multi_turn and limits.allow_answers and total <= len(PROMPT) + 3:
        # the shortest conversation fits behind the shortest prompt only
        yield corner.case(prompt=PROMPT[:1], budget=3, turns=((203,),), model=model)
    if corner.contract.partial_off is not None and limits.allow_fragments:
        # with a small total, a part of a turn fits behind the shortest prompt only
        abort = act(ActionKind.ABORT, 1)
        yield corner.case(abort, prompt=PROMPT[:1], budget=2, partial=False)
    for size in _around(total - len(PROMPT)):
        answers = _answers(corner, size)
        if answers and size <= (limits.response or size):
            yield corner.case(budget=total, turns=(*answers, (203,)), model=model)


def _turn_limit(corner: Corner) -> Iterator[Case]:
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
            act(ActionKind.ABORT, 1), budget=2 * turns + 4, turns=answers, model=model
        )


def _turn_tokens_limit(corner: Corner) -> Iterator[Case]:
    size = corner.limits.turn_tokens
    if size is None or size > _LONG_RUN:
        return
    for budget in _around(size):
        yield corner.case(budget=budget)
    if corner.contract.multi_turn:
        for actions in ((), (act(ActionKind.ABORT, 1),)):
            yield corner.case(*actions, budget=3 * size + 3, turns=ANSWERS)


def _answer_limit(corner: Corner) -> Iterator[Case]:
    answer = corner.limits.answer
    if answer is None or answer > _LONG_TEXT or not corner.contract.multi_turn:
        return
    model = replace(corner.model, eos_every=1)
    for size in (*_around(answer), 2 * answer + 1):
        yield corner.case(budget=answer + 8, turns=(some_tokens(size), (203,)), model=model)
