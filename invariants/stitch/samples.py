"""Stitch checks on samples: whether a response is exactly what was sampled, and whose objects are
touched on the way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from rollproof.core.contract import ResumeBy
from rollproof.invariants._shared.delivery import delivery, missing_reason
from rollproof.invariants._shared.phrases import count, listing, ranges, share, window
from rollproof.invariants.stitch import attempts, masks
from rollproof.invariants.stitch.token_faults import contains, describe_token_fault
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.core.oracle import Chooser
    from rollproof.judging.request_view import RequestView

__all__ = [
    "stitch_caller_objects",
    "stitch_environment_tokens",
    "stitch_handed_over",
    "stitch_matches_unbroken",
    "stitch_prompt",
    "stitch_request_id",
    "stitch_tokens",
]


@request_check(
    "stitch.prompt",
    promise="A sample carries the prompt of its request, token for token.",
    needs="a delivered sample",
    exercised_by="samples",
)
def stitch_prompt(view: RequestView, out: Collector) -> None:
    """Compare the record's prompt with the request's."""
    rollout = view.rollout
    if rollout is None:
        out.absent(missing_reason(view))
        return
    out.exercised("samples")
    want, got = view.request.prompt_ids, rollout.prompt_ids
    if got == want:
        return
    at = _first_difference(want, got)
    other = next(
        (o.request.request_id for o in view.neighbours if o.request.prompt_ids == got), None
    )
    out.finding(
        f"The sample carries a prompt of {count(len(got), 'token')} that is not its request's"
        + (f", but that of request {other}" if other else ""),
        kind="the prompt of another request" if other else "a prompt that is no request's",
        expected=f"the {count(len(want), 'token')} of the request's prompt: {window(want, at)}",
        observed=f"{window(got, at)}; the first difference is at position {at}",
        where=view.place(position=at),
        hint=(
            "Routes and logprobs are placed by prompt length, so a prompt that was cut, padded or"
            " retokenised shifts every one of them."
        ),
    )


@request_check(
    "stitch.request-id",
    promise="A sample carries the id of its own request, never that of another request of the run.",
    needs="a delivered sample, and other requests of the run",
    exercised_by="samples beside other requests",
)
def stitch_request_id(view: RequestView, out: Collector) -> None:
    """Compare the record's id with those of the run's requests.

    Requests of a group share a prompt, and may share an id; an id that no request has is the
    stack's own affair.
    """
    rollout, request = view.rollout, view.request
    if rollout is None:
        out.absent(missing_reason(view))
        return
    others = [
        other.request for other in view.neighbours if other.request.request_id != request.request_id
    ]
    out.exercised("samples beside other requests", int(bool(others)))
    taken = next((other for other in others if other.request_id == rollout.request_id), None)
    if taken is None or (request.group is not None and taken.group == request.group):
        return
    out.finding(
        f"The sample of request {request.request_id} carries the id of request {taken.request_id}",
        kind="the id of another request",
        expected=f"request id {request.request_id!r}",
        observed=f"request id {rollout.request_id!r}",
        where=view.place(),
        hint=(
            "Rewards and advantages are joined by id, so both requests get the wrong ones: results"
            " were matched by the order of their ends, or a shared variable was read after the next"
            " request had written it. A stack with a numbering of its own hands over the request's"
            " id, or one that no request has."
        ),
    )


@request_check(
    "stitch.tokens",
    promise=(
        "The response holds exactly the tokens that the engines sampled and delivered, in order:"
        " none lost, doubled or foreign."
    ),
    needs="a delivered sample, and its engine calls and replies",
    exercised_by=("single-call samples", "resumed samples", "samples without tokens"),
)
def stitch_tokens(view: RequestView, out: Collector) -> None:
    """Compare the response with the reference stitch."""
    found = delivery(view)
    if found is None:
        out.absent(missing_reason(view))
        return
    if not found.known:
        out.absent(found.why)
        return
    resumed = len(view.segments) > 1
    out.exercised(
        "resumed samples"
        if resumed
        else "single-call samples"
        if found.rollout.response_ids
        else "samples without tokens"
    )
    if not found.aligned:
        fault = describe_token_fault(view, found.rollout.response_ids)
        out.finding(
            fault.title,
            kind=fault.kind,
            expected=fault.expected,
            observed=fault.observed,
            where=fault.where,
            hint=fault.hint,
        )


@request_check(
    "stitch.matches-unbroken",
    promise=(
        "Where the weights did not change, a resumed rollout is the one that a single call would"
        " have sampled."
    ),
    needs=(
        "a coded policy (its next token is a pure function of weights and ids) and the true"
        " versions of the tokens"
    ),
    exercised_by="resumed samples under one version",
)
def stitch_matches_unbroken(view: RequestView, out: Collector) -> None:
    """Compare the response with what the policy samples when nobody interrupts it."""
    if view.contract.resume is not ResumeBy.CLIENT:
        out.inapplicable(attempts.not_resumed(view.contract))
    found = delivery(view)
    if not hasattr(view.oracle, "choices"):
        out.absent("no policy whose next token is known")
        return
    if found is None or not found.known:
        out.absent(found.why if found else missing_reason(view))
        return
    oracle = cast("Chooser", view.oracle)
    reference = found.reference
    stretches = reference.stretches
    if (
        not found.aligned
        or len(view.segments) < 2
        or not stretches
        or any(stretch.attempt < 0 for stretch in stretches)
    ):
        return
    version = stretches[0].true
    history = view.history
    if any(stretch.true != version for stretch in stretches) or not (
        history.labels_of(version) or version in history.unlabelled()
    ):
        return
    if any(run.ids and run.ids[-1] == oracle.eos_id for run in reference.runs[:-1]):
        out.absent("an abort won over an end-of-sequence token, which a client cannot know")
        return
    out.exercised("resumed samples under one version")
    total = view.request.prompt_ids + found.rollout.response_ids[: found.count]
    want = oracle.choices(version, total, len(view.request.prompt_ids)).tolist()
    got = list(found.rollout.response_ids[: found.count])
    if want == got:
        return
    wrong = [i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b]
    segment = view.segment_of(len(view.request.prompt_ids) + wrong[0])
    out.finding(
        f"{share(len(wrong), len(got), 'token')} of a resumed rollout differ from the unbroken run,"
        " although the weights stayed the same",
        kind="a resumed rollout differs from the unbroken run",
        expected=f"the tokens that the policy samples in one go: {window(want, wrong[0])}",
        observed=f"{window(got, wrong[0])}; differs at response index {ranges(wrong)}",
        where=view.place(index=wrong[0], segment=segment, version=version),
        hint=(
            "The engine went on from another context than the one it was sent: KV of another"
            " request or of older weights was reused."
        ),
    )


@request_check(
    "stitch.caller-objects",
    promise="What the caller hands in is the caller's: a rollout changes none of it.",
    needs="the end of a request, seen by the runner",
    exercised_by="ended requests",
)
def stitch_caller_objects(view: RequestView, out: Collector) -> None:
    """Report what the stack wrote into the caller's objects."""
    if view.result is None:
        out.absent("the request never ended")
        return
    # what an engine's reply held is not the caller's: routes.reply-untouched judges it
    changed = [name for name in view.result.caller_changed if "route" not in name.partition(":")[0]]
    if not changed and not _was_run(view):
        out.absent("the trace was recorded, and nobody watched the caller's objects")
        return
    out.exercised("ended requests")
    if not changed:
        return
    out.finding(
        f"The stack changed {count(len(changed), 'object')} of its caller: {listing(changed)}",
        kind=f"changed: {listing(sorted({_object(each) for each in changed}))}",
        expected="sampling parameters, prompt ids and media as they were handed in",
        observed=f"after the rollout, these differ: {listing(changed)}",
        where=view.place(),
        hint=(
            "A caller that reuses its sampling parameters for the next turn starts it with the"
            " budget that was left of this one: copy them before the budget is written into them"
            " (verl #7207)."
        ),
    )


def _object(change: str) -> str:
    """What was changed, without the values: ``sampling_params: max_tokens``."""
    name, _, how = change.partition(": ")
    return ": ".join(
        filter(
            None,
            (name, ", ".join(re.findall(r"'([^']*)' (?:went from|was added|was removed)", how))),
        )
    )


def _was_run(view: RequestView) -> bool:
    """Whether rollproof's runner ran the request: it looks at what was lent out and handed over, a
    recording does not.
    """
    return view.header is not None and view.header.case is not None


@request_check(
    "stitch.handed-over",
    promise="Logprobs and loss mask of a sample do not change after it was handed over.",
    needs="a delivered sample, looked at again when the run has ended",
    exercised_by="samples looked at again",
)
def stitch_handed_over(view: RequestView, out: Collector) -> None:
    """Report arrays that changed later; those of routes are ``routes.handed-over``'s."""
    if view.rollout is None or view.result is None:
        out.absent(missing_reason(view))
        return
    changed = [name for name in view.result.later_changed if "route" not in name]
    if not changed and not _was_run(view):
        out.absent("the trace was recorded, and nobody looked at the sample again")
        return
    out.exercised("samples looked at again")
    if not changed:
        return
    out.finding(
        f"{listing(changed)} of the sample changed after it was handed over",
        kind=f"changed later: {listing(sorted(changed))}",
        expected="lists of the sample's own",
        observed=f"other values at the end of the run in {listing(changed)}",
        where=view.place(),
        hint=(
            "The sample shares its lists with the client, which went on appending or reused them"
            " for the next request: copy them."
        ),
    )


@request_check(
    "stitch.environment-tokens",
    promise=(
        "Between the turns of a multi-turn response stands what the environment said, whole and in"
        " order."
    ),
    needs="a multi-turn request whose turns are declared, its engine calls and a delivered sample",
    exercised_by="turns of the environment",
)
def stitch_environment_tokens(view: RequestView, out: Collector) -> None:
    """Compare the turns that the request declares with what its calls sent; templates around them,
    and a cut at their end, are allowed.
    """
    if not view.contract.multi_turn:
        out.inapplicable(masks.NO_TURNS)
    found = delivery(view)
    if found is None or not found.known:
        out.absent(found.why if found else missing_reason(view))
        return
    said = [run.ids for run in found.reference.runs if run.attempt < 0 and run.ids]
    for number, (want, got) in enumerate(zip(view.request.turns, said, strict=False)):
        out.exercised("turns of the environment")
        if got != want and not contains(got, want) and want[: len(got)] != got:
            at = _first_difference(want, got)
            out.finding(
                f"Turn {number} of the environment is not what it said",
                kind="a turn of the environment is not what it said",
                expected=f"{count(len(want), 'token')}: {window(want, at)}",
                observed=f"{count(len(got), 'token')}: {window(got, at)}",
                where=view.place(
                    index=next(run.start for run in found.reference.runs if run.ids is got)
                ),
                hint=(
                    "Tool output was retokenised, cut in the middle, or taken from another request;"
                    " the policy answered something else."
                ),
            )
            return


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
