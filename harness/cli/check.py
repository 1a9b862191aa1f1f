"""The command ``check``: judge recorded traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.output import Github, JsonTarget, Meter, Only, Output, ReportTargets, Verbose
from rollproof.core.events.rollout import Submit
from rollproof.core.progress import Progress
from rollproof.core.source_location import SourceLocation
from rollproof.core.trace import Header
from rollproof.errors import TraceError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.checks import Check, CheckResult, Verdict
from rollproof.judging.judge import Judge, Tally
from rollproof.judging.report import ExitCode, Report
from rollproof.reporting.text import NOT_EXERCISED, WIDTH, Line, Style, report_lines, wrapped
from rollproof.store import open_trace
from rollproof.verification.reports import situations_of
from rollproof.verification.traces import oracle_of

__all__ = ["check", "summary_lines", "unsealed_notes"]

_NAMED = 10
"""A line names as many checks or situations; of more checks it counts the families."""
_SAMPLE_DATA = ("Submit", "Result", "samples")
"""Words in the ``needs`` of checks that judge requests and samples."""
_NEXT = (
    "  next: have your client report its samples: put `@rollout` of rollproof.http_clients on the"
    " function that makes one, and a hook of that module into its HTTP client (docs/http.md)."
    " The server needs what they promise: `rollproof serve --contract FILE` or `--like STACK`. A"
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
    unfinished_ok: Annotated[
        bool,
        typer.Option(
            "--unfinished-ok",
            help="Let checks pass on what an unfinished file has: its writer runs, or was killed.",
        ),
    ] = False,
    json_target: JsonTarget = None,
    report: ReportTargets = None,
    github: Github = None,
    verbose: Verbose = False,
) -> int:
    """Judge recorded traces. Memory does not grow with their length.

    A damaged file is judged as far as it can be read, and reported. In an unfinished file, which
    lost its end or is still written, checks may fail, but pass only with --unfinished-ok; requests
    that were open at its end do not count as hanging.
    """
    output = Output(json_target, report, github=github)
    traces_judged = _TraceResults(
        Tally(default_registry().select(only) if only else default_registry()),
        unfinished_ok=unfinished_ok,
    )
    # One tally for all files, so that a check that one file exercises is not unknown for another.
    with Meter() as meter:
        for number, path in enumerate(traces):
            meter(Progress(done=number, total=len(traces), what=str(path)))
            traces_judged.add(path)
    if not traces_judged.headers:
        raise traces_judged.errors[0]
    judged = traces_judged.report()
    data = judged.to_dict()
    if len(traces) == 1:  # of several files the report does not say which one a finding is in
        file = SourceLocation(file=traces[0].resolve(), line=1)
        data["location"] = file.to_dict(Path.cwd())
    output.lines(report_lines(data, verbose=verbose, gather=True, width=output.width))
    output.lines(
        summary_lines(
            judged.results,
            has_samples=traces_judged.has_samples,
            verbose=verbose,
            width=output.width,
        )
    )
    output.lines((Style.BAD, f"  {error}") for error in traces_judged.errors)
    output.json(data)
    # A failure outranks a damaged file: the part that could be read is enough to show it.
    unreadable = traces_judged.errors and judged.exit_code != ExitCode.FAIL
    code = ExitCode.USAGE if unreadable else judged.exit_code
    output.report(data, code, problems=map(str, traces_judged.errors))
    return output.ended(code)


@dataclass
class _TraceResults:
    """The results of the traces that have been judged."""

    tally: Tally
    unfinished_ok: bool
    unfinished: list[str] = field(default_factory=list)
    """What unfinished files lack, one text a file."""
    unsealed: list[str] = field(default_factory=list)
    """Files in which damage would not be noticed."""
    exercised: Counter[str] = field(default_factory=Counter)
    headers: list[Header] = field(default_factory=list)
    errors: list[TraceError | UsageError] = field(default_factory=list)
    has_samples: bool = False
    """Whether a trace has requests, or is not about rollouts."""

    def add(self, path: Path) -> None:
        """Judge every episode of a file, as far as the file can be read."""
        try:
            reader = open_trace(path)
            if not reader.sealed:
                self.unsealed.append(str(path))
            for header, events in reader.episodes():
                self.headers.append(header)
                self.has_samples |= header.about != "rollouts"
                judge, scenarios = (
                    Judge(header, self.tally, oracle_of(header)),
                    situations_of(header.about, header),
                )
                for event in events:
                    self.has_samples = self.has_samples or type(event) is Submit
                    judge.feed(event)
                    scenarios.event(event)
                self.exercised.update(scenarios.counts)
                # The writer of an unfinished file was killed, or still runs: what it did not
                # write must not count as a hang.
                if reader.ending is None or reader.ending.closed:
                    judge.finish()
                else:
                    self.unfinished.append(f"{path}: {reader.ending}")
        except (TraceError, UsageError) as error:
            self.errors.append(error)

    def report(self) -> Report:
        """Return the verdicts over all traces."""
        first = self.headers[0]
        results = self.tally.judgement().results
        if self.unfinished and not self.unfinished_ok:
            results = tuple(map(self._of_a_part, results))
        return Report(
            subject=", ".join(dict.fromkeys(header.subject for header in self.headers)),
            profile=first.profile,
            seed=first.seed,
            results=results,
            exercised=dict(sorted(self.exercised.items())),
            cases=len(self.headers),
            notes=(*self.unfinished, *unsealed_notes(self.unsealed)),
        )

    def _of_a_part(self, result: CheckResult) -> CheckResult:
        """Return the result of a check that saw a part of a run: what it did not see may fail."""
        if result.verdict is not Verdict.PASS:
            return result
        reason = (
            "a file is unfinished, so the rest of its run was not seen (--unfinished-ok judges by"
            " what there is)"
        )
        return replace(result, verdict=Verdict.UNKNOWN, reason=reason)


def unsealed_notes(files: Sequence[str]) -> Iterator[str]:
    """Yield what to say of files without a checksum: once, however many there are."""
    if files:
        others = f" and {len(files) - 1} more" if len(files) > 1 else ""
        yield (
            f"{files[0]}{others}: no checksum, so damage would not be noticed; `rollproof seal"
            " FILE` adds one"
        )


def summary_lines(
    results: Sequence[CheckResult],
    *,
    has_samples: bool,
    verbose: bool = False,
    width: int = WIDTH,
) -> Iterator[Line]:
    """Yield lines on which checks passed, which were not judged and why, and what to do next.

    ``has_samples``: whether the traces have requests. Without them no check of samples is judged.
    ``verbose``: whether the report lists every check, so that only the next step is left to say.
    ``width``: the columns of the terminal.
    """
    width = min(width, WIDTH)
    passed = [result.check for result in results if result.verdict is Verdict.PASS]
    if passed and not verbose:
        yield Style.GOOD, wrapped(f"  passed: {_listed(passed)}.", width=width)
    # Unknown checks with a reason of their own are in the report above; their situations may well
    # have occurred.
    idle = [
        result.check
        for result in results
        if result.verdict is Verdict.UNKNOWN and result.reason.startswith(NOT_EXERCISED)
    ]
    without_data = [] if has_samples else [check for check in idle if _needs_samples(check)]
    not_met = [check for check in idle if check not in without_data]
    if without_data and not verbose:
        reason = (
            "they need requests and samples, and none were reported to this recording: it has"
            " calls, aborts, pauses and weights"
        )
        yield Style.DOUBT, wrapped(f"  not judged: {_listed(without_data)}: {reason}.", width=width)
    if not_met and not verbose:
        situations = list(dict.fromkeys(name for check in not_met for name in check.exercised_by))
        more = f", and {len(situations) - _NAMED} more" if len(situations) > _NAMED else ""
        text = (
            f"  not judged: {_listed(not_met)}: none of their situations occurred"
            f" ({', '.join(situations[:_NAMED])}{more})."
        )
        yield Style.DOUBT, wrapped(text, width=width)
    if without_data:
        yield Style.PLAIN, wrapped(_NEXT, width=width)


def _needs_samples(check: Check) -> bool:
    return check.request is not None or any(word in check.needs for word in _SAMPLE_DATA)


def _listed(checks: Sequence[Check]) -> str:
    if len(checks) <= _NAMED:
        return ", ".join(check.id for check in checks)
    families = Counter(check.family for check in checks)
    return (
        f"{len(checks)} checks"
        f" ({', '.join(f'{family} {count}' for family, count in families.most_common())})"
    )
