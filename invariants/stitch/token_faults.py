"""Token faults: puts into words how a response differs from what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.core.records import Scalar
from rollproof.invariants._shared.phrases import count, segment_name, share, window
from rollproof.judging.partial_replies import streamed

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.stitching import Step

__all__ = ["TokenFault", "contains", "describe_token_fault"]


@dataclass(frozen=True, slots=True)
class TokenFault:
    """The parts of a finding about tokens."""

    title: str
    kind: str
    expected: str
    observed: str
    where: Mapping[str, Scalar]
    hint: str


def describe_token_fault(view: RequestView, got: Sequence[int]) -> TokenFault:
    """How ``got`` differs from the reference's response: lost, added, doubled, foreign, reordered
    or replaced tokens.
    """
    want = view.stitched.response_ids
    got = tuple(got)
    at = _common_prefix(want, got)
    tail = _common_prefix(want[at:][::-1], got[at:][::-1])
    gone, come = want[at : len(want) - tail], got[at : len(got) - tail]
    attempt = _attempt_at(view, at)
    segment = segment_name(view, attempt) if attempt is not None else "the end"
    again = _kept_from_before(view, got)
    if again is not None:
        kind = "tokens from before a restart"
        title = f"The response is not what was sampled since call {again.attempt} started again"
        hint = (
            f"Call {again.attempt} sent {count(again.sent, 'token')} of {again.known}, so what"
            " followed was sampled without the rest: tokens from before it do not belong to the"
            " sample any more. Resume with them, or drop them."
        )
    elif not come:
        whole = _whole_segment(view, at, len(gone))
        kind = "sampled tokens are missing"
        title = (
            f"{share(len(gone), len(want), 'sampled token')} {'is' if len(gone) == 1 else 'are'}"
            " missing from the response"
        )
        hint = (
            f"All that {segment} sampled is gone: a resume must append each reply, also the last"
            " one and those of aborted calls."
            if whole
            else (
                f"The loss begins in {segment}; aborted calls return tokens too, and each reply"
                " must be appended in full."
            )
        )
    elif not gone:
        title, kind, hint = _added(view, want, at, come, segment)
    elif sorted(gone) == sorted(come):
        kind = "tokens stand in another order"
        title = (
            f"{share(len(gone), len(want), 'token')} stand in another order than they were sampled"
        )
        hint = (
            "Replies must be appended in the order of their calls, also where one arrives late or"
            " twice."
        )
    else:
        kind = "tokens that the engines did not sample"
        title = (
            f"{share(len(come), len(got), 'token')} of the response"
            f" {'is' if len(come) == 1 else 'are'} not what the engines sampled"
        )
        hint = (
            _origin(view, come)
            or f"The difference begins in {segment}; ids must be kept as sampled, never taken from decoded text."
        )
    return TokenFault(
        title=title,
        kind=kind,
        expected=f"{count(len(want), 'token')} as sampled: {window(want, at)}",
        observed=(
            f"{count(len(got), 'token')}: {window(got, at)}; the first difference is at response"
            f" index {at}"
        ),
        where=view.place(index=at, segment=view.segment_of(len(view.request.prompt_ids) + at)),
        hint=hint,
    )


def _kept_from_before(view: RequestView, got: tuple[int, ...]) -> Step | None:
    """The call that started again, where the response still holds what was sampled before it."""
    kept = {run.attempt for run in view.stitched.runs}
    for step in view.stitched.steps:
        for attempt in view.attempts[: step.attempt] if step.restarts else ():
            reply = attempt.consumed
            if (
                reply is not None
                and reply.output.token_ids
                and attempt.number not in kept
                and contains(got, reply.output.token_ids)
            ):
                return step
    return None


def _added(
    view: RequestView, want: tuple[int, ...], at: int, come: tuple[int, ...], segment: str
) -> tuple[str, str, str]:
    size = len(come)
    again = come in (want[max(0, at - size) : at], want[at : at + size]) or (
        size > 1 and contains(want, come)
    )
    if again:
        return (
            (
                f"The response repeats {count(size, 'token')} that {'was' if size == 1 else 'were'}"
                " sampled once"
            ),
            "tokens are repeated",
            (
                f"A reply was appended twice near {segment}: a duplicate delivery, or partial"
                " output that was kept and also returned again."
            ),
        )
    prompt = view.request.prompt_ids
    if come == prompt or (size > 1 and prompt[-size:] == come):
        return (
            f"The response holds {share(size, len(prompt), 'token')} of the prompt",
            "tokens of the prompt",
            (
                "Response and prompt were parted at the wrong place: cut at the prompt's length;"
                " `ids[-n:]` is the whole list where n is 0."
            ),
        )
    title = (
        f"The response holds {count(size, 'token')} that no engine call of this request returned"
    )
    hint = (
        _origin(view, come)
        or "An end-of-sequence or padding token that the stack adds itself must be masked out (loss mask 0)."
    )
    return title, "tokens that no call returned", hint


def _origin(view: RequestView, tokens: tuple[int, ...]) -> str:
    """Whose tokens these are, where another request of the run sampled them."""
    for other in view.neighbours:
        if contains(other.stitched.response_ids, tokens) and len(tokens) > 1:
            return (
                f"Request {other.request.request_id} sampled these tokens: the replies of two"
                " requests were mixed up."
            )
    for attempt in view.attempts:
        for reply in attempt.replies:
            if not reply.delivered and len(tokens) > 1 and contains(reply.output.token_ids, tokens):
                if streamed(attempt):
                    return (
                        "They are what a stream had brought before it broke, and the call after"
                        f" call {attempt.number} was made without."
                    )
                return (
                    f"They are in the reply to call {attempt.number} that was lost on its way: the"
                    " stack cannot have them from there."
                )
    return ""


def _attempt_at(view: RequestView, index: int) -> int | None:
    for run in view.stitched.runs:
        if run.start <= index < run.end:
            return run.attempt
    return None


def _whole_segment(view: RequestView, at: int, size: int) -> bool:
    return any(run.start == at and run.end == at + size for run in view.stitched.runs)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def contains(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Whether the tokens ``part`` stand in ``whole`` in one piece."""
    size = len(part)
    first = part[0] if part else None
    return any(
        whole[i] == first and whole[i : i + size] == part for i in range(len(whole) - size + 1)
    )
