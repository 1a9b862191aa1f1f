"""check: judge traces that were written earlier, by whoever wrote them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.check_summary import judged_lines
from rollproof.cli.options import JsonTarget, Only, Verbose
from rollproof.cli.output import Meter, Output
from rollproof.core.events.rollout import Submit
from rollproof.core.progress import Progress
from rollproof.core.trace import Header
from rollproof.errors import TraceError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.judge import Judge, Tally
from rollproof.judging.report import ExitCode, Report
from rollproof.reporting.text import Style, report_lines
from rollproof.store import open_trace
from rollproof.verification.reports import situations_of
from rollproof.verification.traces import oracle_of

__all__ = ["check"]


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
