"""The check on the environment's words: calls and sample carry them, complete and in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollproof.core.limits import AnswerCut, RolloutLimits
from rollproof.invariants._shared.answered_turns import expect_answers
from rollproof.invariants._shared.delivery import Delivery, reliable_delivery
from rollproof.invariants._shared.phrases import count, share, window
from rollproof.invariants.stitch.token_faults import contains
from rollproof.judging.checks import Collector, Scope, request_check
from rollproof.judging.stitching import Answer

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = ["stitch_environment_tokens"]

_NO_LIMITS = RolloutLimits()
_UNRECORDED = (
    "calls carry tokens around the environment's words of which the trace does not say what they"
    " are: record what the stack adds as an Observation, or declare answer_template=True"
)
_CUT = (
    "the environment's words are cut, as by a limit: declare it as limits={'answer': tokens,"
    " 'answer_keeps': 'start'}"
)


@request_check(
    "stitch.environment-tokens",
    promise=(
        "Between the turns of a multi-turn response are the environment's tokens, complete"
        " and in order, as the engines were sent them."
    ),
    needs="a multi-turn request, its engine calls and a delivered sample",
    exercised_by=("turns of the environment", "answers cut as declared"),
    scope=Scope.ONLY_SAMPLE,
)
def stitch_environment_tokens(view: RequestView, out: Collector) -> None:
    """Compare what the request declares, what its calls sent, and what the sample holds."""
    expect_answers(view, out)
    delivered = reliable_delivery(view, out)
    if delivered is None:
        return
    limits = view.contract.limits or _NO_LIMITS
    answers = delivered.reference.answers
    for number, (words, answer) in enumerate(zip(view.request.turns, answers, strict=False)):
        expected = limits.cut_answer(words)
        if answer.ids == expected:
            out.exercised("turns of the environment")
            out.exercised("answers cut as declared", int(len(expected) < len(words)))
            continue
        undecided = _undecided(view, answer, words)
        if undecided is None:
            _changed_answer(view, number, answer, words, out)
            return
        if undecided:
            out.absent(undecided)
        else:
            out.exercised("turns of the environment")
    if delivered.answers is None:
        # The requests of a recording declare no turns; there only calls and sample are compared.
        if delivered.aligned and not view.request.turns:
            out.exercised("turns of the environment", len(answers))
        return
    _changed_in_sample(view, delivered, delivered.answers, out)


def _undecided(view: RequestView, answer: Answer, words: tuple[int, ...]) -> str | None:
    """Judge an answer that was not sent as it is expected.

    Returns:
        ``None`` for a fault, an empty text if it is right, or why that cannot be told.
    """
    template, limits = view.contract.answer_template, view.contract.limits
    expected = (limits or _NO_LIMITS).cut_answer(words)
    if len(expected) < len(words) and contains(answer.ids, words):
        return None
    if contains(answer.ids, expected):
        if _repeated(view, answer, expected):
            return None
        # What a stack records as said, it takes responsibility for: a chat template, a separator.
        if answer.recorded or template:
            return ""
        return _UNRECORDED if template is None else None
    if answer.recorded and limits is not None and _marked_cut(limits, words, answer.ids):
        return ""
    if expected[: len(answer.ids)] == answer.ids and _no_room(view, answer, expected):
        return ""
    if limits is None and _may_be_capped(view, answer):
        return _CUT
    return None


def _marked_cut(limits: RolloutLimits, words: tuple[int, ...], ids: tuple[int, ...]) -> bool:
    """Return whether ``ids`` are both ends of an answer that was cut, with a mark between them."""
    if limits.answer is None or limits.answer_keeps is not AnswerCut.BOTH:
        return False
    head = limits.answer // 2
    tail = limits.answer - head
    return len(words) > limits.answer and any(
        ids[i : i + head] == words[:head] and contains(ids[i + head :], words[-tail:])
        for i in range(len(ids))
    )


def _repeated(
    view: RequestView, answer: Answer, expected: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the part of the conversation that an answer repeats around the expected words."""
    at = (
        next(i for i in range(len(answer.ids)) if answer.ids[i : i + len(expected)] == expected)
        if expected
        else 0
    )
    around = (answer.ids[:at], answer.ids[at + len(expected) :])
    for part in _said_before(view, answer):
        # One token proves nothing: it may be a separator.
        if len(part) > 1 and any(contains(side, part) for side in around):
            return part
    return None


def _said_before(view: RequestView, answer: Answer) -> Iterator[tuple[int, ...]]:
    """Yield the parts of the conversation before an answer: the prompt, then each turn."""
    yield view.request.prompt_ids
    begin, ids = 0, view.stitched.response_ids
    for earlier in view.stitched.answers:
        yield ids[begin : earlier.start]
        if earlier.start >= answer.start:
            return
        yield earlier.ids
        begin = earlier.end


def _no_room(view: RequestView, answer: Answer, expected: tuple[int, ...]) -> bool:
    """Return whether the complete answer would have left no room for another token, or no call sent
    any of it.
    """
    limits, prompt = view.contract.limits or _NO_LIMITS, len(view.request.prompt_ids)
    total = None if limits.total is None else limits.total - prompt
    # Stacks with a response length of their own grant it to the first call.
    first = view.attempts[0].call.max_tokens
    bounds = [*view.request.bounds, limits.response, total, first]
    sent = answer.end < len(view.stitched.response_ids)
    return not sent or any(
        bound is not None and answer.start + len(expected) >= bound for bound in bounds
    )


def _may_be_capped(view: RequestView, answer: Answer) -> bool:
    """Return whether one limit explains the lengths of all answers of the request."""
    cap = len(answer.ids)
    pairs = list(zip(view.request.turns, view.stitched.answers, strict=False))
    return cap > 0 and any(
        all(limits.cut_answer(said) == other.ids for said, other in pairs)
        for limits in (RolloutLimits(answer=cap, answer_keeps=side) for side in AnswerCut)
    )


def _changed_answer(
    view: RequestView, number: int, answer: Answer, words: tuple[int, ...], out: Collector
) -> None:
    limits = view.contract.limits or _NO_LIMITS
    expected, actual = limits.cut_answer(words), answer.ids
    position = _first_difference(expected, actual)
    repeated = _repeated(view, answer, expected) if contains(actual, expected) else None
    side = _other_side(limits, words, actual)
    if repeated:
        title = (
            f"Turn {number} of the environment repeats {count(len(repeated), 'token')} said before"
        )
        kind = "a turn of the environment repeats what was said before"
        hint = (
            "The conversation was appended to itself: only the new words may follow what was"
            " delivered (open-instruct #1233)."
        )
    elif len(expected) < len(words) and contains(actual, words):
        title = f"Turn {number} of the environment is longer than the declared limit"
        kind = "an answer is longer than the declared limit"
        hint = (
            f"The contract says limits.answer={limits.answer}: the limit is not applied, or not to"
            " this kind of answer."
        )
    elif side is not None:
        title = f"Turn {number} of the environment keeps another part than declared"
        kind = "an answer was cut on the wrong side"
        hint = (
            f"The contract says answer_keeps={str(limits.answer_keeps)!r}, and the stack kept"
            f" {str(side)!r}: the policy sees another part of the tool's answer than its author"
            " configured."
        )
    elif contains(actual, expected):
        extra = len(actual) - len(expected)
        title = f"Turn {number} of the environment has {count(extra, 'token')} around its words"
        kind = "tokens around a turn of the environment"
        hint = "Record what the stack adds as an Observation, or declare answer_template=True."
    elif _is_subsequence(actual, expected):
        missing = len(expected) - len(actual)
        title = (
            f"{share(missing, len(expected), 'token')} of turn {number} of the environment"
            f" {'is' if missing == 1 else 'are'} missing"
        )
        kind = "tokens of the environment are missing"
        hint = (
            "The policy answered less than the environment said: a separator was left out where"
            " two turns join (verl #6921), or an answer was cut by a limit that the contract does"
            " not declare (limits)."
        )
    elif actual in view.request.turns:
        other = view.request.turns.index(actual)
        title = f"Turn {number} of the environment is answered by that of turn {other}"
        kind = "an answer of another turn"
        hint = (
            "The answers are counted by something else than the turns that the model ended, such"
            " as calls: an aborted call, a retry or an empty reply is no turn."
        )
    else:
        title = f"Turn {number} of the environment was changed"
        kind = "a turn of the environment was changed"
        hint = (
            "Tool output was retokenised, cut in the middle, or taken from another"
            " request; the policy answered other tokens than the environment sent."
        )
    out.finding(
        title,
        kind=kind,
        expected=f"{count(len(expected), 'token')}: {window(expected, position)}",
        observed=f"{count(len(actual), 'token')}: {window(actual, position)}",
        where=view.place(index=answer.start),
        hint=hint,
    )


def _other_side(
    limits: RolloutLimits, words: tuple[int, ...], actual: tuple[int, ...]
) -> AnswerCut | None:
    """Return which other part than the declared one was kept of an answer that was cut."""
    return next(
        (
            side
            for side in AnswerCut
            if side is not limits.answer_keeps
            and actual == replace(limits, answer_keeps=side).cut_answer(words)
        ),
        None,
    )


def _changed_in_sample(
    view: RequestView,
    delivered: Delivery,
    places: Sequence[tuple[int, int]],
    out: Collector,
) -> None:
    response = delivered.rollout.response_ids
    for number, (answer, (start, end)) in enumerate(
        zip(delivered.reference.answers, places, strict=True)
    ):
        held = response[start:end]
        if held == answer.ids:
            continue
        position = _first_difference(answer.ids, held)
        lost = _is_subsequence(held, answer.ids)
        out.finding(
            (
                f"The sample lacks {share(len(answer.ids) - len(held), len(answer.ids), 'token')}"
                f" of turn {number} of the environment"
                if lost
                else f"The sample holds turn {number} of the environment in another form"
            ),
            kind=(
                "the sample lacks tokens of the environment"
                if lost
                else "the sample holds other tokens of the environment"
            ),
            expected=(
                f"the {count(len(answer.ids), 'token')} that the engine was sent:"
                f" {window(answer.ids, position)}"
            ),
            observed=f"{count(len(held), 'token')}: {window(held, position)}",
            where=view.place(index=start),
            hint=(
                "The next turn was sampled after tokens that the trainer does not see, so that"
                " logprobs and routes are of another context: append the same ids to the call and"
                " to the sample."
            ),
        )
        return


def _is_subsequence(part: Sequence[int], whole: Sequence[int]) -> bool:
    rest = iter(whole)
    return len(part) < len(whole) and all(token in rest for token in part)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
