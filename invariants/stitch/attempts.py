"""Checks on calls: what each attempt sends, and when no further one may be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rollproof.core.contract import Contract, Provenance, ResumeBy, Sampling
from rollproof.core.records import FinishReason, Scalar
from rollproof.invariants._shared.phrases import call_id, call_name, count, listing, share, window
from rollproof.judging.checks import Collector, request_check
from rollproof.judging.partial_replies import streamed
from rollproof.judging.stitching import Step, stitch

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = [
    "not_resumed",
    "stitch_media",
    "stitch_no_call_after_end",
    "stitch_resume_prompt",
    "stitch_sampling_forwarded",
    "stitch_sampling_params",
]

_FREE_PARAMETERS = frozenset(
    {
        *(
            "max_tokens",
            "max_new_tokens",
            "max_completion_tokens",
            "min_tokens",
            "min_new_tokens",
            "seed",
            "sampling_seed",
        ),
        *(
            "rid",
            "request_id",
            "priority",
            "cache_salt",
            "extra_key",
            "kv_transfer_params",
            "stream",
        ),
        *("routed_experts_start_len", "routed_experts_prompt_start"),
    }
)
"""Parameters that may differ from attempt to attempt: budgets shrink; seeds and labels belong to
one call.
"""
_COMMON_PARAMETERS: Mapping[str, tuple[Scalar, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "ignore_eos": (False,),
}
"""Parameters with one meaning in every stack and engine, so that a call's can be compared with the
request's; with the values that change nothing, which a stack may leave out.
"""

_GREEDY = 0.01
"""The temperature below which vLLM warns, and takes its own minimum (``_MAX_TEMP``)."""


def not_resumed(contract: Contract) -> str:
    """Return why checks of resumed calls do not apply when no client resumes."""
    return f"no client continues an aborted call (resume={str(contract.resume)!r})"


@request_check(
    "stitch.resume-prompt",
    promise=(
        "Every call sends the prompt and all tokens delivered so far; a call may start again only"
        " after a lost or failed one."
    ),
    needs="the engine calls of a request",
    exercised_by=("first calls", "resuming calls", "restarts", "calls of a later turn"),
)
def stitch_resume_prompt(view: RequestView, out: Collector) -> None:
    """Judge how each call continues what the stack knew when it made it."""
    if not view.attempts:
        out.absent("no engine call of the request was recorded")
        return
    client = view.contract.resume is ResumeBy.CLIENT
    attempts = view.attempts
    # Steps compare what a call sent with what had been delivered before it was made, not with the
    # final response.
    for step in view.stitched.steps:
        if step.continues:
            out.exercised(
                "first calls"
                if step.attempt == 0
                else "calls of a later turn"
                if step.turn
                else "resuming calls"
            )
        # Reported once, by the check whose name says it.
        elif step.after_end:
            continue  # stitch.no-call-after-end reports it
        elif _unrecorded_stream(view, step):
            out.absent("a stream broke, and the trace does not say which tokens it had delivered")
            return
        elif (
            step.restarts
            and step.sent >= len(view.request.prompt_ids)
            and (not client or _may_restart(view, step))
        ):
            out.exercised("restarts")
        else:
            _wrong_prompt(view, step, attempts[step.attempt], out)
            return


def _may_restart(view: RequestView, step: Step) -> bool:
    """Return whether the previous call got no usable answer, so that the stack may have had to
    start again.
    """
    if step.attempt == 0:
        return False
    reply = view.attempts[step.attempt - 1].consumed
    # The reply came after the stack had made its next call, so that it could not use it.
    late = reply is not None and reply.index > view.attempts[step.attempt].call.index
    # A timeout, a lost reply and an engine error leave the client without the tokens: starting over
    # is right then.
    return reply is None or late or reply.output.finish_reason is FinishReason.ERROR


def _unrecorded_stream(view: RequestView, step: Step) -> bool:
    """Return whether the previous call was streamed and the trace does not say what it sampled."""
    before = view.attempts[step.attempt - 1] if step.attempt else None
    return (
        before is not None
        and step.agree == step.delivered < step.sent
        and streamed(before)
        and not before.replies
    )


def _wrong_prompt(view: RequestView, step: Step, attempt: Attempt, out: Collector) -> None:
    base = len(view.request.prompt_ids)
    known_ids = (view.request.prompt_ids + _delivered_response(view, step))[: step.delivered]
    sent = attempt.call.prompt_ids
    delivered = step.delivered - base
    call = attempt.call.call_id
    if step.attempt == 0:
        kind = title = "The first call does not send the request's prompt"
        hint = (
            "A prompt that was cut, padded or retokenised on its way is not the one that the"
            " trainer will see."
        )
    elif step.restarts and step.sent >= base:
        lost = step.delivered - step.sent
        kind = "a call throws away delivered tokens"
        title = f"Call {call} throws away {share(lost, delivered, 'token')} delivered before it"
        hint = (
            "An abort returns what was sampled so far; a resume that does not append it to the"
            " prompt samples those tokens again, under other weights, and pays for them twice."
        )
    elif step.agree == step.delivered:
        kind = "a call sends more than what was delivered"
        title = (
            f"Call {call} sends {count(step.sent - step.delivered, 'token')} more than the"
            " prompt and what was delivered"
        )
        hint = _extra_hint(view, sent, known_ids, step)
    elif step.ended:
        kind = "a turn begins with a changed history"
        title = (
            f"Call {call} begins a turn on a history that differs from what was delivered,"
            f" from position {step.agree} on"
        )
        hint = _history_hint(view, sent, known_ids)
    else:
        kind = "a call resumes from another sequence"
        title = (
            f"Call {call} resumes from a sequence that differs from what was delivered,"
            f" from position {step.agree} on"
        )
        hint = (
            "Every later token is sampled after a context that the sample does not show; "
            "ids must be appended as delivered, never retokenised."
        )
    out.finding(
        title,
        kind=kind,
        expected=(
            f"prompt ({base}) + delivered response ({delivered}) = {step.delivered} tokens:"
            f" {window(known_ids, step.agree)}"
        ),
        observed=(
            f"{count(step.sent, 'token')} sent: {window(sent, step.agree)}; the first {step.agree}"
            " agree"
        ),
        where=view.place(call=call, position=step.agree, server=attempt.call.server_id),
        hint=hint,
    )


def _extra_hint(
    view: RequestView, sent: Sequence[int], known_ids: Sequence[int], step: Step
) -> str:
    extra = tuple(sent[step.delivered :])
    if extra in view.request.turns and extra == tuple(known_ids[-len(extra) :]):
        return (
            "The environment's answer was appended again: a call that returned no tokens, or was"
            " lost, begins no new turn. Append an answer once, when the turn before it has ended."
        )
    if extra and tuple(known_ids[-len(extra) :]) == extra:
        return (
            "The last delivered tokens were appended twice, as when a reply is added both inside"
            " and outside the resume loop."
        )
    return (
        "The rest is sampled after tokens that no engine sampled; tokens of a tool or user"
        " may only follow a natural end."
    )


def _history_hint(view: RequestView, sent: Sequence[int], known_ids: Sequence[int]) -> str:
    """Return what became of the history of a turn, as far as the call shows it."""
    sent, known_ids = tuple(sent), tuple(known_ids)
    prompt = view.request.prompt_ids
    for other in view.neighbours:
        theirs = other.request.prompt_ids
        if theirs != prompt and len(theirs) > 1 and sent[: len(theirs)] == theirs:
            return (
                f"It is the history of request {other.request.request_id}: the conversations of two"
                " requests were mixed up."
            )
    # One token alone may agree by chance.
    if any(known_ids[cut:] == sent[: len(known_ids) - cut] for cut in range(1, len(known_ids) - 1)):
        return (
            "Its oldest tokens were cut off, as by a window: end the rollout at the length of the"
            " context, since its response shows a context that the next tokens did not have."
        )
    return (
        "The earlier turns were rendered again by a chat template that drops or respells"
        " tokens, so the next tokens were sampled in a context that the response does not"
        " show. Append the new turn to the ids as delivered."
    )


def _delivered_response(view: RequestView, step: Step) -> tuple[int, ...]:
    """Return what had been delivered when the call was made, as far as the reference goes."""
    ids = view.stitched.response_ids
    expected = step.delivered - len(view.request.prompt_ids)
    if len(ids) >= expected and view.stitched.broken in (None, step.attempt):
        return ids[:expected]
    earlier = [attempt for attempt in view.attempts if attempt.number < step.attempt]
    return stitch(
        view.request.prompt_ids, earlier, view.observations, Provenance.AS_SAMPLED
    ).response_ids


@request_check(
    "stitch.no-call-after-end",
    promise="After an engine ended a turn naturally, no further call is made for that turn.",
    needs="the engine calls and replies of a request",
    exercised_by="natural ends",
)
def stitch_no_call_after_end(view: RequestView, out: Collector) -> None:
    """Look for a call that was made although the turn had ended with ``stop``."""
    reference = view.stitched
    late_steps = [step for step in reference.steps if step.after_end]
    if reference.finish_reason in (FinishReason.STOP, FinishReason.COMPLETED) or late_steps:
        out.exercised("natural ends")
    if not late_steps:
        return
    step = late_steps[0]
    attempt = view.attempts[step.attempt]
    out.finding(
        f"Call {attempt.call.call_id} was made after the rollout had ended",
        kind="a call after the rollout had ended",
        expected=(
            "no further call once an engine returned a natural end (stop); only tokens of the"
            " environment begin a new turn"
        ),
        observed=(
            f"{call_name(attempt)} sends {step.sent} of the {step.delivered} known tokens and"
            " requests more"
        ),
        where=view.place(
            call=attempt.call.call_id, position=step.delivered, server=attempt.call.server_id
        ),
        hint=(
            "Tokens after the end of a sequence are not sampled by the policy; a resume loop"
            " must end on every finish reason except abort."
        ),
    )


@request_check(
    "stitch.sampling-params",
    promise=(
        "Every attempt of a request uses the same sampling parameters, except for the budget."
    ),
    needs="the engine calls of a request",
    exercised_by=("first calls", "resuming calls"),
)
def stitch_sampling_params(view: RequestView, out: Collector) -> None:
    """Compare each call's parameters with the first call's.

    ``stitch.sampling-forwarded`` compares them with the request's.
    """
    if not view.attempts:
        out.absent("no engine call of the request was recorded")
        return
    first = view.attempts[0].call.sampling
    out.exercised("first calls")
    for attempt in view.attempts[1:]:
        out.exercised("resuming calls")
        parameters = attempt.call.sampling
        if parameters == first:
            continue
        # Budgets, seeds and request ids belong to one call.
        changed = {
            k
            for k in {*first, *parameters} - _FREE_PARAMETERS
            if k not in first or k not in parameters or not _equal(first[k], parameters[k])
        }
        if changed:
            names = sorted(changed)
            out.finding(
                f"Call {attempt.call.call_id} changes {count(len(names), 'sampling parameter')}:"
                f" {listing(names)}",
                kind=f"a call changes {listing(names)}",
                expected=f"{_values(first, names)}, as in call {call_id(view, 0)}",
                observed=_values(parameters, names),
                where=view.place(call=attempt.call.call_id, server=attempt.call.server_id),
                hint=(
                    "The rest of the response is sampled from another distribution than its"
                    " start; send the same parameters with every attempt."
                ),
            )
            return


@request_check(
    "stitch.sampling-forwarded",
    promise=(
        "The calls of a request carry the sampling parameters that its caller set"
        " (temperature, top_p, ...)."
    ),
    needs=(
        "a request with sampling parameters, its engine calls, and a contract that declares whether"
        " they are forwarded (sampling)"
    ),
    exercised_by="parameters of callers",
    applies=lambda contract: (
        "the contract declares sampling='own'" if contract.sampling is Sampling.OWN else None
    ),
)
def stitch_sampling_forwarded(view: RequestView, out: Collector) -> None:
    """Look for parameters of the request that no call carries, or none with the caller's value.

    ``stitch.sampling-params`` judges one that only some calls carry, or carry with that value.
    """
    if not view.attempts:
        out.absent("no engine call of the request was recorded")
        return
    requested = view.request.sampling
    common = [name for name in requested if name in _COMMON_PARAMETERS]
    # A stack that only passes its own parameters may differ from the request.
    replaced = [] if view.contract.sampling is Sampling.FORWARDED else _replaced(view)
    # A stack that carries a parameter shows that it forwards, whatever it declares. One that does
    # not may rename or replace it, so only a declaration can be broken.
    carried = [
        name
        for name in common
        if name not in replaced and any(name in attempt.call.sampling for attempt in view.attempts)
    ]
    out.exercised("parameters of callers", len(carried))
    # Greedy sampling has many spellings (temperature 0, top_k 1), so it is not looked for.
    defaults = {"temperature": (*_COMMON_PARAMETERS["temperature"], 0.0)}
    missing = [
        name
        for name in common
        if name not in carried
        and requested[name] not in (None, *defaults.get(name, _COMMON_PARAMETERS[name]))
    ]
    if view.contract.sampling is Sampling.FORWARDED:
        _find_replaced(view, out)
    if not missing:
        return
    values = ", ".join(f"{name}={_parameter(requested, name)}" for name in missing)
    if view.contract.sampling is None:
        out.absent(
            f"the caller gave {values}, and no call carries it: declare sampling='forwarded'"
            " to have that judged, or sampling='own' if the stack chooses its parameters"
            " itself"
        )
        return
    out.finding(
        f"No call carries {count(len(missing), 'sampling parameter')} that the caller gave:"
        f" {listing(missing)}",
        kind=f"no call carries {listing(sorted(missing))}",
        expected=f"{values} on every call (sampling='forwarded')",
        observed=(
            f"{count(len(view.attempts), 'call')} without; the first carries"
            f" {_parameters(view.attempts[0].call.sampling)}"
        ),
        where=view.place(call=call_id(view, 0), server=view.attempts[0].call.server_id),
        hint=(
            "The engine samples with its defaults (vLLM: those of the model's"
            " generation_config.json), and the trainer corrects for parameters that were never"
            " used."
        ),
    )


def _find_replaced(view: RequestView, out: Collector) -> None:
    """Find parameters that no call carries with the value that the caller gave."""
    requested, first = view.request.sampling, view.attempts[0].call.sampling
    names = [
        name
        for name in sorted(_replaced(view))
        if not any(
            name in attempt.call.sampling and _equal(attempt.call.sampling[name], requested[name])
            for attempt in view.attempts
        )
    ]
    if not names:
        return
    out.finding(
        f"No call carries {listing(names)} as the caller gave"
        f" {'it' if len(names) == 1 else 'them'}",
        kind=f"no call carries the caller's {listing(names)}",
        expected=f"{_values(requested, names)} on every call (sampling='forwarded')",
        observed=f"{_values(first, names)} in call {call_id(view, 0)}",
        where=view.place(call=call_id(view, 0), server=view.attempts[0].call.server_id),
        hint=(
            "The stack's own values replace the caller's (defaults that are merged last), so the"
            " trainer corrects for a distribution that was never sampled from. A stack that"
            " chooses its parameters itself declares sampling='own'."
        ),
    )


def _replaced(view: RequestView) -> list[str]:
    """Return the parameters that the first call carries with another value than the caller gave."""
    first = view.attempts[0].call.sampling
    return [
        k
        for k, value in view.request.sampling.items()
        if k in _COMMON_PARAMETERS
        and k in first
        and not _equal(first[k], value)
        # greedy as a rank, or as a temperature that engines take for 0
        and not (k == "temperature" and value == 0 and _is_greedy(first))
    ]


def _is_greedy(parameters: Mapping[str, Scalar]) -> bool:
    temperature = parameters.get("temperature")
    return parameters.get("top_k") == 1 or (
        isinstance(temperature, int | float) and temperature <= _GREEDY
    )


def _values(parameters: Mapping[str, Scalar], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={_parameter(parameters, name)}" for name in names)


def _parameters(parameters: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in parameters.items()) or "none"


def _parameter(parameters: Mapping[str, Scalar], name: str) -> str:
    return repr(parameters[name]) if name in parameters else "(absent)"


def _equal(a: Scalar, b: Scalar) -> bool:
    return a == b


@request_check(
    "stitch.media",
    promise="Every attempt carries the request's images, videos and audio unchanged.",
    needs="a request with media, and its engine calls",
    exercised_by="calls with media",
    applies=lambda contract: (
        None if contract.multimodal else "the contract declares no media (multimodal)"
    ),
)
def stitch_media(view: RequestView, out: Collector) -> None:
    """Compare the media handle of every call with the request's."""
    expected = view.request.media
    for attempt in view.attempts:
        actual = attempt.call.media
        if expected is None and actual is None:
            continue
        out.exercised("calls with media")
        if actual != expected:
            out.finding(
                f"Call {attempt.call.call_id} {'drops' if actual is None else 'changes'} the"
                " request's media",
                kind=f"a call {'drops' if actual is None else 'changes'} the request's media",
                expected=f"media {expected!r} on every attempt",
                observed=f"media {actual!r} on {call_name(attempt)}",
                where=view.place(call=attempt.call.call_id, server=attempt.call.server_id),
                hint=(
                    "Without its images the engine continues another conversation than it"
                    " began (verl #4842, #5160)."
                    # contracts to start from promise media, which not every stack takes
                    + (
                        " A stack that takes none declares multimodal=False."
                        if actual is None
                        else ""
                    )
                ),
            )
            return
