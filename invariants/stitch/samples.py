"""Checks on samples: the response is exactly what was sampled, and no object of others changes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from rollproof.core.contract import ResumeBy
from rollproof.invariants._shared.declared_limits import no_fragments
from rollproof.invariants._shared.delivery import delivery, missing_reason, reliable_delivery
from rollproof.invariants._shared.phrases import count, listing, ranges, share, window
from rollproof.invariants.stitch import attempts
from rollproof.invariants.stitch.token_faults import describe_token_fault
from rollproof.judging.checks import Collector, Scope, request_check

if TYPE_CHECKING:
    from rollproof.core.oracle import Chooser
    from rollproof.core.records import Rollout
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = [
    "stitch_caller_objects",
    "stitch_handed_over",
    "stitch_matches_unbroken",
    "stitch_prompt",
    "stitch_request_id",
    "stitch_sampled_by_engine",
    "stitch_tokens",
]


@request_check(
    "stitch.prompt",
    promise="A sample carries the prompt of its request, token for token.",
    needs="a delivered sample",
    exercised_by="samples",
)
def stitch_prompt(view: RequestView, out: Collector) -> None:
    """Compare the sample's prompt with the request's."""
    rollout = view.rollout
    if rollout is None:
        out.absent(missing_reason(view))
        return
    out.exercised("samples")
    expected, actual = view.request.prompt_ids, rollout.prompt_ids
    if actual == expected:
        return
    position = _first_difference(expected, actual)
    # Results that were matched by order carry the prompt of a neighbour.
    other = next(
        (o.request.request_id for o in view.neighbours if o.request.prompt_ids == actual), None
    )
    out.finding(
        f"The sample carries a prompt of {count(len(actual), 'token')} that is not its request's"
        + (f", but that of request {other}" if other else ""),
        kind="the prompt of another request" if other else "a prompt that belongs to no request",
        expected=(
            f"the {count(len(expected), 'token')} of the request's prompt:"
            f" {window(expected, position)}"
        ),
        observed=f"{window(actual, position)}; the first difference is at position {position}",
        where=view.place(position=position),
        hint=(
            "Routes and logprobs are placed by prompt length, so a prompt that was cut, padded or"
            " retokenised shifts every one of them."
        ),
    )


@request_check(
    "stitch.request-id",
    promise="A sample carries the id of its own request, never that of another request of the run.",
    needs="a delivered sample, and other requests of the run",
    exercised_by="samples with other requests in the run",
)
def stitch_request_id(view: RequestView, out: Collector) -> None:
    """Compare the sample's id with those of the run's requests.

    Requests of a group share a prompt and may share an id. An id that no request has is the stack's
    own choice; a driven run replaces it by that of the request whose sample had it first.
    """
    rollout, request = view.rollout, view.request
    if rollout is None:
        out.absent(missing_reason(view))
        return
    others = [
        other.request for other in view.neighbours if other.request.request_id != request.request_id
    ]
    out.exercised("samples with other requests in the run", int(bool(others)))
    owner = next((other for other in others if other.request_id == rollout.request_id), None)
    # GRPO groups submit one request several times under one id.
    if owner is None or (request.group is not None and owner.group == request.group):
        return
    out.finding(
        f"The sample of request {request.request_id} carries the id of request {owner.request_id}",
        kind="the id of another request",
        expected=f"request id {request.request_id!r}",
        observed=f"request id {rollout.request_id!r}",
        where=view.place(),
        hint=(
            "Rewards and advantages are joined by id, so both requests get the wrong ones:"
            " results were matched in the order in which they ended, or a shared variable was"
            " read after the next request had written it. A stack with names of its own must"
            " give samples of different prompts different ones, none of them a request's id."
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
    if _made_up(view):
        response = view.total_ids[len(view.request.prompt_ids) :]
        out.finding(
            f"{count(len(response), 'token')} that no engine sampled",
            kind="tokens that no engine sampled",
            expected="the tokens that engines sampled and delivered for this request",
            observed=f"{window(response)}; no engine delivered a token for this request",
            where=view.place(),
            hint="stitch.sampled-by-engine says where such samples come from.",
        )
        return
    delivered = reliable_delivery(view, out)
    if delivered is None:
        return
    resumed = len(view.segments) > 1
    out.exercised(
        "resumed samples"
        if resumed
        else "single-call samples"
        if delivered.rollout.response_ids
        else "samples without tokens"
    )
    # stitch.environment-tokens reports a sample that differs in the environment's tokens alone.
    if not delivered.aligned and delivered.answers is None:
        fault = describe_token_fault(view, delivered.rollout.response_ids)
        out.finding(
            fault.title,
            kind=fault.kind,
            expected=fault.expected,
            observed=fault.observed,
            where=fault.where,
            hint=fault.hint,
        )


@request_check(
    "stitch.sampled-by-engine",
    promise="A sample comes from engine calls that were made for its own request.",
    needs="a delivered sample with tokens, in a run of which every engine call is known",
    exercised_by="samples with engine calls",
)
def stitch_sampled_by_engine(view: RequestView, out: Collector) -> None:
    """Look for samples of requests for which no engine was called.

    ``stitch.tokens`` compares a sample with the replies to the calls of its request.
    """
    rollout = view.rollout
    if rollout is None:
        out.absent(missing_reason(view))
        return
    response = rollout.response_ids
    if any(attempt.replies for attempt in view.attempts):
        out.exercised("samples with engine calls", int(bool(response)))
        return
    if not _is_trained_on(rollout):
        return
    if not _was_run(view):
        out.absent("a recording may miss engine calls")
        return
    internal = _internal_calls(view)
    if internal:
        calls = count(len(internal), "call")
        out.finding(
            f"A sample of {count(len(response), 'token')} came from no engine call of its request:"
            " its calls were made inside fleet.internal()",
            kind="a sample of internal calls",
            expected="tokens that replies to calls of this request brought",
            observed=f"{window(response)}; {calls} inside fleet.internal() brought these tokens",
            where=view.place(),
            hint=(
                "A call inside fleet.internal() belongs to no request. Enter it with `with` around"
                " health checks and the like only, and leave it in the task that entered it, before"
                " the rollout calls: tasks begun inside stay inside."
            ),
        )
        return
    source = _source(view, response)
    out.finding(
        f"A sample of {count(len(response), 'token')} came from no engine call of its request"
        + (f", but from request {source}" if source else ""),
        kind="the sample of another request" if source else "a sample that no engine sampled",
        expected="tokens that replies to calls of this request brought",
        observed=(
            f"{window(response)}; "
            + (
                f"request {source} received these tokens, and they were used twice"
                if source
                else "no engine was called for this request"
                if not view.attempts
                else f"none of its {count(len(view.attempts), 'call')} was answered"
            )
        ),
        where=view.place(),
        hint=(
            "Each sample of a prompt (n > 1) needs a draw of its own: call the engine once for each"
            " of them, or with n, and give no reply to two requests, from a cache or otherwise."
            if source
            else "A mock, a cache or a default answered instead of an engine. If an engine was"
            " called, give that call the id of the request as its handle (request_id=)."
        ),
    )


def _is_trained_on(rollout: Rollout) -> bool:
    """Whether a sample has a token that is trained on: stacks fill up a batch with dummies."""
    mask = rollout.loss_mask
    return bool(rollout.response_ids) and (mask is None or bool(mask.any()))


def _made_up(view: RequestView) -> bool:
    """Whether no engine delivered the tokens of a sample, to this request or to another one."""
    rollout = view.rollout
    return (
        rollout is not None
        and view.uncalled
        and _was_run(view)
        and _is_trained_on(rollout)
        and not _internal_calls(view)
        and _source(view, rollout.response_ids) is None
    )


def _internal_calls(view: RequestView) -> list[Attempt]:
    """Return the internal calls that brought all tokens of a sample that are trained on."""
    rollout = view.rollout
    if rollout is None:
        return []
    sequence, mask = view.total_ids, rollout.loss_mask
    start = len(view.request.prompt_ids)
    missing = {
        place
        for place in range(start, len(sequence))
        if mask is None or len(mask) <= place - start or mask[place - start]
    }
    brought = []
    for attempt in view.internal_calls:
        sent = attempt.call.prompt_ids
        for reply in attempt.replies:
            tokens = reply.output.token_ids
            if tokens and sequence[: len(sent) + len(tokens)] == (*sent, *tokens):
                brought.append(attempt)
                missing -= set(range(len(sent), len(sent) + len(tokens)))
    return [] if missing else brought


def _source(view: RequestView, response: tuple[int, ...]) -> str | None:
    """Return the other request to which an engine sent exactly these tokens."""
    return next(
        (
            other.request.request_id
            for other in view.neighbours
            if other.stitched.response_ids[: len(response)] == response
        ),
        None,
    )


@request_check(
    "stitch.matches-unbroken",
    promise=(
        "If the weights did not change, a resumed rollout is the one that a single call would"
        " have sampled."
    ),
    needs=(
        "a coded policy (its next token is a pure function of weights and ids) and the true"
        " versions of the tokens"
    ),
    exercised_by="resumed samples under one version",
    applies=no_fragments,
)
def stitch_matches_unbroken(view: RequestView, out: Collector) -> None:
    """Compare the response with what the policy samples without an interruption."""
    if view.contract.resume is not ResumeBy.CLIENT:
        out.inapplicable(attempts.not_resumed(view.contract))
    # Each call may draw its first token (``draw`` of the fake engine's generate). Older traces do
    # not say which draw it was.
    if view.attempts and all(
        attempt.call.max_tokens == 1
        and all(reply.true_draw is None for reply in attempt.replies if reply.output.token_ids)
        for attempt in view.attempts
    ):
        out.inapplicable("each call samples one token, which the engine may draw anew in each call")
    delivered = delivery(view)
    if not hasattr(view.oracle, "choices"):
        out.absent("the trace has no coded policy whose next token is known")
        return
    if delivered is None or not delivered.reliable:
        out.absent(delivered.reason if delivered else missing_reason(view))
        return
    oracle = cast("Chooser", view.oracle)
    reference = delivered.reference
    stretches = reference.stretches
    if (
        not delivered.aligned
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
    # The engine sampled the end of sequence, but the abort came first. The client must resume, and
    # the unbroken run would have stopped.
    if any(run.ids and run.ids[-1] == oracle.eos_id for run in reference.runs[:-1]):
        out.absent(
            "a call was aborted on its end-of-sequence token: a client cannot know that the"
            " turn had ended"
        )
        return
    ids = view.request.prompt_ids + delivered.rollout.response_ids[: delivered.count]
    # The coded policy is a pure function of weights and ids, so the unbroken run can be computed
    # instead of made.
    expected = oracle.choices(version, ids, len(view.request.prompt_ids)).tolist()
    actual = list(delivered.rollout.response_ids[: delivered.count])
    begun = [run for run in reference.runs if run.ids and run.start < len(actual)]
    draws = [None if run.reply is None else run.reply.true_draw for run in begun]
    if len(begun) == len(actual) and set(draws) == {None}:
        return
    out.exercised("resumed samples under one version")
    for run, draw in zip(begun, draws, strict=True):
        position = len(view.request.prompt_ids) + run.start
        expected[run.start] = (
            actual[run.start] if draw is None else oracle.drawn(version, ids[:position], draw)
        )
    if expected == actual:
        return
    differing = [i for i, (a, b) in enumerate(zip(expected, actual, strict=True)) if a != b]
    segment = view.segment_of(len(view.request.prompt_ids) + differing[0])
    out.finding(
        f"{share(len(differing), len(actual), 'token')} of a resumed rollout differ from the"
        " unbroken run, although the weights stayed the same",
        kind="a resumed rollout differs from the unbroken run",
        expected=(
            "the tokens that the policy samples without an interruption:"
            f" {window(expected, differing[0])}"
        ),
        observed=f"{window(actual, differing[0])}; differs at response index {ranges(differing)}",
        where=view.place(index=differing[0], segment=segment, version=version),
        hint=(
            "The engine continued from another context than it was sent: it reused the KV"
            " cache of another request or of older weights."
        ),
    )


@request_check(
    "stitch.caller-objects",
    promise="A rollout changes none of the objects that its caller passed in.",
    needs="the end of a request, seen by the runner",
    exercised_by="ended requests",
    scope=Scope.REQUEST,
)
def stitch_caller_objects(view: RequestView, out: Collector) -> None:
    """Report what the stack wrote into the caller's objects."""
    if view.result is None:
        out.absent("the request never ended")
        return
    # An engine's reply is not the caller's object: routes.reply-untouched judges that.
    changed = [name for name in view.result.caller_changed if "route" not in name.partition(":")[0]]
    if not changed and not _was_run(view):
        out.absent("a recording does not watch the caller's objects")
        return
    out.exercised("ended requests")
    if not changed:
        return
    out.finding(
        f"The stack changed {count(len(changed), 'object')} of its caller: {listing(changed)}",
        kind=f"changed: {listing(sorted({_changed_field(change) for change in changed}))}",
        expected="sampling parameters, prompt ids and media as the caller passed them",
        observed=f"after the rollout, these differ: {listing(changed)}",
        where=view.place(),
        hint=(
            "A caller that reuses its sampling parameters for the next turn starts it with"
            " what was left of this turn's budget: copy them before you write the budget into"
            " them (verl #7207)."
        ),
    )


def _changed_field(change: str) -> str:
    """Return what was changed, without the values: ``sampling_params: max_tokens``."""
    name, _, difference = change.partition(": ")
    return ": ".join(
        filter(
            None,
            (
                name,
                ", ".join(re.findall(r"'([^']*)' (?:went from|was added|was removed)", difference)),
            ),
        )
    )


def _was_run(view: RequestView) -> bool:
    """Return whether rollproof's runner ran the request. It compares objects before and after, a
    recording does not.
    """
    return view.header is not None and view.header.case is not None


@request_check(
    "stitch.handed-over",
    promise="Logprobs and loss mask of a sample do not change after it was delivered.",
    needs="a delivered sample that is compared again at the end of the run",
    exercised_by="samples looked at again",
    scope=Scope.REQUEST,
)
def stitch_handed_over(view: RequestView, out: Collector) -> None:
    """Report arrays that changed later; ``routes.handed-over`` judges those of routes."""
    if view.rollout is None or view.result is None:
        out.absent(missing_reason(view))
        return
    # routes.handed-over judges arrays of routes.
    changed = [name for name in view.result.later_changed if "route" not in name]
    if not changed and not _was_run(view):
        out.absent("a recording does not compare the sample again at the end of the run")
        return
    out.exercised("samples looked at again")
    if not changed:
        return
    out.finding(
        f"{listing(changed)} of the sample changed after delivery",
        kind=f"changed later: {listing(sorted(changed))}",
        expected="lists that only the sample holds",
        observed=f"other values at the end of the run in {listing(changed)}",
        where=view.place(),
        hint=(
            "The sample shares its lists with the client, which appended to them or reused"
            " them for the next request: copy them."
        ),
    )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
