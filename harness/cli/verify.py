"""verify: run subjects through schedules, judge what happened, report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from rollproof.cli.named_targets import (
    Target,
    engine_target,
    references,
    stack_targets,
    subject_target,
)
from rollproof.cli.output import JsonTarget, Meter, Only, Output, Verbose
from rollproof.cli.parallel import Settings, judge_all, processors
from rollproof.core.files import check_folder, check_target
from rollproof.errors import UsageError
from rollproof.invariants import default_registry
from rollproof.judging.known_failures import KnownFailures
from rollproof.judging.registry import Registry
from rollproof.judging.report import ExitCode, Interrupted, Report
from rollproof.reporting.text import Style, report_lines, summary_text
from rollproof.stacks.matrix import Matrix
from rollproof.verification.expected_failures import ExpectedFailures, Outcome
from rollproof.verification.reports import merge_reports
from rollproof.verification.schedules import profile_named

__all__ = ["Known", "verify"]


def verify(
    stack: Annotated[
        str | None,
        typer.Option(
            "--stack",
            metavar="NAME[==VERSION]",
            help="Judge a released framework that is installed here.",
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
            help="Checkout of a --stack that no package index has, such as slime.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Judge a version of the --stack that the adapters were not tested with."
        ),
    ] = False,
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix",
            help="Expect the verdicts that rollproof knows of this release of the --stack.",
        ),
    ] = False,
    subject: Annotated[
        str | None,
        typer.Option("--subject", metavar="MODULE:FACTORY", help="Judge a subject of your own."),
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
            "--flavour", metavar="NAME", help="Only this engine flavour; may be repeated."
        ),
    ] = None,
    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="How much is run: pr, nightly or soak.")
    ] = "pr",
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Seed of everything that is drawn; default: what the profile says.",
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
            "--accept", help="Rewrite the file of expected failures to say what fails now."
        ),
    ] = False,
    json_target: JsonTarget = None,
    witness_dir: Annotated[
        Path,
        typer.Option(
            "--witness-dir",
            metavar="DIR",
            help="Where counterexamples are written, for `rollproof replay`.",
        ),
    ] = Path(".rollproof"),
    verbose: Verbose = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            metavar="N",
            min=1,
            help="Subjects judged at once; default: as many as there are processors.",
        ),
    ] = None,
) -> int:
    """Judge a stack's rollout code on fake engines: every abort, resume and weight update of a
    small scope, then random ones.

    With --engine it judges a rollout engine itself: rows, logprobs and versions against an
    independent forward. With --replay it judges a trainer: that its routers execute the routes that
    came with the samples, in every pass and mode. Without any of them it judges the references that
    rollproof ships (resume managers, a conversion, trainers): all must pass.
    """
    output = Output(json_target)
    check_folder(witness_dir)
    seed = profile_named(profile).seed_for(seed)
    registry = default_registry()
    listed = _listed(expected, accept=accept)
    _of_a_stack(
        {"--part": part, "--checkout": checkout, "--force": force, "--matrix": matrix}, stack
    )
    title, targets = (
        _trainer(replay, stack, subject, engine)
        or _engine(engine, model, stack, subject, flavour)
        or _targets(stack, part, subject, checkout=checkout, force=force)
    )
    known = Known.of(targets, whole=not part) if matrix else None
    ids = registry.select(only).ids if only else _judging(registry, targets)
    settings = Settings(
        profile=profile,
        seed=seed,
        only=ids,
        flavours=tuple(flavour or ()),
        expected=(
            known.reasons()
            if known
            else {target.name: listed.reasons(target.name) for target in targets}
            if listed
            else {}
        ),
        ways=(
            known.ways()
            if known
            else {target.name: listed.ways(target.name) for target in targets}
            if listed
            else {}
        ),
        witness_dir=witness_dir,
    )
    try:
        with Meter() as meter:
            reports = judge_all(
                targets, settings, meter, jobs=processors() if jobs is None else jobs
            )
    except Interrupted as interrupt:
        if interrupt.reports:
            found = list(interrupt.reports)
            whole = found[0] if len(found) == 1 else merge_reports(title, found)
            _show(output, whole, found, verbose=verbose)
            output.json(_json(whole, found, targets))
        raise
    whole = reports[0] if len(reports) == 1 else merge_reports(title, reports)
    _show(output, whole, reports, verbose=verbose)
    told = Known.told(targets, reports) if stack is not None and known is None else None
    output.lines([(Style.DOUBT, f"  {told}")] if told else [])
    output.json(_json(whole, reports, targets))
    stale = _settle(output, listed, reports, accept=accept)
    if known is not None:
        news = known.deviations(reports, ids)
        output.lines((Style.BAD, f"  {text}") for text in news)
        return output.ended(ExitCode.FAIL if news else ExitCode.PASS)
    return output.ended(ExitCode.FAIL if stale else whole.exit_code)


def _judging(registry: Registry, targets: list[Target]) -> tuple[str, ...]:
    """The checks that a run without --only reports: those that judge a kind of subject that is
    among the targets.
    """
    kinds = {target.about for target in targets}
    return tuple(check.id for check in registry if any(check.judges(kind) for kind in kinds))


def _trainer(
    replay: str | None, stack: str | None, subject: str | None, engine: str | None
) -> tuple[str, list[Target]] | None:
    """The trainer that is named; ``None`` where none is."""
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
    """The engine that is named; ``None`` where none is."""
    if engine is None:
        if model is not None:
            raise UsageError(
                "--model is the checkpoint that an engine is judged on: give --engine too."
            )
        return None
    if stack is not None or subject is not None:
        raise UsageError("Give --engine, --stack or --subject: one run judges one of them.")
    if flavours:
        raise UsageError(
            "--flavour chooses fake engines below a stack: an engine's own flavour is fixed"
            " (--engine fake-FLAVOUR is a fake)."
        )
    return engine, [engine_target(engine, None if model is None else str(model))]


def _of_a_stack(options: Mapping[str, object], stack: str | None) -> None:
    """Refuse options of a stack where none is named."""
    for option, value in options.items():
        if value and stack is None:
            raise UsageError(f"{option} says something about a stack: give --stack too.")


def _targets(
    stack: str | None,
    parts: list[str] | None,
    subject: str | None,
    *,
    checkout: Path | None,
    force: bool,
) -> tuple[str, list[Target]]:
    if stack is not None and subject is not None:
        raise UsageError("Give --stack or --subject, not both: one run judges one of them.")
    if stack is not None:
        return stack_targets(stack, parts or (), checkout=checkout, force=force)
    if subject is not None:
        target = subject_target(subject)
        return target.name, [target]
    return "references", references()


def _listed(expected: Path | None, *, accept: bool) -> ExpectedFailures | None:
    if expected is None:
        if accept:
            raise UsageError(
                "--accept rewrites the file of expected failures: say which one with --expected"
                " FILE."
            )
        return None
    if accept:
        check_target(expected)
    return ExpectedFailures.read(expected, missing_ok=accept)


def _show(output: Output, whole: Report, reports: list[Report], *, verbose: bool) -> None:
    if len(reports) == 1:
        output.lines(report_lines(whole.to_dict(), verbose=verbose))
        return
    # Parts tell what is wrong with them; what stayed unknown in all of them, what was exercised and
    # the canary are told once.
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
                    {**data, "checks": shown, "exercised": {}, "canary": {}}, verbose=verbose
                )
            )
        else:
            output.lines([(Style.PLAIN, f"{report.subject}: {summary_text(data)}")])
    data = whole.to_dict()
    output.lines(
        report_lines(
            {**data, "checks": [check for check in data["checks"] if check["verdict"] == "unknown"]}
        )
    )


def _json(whole: Report, reports: list[Report], targets: list[Target]) -> dict[str, Any]:
    recipes = {target.name: dict(target.recipe) for target in targets}
    each = [{**report.to_dict(), "recipe": recipes.get(report.subject, {})} for report in reports]
    return each[0] if len(each) == 1 else {**whole.to_dict(), "reports": each}


def _settle(
    output: Output, listed: ExpectedFailures | None, reports: list[Report], *, accept: bool
) -> bool:
    """Compare with the file of expected failures, or rewrite it; returns whether it lists what does
    not fail.
    """
    if listed is None:
        return False
    outcomes = [Outcome.of_report(report.to_dict()) for report in reports]
    if accept:
        output.lines(
            (Style.PLAIN, f"  expected failures: {text}") for text in listed.accept(outcomes)
        )
        return False
    stale = [text for outcome in outcomes for text in listed.stale(outcome)]
    output.lines((Style.BAD, f"  {text}") for text in stale)
    return bool(stale)


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The matrix of one release; ``parts`` maps names of targets to the parts of the stack."""

    matrix: Matrix
    version: str
    parts: Mapping[str, str]
    whole: bool = False

    @classmethod
    def of(cls, targets: Iterable[Target], *, whole: bool = False) -> Self:
        """Of the parts of one stack. Raises ``UsageError`` where its version is not pinned.

        ``whole``: these are all its parts, so that the matrix may name no other.
        """
        recipes = {target.name: target.recipe for target in targets}
        first = next(iter(recipes.values()))
        matrix, version = Matrix.read(first["stack"]), str(first["version"])
        if version not in matrix.pinned:
            raise UsageError(
                f"--matrix has no verdicts of {matrix.stack} {version}: pinned are"
                f" {', '.join(matrix.pinned)}. Judge it without --matrix."
            )
        parts = {name: str(recipe["part"]) for name, recipe in recipes.items()}
        return cls(matrix=matrix, version=version, parts=parts, whole=whole)

    @classmethod
    def told(cls, targets: Iterable[Target], reports: Iterable[Report]) -> str | None:
        """How many of the checks that fail in a run without --matrix are known to, and where that
        is written; ``None`` where none is.
        """
        try:
            known = cls.of(targets).reasons()
        except UsageError:
            return None
        count = sum(
            result.id in known[report.subject] for report in reports for result in report.failed
        )
        if not count:
            return None
        which = "1 of these checks is" if count == 1 else f"{count} of these checks are"
        return (
            f"note: {which} known to fail in this release (docs/stacks.md); --matrix says which"
            " fail otherwise than that"
        )

    def reasons(self) -> dict[str, dict[str, str]]:
        """By target: the checks that are known to fail, with the reason."""
        return {name: self.matrix.known(self.version, part) for name, part in self.parts.items()}

    def ways(self) -> dict[str, KnownFailures]:
        """By target: how those checks are known to fail."""
        return {name: self.matrix.ways(self.version, part) for name, part in self.parts.items()}

    def deviations(self, reports: Iterable[Report], judged: Collection[str]) -> list[str]:
        """What the reports say otherwise, of the checks that were ``judged``."""
        said = self.matrix.stray_parts(self.version, set(self.parts.values())) if self.whole else []
        for report in reports:
            outcome, part = Outcome.of_report(report.to_dict()), self.parts[report.subject]
            said += self.matrix.deviations(self.version, part, outcome, judged)
            canary = report.canary
            if canary is not None and canary.planted is not None and not canary.red:
                said.append(
                    f"{report.subject}: the canary stayed green ({canary.planted}): its other"
                    " verdicts cannot be trusted."
                )
        return said
