"""Describes how a response differs from what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.core.records import FinishReason, Scalar
from rollproof.invariants._shared.phrases import call_id, count, segment_name, share, window
from rollproof.invariants.stitch.stop_faults import describe_stop_fault
from rollproof.judging.partial_replies import streamed

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.stitching import Step

__all__ = ["TokenFault", "contains", "describe_token_fault"]


_ENDED = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.COMPLETED)


@dataclass(frozen=True, slots=True)
class TokenFault:
    """The parts of a finding about tokens."""

    title: str
    kind: str
    expected: str
    observed: str
    where: Mapping[str, Scalar]
    hint: str


def describe_token_fault(view: RequestView, response: Sequence[int]) -> TokenFault:
    """Return how the response differs from the reference: lost, added, doubled, foreign, reordered
    or replaced tokens.
    """
    sampled = view.stitched.response_ids
    response = tuple(response)
    start = _common_prefix(sampled, response)
    # Common prefix and suffix leave the smallest part that differs, which names the fault best.
    tail = _common_prefix(sampled[start:][::-1], response[start:][::-1])
    missing, extra = sampled[start : len(sampled) - tail], response[start : len(response) - tail]
    attempt = _attempt_at(view, start)
    segment = segment_name(view, attempt) if attempt is not None else "the end"
    # Checked first: after a restart everything else would look like added or doubled tokens.
    restart = _restart_before(view, response)
    if restart is not None:
        kind, call = "tokens from before a restart", call_id(view, restart.attempt)
        title = f"The response is not what was sampled since call {call} started again"
        hint = (
            f"Call {call} sent {count(restart.sent, 'token')} of {restart.delivered},"
            " so the tokens after it were sampled without the rest, and tokens from before it"
            " no longer belong to the sample. Resume with them, or drop them."
        )
    elif own := describe_stop_fault(view, response, start):
        kind, title, hint = own.kind, own.title, own.hint
    elif stops := _stripped_stops(view, response):
        kind = "sampled tokens are missing"
        title = (
            f"{share(stops, len(sampled), 'sampled token')}"
            f" {'is' if stops == 1 else 'are'} missing from the response"
        )
        hint = (
            "Stop tokens were stripped, with which the policy ended its turns: text is decoded"
            " without them, and the ids of a sample keep them."
        )
    elif not extra:
        segment_lost = _is_segment(view, start, len(missing))
        kind = "sampled tokens are missing"
        title = (
            f"{share(len(missing), len(sampled), 'sampled token')}"
            f" {'is' if len(missing) == 1 else 'are'} missing from the response"
        )
        hint = (
            f"All that {segment} sampled is gone: a resume must append each reply, also the last"
            " one and those of aborted calls."
            if segment_lost
            else f"The loss begins in {segment}{_cut_end(view, start, len(missing))}"
        )
    elif not missing:
        title, kind, hint = _added(view, sampled, start, extra, segment)
    # the same tokens elsewhere: replies overtook each other, and no text was tokenized anew
    elif sorted(missing) == sorted(extra):
        kind = "tokens are in another order"
        title = (
            f"{share(len(missing), len(sampled), 'token')} are in another order than they"
            " were sampled"
        )
        hint = "Append replies in the order of their calls, even if one arrives late or twice."
    else:
        kind = "tokens that the engines did not sample"
        title = (
            f"{share(len(extra), len(response), 'token')} of the response"
            f" {'is' if len(extra) == 1 else 'are'} not what the engines sampled"
        )
        hint = _origin(view, extra) or (
            f"The difference begins in {segment}; use the sampled ids, never ids from decoded text."
        )
    return TokenFault(
        title=title,
        kind=kind,
        expected=f"{count(len(sampled), 'token')} as sampled: {window(sampled, start)}",
        observed=(
            f"{count(len(response), 'token')}: {window(response, start)}; the first difference"
            f" is at response index {start}"
        ),
        where=view.place(
            index=start, segment=view.segment_of(len(view.request.prompt_ids) + start)
        ),
        hint=hint,
    )


def _stripped_stops(view: RequestView, response: tuple[int, ...]) -> int:
    """Return how many stop tokens the response lacks, if it lacks the last token of every turn that
    ended naturally, or of every one but the last turn, and nothing else.
    """
    runs = view.stitched.runs
    stops = {
        run.end - 1
        for run in runs
        if run.reply is not None
        and run.reply.output.finish_reason is FinishReason.STOP
        and run.ids == run.reply.output.token_ids
        and run.ids
    }
    sampled = view.stitched.response_ids
    for lost in (stops, stops - {len(sampled) - 1}):
        if lost and response == tuple(token for i, token in enumerate(sampled) if i not in lost):
            return len(lost)
    return 0


def _restart_before(view: RequestView, response: tuple[int, ...]) -> Step | None:
    """Return the call that started again, if the response still holds what was sampled before
    it.
    """
    sources = {run.attempt for run in view.stitched.runs}
    for step in view.stitched.steps:
        for attempt in view.attempts[: step.attempt] if step.restarts else ():
            reply = attempt.consumed
            if (
                reply is not None
                and reply.output.token_ids
                and attempt.number not in sources
                and contains(response, reply.output.token_ids)
            ):
                return step
    return None


def _added(
    view: RequestView, sampled: tuple[int, ...], start: int, extra: tuple[int, ...], segment: str
) -> tuple[str, str, str]:
    size = len(extra)
    # What comes next cannot be repeated before it: it would be common to both.
    if sampled[:start][-size:] == extra or (size > 1 and contains(sampled, extra)):
        return (
            (
                f"The response repeats {count(size, 'token')} that {'was' if size == 1 else 'were'}"
                " sampled once"
            ),
            "tokens are repeated",
            (
                f"A reply was appended twice near {segment}: a duplicate delivery, or partial"
                " output that was kept and then returned again."
            ),
        )
    prompt = view.request.prompt_ids
    # `ids[-n:]` with n = 0 is the entire list, so an empty response becomes the prompt.
    if extra == prompt or (size > 1 and prompt[-size:] == extra):
        return (
            f"The response holds {share(size, len(prompt), 'token')} of the prompt",
            "tokens of the prompt",
            (
                "Response and prompt were split at the wrong position: cut at the prompt's"
                " length; `ids[-n:]` is the entire list if n is 0."
            ),
        )
    title = (
        f"The response holds {count(size, 'token')} that no engine call of this request returned"
    )
    hint = _origin(view, extra) or (
        "An end-of-sequence token that the stack adds itself must be masked out (loss mask 0)."
        if start == len(sampled) and _is_end(view, extra)
        else "A response holds only what calls of its request returned, and what the environment"
        " said. What a stack adds itself goes to the end, masked out (loss mask 0)."
    )
    return title, "tokens that no call returned", hint


def _is_end(view: RequestView, tokens: tuple[int, ...]) -> bool:
    """Return whether ``tokens`` are one end of sequence; where that is not known, one token."""
    eos = getattr(view.oracle, "eos_id", None)
    return len(tokens) == 1 and eos in (None, *tokens)


def _origin(view: RequestView, tokens: tuple[int, ...]) -> str:
    """Return which other request or lost reply these tokens come from."""
    for other in view.neighbours:
        # a single token is shared by chance too often to blame another request for it
        long_enough = len(tokens) > 1 and contains(other.stitched.response_ids, tokens)
        if long_enough or _is_sample_of(view, other):
            return (
                f"Request {other.request.request_id} sampled these tokens: the replies of two"
                " requests were mixed up."
            )
    for attempt in view.attempts:
        for reply in attempt.replies:
            if not reply.delivered and len(tokens) > 1 and contains(reply.output.token_ids, tokens):
                if streamed(attempt):
                    return (
                        "A stream delivered them before it broke, and the call after call"
                        f" {attempt.call.call_id} was made without them."
                    )
                return (
                    f"They are in the reply to call {attempt.call.call_id} that was lost on its"
                    " way: the stack cannot have received them."
                )
    return ""


def _cut_end(view: RequestView, start: int, size: int) -> str:
    """Return what the lost tokens are: the end of a reply, or others of it."""
    for run in view.stitched.runs:
        if not (run.start < start and start + size == run.end) or run.reply is None:
            continue
        # the end of a stream that broke was lost on its way
        complete = view.attempts[run.attempt].partial is None
        if complete and run.reply.output.finish_reason in _ENDED:
            return (
                f": the end of the reply to call {call_id(view, run.attempt)} was cut off. The"
                " engine sampled it, and ended there: let max_tokens cut a turn, not the stack, or"
                " declare the stop sequences at which it cuts (own_stops)."
            )
    return "; aborted calls return tokens too, and each reply must be appended in full."


def _is_sample_of(view: RequestView, other: RequestView) -> bool:
    """Return whether the sample is that of another request, to the last bit of its logprobs: a
    token alone may be equal by chance.
    """
    rollout, stitched = view.rollout, other.stitched
    return (
        rollout is not None
        and rollout.logprobs is not None
        and bool(rollout.response_ids)
        and rollout.response_ids == stitched.response_ids
        and rollout.logprobs.tolist() == stitched.logprob_list
    )


def _attempt_at(view: RequestView, index: int) -> int | None:
    for run in view.stitched.runs:
        if run.start <= index < run.end:
            return run.attempt
    return None


def _is_segment(view: RequestView, start: int, size: int) -> bool:
    return any(run.start == start and run.end == start + size for run in view.stitched.runs)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def contains(sequence: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Return whether ``part`` is a contiguous part of ``sequence``."""
    size = len(part)
    first = part[0] if part else None
    return any(
        sequence[i] == first and sequence[i : i + size] == part
        for i in range(len(sequence) - size + 1)
    )
