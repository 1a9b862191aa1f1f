"""Corner cases of stop sequences at which a stack cuts replies itself."""

from __future__ import annotations

from collections.abc import Iterator

from rollproof.core.case import ActionKind, Case
from rollproof.core.own_stops import OwnStops
from rollproof.verification.schedules.corner import ANSWERS, Corner, act, with_stop

__all__ = ["own_stops"]


def own_stops(corner: Corner) -> Iterator[Case]:
    """Let each declared sequence be sampled: early in a reply, at its end, or not; with aborts
    within it, right after it and later, and with answers of the environment after it.
    """
    stops = corner.contract.own_stops
    if stops is None:
        return
    # each is tried at every place, and a contract may list many that are cut alike
    for sequence in stops.sequences[:4]:
        yield from _cases(corner, sequence)


def _cases(corner: Corner, sequence: tuple[int, ...]) -> Iterator[Case]:
    model, size = with_stop(corner.model, sequence), len(sequence)
    stops, budget = OwnStops(sequences=(sequence,)), corner.budget

    def ends_at(*places: int) -> int | None:
        """Return a seed with which the first such sequence ends at one of these places."""

        def fits(tokens: tuple[int, ...], _: tuple[float, ...]) -> bool:
            found = stops.first_in((), tokens)
            return found is not None and found[0] in places

        return corner.seed_where(model, fits)

    early = ends_at(*range(size, budget - 1))
    if early is not None:
        yield corner.case(model=model, seed=early)
        for place in range(1, budget):
            for kind in (ActionKind.ABORT, ActionKind.SYNC):
                yield corner.case(act(kind, place), model=model, seed=early)
        if corner.contract.multi_turn:
            for actions in ((), (act(ActionKind.ABORT, size),)):
                yield corner.case(*actions, budget=16, turns=ANSWERS, model=model, seed=early)
    last = ends_at(budget)
    if last is not None:
        yield corner.case(model=model, seed=last)
        yield corner.case(act(ActionKind.ABORT, budget - 1), model=model, seed=last)
