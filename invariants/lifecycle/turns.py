"""Checks on conversations: every turn that ended is answered, and no turn that an abort cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.limits import RolloutLimits
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.answered_turns import expect_answers
from rollproof.invariants._shared.delivery import existing_delivery, reliable_delivery
from rollproof.invariants._shared.end_tokens import ends_with_eos
from rollproof.invariants._shared.phrases import call_id, count, share
from rollproof.judging.checks import Collector, Scope, request_check

if TYPE_CHECKING:
    from rollproof.invariants._shared.delivery import Delivery
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.stitching import Answer

__all__ = ["lifecycle_cut_turns_not_answered", "lifecycle_ended_turns_answered"]

NO_TURNS = "the contract declares no turns of the environment (multi_turn)"
_AMPLE = 64
"""Tokens that are room enough for every chat template."""
_UNFINISHED = (FinishReason.ABORT, FinishReason.ERROR)


@request_check(
    "lifecycle.cut-turns-not-answered",
    promise=(
        "The environment answers only turns that an engine ended: a turn that an abort cut off is"
        " resumed, dropped, surfaced as aborted or masked out, and one that was cut at"
        " limits.turn_tokens is the last one, unless the contract says answers_cut_turns=True."
    ),
    needs="a multi-turn request, its engine calls and a delivered sample",
    exercised_by=("answers of the environment", "cut turns that are masked out"),
    scope=Scope.ONLY_SAMPLE,
)
def lifecycle_cut_turns_not_answered(view: RequestView, out: Collector) -> None:
    """Look for an answer to a turn whose last reply was an abort, or that reached its limit."""
    expect_answers(view, out)
    delivered = existing_delivery(view, out)
    if delivered is None:
        return
    begin = 0
    for number, answer in enumerate(delivered.reference.answers):
        out.exercised("answers of the environment")
        size = answer.start - begin
        limited = _at_its_limit(view, answer, size)
        if limited or _was_cut(view, answer):
            trained = _trained(delivered, begin, answer.start)
            surfaced = delivered.rollout.finish_reason in _UNFINISHED
            # a fragment that is masked out, or says that it is one, teaches nothing wrong
            if trained and not surfaced:
                if limited:
                    _answered_at_the_limit(view, number, answer, size, out)
                else:
                    _answered_cut_turn(view, number, answer, trained, size, out)
                return
            if answer.start > begin and not trained:
                out.exercised("cut turns that are masked out")
        begin = answer.end


def _was_cut(view: RequestView, answer: Answer) -> bool:
    if answer.finish is not FinishReason.ABORT or answer.attempt is None:
        return False
    attempt = view.attempts[answer.attempt]
    reply, grant = attempt.consumed, attempt.call.max_tokens
    # An abort on the last token of a grant cut nothing off, nor one after the end of sequence. A
    # stack that stops a call itself has seen what it waited for, such as a complete tool call.
    used_up = reply is not None and grant is not None and len(reply.output.token_ids) >= grant
    return not (used_up or ends_with_eos(view, attempt) or attempt.stopped_by_stack)


def _at_its_limit(view: RequestView, answer: Answer, size: int) -> bool:
    """Return whether a turn of ``size`` tokens was cut at the declared limit of a turn, which the
    contract does not let the environment answer.
    """
    limits = view.contract.limits
    if limits is None or limits.turn_tokens is None or limits.answers_cut_turns:
        return False
    if answer.finish is not FinishReason.LENGTH or answer.attempt is None:
        return False
    return size >= limits.turn_tokens and not ends_with_eos(view, view.attempts[answer.attempt])


def _trained(delivered: Delivery, begin: int, end: int) -> int:
    """Return how many of the reference's tokens from ``begin`` to ``end`` the sample trains on."""
    mask = delivered.rollout.loss_mask
    # stitch.mask-shape reports such a mask, whose places mean nothing
    if mask is not None and len(mask) != len(delivered.rollout.response_ids):
        return 0
    return sum(
        mask is None or bool(mask[start + i])
        for run, start in delivered.placed()
        if run.attempt >= 0 and begin <= run.start < end
        for i in range(len(run.ids))
    )


def _answered_cut_turn(
    view: RequestView, number: int, answer: Answer, trained: int, size: int, out: Collector
) -> None:
    assert answer.attempt is not None
    attempt = view.attempts[answer.attempt]
    rollout = view.rollout
    assert rollout is not None
    out.finding(
        f"The environment answered turn {number}, which an abort had cut off",
        kind="the environment answered a turn that an abort had cut off",
        expected=(
            f"call {attempt.call.call_id} ended by abort: its turn is resumed before the"
            " environment speaks, or the sample is dropped, surfaced as aborted, or without this"
            " turn in the loss"
        ),
        observed=(
            f"{count(len(answer.ids), 'token')} of the environment follow,"
            f" {share(trained, size, 'token')} of the cut turn have loss mask 1, and the sample"
            f" ends by {rollout.finish_reason!s}"
        ),
        where=view.place(
            call=attempt.call.call_id, server=attempt.call.server_id, index=answer.start
        ),
        hint=(
            "A fragment is parsed, answered and trained on as if the policy had ended its turn:"
            " read the finish reason of every call, not only of the last one."
        ),
    )


def _answered_at_the_limit(
    view: RequestView, number: int, answer: Answer, size: int, out: Collector
) -> None:
    assert answer.attempt is not None
    assert view.contract.limits is not None
    attempt = view.attempts[answer.attempt]
    out.finding(
        f"The environment answered turn {number}, which was cut at its limit",
        kind="the environment answered a turn that was cut at its limit",
        expected=(
            f"the turn of {count(size, 'token')} is the last one: limits.turn_tokens="
            f"{view.contract.limits.turn_tokens}, answers_cut_turns=False"
        ),
        observed=(
            f"call {attempt.call.call_id} ended by length, and"
            f" {count(len(answer.ids), 'token')} of the environment follow"
        ),
        where=view.place(
            call=attempt.call.call_id, server=attempt.call.server_id, index=answer.start
        ),
        hint=(
            "A fragment is parsed and answered as if the policy had ended its turn: end the rollout"
            " when a turn ends by length. If the environment answers such turns on purpose, declare"
            " limits={'answers_cut_turns': True}."
        ),
    )


@request_check(
    "lifecycle.ended-turns-answered",
    promise=(
        "A multi-turn rollout goes on after a natural end, as long as the environment has an answer"
        " and the budget has room for it and one more token."
    ),
    needs="a request that declares its turns, its engine calls and a delivered sample",
    exercised_by=("conversations to the last turn", "conversations that the budget ended"),
    scope=Scope.ONLY_SAMPLE,
)
def lifecycle_ended_turns_answered(view: RequestView, out: Collector) -> None:
    """Look for a sample that ends naturally while the environment still has answers."""
    if not view.contract.multi_turn:
        out.inapplicable(NO_TURNS)
        return
    turns = view.request.turns
    if not turns:
        return
    delivered = reliable_delivery(view, out)
    if delivered is None:
        return
    reference, rollout = delivered.reference, delivered.rollout
    limits = view.contract.limits or RolloutLimits()
    # a limit counts turns of the model, and the environment speaks only between them
    most = len(turns) if limits.turns is None else min(limits.turns - 1, len(turns))
    answered = len(reference.answers)
    if answered >= most:
        out.exercised("conversations to the last turn")
        return
    last = reference.last
    # A reason other than a natural end is judged by the checks of finish reasons, and a call
    # that was never answered may have been the next turn's.
    if (
        not reference.ended
        or last is None
        or rollout.finish_reason not in (FinishReason.STOP, FinishReason.COMPLETED, None)
        or any(attempt.consumed is None for attempt in view.attempts[last:])
    ):
        return
    words = turns[answered]
    room, around = _room(view, delivered), _around(view, limits, words)
    if room is not None and room <= len(limits.cut_answer(words)) + (around or 0):
        out.exercised("conversations that the budget ended")
        return
    # What a template would take is not known before an answer shows it.
    if room is not None and around is None and room <= len(words) + _AMPLE:
        return
    turn = [run for run in reference.runs if run.start >= _turn_start(delivered)]
    resumed = len([run for run in turn if run.attempt >= 0 and run.ids]) > 1
    call = call_id(view, last)
    out.finding(
        f"The rollout ended after {count(answered + 1, 'turn')} of the model, although the"
        " environment had an answer",
        kind="a rollout ended although the environment had an answer",
        expected=(
            f"{count(len(limits.cut_answer(words)), 'token')} of the environment after call {call},"
            " then another turn:"
            f" {count(len(turns) - answered, 'answer')} left"
            + (", no budget" if room is None else f", {count(room, 'token')} of the budget left")
        ),
        observed=(
            f"a sample of {count(len(rollout.response_ids), 'token')}, finish reason"
            f" {rollout.finish_reason!s}"
        ),
        where=view.place(call=call, index=len(rollout.response_ids)),
        hint=(
            "The turn had been resumed: a parser that reads only what the last call returned finds"
            " no tool call in it (cf. vLLM #46079). Parse the text of the complete turn."
            if resumed
            else "A tool call that is lost looks like a final answer (vLLM #46079). If the stack"
            " limits the number of turns, declare limits={'turns': most}."
        ),
    )


def _room(view: RequestView, delivered: Delivery) -> int | None:
    """Return how many tokens are left by the narrowest reading of the budget: of all turns
    together, with the environment's tokens, under what the first call was granted, and of what the
    last call was. ``None`` without any limit.
    """
    used = max(len(delivered.rollout.response_ids), len(delivered.reference.response_ids))
    limits, prompt = view.contract.limits or RolloutLimits(), len(view.request.prompt_ids)
    total = None if limits.total is None else limits.total - prompt
    first = view.attempts[0].call.max_tokens if limits.turn_tokens is None else None
    bounds = [*view.request.bounds, limits.response, total, first]
    rooms = [bound - used for bound in bounds if bound is not None]
    last = view.attempts[delivered.reference.last or 0]
    # a grant that is the limit of a turn says nothing of the next one
    granted = last.call.max_tokens
    if granted is not None and last.consumed is not None and limits.turn_tokens is None:
        rooms.append(granted - len(last.consumed.output.token_ids))
    return min(rooms, default=None)


def _around(view: RequestView, limits: RolloutLimits, words: tuple[int, ...]) -> int | None:
    """Return how many tokens the stack puts around ``words``, ``None`` if earlier answers do not
    show it: there was none, they differ in it, or none was cut as these words will be.
    """
    if view.contract.answer_template is False:
        return 0
    pairs = list(zip(view.request.turns, view.stitched.answers, strict=False))
    sizes = {len(answer.ids) - len(limits.cut_answer(said)) for said, answer in pairs}
    cut = {limits.cut_answer(said) != said for said, _ in pairs}
    if len(sizes) != 1 or (limits.cut_answer(words) != words) not in cut:
        return None
    around = sizes.pop()
    return around if around >= 0 else None


def _turn_start(delivered: Delivery) -> int:
    answers = delivered.reference.answers
    return answers[-1].end if answers else 0
