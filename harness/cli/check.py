"""check: judge traces that were written earlier, by whoever wrote them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.output import JsonTarget, Meter, Only, Output, Verbose
from rollproof.core.events.rollout import Submit
from rollproof.core.progress import Progress
from rollproof.core.trace import Header
from rollproof.errors import TraceError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.checks import Check, CheckResult, Verdict
from rollproof.judging.judge import Judge, Tally
from rollproof.judging.report import ExitCode, Report
from rollproof.reporting.text import NOT_EXERCISED, Line, Style, report_lines, wrapped
from rollproof.store import open_trace
from rollproof.verification.reports import situations_of
from rollproof.verification.traces import oracle_of

__all__ = ["check", "judged_lines"]

_NAMED = 10
"""Checks or situations of one line that are named; of more checks the families are counted."""
_OF_SAMPLES = ("Submit", "Result", "samples")
"""One of these stands in what a check ``needs`` that judges what was asked for and what came of it."""
_NEXT = (
    "  next: have your stack tell them. `rollproof serve --contract FILE` takes what it promises,"
    " and the running server each request and sample (rollproof.fakes.http.trace_client.Teller, or"
    " POST /rollproof/submit and /rollproof/result: docs/entry-points.md, A fake engine behind HTTP). A"
    " stack in Python needs no server: rollproof.record(...) or @rollproof.conformance."
)


def check(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...", help="Trace files: Arrow streams or JSON counterexamples."
        ),
    ],
    only: Only = None,
    json_target: JsonTarget = None,
    verbose: Verbose = False,
) -> int:
    """Judge recorded traces, however long: memory does not grow with them.

    A file that cannot be read to its end is judged up to there and then told; requests that were
    open at the end of an unfinished file are not blamed for not ending.
    """
    output = Output(json_target)
    judged = _Judged(Tally(default_registry().select(only) if only else default_registry()))
    with Meter() as meter:
        for number, path in enumerate(traces):
            meter(Progress(done=number, total=len(traces), what=str(path)))
            judged.take(path)
    if not judged.headers:
        raise judged.broken[0]
    report = judged.report()
    output.lines(report_lines(report.to_dict(), verbose=verbose, gather=True))
    if not verbose:
        output.lines(judged_lines(report.results, told=judged.told))
    output.lines((Style.BAD, f"  {error}") for error in judged.broken)
    output.json(report.to_dict())
    broken = judged.broken and report.exit_code != ExitCode.FAIL
    return output.ended(ExitCode.USAGE if broken else report.exit_code)


@dataclass
class _Judged:
    """What the traces came to so far."""

    tally: Tally
    exercised: Counter[str] = field(default_factory=Counter)
    headers: list[Header] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: list[TraceError | UsageError] = field(default_factory=list)
    told: bool = False
    """Whether requests are told of, or the trace is of something else than rollouts."""

    def take(self, path: Path) -> None:
        """Judge every episode of a file, as far as it can be read."""
        try:
            reader = open_trace(path)
            for header, events in reader.episodes():
                self.headers.append(header)
                self.told |= header.about != "rollouts"
                judge, scenarios = (
                    Judge(header, self.tally, oracle_of(header)),
                    situations_of(header.about),
                )
                for event in events:
                    self.told = self.told or type(event) is Submit
                    judge.feed(event)
                    scenarios.event(event)
                self.exercised.update(scenarios.counts)
                if reader.ending is None or reader.ending.closed:
                    judge.finish()
                else:
                    self.notes.append(f"{path}: {reader.ending}")
        except (TraceError, UsageError) as error:
            self.broken.append(error)

    def report(self) -> Report:
        """The verdicts over all of them."""
        first = self.headers[0]
        return Report(
            subject=", ".join(dict.fromkeys(header.subject for header in self.headers)),
            profile=first.profile,
            seed=first.seed,
            results=self.tally.judgement().results,
            exercised=dict(sorted(self.exercised.items())),
            cases=len(self.headers),
            notes=tuple(self.notes),
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
