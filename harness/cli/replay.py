"""The command ``replay``: run a counterexample again, and say whether the fault is still there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rollproof.cli.named_targets import (
    Target,
    foreign_code,
    stack_targets,
    subject_target,
    target_of_recipe,
)
from rollproof.cli.output import JsonTarget, Output
from rollproof.core.trace import Trace
from rollproof.errors import UsageError
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import Judgement
from rollproof.judging.report import ExitCode, Report
from rollproof.reporting.text import Line, Style, check_lines, run_text
from rollproof.store.json_format import JsonTrace
from rollproof.verification.judged_files import unsealed_note
from rollproof.verification.subject_kinds import KINDS, run_again
from rollproof.verification.traces import judge

__all__ = ["replay"]


def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A counterexample that rollproof wrote (JSON).")
    ],
    subject: Annotated[
        str | None,
        typer.Option(
            "--subject",
            metavar="MODULE:FACTORY",
            help="Run this subject, whatever the file names.",
        ),
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option("--stack", metavar="NAME[==VERSION]", help="Run this stack instead."),
    ] = None,
    part: Annotated[
        str | None, typer.Option("--part", metavar="NAME", help="The part of the stack to run.")
    ] = None,
    trust_subject: Annotated[
        bool,
        typer.Option(
            "--trust-subject",
            help="Import and run what the file names. A file from somebody else can name any code.",
        ),
    ] = False,
    json_target: JsonTarget = None,
) -> int:
    """Judge the recorded trace of a counterexample, run its case again, and compare.

    A file chooses no code: name the subject, or agree to the one that the file names
    (--trust-subject). References of rollproof run without.

    Exit code 1: a check that failed fails again (reproduced), or only others do (another fault).
    Exit code 0: the checks that failed pass now (fixed). Exit code 2: undecided.
    """
    output = Output(json_target)
    source = JsonTrace(file)
    trace = source.trace
    if not source.sealed:
        output.say(f"note: {unsealed_note(str(file))}")
    recorded = judge(trace)
    output.say(
        f"{file}: {trace.header.subject}, {run_text(trace.header)}, {len(trace.events)} events;"
        f" failing as recorded: {', '.join(recorded.failed) or 'nothing'}"
    )
    if not trace.events:
        output.say(
            "It has no events, so nothing could be judged as recorded: only the new run counts."
        )
    target = _target(trace, subject, stack, part, trusted=trust_subject)
    if target is None:
        output.say(
            "The file does not say how to make its subject: only the recorded trace was judged."
            " Name one with --subject or --stack."
        )
        outcome = _Outcome(recorded, recorded, rerun=False)
    else:
        if trace.header.case is None:
            raise UsageError(
                f"{file} has no case, so it cannot be run again; `rollproof check {file}` judges"
                " it as recorded."
            )
        # On the code that is there now: the question is whether the fault is fixed.
        again = run_again(target.factory, replace(trace.header, recipe=target.recipe))
        outcome = _Outcome(recorded, judge(again), rerun=True)
    output.lines(outcome.lines())
    output.json(outcome.to_dict(trace))
    return output.ended(outcome.exit_code)


def _target(
    trace: Trace, subject: str | None, stack: str | None, part: str | None, *, trusted: bool
) -> Target | None:
    if subject is not None and stack is not None:
        raise UsageError("Give --subject or --stack, not both: one run replays on one of them.")
    if subject is not None:
        about = trace.header.about
        return subject_target(subject, about if about in KINDS else None)
    if stack is not None:
        targets = stack_targets(stack, [part] if part else ())[1]
        if len(targets) > 1:
            raise UsageError(
                f"{stack} has several parts: say which with --part, among"
                f" {[target.name for target in targets]}."
            )
        return targets[0]
    recipe = trace.header.recipe
    if not recipe:
        return None
    code = foreign_code(recipe)
    if code is not None and not trusted:
        raise UsageError(
            f"The file names {code}, and running it again runs that code. Add --trust-subject if"
            " you know where the file comes from, or say what to run with --subject or --stack."
        )
    return target_of_recipe(recipe)


@dataclass(frozen=True, slots=True)
class _Outcome:
    recorded: Judgement
    now: Judgement
    rerun: bool

    @property
    def verdict(self) -> str:
        """How the new run compares with the recorded one."""
        # One check of the recorded ones is enough: others may have failed as its consequence.
        if set(self.now.failed) & set(self.recorded.failed):
            return "reproduced"
        if self.now.failed:
            return "another fault" if self.recorded.failed else "new fault"
        passed = {result.id for result in self.now.results if result.verdict is Verdict.PASS}
        return (
            "fixed" if self.recorded.failed and set(self.recorded.failed) <= passed else "undecided"
        )

    @property
    def exit_code(self) -> int:
        return {
            "reproduced": ExitCode.FAIL,
            "another fault": ExitCode.FAIL,
            "new fault": ExitCode.FAIL,
            "fixed": ExitCode.PASS,
            "undecided": ExitCode.UNKNOWN,
        }[self.verdict]

    def report(self, trace: Trace) -> Report:
        return Report(
            subject=trace.header.subject,
            profile=trace.header.profile,
            seed=trace.header.seed,
            results=self.now.results,
            cases=1,
        )

    def to_dict(self, trace: Trace) -> dict[str, Any]:
        """Return the JSON report of the new run, with the comparison."""
        comparison = {
            "verdict": self.verdict,
            "rerun": self.rerun,
            "recorded": list(self.recorded.failed),
            "now": list(self.now.failed),
        }
        return {**self.report(trace).to_dict(), "replay": comparison}

    def lines(self) -> list[Line]:
        """Return the lines on checks that fail now or failed as recorded, and the comparison."""
        lines: list[Line] = []
        for check in self._checks():
            if check["verdict"] == "fail":
                lines += check_lines(check)
            elif check["id"] in self.recorded.failed:
                style = Style.GOOD if check["verdict"] == "pass" else Style.DOUBT
                lines.append(
                    (
                        style,
                        f"  {check['id']} failed as recorded; now: {check['verdict']}"
                        f" {check['reason']}".rstrip(),
                    )
                )
        style = {"fixed": Style.GOOD, "undecided": Style.DOUBT}.get(self.verdict, Style.BAD)
        return [
            *lines,
            (
                style,
                f"{self.verdict}{'' if self.rerun else ' (judged as recorded, not run again)'}",
            ),
        ]

    def _checks(self) -> list[dict[str, Any]]:
        return list(
            Report(subject="", profile="", seed=0, results=self.now.results).to_dict()["checks"]
        )
