"""Corner cases of conversations: turns that are cut, and turns of very different lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rollproof.core.case import ActionKind, Case
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.verification.schedules.corner import ANSWERS, PROMPT, Corner, act, until_end

__all__ = ["cut_turns", "long_turns"]

_LONG_TURN = 64
"""The tokens of a turn that only its budget ends."""


def cut_turns(corner: Corner) -> Iterator[Case]:
    """Cut the first turn at the budget, and the second one, while answers are left; end the last
    one where the budget ends. Abort the first one where room is left for an answer, and later ones
    before their first token.
    """
    if not corner.contract.multi_turn:
        return
    yield corner.case(act(ActionKind.ABORT, 2), budget=12, turns=ANSWERS)
    for actions in ((), (act(ActionKind.ABORT, 1),)):
        yield corner.case(*actions, budget=3, turns=ANSWERS)
    # every turn is one token, and one more is the budget after the first answer
    ending = replace(corner.model, eos_every=1)
    for budget in (3, 4, 5):
        yield corner.case(budget=budget, turns=ANSWERS, model=ending)
    # the last turn ends by itself on the last token of the budget, and no answer is left
    yield corner.case(budget=4, turns=ANSWERS[:1], model=ending)
    # before the second turn and before the last one, also twice
    for places in ((1,), (1, 1), (2, 2)):
        empty = (act(ActionKind.ABORT, place, queued=True) for place in places)
        yield corner.case(*empty, budget=12, turns=ANSWERS, model=ending)


def long_turns(corner: Corner) -> Iterator[Case]:
    """Let the second turn be much longer than the first one, so that only its budget ends it."""
    if not corner.contract.multi_turn or not corner.limits.allow_answers:
        return
    model = replace(corner.model, eos_every=_LONG_TURN // 2)
    answer = ANSWERS[0]
    # where a model ends its turns follows from the seed alone, so one is searched that fits
    for seed in range(corner.seed, corner.seed + 1000):
        policy = CodedPolicy.from_model(model, seed)
        first = until_end(policy, PROMPT, 3)
        if first is None:
            continue
        if until_end(policy, (*PROMPT, *first, *answer), _LONG_TURN) is None:
            budget = len(first) + len(answer) + _LONG_TURN
            yield corner.case(budget=budget, turns=(answer,), model=model, seed=seed)
            return
