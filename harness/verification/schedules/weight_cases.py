"""Cases for stacks whose weight updates bring something else than all weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rollproof.core.case import Action, ActionKind, Case, EngineOptions
from rollproof.core.contract import Adapters, Contract
from rollproof.core.records import Request
from rollproof.verification.schedules.corner import PROMPT, Corner, act

__all__ = ["adapter_updates", "delta_updates", "fitting_kind", "with_fitting_updates"]

_ADAPTERS: Mapping[ActionKind, ActionKind] = {
    ActionKind.SKEW: ActionKind.SYNC_MERGED,
    ActionKind.LAG: ActionKind.EVICT_ADAPTERS,
    ActionKind.RELABEL: ActionKind.EVICT_ADAPTERS,
}
"""What happens in place of weights and labels that rollproof itself would bring to a server: it
does not know by what names a stack calls its adapters.
"""


def with_fitting_updates(case: Case, contract: Contract) -> Case:
    """Return the case with updates that a stack with that contract can run."""
    if contract.adapters is None:
        return case
    return replace(case, actions=tuple(_fitting(action, contract) for action in case.actions))


def fitting_kind(kind: ActionKind, contract: Contract) -> ActionKind:
    """Return the kind of action that takes the place of ``kind`` for a stack with that contract."""
    if contract.adapters is None:
        return kind
    kind = _ADAPTERS.get(kind, kind)
    if kind is ActionKind.SYNC_MERGED and contract.adapters is not Adapters.MOVING_BASE:
        return ActionKind.EVICT_ADAPTERS
    return kind


def _fitting(action: Action, contract: Contract) -> Action:
    kind = fitting_kind(action.do, contract)
    return action if kind is action.do else replace(action, do=kind)


def adapter_updates(corner: Corner) -> Iterator[Case]:
    """Serve requests by the first adapter and by the next, after an eviction, and after a merge;
    with a shared prefix, of which a cache may have KV of the adapter before.
    """
    adapters = corner.contract.adapters
    if adapters is None:
        return
    shared = (*PROMPT, 13, 14)
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(*shared, 15 + i), max_tokens=corner.budget)
        for i in range(4)
    )
    changes = [
        (ActionKind.SYNC, ActionKind.SYNC, ActionKind.SYNC),
        (ActionKind.SYNC, ActionKind.EVICT_ADAPTERS, ActionKind.SYNC),
        (ActionKind.SYNC, ActionKind.SYNC_FAILS, ActionKind.EVICT_ADAPTERS),
    ]
    if adapters is Adapters.MOVING_BASE:
        changes += [
            (ActionKind.SYNC, ActionKind.SYNC_MERGED, ActionKind.SYNC),
            (ActionKind.SYNC_MERGED, ActionKind.SYNC, ActionKind.SYNC_MERGED),
        ]
    for kinds in changes:
        actions = [
            act(kind, 1, request.request_id) for kind, request in zip(kinds, requests, strict=False)
        ]
        for servers, cache in ((1, True), (2, False)):
            yield corner.case(
                *actions,
                requests=requests,
                arrivals=(0.0, 60.0, 120.0, 180.0),
                engine=EngineOptions(prefix_cache=cache),
                servers=servers,
            )
    # calls in flight at an update, and at the one after it
    yield corner.case(
        act(ActionKind.SYNC, 1), act(ActionKind.SYNC, corner.budget // 2), requests=requests[:2]
    )


def delta_updates(corner: Corner) -> Iterator[Case]:
    """Let deltas follow one another, break in the middle, and meet a server that has other weights
    than they were made from.
    """
    # weights that a stack did not ask for may exceed the staleness that it bounds
    if corner.contract.deltas is None or corner.contract.max_staleness is not None:
        return
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(31 + i, *PROMPT), max_tokens=corner.budget)
        for i in range(5)
    )
    for kind in (ActionKind.SYNC, ActionKind.SYNC_FAILS, ActionKind.SKEW, ActionKind.KILL):
        server = "s0" if kind in (ActionKind.SKEW, ActionKind.KILL) else None
        for servers in (1, 2):
            yield corner.case(
                act(ActionKind.SYNC, 1),
                act(kind, 1, "r1", server=server),
                act(ActionKind.SYNC, 1, "r2"),
                act(ActionKind.SYNC_FAILS, 1, "r3"),
                requests=requests,
                arrivals=(0.0, 60.0, 120.0, 180.0, 260.0),
                servers=servers,
            )
