"""Stitch checks on logprobs: one per token, that of this token, missing ones marked and never made
up.

Every position is blamed on one check: a value that is absent on ``logprobs-present``, one that no
logarithm of a probability can have on ``logprobs-valid``, one that belongs elsewhere on
``logprobs-paired``, and what stands where the engine gave none on ``logprobs-missing``. Where the
lengths differ (``logprobs-length``) or the tokens are wrong (``stitch.tokens``), no position can be
told and the others stand back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Contract, Logprobs, MissingLogprobs
from rollproof.invariants._shared.delivery import Delivery, delivery, missing_reason
from rollproof.invariants._shared.phrases import count, listing, ranges, segment_name, share, window
from rollproof.invariants.stitch.logprob_faults import describe_wrong_logprobs
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = [
    "LIMIT",
    "close",
    "stitch_logprobs_length",
    "stitch_logprobs_missing",
    "stitch_logprobs_paired",
    "stitch_logprobs_present",
    "stitch_logprobs_valid",
]

LIMIT = 1e-4
"""A logprob may exceed 0 by this much: log-softmax in 32 bits rounds."""
_RELATIVE, _ABSOLUTE = 1e-6, 1e-6
_SMALL = 64


def close(a: float, b: float) -> bool:
    """Whether two logprobs are the same number, at most rounded to 32 bits."""
    return abs(a - b) <= _ABSOLUTE + _RELATIVE * abs(b)


@dataclass(slots=True)
class _Scan:
    """Response indexes of sampled tokens by what is wrong with their logprob; ``absent``: the
    engine returned none.
    """

    sampled: int = 0
    absent: list[int] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    invalid: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)


def _declared(contract: Contract) -> str | None:
    return "the contract declares logprobs='none'" if contract.logprobs is Logprobs.NONE else None


def _scan(view: RequestView, found: Delivery) -> _Scan | None:
    """Sort the positions; ``None`` where they cannot be told (no logprobs, wrong length, wrong
    tokens).
    """
    if "logprob scan" not in view.memo:
        values = found.rollout.logprobs
        fit = (
            values is not None and found.aligned and len(values) == len(found.rollout.response_ids)
        )
        view.memo["logprob scan"] = _sorted(found) if fit else None
    scan: _Scan | None = view.memo["logprob scan"]
    return scan


def _sorted(found: Delivery) -> _Scan:
    scan = _Scan()
    values = found.rollout.logprobs
    assert values is not None
    for run in found.reference.runs:
        end = min(run.end, found.count)
        if run.attempt < 0 or end <= run.start:
            continue
        scan.sampled += end - run.start
        given = None if run.reply is None else run.reply.output.logprobs
        if end - run.start > _SMALL and given is not None and len(given) >= end - run.start:
            _sort_array(scan, run.start, values[run.start : end], given[: end - run.start])
        else:
            _sort_list(scan, run.start, values[run.start : end].tolist(), run.logprobs)
    return scan


def _sort_list(scan: _Scan, start: int, got: Sequence[float], want: Sequence[float]) -> None:
    for i, value in enumerate(got, start):
        true = want[i - start]
        if true != true:  # NaN, the one number that differs from itself
            scan.absent.append(i)
            if value == value:
                scan.filled.append(i)
        elif value != value:
            scan.lost.append(i)
        elif value > LIMIT or value == -math.inf:
            scan.invalid.append(i)
        elif value != true and not close(value, true):
            scan.wrong.append(i)


def _sort_array(scan: _Scan, start: int, got: np.ndarray, want: np.ndarray) -> None:
    if np.array_equal(got, want) and not (got > LIMIT).any() and not np.isneginf(got).any():
        return
    absent, nan = np.isnan(want), np.isnan(got)
    invalid = ~absent & ~nan & ((got > LIMIT) | np.isneginf(got))
    with np.errstate(invalid="ignore"):
        wrong = (
            ~absent
            & ~nan
            & ~invalid
            & ~(np.abs(got - want) <= _ABSOLUTE + _RELATIVE * np.abs(want))
        )
    for name, mask in (
        ("absent", absent),
        ("filled", absent & ~nan),
        ("lost", nan & ~absent),
        ("invalid", invalid),
        ("wrong", wrong),
    ):
        getattr(scan, name).extend((np.flatnonzero(mask) + start).tolist())


def _judged(view: RequestView, out: Collector) -> tuple[Delivery, _Scan] | None:
    """What the position checks start from; says what is absent where they cannot."""
    found = delivery(view)
    if found is None:
        out.absent(missing_reason(view))
        return None
    if not found.known:
        out.absent(found.why)
        return None
    scan = _scan(view, found)
    if scan is None:
        out.absent(
            "the sample carries no logprobs"
            if found.rollout.logprobs is None
            else "logprobs and tokens do not line up"
        )
        return None
    return found, scan


@request_check(
    "stitch.logprobs-present",
    promise="Logprobs that were asked for, and that the engines returned, are in the sample.",
    needs="a request that wants logprobs, its calls and replies, a delivered sample",
    exercised_by=("sampled tokens with a logprob", "calls that ask for logprobs"),
    applies=_declared,
)
def stitch_logprobs_present(view: RequestView, out: Collector) -> None:
    """Every call asks for them, and what came back is there."""
    if not view.request.want_logprobs:
        out.absent("no request wanted logprobs")
        return
    deaf = [attempt for attempt in view.attempts if not attempt.call.want_logprobs]
    out.exercised("calls that ask for logprobs", len(view.attempts) - len(deaf))
    if deaf:
        out.finding(
            f"{share(len(deaf), len(view.attempts), 'call')} {'does' if len(deaf) == 1 else 'do'}"
            " not ask for logprobs, although the request wants them",
            kind="calls do not ask for logprobs",
            expected="every attempt asks the engine for logprobs",
            observed=f"call {listing(attempt.number for attempt in deaf[:6])} does not",
            where=view.place(call=deaf[0].number, server=deaf[0].call.server_id),
            hint=(
                "The option got lost on a resume: build the parameters of each attempt from the"
                " request's."
            ),
        )
        return
    found = delivery(view)
    if found is None or not found.known:
        out.absent(found.why if found else missing_reason(view))
        return
    if found.rollout.logprobs is not None:
        scan = _scan(view, found)
        if scan is not None:
            out.exercised("sampled tokens with a logprob", scan.sampled - len(scan.absent))
            if scan.lost:
                _lost(view, scan, out)
        return
    given = sum(not math.isnan(value) for value in found.reference.logprob_list)
    out.exercised("sampled tokens with a logprob", given)
    if not given:
        return
    out.finding(
        "The sample carries no logprobs, although the engines returned them",
        expected=f"{count(given, 'logprob')}, as the engines returned them",
        observed="logprobs is None",
        where=view.place(),
        hint=(
            "Without rollout logprobs a trainer cannot correct for the gap between rollout and"
            " training (slime #1995)."
        ),
    )


def _lost(view: RequestView, scan: _Scan, out: Collector) -> None:
    first = scan.lost[0]
    out.finding(
        f"{share(len(scan.lost), scan.sampled, 'logprob')} {'is' if len(scan.lost) == 1 else 'are'}"
        " missing from the sample, although the engine returned them",
        kind="logprobs are missing from the sample",
        expected="the engine's value for every sampled token",
        observed=f"NaN at response index {ranges(scan.lost)}",
        where=view.place(
            index=first, segment=view.segment_of(len(view.request.prompt_ids) + first)
        ),
        hint=(
            "Values went missing between the engine's reply and the sample, as when a list is"
            " padded to length instead of extended."
        ),
    )


@request_check(
    "stitch.logprobs-length",
    promise="A sample that carries logprobs has exactly one per response token.",
    needs="a delivered sample with logprobs",
    exercised_by="samples with logprobs",
    applies=_declared,
)
def stitch_logprobs_length(view: RequestView, out: Collector) -> None:
    """Compare the two lengths."""
    found = delivery(view)
    if found is None:
        out.absent(missing_reason(view))
        return
    values, tokens = found.rollout.logprobs, len(found.rollout.response_ids)
    if values is None:
        out.absent("no sample carries logprobs")
        return
    out.exercised("samples with logprobs")
    if len(values) == tokens or found.fits(len(values)):
        return
    silent = [
        run
        for run in found.reference.runs
        if run.ids and run.reply is not None and run.reply.output.logprobs is None
    ]
    hint = (
        "Tokens and logprobs must be appended together, segment by segment; from the gap on each"
        " value stands beside another token."
    )
    if silent and tokens - len(values) == sum(len(run.ids) for run in silent):
        names = listing(segment_name(view, run.attempt) for run in silent)
        hint = (
            f"The engine returned no logprobs for {names}, and the stack appended nothing in their"
            " place: the values of later segments now stand beside the tokens of earlier ones."
            " Append one marker per token instead."
        )
    out.finding(
        f"The sample has {count(len(values), 'logprob')} for {count(tokens, 'token')}",
        kind="fewer logprobs than tokens" if len(values) < tokens else "more logprobs than tokens",
        expected=f"one logprob per response token: {tokens}",
        observed=f"{len(values)}: {window(values.tolist())}",
        where=view.place(),
        hint=hint,
    )


@request_check(
    "stitch.logprobs-valid",
    promise=(
        "Every logprob of a sampled token is a number that a probability can have: finite and at"
        " most 0."
    ),
    needs="a delivered sample with one logprob per token",
    exercised_by="sampled tokens with a logprob",
    applies=_declared,
)
def stitch_logprobs_valid(view: RequestView, out: Collector) -> None:
    """Report infinite and positive values; missing ones are judged by ``logprobs-missing`` and
    ``logprobs-present``.
    """
    judged = _judged(view, out)
    if judged is None:
        return
    found, scan = judged
    out.exercised("sampled tokens with a logprob", scan.sampled - len(scan.absent))
    if not scan.invalid:
        return
    assert found.rollout.logprobs is not None
    first = scan.invalid[0]
    got = found.rollout.logprobs.tolist()
    returned = found.reference.logprob_list[first]
    same = got[first] == returned
    out.finding(
        f"{share(len(scan.invalid), scan.sampled, 'logprob')} cannot be the logarithm of a"
        " probability",
        kind="values that are no logarithm of a probability",
        expected="finite values of at most 0",
        observed=(
            f"{got[first]:.6g} at response index {first} (in all: {ranges(scan.invalid)}); the"
            f" engine returned {returned:.6g}"
        ),
        where=view.place(
            index=first, segment=view.segment_of(len(view.request.prompt_ids) + first)
        ),
        hint=(
            "The engine itself returned it: it scored the token under another mask, or other"
            " weights, than it sampled it with."
            if same
            else (
                "The value was made on the way: a sign that flipped, a probability in place of its"
                " logarithm, or an overflow."
            )
        ),
    )


@request_check(
    "stitch.logprobs-paired",
    promise="Each logprob is the one that the engine returned with this very token.",
    needs="a delivered sample with one logprob per token, and the engines' replies",
    exercised_by=("tokens of single-call samples", "tokens of resumed samples"),
    applies=_declared,
)
def stitch_logprobs_paired(view: RequestView, out: Collector) -> None:
    """Compare value by value with the reference stitch, up to rounding to 32 bits."""
    if view.engine is not None and view.engine.logprobs is not view.contract.logprobs:
        out.absent(
            f"the engines return {view.engine.logprobs} logprobs, and the stack hands over"
            f" {view.contract.logprobs} ones"
        )
        return
    judged = _judged(view, out)
    if judged is None:
        return
    found, scan = judged
    kind = (
        "tokens of resumed samples" if len(view.segments) > 1 else "tokens of single-call samples"
    )
    out.exercised(kind, scan.sampled - len(scan.absent) - len(scan.lost))
    if not scan.wrong:
        return
    assert found.rollout.logprobs is not None
    first = scan.wrong[0]
    want, got = found.reference.logprob_list, found.rollout.logprobs.tolist()
    out.finding(
        f"{share(len(scan.wrong), scan.sampled, 'logprob')}"
        f" {'is' if len(scan.wrong) == 1 else 'are'} not what the engine returned with"
        f" {'its token' if len(scan.wrong) == 1 else 'their tokens'}",
        kind="logprobs are not those of their tokens",
        expected=f"as returned: {window(want, first)}",
        observed=f"{window(got, first)}; differs at response index {ranges(scan.wrong)}",
        where=view.place(
            index=first,
            segment=view.segment_of(len(view.request.prompt_ids) + first),
            version=view.stitched.tokens[first].true if len(want) <= _SMALL else None,
        ),
        hint=describe_wrong_logprobs(view, want, got, scan.wrong),
    )


@request_check(
    "stitch.logprobs-missing",
    promise=(
        "Where the engine returned no logprob, the sample says so as its contract declares; a value"
        " is never made up."
    ),
    needs="a delivered sample with one logprob per token, and the engines' replies",
    exercised_by=("sampled tokens", "tokens that came without a logprob"),
    applies=_declared,
)
def stitch_logprobs_missing(view: RequestView, out: Collector) -> None:
    """Look at the tokens for which the engine returned no logprob."""
    rule, engine = view.contract.missing_logprobs, view.engine
    if (
        rule is not MissingLogprobs.NEVER
        and engine is not None
        and engine.missing_logprobs is MissingLogprobs.NEVER
    ):
        out.inapplicable(
            "the engines declare that every token comes with a logprob (missing_logprobs='never')"
        )
    if (
        any(not attempt.call.want_logprobs for attempt in view.attempts)
        or not view.request.want_logprobs
    ):
        out.absent("not every call asked for logprobs")
        return
    found = delivery(view)
    if found is None or not found.known:
        out.absent(found.why if found else missing_reason(view))
        return
    scan = _scan(view, found)
    if scan is None:
        if found.rollout.logprobs is not None or not found.aligned:
            out.absent("logprobs and tokens do not line up")
            return
        scan = _all_absent(found)
    if rule is MissingLogprobs.NEVER:
        out.exercised("sampled tokens", scan.sampled)
    out.exercised("tokens that came without a logprob", len(scan.absent))
    if not scan.absent:
        return
    bad = _unmarked(rule, found, scan)
    if bad:
        _unmarked_finding(view, found, scan, bad, out)


def _all_absent(found: Delivery) -> _Scan:
    """The scan of a sample without any logprobs: the tokens for which there were none."""
    absent = [
        i
        for run in found.reference.runs
        if run.attempt >= 0
        for i, value in enumerate(run.logprobs, run.start)
        if math.isnan(value) and i < found.count
    ]
    sampled = sum(
        min(run.end, found.count) - run.start
        for run in found.reference.runs
        if run.attempt >= 0 and run.start < found.count
    )
    return _Scan(sampled=sampled, absent=absent)


def _unmarked(rule: MissingLogprobs, found: Delivery, scan: _Scan) -> list[int]:
    """The positions that are not marked as ``rule`` says."""
    if rule is MissingLogprobs.NEVER:
        return scan.absent
    if rule is MissingLogprobs.NAN:
        return scan.filled
    mask = found.rollout.loss_mask
    if mask is None:
        return scan.absent
    return [i for i in scan.absent if i < len(mask) and mask[i]]


_MARKS = {
    MissingLogprobs.NEVER: "a logprob with every token (missing_logprobs='never')",
    MissingLogprobs.NAN: "NaN where the engine returned none (missing_logprobs='nan')",
    MissingLogprobs.MASKED: (
        "loss mask 0 where the engine returned none (missing_logprobs='masked')"
    ),
}


def _unmarked_finding(
    view: RequestView, found: Delivery, scan: _Scan, bad: list[int], out: Collector
) -> None:
    rule = view.contract.missing_logprobs
    first = bad[0]
    values = found.rollout.logprobs
    filled = {values[i].item() for i in bad if values is not None and not math.isnan(values[i])}
    if filled:
        title = (
            f"{share(len(bad), scan.sampled, 'logprob')} {'was' if len(bad) == 1 else 'were'} made"
            " up: the engine returned none"
        )
        shown = listing(f"{value:.6g}" for value in sorted(filled)[:3])
        observed = f"{shown} at response index {ranges(bad)}" + (
            "" if rule is not MissingLogprobs.MASKED else ", with loss mask 1"
        )
        hint = (
            "0.0 says probability 1, a large negative number says never: either poisons the"
            " importance ratio of these tokens (OpenRLHF fills 0.0, SkyRL clamps to -9999). Mark"
            " them as missing."
        )
    else:
        title = f"The engine returned no logprob for {share(len(bad), scan.sampled, 'token')}"
        observed = f"none at response index {ranges(bad)}"
        hint = (
            "Either the engine dropped them, or the contract must say how samples mark them:"
            " missing_logprobs='nan' or 'masked'."
        )
    out.finding(
        title,
        kind="logprobs were made up" if filled else "the engine returned no logprob",
        expected=_MARKS[rule],
        observed=observed,
        where=view.place(
            index=first, segment=view.segment_of(len(view.request.prompt_ids) + first)
        ),
        hint=hint,
    )
