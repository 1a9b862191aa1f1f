"""Shrinking: make a failing case small enough to be read and mailed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from rollproof.core.case import Action, Case, EngineOptions, Model
from rollproof.core.records import Request
from rollproof.errors import RollproofError

__all__ = ["shrink"]


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 150) -> Case:
    """Return the smallest case that still fails, reached from ``case`` by single simplifications.

    Greedy and deterministic: simplifications are tried in the order of how much they remove, and
    the search restarts after each one that still fails. At most ``tries`` cases are run. A case
    that cannot be built or run does not count as failing.
    """
    best = case
    seen = {repr(case)}
    progress = True
    while progress and tries > 0:
        progress = False
        for smaller in _simpler(best):
            if repr(smaller) in seen:
                continue
            seen.add(repr(smaller))
            tries -= 1
            if _still_fails(fails, smaller):
                best = smaller
                progress = True
                break
            if tries <= 0:
                break
    return best


def _still_fails(fails: Callable[[Case], bool], case: Case) -> bool:
    try:
        return fails(case)
    except RollproofError:
        return False


def _simpler(case: Case) -> Iterator[Case]:
    yield from _fewer_requests(case)
    for i in range(len(case.actions)):
        yield replace(case, actions=case.actions[:i] + case.actions[i + 1 :])
    yield from _plainer_fleet(case)
    for i, request in enumerate(case.requests):
        for smaller in _smaller_requests(request):
            yield from _rebuilt(
                case, requests=(*case.requests[:i], smaller, *case.requests[i + 1 :])
            )
    for i, action in enumerate(case.actions):
        for plainer in _plainer_actions(action):
            yield replace(case, actions=(*case.actions[:i], plainer, *case.actions[i + 1 :]))


def _rebuilt(case: Case, **changes: object) -> Iterator[Case]:
    """Yield the case with changes if it is still valid."""
    # two requests that come to share a prompt, say, cannot be told apart: Case refuses them
    try:
        yield replace(case, **changes)  # type: ignore[arg-type]
    except RollproofError:
        return


def _fewer_requests(case: Case) -> Iterator[Case]:
    if len(case.requests) == 1:
        return
    for i, removed in enumerate(case.requests):
        yield replace(
            case,
            requests=case.requests[:i] + case.requests[i + 1 :],
            arrivals=case.arrivals[:i] + case.arrivals[i + 1 :],
            actions=tuple(
                action for action in case.actions if action.when.request != removed.request_id
            ),
        )


def _plainer_fleet(case: Case) -> Iterator[Case]:
    if case.servers > 1 and not any(action.server not in (None, "s0") for action in case.actions):
        yield replace(case, servers=1)
    if any(case.arrivals):
        yield replace(case, arrivals=())
    if case.engine != EngineOptions():
        yield replace(case, engine=EngineOptions())
        for option in fields(EngineOptions):
            if option.name != "step":
                yield replace(
                    case,
                    engine=replace(
                        case.engine, **{option.name: getattr(EngineOptions(), option.name)}
                    ),
                )
    if case.model != Model():
        yield replace(case, model=Model())
        yield replace(case, model=replace(case.model, wide_logprobs=False))
    if case.first_version:
        yield replace(case, first_version=0)


def _smaller_requests(request: Request) -> Iterator[Request]:
    if request.turns:
        yield replace(request, turns=request.turns[:-1])
    if request.media is not None:
        yield replace(request, media=None)
    if request.sampling:
        yield replace(request, sampling={})
    for size in {len(request.prompt_ids) // 2, len(request.prompt_ids) - 1} - {
        0,
        len(request.prompt_ids),
    }:
        yield replace(request, prompt_ids=request.prompt_ids[:size])
    if request.max_tokens is not None:
        for budget in sorted({request.max_tokens // 2, request.max_tokens - 1} - {0}):
            yield replace(request, max_tokens=budget)


def _plainer_actions(action: Action) -> Iterator[Action]:
    when = action.when
    if when.race:
        yield replace(action, when=replace(when, race=False))
    if when.queued:
        yield replace(action, when=replace(when, queued=False))
    for tokens in sorted({0, 1, when.tokens // 2, when.tokens - 1} - {when.tokens, -1}):
        if tokens < when.tokens:
            yield replace(action, when=replace(when, tokens=tokens))
