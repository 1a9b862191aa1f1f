"""The command ``verify``: run subjects through schedules, judge the traces, and report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from rollproof.cli.completions import (
    complete_engines,
    complete_flavours,
    complete_profiles,
    complete_stacks,
)
from rollproof.cli.named_targets import (
    Target,
    engine_target,
    references,
    stack_targets,
    subject_target,
)
from rollproof.cli.output import (
    Github,
    Jobs,
    JsonTarget,
    Meter,
    Only,
    Output,
    RayAddress,
    ReportTargets,
    Verbose,
)
from rollproof.cli.parallel import Settings, judge_all, processors
from rollproof.cli.ray_targets import judge_all_on_ray
from rollproof.core.files import check_folder, check_target
from rollproof.core.source_location import source_location
from rollproof.errors import UsageError
from rollproof.invariants import default_registry
from rollproof.judging.checks import Verdict
from rollproof.judging.known_failures import KnownFailures
from rollproof.judging.registry import Registry
from rollproof.judging.report import ExitCode, Interrupted, Report
from rollproof.reporting.text import Style, report_lines, summary_text
from rollproof.stacks.matrix import Matrix
from rollproof.verification.expected_failures import ExpectedFailures, Outcome
from rollproof.verification.reports import merge_reports
from rollproof.verification.schedules import profile_named

__all__ = ["PinnedVerdicts", "verify"]


def verify(
    stack: Annotated[
        str | None,
        typer.Option(
            "--stack",
            metavar="NAME[==VERSION]",
            help="Judge a released framework that is installed here.",
            autocompletion=complete_stacks,
        ),
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part", metavar="NAME", help="Only this part of the stack; may be repeated."
        ),
    ] = None,
    checkout: Annotated[
        Path | None,
        typer.Option(
            "--checkout",
            metavar="DIR",
            help="Judge this checkout of the --stack, a fork too, instead of what is installed.",
        ),
    ] = None,
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix",
            help="Compare with the pinned verdicts of this release of the --stack, or of the"
            " nearest one.",
        ),
    ] = False,
    subject: Annotated[
        str | None,
        typer.Option(
            "--subject",
            metavar="MODULE:FACTORY",
            help="Judge an adapter of your own; FILE.py:FACTORY names it by its file.",
        ),
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(
            "--replay",
            metavar="MODULE:FACTORY",
            help="Judge a trainer with routing replay of your own.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="Judge a rollout engine: vllm, sglang (installed here), fake-FLAVOUR.",
            autocompletion=complete_engines,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="MoE checkpoint for --engine; default: a tiny random one.",
        ),
    ] = None,
    flavour: Annotated[
        list[str] | None,
        typer.Option(
            "--flavour",
            metavar="NAME",
            help="Only this engine flavour; may be repeated.",
            autocompletion=complete_flavours,
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            metavar="NAME",
            help="How much is run: pr, nightly or soak.",
            autocompletion=complete_profiles,
        ),
    ] = "pr",
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Seed of every random choice; default: the profile's seed.",
        ),
    ] = None,
    only: Only = None,
    expected: Annotated[
        Path | None,
        typer.Option("--expected", metavar="FILE", help="File of expected failures (TOML)."),
    ] = None,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept", help="Rewrite the file of expected failures to list what fails now."
        ),
    ] = False,
    json_target: JsonTarget = None,
    report: ReportTargets = None,
    github: Github = None,
    witness_dir: Annotated[
        Path,
        typer.Option(
            "--witness-dir",
            metavar="DIR",
            help="Folder for counterexamples, for `rollproof replay`.",
        ),
    ] = Path(".rollproof"),
    verbose: Verbose = False,
    jobs: Jobs = None,
    ray: RayAddress = None,
) -> int:
    """Judge a stack's rollout code on fake engines: every abort, resume and weight update of a
    small scope, then random ones.

    --engine judges a rollout engine: rows, logprobs and versions against an independent forward.
    --replay judges a trainer: its routers must execute the routes of the samples in every pass and
    mode. Without any of these options the references that rollproof ships are judged (clients, a
    conversion, layouts, trainers): all must pass.
    """
    # Everything that can be refused is refused before the run, which may take hours.
    output = Output(json_target, report, github=github)
    check_folder(witness_dir)
    if ray is not None and jobs is not None:
        raise UsageError("Give --jobs or --ray, not both: the cluster has its own workers.")
    seed = profile_named(profile).seed_for(seed)
    registry = default_registry()
    expected_failures = _read_expected(expected, accept=accept)
    _require_stack({"--part": part, "--checkout": checkout, "--matrix": matrix}, stack)
    title, targets = (
        _trainer(replay, stack, subject, engine)
        or _engine(engine, model, stack, subject, flavour)
        or _targets(stack, part, subject, checkout=checkout)
    )
    pinned = PinnedVerdicts.of(targets, complete=not part) if matrix else None
    ids = registry.select(only).ids if only else _applicable(registry, targets)
    reasons: dict[str, Mapping[str, str]] = {}
    known_failures: dict[str, KnownFailures] = {}
    if pinned is not None:
        reasons |= pinned.reasons()
        known_failures |= pinned.known_failures()
    elif expected_failures is not None:
        for target in targets:
            reasons[target.name] = expected_failures.reasons(target.name)
            known_failures[target.name] = expected_failures.ways(target.name)
    settings = Settings(
        profile=profile,
        seed=seed,
        only=ids,
        flavours=tuple(flavour or ()),
        expected=reasons,
        known_failures=known_failures,
        witness_dir=witness_dir,
    )
    try:
        with Meter() as meter:
            if ray is not None:
                reports = judge_all_on_ray(targets, settings, meter, address=ray)
            else:
                reports = judge_all(
                    targets, settings, meter, jobs=processors() if jobs is None else jobs
                )
    except Interrupted as interrupt:
        # Ctrl-C: show the verdicts so far, then end as interrupted.
        if interrupt.reports:
            reports = list(interrupt.reports)
            merged = _show(output, title, reports, targets, verbose=verbose)
            stopped = "The run was interrupted: what it did not reach is not in this report."
            code = merged.exit_code or ExitCode.UNKNOWN
            output.report(_json(merged, reports, targets), code, problems=[stopped])
        raise
    notes = [_changed(targets), _untested(targets)]
    if pinned is not None:
        notes += pinned.repaired(reports, ids)
    elif stack is not None:
        notes.append(PinnedVerdicts.note(targets, reports))
    merged = _show(output, title, reports, targets, notes, verbose=verbose)
    problems = _compare_expected(output, expected_failures, reports, accept=accept)
    code = ExitCode.FAIL if problems else merged.exit_code
    if code == ExitCode.UNKNOWN and _all_listed(expected_failures, reports):
        code = ExitCode.PASS
    # With --matrix the pinned verdicts decide: a known failure is no failure, and a check that
    # passes unexpectedly is one.
    if pinned is not None:
        problems = pinned.deviations(reports, ids)
        output.lines((Style.BAD, f"  {text}") for text in problems)
        code = ExitCode.FAIL if problems else ExitCode.PASS
    output.report(
        _json(merged, reports, targets), code, problems=problems, notes=filter(None, notes)
    )
    return output.ended(code)


def _applicable(registry: Registry, targets: list[Target]) -> tuple[str, ...]:
    """Return the checks that a run without --only reports: those for the targets' kinds."""
    kinds = {target.about for target in targets}
    return tuple(check.id for check in registry if any(check.judges(kind) for kind in kinds))


def _trainer(
    replay: str | None, stack: str | None, subject: str | None, engine: str | None
) -> tuple[str, list[Target]] | None:
    """Return the trainer of --replay, or ``None``."""
    if replay is None:
        return None
    if stack is not None or subject is not None or engine is not None:
        raise UsageError(
            "Give --replay, --engine, --stack or --subject: one run judges one of them."
        )
    target = subject_target(replay, "replay", "--replay")
    return target.name, [target]


def _engine(
    engine: str | None,
    model: Path | None,
    stack: str | None,
    subject: str | None,
    flavours: list[str] | None,
) -> tuple[str, list[Target]] | None:
    """Return the engine of --engine, or ``None``."""
    if engine is None:
        if model is not None:
            raise UsageError("--model is the checkpoint of an engine: give --engine too.")
        return None
    if stack is not None or subject is not None:
        raise UsageError("Give --engine, --stack or --subject: one run judges one of them.")
    if flavours:
        raise UsageError(
            "--flavour selects the fake engines of a stack; an engine has one flavour"
            " (--engine fake-FLAVOUR is a fake engine)."
        )
    return engine, [engine_target(engine, None if model is None else str(model))]


def _require_stack(options: Mapping[str, object], stack: str | None) -> None:
    """Refuse options of a stack without --stack."""
    for option, value in options.items():
        if value and stack is None:
            raise UsageError(f"{option} is an option of --stack: give --stack too.")


def _targets(
    stack: str | None,
    parts: list[str] | None,
    subject: str | None,
    *,
    checkout: Path | None,
) -> tuple[str, list[Target]]:
    if stack is not None and subject is not None:
        raise UsageError("Give --stack or --subject, not both: one run judges one of them.")
    if stack is not None:
        return stack_targets(stack, parts or (), checkout=checkout)
    if subject is not None:
        target = subject_target(subject)
        return target.name, [target]
    return "references", references()


def _read_expected(expected: Path | None, *, accept: bool) -> ExpectedFailures | None:
    if expected is None:
        if accept:
            raise UsageError(
                "--accept rewrites the file of expected failures: name the file with --expected"
                " FILE."
            )
        return None
    if accept:  # the file need not exist yet
        check_target(expected)
    return ExpectedFailures.read(expected, missing_ok=accept)


def _show(
    output: Output,
    title: str,
    reports: list[Report],
    targets: list[Target],
    notes: Iterable[str | None] = (),
    *,
    verbose: bool,
) -> Report:
    """Print the reports and write the JSON; returns the one report, or all of them merged."""
    merged = reports[0] if len(reports) == 1 else merge_reports(title, reports)
    if len(reports) == 1:
        output.lines(report_lines(merged.to_dict(), verbose=verbose, width=output.width))
    else:
        _show_parts(output, merged, reports, verbose=verbose)
    output.lines((Style.DOUBT, f"  {note}") for note in notes if note)
    output.json(_json(merged, reports, targets))
    return merged


def _show_parts(output: Output, merged: Report, reports: list[Report], *, verbose: bool) -> None:
    # Each part shows its failures. What is unknown in all of them, what was exercised, and the
    # self-test come once, from the merged report.
    for report in reports:
        data = report.to_dict()
        if verbose or report.summary["fail"] or report.summary["expected_fail"]:
            shown = [
                check
                for check in data["checks"]
                if verbose or check["verdict"] in ("fail", "expected fail")
            ]
            output.lines(
                report_lines(
                    {**data, "checks": shown, "exercised": {}, "canary": {}},
                    verbose=verbose,
                    width=output.width,
                )
            )
        else:
            output.lines([(Style.PLAIN, f"{report.subject}: {summary_text(data)}")])
    data = merged.to_dict()
    output.lines(
        report_lines(
            {
                **data,
                "checks": [check for check in data["checks"] if check["verdict"] == "unknown"],
            },
            width=output.width,
        )
    )


def _untested(targets: list[Target]) -> str | None:
    """Return a note on a stack in a version that its adapters do not know."""
    recipe = targets[0].recipe
    if "driven_as" not in recipe:
        return None
    return (
        f"note: the adapters do not know {recipe['stack']} {recipe['version']} and drive it as"
        f" {recipe['driven_as']}: what fails here and not there may be the adapters' fault"
    )


def _changed(targets: list[Target]) -> str | None:
    """Return a note on a stack whose files were changed after they were installed or committed."""
    recipe = targets[0].recipe
    if "changed" not in recipe:
        return None
    original = "in its commit" if "checkout" in recipe else "when it was installed"
    return f"note: {recipe['stack']} was changed: {recipe['changed']} was other {original}"


def _json(merged: Report, reports: list[Report], targets: list[Target]) -> dict[str, Any]:
    facts = {target.name: _facts(target) for target in targets}
    each = [{**report.to_dict(), **facts.get(report.subject, {"recipe": {}})} for report in reports]
    return each[0] if len(each) == 1 else {**merged.to_dict(), "reports": each}


def _facts(target: Target) -> dict[str, Any]:
    """Return what a report says of its subject: how to make it, and where the user wrote it."""
    location = source_location(target.factory) if "subject" in target.recipe else None
    return {
        "recipe": dict(target.recipe),
        **({} if location is None else {"location": location.to_dict(Path.cwd())}),
    }


def _all_listed(expected: ExpectedFailures | None, reports: list[Report]) -> bool:
    """Whether the file of expected failures lists every check that is unknown."""
    return expected is not None and all(
        report.summary["pass"]
        and all(
            result.id in expected.undecided(report.subject)
            for result in report.results
            if result.verdict is Verdict.UNKNOWN
        )
        for report in reports
    )


def _compare_expected(
    output: Output, expected: ExpectedFailures | None, reports: list[Report], *, accept: bool
) -> list[str]:
    """Compare with the file of expected failures, or rewrite it.

    Returns the entries that are stale: their check does not fail any more.
    """
    if expected is None:
        return []
    outcomes = [Outcome.of_report(report.to_dict()) for report in reports]
    if accept:
        output.lines(
            (Style.PLAIN, f"  expected failures: {text}") for text in expected.accept(outcomes)
        )
        return []
    stale = [text for outcome in outcomes for text in expected.stale(outcome)]
    output.lines((Style.BAD, f"  {text}") for text in stale)
    return stale


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedVerdicts:
    """The pinned verdicts of one release of a stack. A version that the adapters do not know has
    those of the release as which it is driven.

    ``parts`` maps the names of targets to parts of the stack; ``complete`` says that these are all
    its parts, so that an entry may name no other. ``exact`` says that the release itself is judged:
    in other code, a known failure that does not show is good news, not a deviation.
    """

    matrix: Matrix
    version: str
    parts: Mapping[str, str]
    complete: bool = False
    exact: bool = True

    @classmethod
    def of(cls, targets: Iterable[Target], *, complete: bool = False) -> Self:
        """Return those of the parts of one stack.

        Raises ``UsageError`` for a release without pinned verdicts.
        """
        recipes = {target.name: target.recipe for target in targets}
        first = next(iter(recipes.values()))
        matrix = Matrix.read(first["stack"])
        version = str(first.get("driven_as", first["version"]))
        if version not in matrix.pinned:
            raise UsageError(
                f"--matrix has no verdicts of {matrix.stack} {version}; pinned releases are"
                f" {', '.join(matrix.pinned)}. Judge it without --matrix."
            )
        parts = {name: str(recipe["part"]) for name, recipe in recipes.items()}
        return cls(
            matrix=matrix,
            version=version,
            parts=parts,
            complete=complete,
            exact="driven_as" not in first,
        )

    @classmethod
    def note(cls, targets: Iterable[Target], reports: Iterable[Report]) -> str | None:
        """Return a note on a run without --matrix: how many of its failing checks are known to
        fail. ``None`` if there are none.
        """
        try:
            reasons = cls.of(targets).reasons()
        except UsageError:
            return None
        count = sum(
            result.id in reasons[report.subject] for report in reports for result in report.failed
        )
        if not count:
            return None
        checks = "1 of these checks is" if count == 1 else f"{count} of these checks are"
        return (
            f"note: {checks} known to fail in this release (docs/stacks.md); --matrix shows what"
            " differs from that"
        )

    def reasons(self) -> dict[str, dict[str, str]]:
        """Return the checks that are known to fail, with the reason, by target."""
        return {name: self.matrix.reasons(self.version, part) for name, part in self.parts.items()}

    def known_failures(self) -> dict[str, KnownFailures]:
        """Return the kinds of findings that those checks are known to show, by target."""
        return {
            name: self.matrix.known_failures(self.version, part)
            for name, part in self.parts.items()
        }

    def deviations(self, reports: Iterable[Report], judged: Collection[str]) -> list[str]:
        """Return how the reports differ from the pinned verdicts on the ``judged`` checks."""
        texts = (
            self.matrix.unknown_parts(self.version, set(self.parts.values()))
            if self.complete and self.exact
            else []
        )
        for report in reports:
            outcome, part = Outcome.of_report(report.to_dict()), self.parts[report.subject]
            texts += self.matrix.new_failures(self.version, part, outcome, name=report.subject)
            if self.exact:
                texts += self.matrix.absent_failures(
                    self.version, part, outcome, judged, name=report.subject
                )
            canary = report.canary
            if canary is not None and canary.planted is not None and not canary.red:
                texts.append(
                    f"{report.subject}: no check detected the self-test ({canary.planted}): its"
                    " other verdicts cannot be trusted."
                )
        return texts

    def repaired(self, reports: Iterable[Report], judged: Collection[str]) -> list[str]:
        """Return notes on known failures of the nearest release that do not show in other code."""
        if self.exact:
            return []
        return [
            f"note: not as in {self.matrix.stack} {self.version}: {text}"
            for report in reports
            for text in self.matrix.absent_failures(
                self.version,
                self.parts[report.subject],
                Outcome.of_report(report.to_dict()),
                judged,
                name=report.subject,
            )
        ]
