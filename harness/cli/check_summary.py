"""judged: what a recording was judged by, what could not be judged and why, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rollproof.judging.checks import Check, CheckResult, Verdict
from rollproof.reporting.text import NOT_EXERCISED, Line, Style, wrapped

__all__ = ["judged_lines"]

_NAMED = 10
"""Checks or situations of one line that are named; of more checks the families are counted."""
_OF_SAMPLES = ("Submit", "Result", "samples")
"""One of these stands in what a check ``needs`` that judges what was asked for and what came of it."""
_NEXT = (
    "  next: have your stack tell them. `rollproof serve --contract FILE` takes what it promises,"
    " and the running server each request and sample (rollproof.fakes.http.trace_client.Teller, or"
    " POST /rollproof/submit and /rollproof/result: docs/doors.md, A fake engine behind HTTP). A"
    " stack in Python needs no server: rollproof.record(...) or @rollproof.conformance."
)


def judged_lines(results: Sequence[CheckResult], *, told: bool) -> Iterator[Line]:
    """Lines behind a report whose unknown checks were gathered; ``told``: the recording knows of
    requests that somebody had.
    """
    held = [one.check for one in results if one.verdict is Verdict.PASS]
    if held:
        yield Style.GOOD, wrapped(f"  held: {_named(held)}.")
    # an unknown check with a reason of its own is told with that reason, and what it is about may
    # well have occurred
    idle = [
        one.check
        for one in results
        if one.verdict is Verdict.UNKNOWN and one.reason.startswith(NOT_EXERCISED)
    ]
    untold = [] if told else [check for check in idle if _of_samples(check)]
    missed = [check for check in idle if check not in untold]
    if untold:
        why = (
            "they are about requests and samples, and nobody told this recording of any: it shows"
            " calls, aborts, pauses and weights"
        )
        yield Style.DOUBT, wrapped(f"  not judged: {_named(untold)}: {why}.")
    if missed:
        waits = list(dict.fromkeys(name for check in missed for name in check.exercised_by))
        more = f", and {len(waits) - _NAMED} more" if len(waits) > _NAMED else ""
        text = (
            f"  not judged: {_named(missed)}: nothing of what they wait for occurred"
            f" ({', '.join(waits[:_NAMED])}{more})."
        )
        yield Style.DOUBT, wrapped(text)
    if untold:
        yield Style.PLAIN, wrapped(_NEXT)


def _of_samples(check: Check) -> bool:
    return check.request is not None or any(word in check.needs for word in _OF_SAMPLES)


def _named(checks: Sequence[Check]) -> str:
    if len(checks) <= _NAMED:
        return ", ".join(check.id for check in checks)
    families = Counter(check.family for check in checks)
    return (
        f"{len(checks)} checks"
        f" ({', '.join(f'{family} {count}' for family, count in families.most_common())})"
    )
