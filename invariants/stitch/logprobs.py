"""Checks on logprobs: one per token, the value of this token, with missing ones marked and never
made up.

Every position is judged by one check: an absent value by ``logprobs-present``, one that no
logarithm of a probability can have by ``logprobs-valid``, one that belongs elsewhere by
``logprobs-paired``, and the value of a token for which the engine returned none by
``logprobs-missing``. If the lengths differ (``logprobs-length``) or the tokens are wrong
(``stitch.tokens``), positions have no meaning and the other checks do not judge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Contract, Logprobs, MissingLogprobs
from rollproof.invariants._shared.delivery import (
    Delivery,
    existing_delivery,
    reliable_delivery,
)
from rollproof.invariants._shared.phrases import (
    count,
    listing,
    ranges,
    segment_name,
    share,
    verb,
    window,
)
from rollproof.invariants.stitch.logprob_faults import (
    ABSOLUTE,
    RELATIVE,
    close,
    describe_wrong_logprobs,
)
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = [
    "stitch_logprobs_length",
    "stitch_logprobs_missing",
    "stitch_logprobs_paired",
    "stitch_logprobs_present",
    "stitch_logprobs_valid",
]

MAX_LOGPROB = 1e-4
"""A logprob may exceed 0 by this much: log-softmax in 32 bits rounds."""
_SMALL = 64


@dataclass(slots=True)
class _Scan:
    """Response indexes of sampled tokens by what is wrong with their logprob.

    sampled: The number of sampled tokens.
    absent: The engine returned no logprob.
    filled: The engine returned none, and the sample has one.
    lost: The engine returned one, and the sample has none.
    invalid: Not the logarithm of a probability.
    wrong: Not the value that the engine returned.
    """

    sampled: int = 0
    absent: list[int] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    invalid: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)


def _no_logprobs(contract: Contract) -> str | None:
    return "the contract declares logprobs='none'" if contract.logprobs is Logprobs.NONE else None


def _scan(view: RequestView, delivered: Delivery) -> _Scan | None:
    """Classify the positions once; ``None`` if they have no meaning (no logprobs, wrong length,
    wrong tokens).
    """
    if "logprob scan" not in view.memo:
        values = delivered.rollout.logprobs
        fits = (
            values is not None
            and delivered.aligned
            and len(values) == len(delivered.rollout.response_ids)
        )
        view.memo["logprob scan"] = _classified(delivered) if fits else None
    scan: _Scan | None = view.memo["logprob scan"]
    return scan


def _classified(delivered: Delivery) -> _Scan:
    scan = _Scan()
    values = delivered.rollout.logprobs
    assert values is not None
    for run in delivered.reference.runs:
        end = min(run.end, delivered.count)
        if run.attempt < 0 or end <= run.start:
            continue
        scan.sampled += end - run.start
        returned = None if run.reply is None else run.reply.output.logprobs
        # numpy costs more than a loop for a few tokens.
        if end - run.start > _SMALL and returned is not None and len(returned) >= end - run.start:
            _classify_array(scan, run.start, values[run.start : end], returned[: end - run.start])
        else:
            _classify_list(scan, run.start, values[run.start : end].tolist(), run.logprobs)
    return scan


def _classify_list(
    scan: _Scan, start: int, actual: Sequence[float], expected: Sequence[float]
) -> None:
    for i, value in enumerate(actual, start):
        engine_value = expected[i - start]
        # NaN is the one number that differs from itself: much faster than math.isnan here.
        if engine_value != engine_value:
            scan.absent.append(i)
            if value == value:
                scan.filled.append(i)
        elif value != value:
            scan.lost.append(i)
        elif value > MAX_LOGPROB or value == -math.inf:
            scan.invalid.append(i)
        elif value != engine_value and not close(value, engine_value):
            scan.wrong.append(i)


def _classify_array(scan: _Scan, start: int, actual: np.ndarray, expected: np.ndarray) -> None:
    if (
        # The usual case, a copy, costs three passes over memory and builds no masks.
        np.array_equal(actual, expected)
        and not (actual > MAX_LOGPROB).any()
        and not np.isneginf(actual).any()
    ):
        return
    absent, nan = np.isnan(expected), np.isnan(actual)
    invalid = ~absent & ~nan & ((actual > MAX_LOGPROB) | np.isneginf(actual))
    with np.errstate(invalid="ignore"):
        wrong = (
            ~absent
            & ~nan
            & ~invalid
            & ~(np.abs(actual - expected) <= ABSOLUTE + RELATIVE * np.abs(expected))
        )
    for name, mask in (
        ("absent", absent),
        ("filled", absent & ~nan),
        ("lost", nan & ~absent),
        ("invalid", invalid),
        ("wrong", wrong),
    ):
        getattr(scan, name).extend((np.flatnonzero(mask) + start).tolist())


def _scanned(view: RequestView, out: Collector) -> tuple[Delivery, _Scan] | None:
    """Return the delivery and its scan, or report what is missing."""
    delivered = reliable_delivery(view, out)
    if delivered is None:
        return None
    scan = _scan(view, delivered)
    if scan is None:
        out.absent(
            "the sample carries no logprobs"
            if delivered.rollout.logprobs is None
            else "logprobs and tokens do not align"
        )
        return None
    return delivered, scan


@request_check(
    "stitch.logprobs-present",
    promise="Logprobs that were requested and that the engines returned are in the sample.",
    needs="a request that wants logprobs, its calls and replies, a delivered sample",
    exercised_by=("sampled tokens with a logprob", "calls that request logprobs"),
    applies=_no_logprobs,
)
def stitch_logprobs_present(view: RequestView, out: Collector) -> None:
    """Check that every call requests logprobs, and that the sample has what was returned."""
    if not view.request.want_logprobs:
        out.absent("no request wanted logprobs")
        return
    without = [attempt for attempt in view.attempts if not attempt.call.want_logprobs]
    out.exercised("calls that request logprobs", len(view.attempts) - len(without))
    if without:
        out.finding(
            f"{share(len(without), len(view.attempts), 'call')}"
            f" {verb(len(without), 'does', 'do')} not request logprobs, although the"
            " request wants them",
            kind="calls do not request logprobs",
            expected="every attempt requests logprobs from the engine",
            observed=(
                f"{verb(len(without), 'call', 'calls')}"
                f" {listing(attempt.call.call_id for attempt in without[:6])}"
                f" {verb(len(without), 'does', 'do')} not"
            ),
            where=view.place(call=without[0].call.call_id, server=without[0].call.server_id),
            hint=(
                "The option was lost on a resume: build the parameters of each attempt from"
                " the request's."
            ),
        )
        return
    delivered = reliable_delivery(view, out)
    if delivered is None:
        return
    if delivered.rollout.logprobs is not None:
        scan = _scan(view, delivered)
        if scan is not None:
            out.exercised("sampled tokens with a logprob", scan.sampled - len(scan.absent))
            if scan.lost:
                _report_lost(view, scan, out)
        return
    count_returned = sum(not math.isnan(value) for value in delivered.reference.logprob_list)
    out.exercised("sampled tokens with a logprob", count_returned)
    if not count_returned:
        return
    out.finding(
        "The sample carries no logprobs, although the engines returned them",
        expected=f"{count(count_returned, 'logprob')}, as the engines returned them",
        observed="logprobs is None",
        where=view.place(),
        hint=(
            "Without rollout logprobs a trainer cannot correct for the gap between rollout and"
            " training (slime #1995)."
        ),
    )


def _report_lost(view: RequestView, scan: _Scan, out: Collector) -> None:
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
            "Values were lost between the engine's reply and the sample, for example because"
            " a list was padded to length instead of extended."
        ),
    )


@request_check(
    "stitch.logprobs-length",
    promise="A sample that carries logprobs has exactly one per response token.",
    needs="a delivered sample with logprobs",
    exercised_by="samples with logprobs",
    applies=_no_logprobs,
)
def stitch_logprobs_length(view: RequestView, out: Collector) -> None:
    """Compare the two lengths."""
    delivered = existing_delivery(view, out)
    if delivered is None:
        return
    values, tokens = delivered.rollout.logprobs, len(delivered.rollout.response_ids)
    if values is None:
        out.absent("no sample carries logprobs")
        return
    out.exercised("samples with logprobs")
    if delivered.fits(len(values)):
        return
    runs_without = [
        run
        for run in delivered.reference.runs
        if run.ids and run.reply is not None and run.reply.output.logprobs is None
    ]
    hint = (
        "Append tokens and logprobs together, segment by segment; from the gap on, each value"
        " is paired with another token."
    )
    # The engine returned none for entire segments: the exact cause can be named.
    if runs_without and tokens - len(values) == sum(len(run.ids) for run in runs_without):
        names = listing(segment_name(view, run.attempt) for run in runs_without)
        hint = (
            f"The engine returned no logprobs for {names}, and the stack appended nothing in"
            " their place: the values of later segments are now paired with tokens of earlier"
            " ones. Append one marker per token instead."
        )
    out.finding(
        f"The sample has {count(len(values), 'logprob')} for {count(tokens, 'token')}",
        kind="fewer logprobs than tokens" if len(values) < tokens else "more logprobs than tokens",
        expected=f"one logprob per response token: {tokens}",
        observed=f"{len(values)}: {window(values.tolist())}" if len(values) else "none",
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
    applies=_no_logprobs,
)
def stitch_logprobs_valid(view: RequestView, out: Collector) -> None:
    """Report infinite and positive values."""
    scanned = _scanned(view, out)
    if scanned is None:
        return
    delivered, scan = scanned
    out.exercised("sampled tokens with a logprob", scan.sampled - len(scan.absent))
    if not scan.invalid:
        return
    assert delivered.rollout.logprobs is not None
    first = scan.invalid[0]
    actual = delivered.rollout.logprobs.tolist()
    returned = delivered.reference.logprob_list[first]
    from_engine = actual[first] == returned
    out.finding(
        f"{share(len(scan.invalid), scan.sampled, 'logprob')} cannot be the logarithm of a"
        " probability",
        kind="values that cannot be the logarithm of a probability",
        expected="finite values of at most 0",
        observed=(
            f"{actual[first]:.6g} at response index {first} (in all: {ranges(scan.invalid)}); the"
            f" engine returned {returned:.6g}"
        ),
        where=view.place(
            index=first, segment=view.segment_of(len(view.request.prompt_ids) + first)
        ),
        hint=(
            "The engine itself returned it: it scored the token under another mask or other"
            " weights than it sampled it with."
            if from_engine
            else (
                "The stack changed the value: a flipped sign, a probability in place of its"
                " logarithm, or an overflow."
            )
        ),
    )


@request_check(
    "stitch.logprobs-paired",
    promise="Each logprob is the one that the engine returned with its token.",
    needs="a delivered sample with one logprob per token, and the engines' replies",
    exercised_by=("tokens of single-call samples", "tokens of resumed samples"),
    applies=_no_logprobs,
)
def stitch_logprobs_paired(view: RequestView, out: Collector) -> None:
    """Compare value by value with the reference stitch, up to rounding to 32 bits."""
    # A stack that converts raw logprobs to temperature-scaled ones has every value changed by
    # design.
    if view.engine is not None and view.engine.logprobs is not view.contract.logprobs:
        out.absent(
            f"the engines return {view.engine.logprobs} logprobs, and the stack delivers"
            f" {view.contract.logprobs} ones"
        )
        return
    scanned = _scanned(view, out)
    if scanned is None:
        return
    delivered, scan = scanned
    kind = (
        "tokens of resumed samples" if len(view.segments) > 1 else "tokens of single-call samples"
    )
    out.exercised(kind, scan.sampled - len(scan.absent) - len(scan.lost))
    if not scan.wrong:
        return
    assert delivered.rollout.logprobs is not None
    first = scan.wrong[0]
    expected, actual = delivered.reference.logprob_list, delivered.rollout.logprobs.tolist()
    out.finding(
        f"{share(len(scan.wrong), scan.sampled, 'logprob')}"
        f" {'is' if len(scan.wrong) == 1 else 'are'} not what the engine returned with"
        f" {'its token' if len(scan.wrong) == 1 else 'their tokens'}",
        kind="logprobs are not those of their tokens",
        expected=f"as returned: {window(expected, first)}",
        observed=f"{window(actual, first)}; differs at response index {ranges(scan.wrong)}",
        where=view.place(
            index=first,
            segment=view.segment_of(len(view.request.prompt_ids) + first),
            version=view.stitched.tokens[first].true if len(expected) <= _SMALL else None,
        ),
        hint=describe_wrong_logprobs(view, expected, actual, scan.wrong),
    )


@request_check(
    "stitch.logprobs-missing",
    promise=(
        "If the engine returned no logprob, the sample marks it as its contract declares; a"
        " value is never made up."
    ),
    needs="a delivered sample with one logprob per token, and the engines' replies",
    exercised_by=("sampled tokens", "tokens that came without a logprob"),
    applies=_no_logprobs,
)
def stitch_logprobs_missing(view: RequestView, out: Collector) -> None:
    """Check the tokens for which the engine returned no logprob."""
    # OpenRLHF fills 0.0 and SkyRL clamps to -9999 where the engine returned nothing; both reach the
    # importance ratio.
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
        out.absent("not every call requested logprobs")
        return
    delivered = reliable_delivery(view, out)
    if delivered is None:
        return
    scan = _scan(view, delivered)
    if scan is None:
        if delivered.rollout.logprobs is not None or not delivered.aligned:
            out.absent("logprobs and tokens do not align")
            return
        # A sample without logprobs marks every token as missing at once.
        scan = _all_absent(delivered)
    if rule is MissingLogprobs.NEVER:
        out.exercised("sampled tokens", scan.sampled)
    out.exercised("tokens that came without a logprob", len(scan.absent))
    if not scan.absent:
        return
    # 0.0 and -9999 look like values: only a marker that the contract declares shows that nothing
    # was returned.
    unmarked = _unmarked_tokens(rule, delivered, scan)
    if unmarked:
        _unmarked_finding(view, delivered, scan, unmarked, out)


def _all_absent(delivered: Delivery) -> _Scan:
    """Return the scan of a sample without logprobs: the tokens for which the engine returned
    none.
    """
    absent = [
        i
        for run in delivered.reference.runs
        if run.attempt >= 0
        for i, value in enumerate(run.logprobs, run.start)
        if math.isnan(value) and i < delivered.count
    ]
    sampled = sum(
        min(run.end, delivered.count) - run.start
        for run in delivered.reference.runs
        if run.attempt >= 0 and run.start < delivered.count
    )
    return _Scan(sampled=sampled, absent=absent)


def _unmarked_tokens(rule: MissingLogprobs, delivered: Delivery, scan: _Scan) -> list[int]:
    """Return the positions that are not marked as ``rule`` says."""
    if rule is MissingLogprobs.NEVER:
        return scan.absent
    if rule is MissingLogprobs.NAN:
        return scan.filled
    mask = delivered.rollout.loss_mask
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
    view: RequestView, delivered: Delivery, scan: _Scan, unmarked: list[int], out: Collector
) -> None:
    rule = view.contract.missing_logprobs
    first = unmarked[0]
    values = delivered.rollout.logprobs
    filled = {
        values[i].item() for i in unmarked if values is not None and not math.isnan(values[i])
    }
    if filled:
        title = (
            f"{share(len(unmarked), scan.sampled, 'logprob')}"
            f" {'was' if len(unmarked) == 1 else 'were'} made up: the engine returned none"
        )
        values_shown = listing(f"{value:.6g}" for value in sorted(filled)[:3])
        observed = f"{values_shown} at response index {ranges(unmarked)}" + (
            "" if rule is not MissingLogprobs.MASKED else ", with loss mask 1"
        )
        hint = (
            "0.0 means probability 1, a large negative number means never: either distorts"
            " the importance ratio of these tokens (OpenRLHF fills 0.0, SkyRL clamps to"
            " -9999). Mark them as missing."
        )
    else:
        title = f"The engine returned no logprob for {share(len(unmarked), scan.sampled, 'token')}"
        observed = f"none at response index {ranges(unmarked)}"
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
