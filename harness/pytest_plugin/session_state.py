"""State of a pytest session: the settings in force, and what its items have found so far."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollproof.core.files import check_target, write_or_keep
from rollproof.errors import RollproofError
from rollproof.invariants import default_registry
from rollproof.judging.report import Report
from rollproof.pytest_plugin.item_location import item_location
from rollproof.reporting.report_files import ReportForm, check_report_target, report_text
from rollproof.reporting.reported_run import ReportedRun, verdict_of
from rollproof.verification.expected_failures import ExpectedFailures, Outcome
from rollproof.verification.schedules import PROFILES, profile_named

__all__ = ["Settings", "State", "read_settings"]

_UNKNOWN = ("fail", "skip")
_GITHUB = ("on", "off")
_NOTHING: Mapping[str, Any] = Report(subject="gaps", profile="", seed=0, results=()).to_dict()
"""The report of a session that measured gaps and judged no subject."""


# No dataclass: the header prints them by _asdict, and gpu_suites read them by name.
class Settings(NamedTuple):
    """The values in force: command line before ini file before default. Paths are absolute."""

    profile: str
    seed: int | None
    only: tuple[str, ...]
    report: tuple[str, ...]
    github: str | None
    expected: str | None
    accept: bool
    unknown: str
    require_gpu: bool
    gpus: int | None
    full: bool
    gpu_report: str | None
    model: str | None
    trainer: str | None


class State:
    """What a session gathers.

    ``settings`` are the options. ``fresh_seed`` is the seed of profiles that have none of their
    own. ``reports`` and ``gaps`` are JSON reports by key, ``runs`` the report of each subject, or
    the error that kept it from running, ``listed`` its expected failures, ``shown_by`` the item
    that shows what several items of a subject have as their cause, and ``summary`` the lines that
    end the closing summary.
    """

    def __init__(self, *, settings: Settings, fresh_seed: int) -> None:
        self.settings = settings
        self.fresh_seed = fresh_seed
        # By key, because two xdist workers that ran the same subject deliver the same report.
        self.reports: dict[str, dict[str, Any]] = {}
        self.gaps: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, Any] = {}
        self.listed: dict[str, ExpectedFailures] = {}
        self.shown_by: dict[str, str] = {}
        self.summary: list[str] = []

    def seed_of(self, profile: str) -> int:
        """Return the seed for ``profile``: the option, else the profile's own, else a fresh one."""
        if self.settings.seed is not None:
            return self.settings.seed
        own = profile_named(profile).seed
        return self.fresh_seed if own is None else own

    def only_of(self, about: str) -> tuple[str, ...]:
        """Return the checks of ``--rollproof-only`` that judge one kind of subject.

        Skips the calling test if the option leaves none of them; ``()`` without the option.
        """
        if not self.settings.only:
            return ()
        selected = default_registry().select(self.settings.only)
        # Skipped, not passed: a test in which no check runs has shown nothing.
        ids = tuple(check.id for check in selected if check.judges(about))
        if not ids:
            pytest.skip(
                f"no check of {about} is among those that --rollproof-only names:"
                f" {', '.join(self.settings.only)}"
            )
        return ids

    def add_report(self, key: str, report: Mapping[str, Any], item: pytest.Item) -> None:
        """Add the report of an item to the summary. A key that another suite of the session has is
        numbered.
        """
        location = item_location(item).to_dict(item.config.rootpath)
        self.reports[_free(key, self.reports)] = {**report, "location": location}

    def add_gap(self, gap: Mapping[str, Any], item: pytest.Item) -> None:
        """Add a measured gap of an item to the reports that are written."""
        location = item_location(item).to_dict(item.config.rootpath)
        self.gaps[_free(item.nodeid, self.gaps)] = {**gap, "location": location}

    def check_settings(self, *, writes: bool) -> None:
        """Refuse unknown checks, a bad file of expected failures, and files that cannot be written.

        ``writes``: whether this process writes the files. Raises ``pytest.UsageError``.
        """
        settings = self.settings
        if settings.expected is None and settings.accept:
            raise pytest.UsageError(
                "--rollproof-accept rewrites the file of expected failures: name the file with"
                " --rollproof-expected=FILE."
            )
        try:
            if settings.only:
                _ = default_registry().select(settings.only)
            if settings.expected is not None:
                ExpectedFailures.read(settings.expected, missing_ok=settings.accept)
            if writes:
                for place in settings.report:
                    check_report_target(Path(place))
                if settings.expected is not None and settings.accept:
                    check_target(Path(settings.expected))
        except RollproofError as error:
            raise pytest.UsageError(str(error)) from None

    def reported_run(self, exit_status: int, root: Path) -> ReportedRun:
        """Return what all subjects of the session showed, in one report.

        Args:
            exit_status: The session's.
            root: pytest's root folder.
        """
        report = _merged(list(self.reports.values())) if self.reports else _NOTHING
        if self.gaps:
            report = {**report, "gaps": list(self.gaps.values())}
        verdict, problems = verdict_of(report), []
        if verdict == "pass" and exit_status != pytest.ExitCode.OK:
            # a test of another kind, or a subject that could not be run, which has no report
            verdict = "unknown"
            problems.append(
                f"pytest ended with exit code {exit_status}, though no check failed: another test"
                " failed, or a subject could not be run, and is not in this report."
            )
        return ReportedRun(
            report=report,
            verdict=verdict,
            checks=tuple(default_registry()),
            problems=problems,
            root=root,
        )

    def write_files(self, exit_status: int, root: Path) -> bool:
        """Write the reports and the file of expected failures, if the options ask for them.

        What was written goes into the closing summary. Returns whether all of it could be written.

        Args:
            exit_status: The session's.
            root: pytest's root folder.
        """
        settings = self.settings
        # Only the controller of an xdist session calls this; it has the reports of all workers.
        reports = list(self.reports.values())
        complete = True
        run = self.reported_run(exit_status, root) if reports or self.gaps else None
        for place in settings.report:
            if run is None:
                self.summary.append(f"report: nothing was judged, {place} was not written")
                continue
            target = Path(place)
            trouble = write_or_keep(target, report_text(run, ReportForm.of(target)))
            self.summary.append(f"report: {trouble or place}")
            complete = complete and trouble is None
        if settings.accept and settings.expected is not None:
            try:
                expected = ExpectedFailures.read(settings.expected, missing_ok=True)
                self.summary += expected.accept(Outcome.of_report(report) for report in reports)
            except RollproofError as error:
                self.summary.append(f"expected failures: {error}")
                complete = False
        return complete


def read_settings(config: pytest.Config, values: Mapping[str, Any]) -> Settings:
    """Make settings of the values of all options, by name. Raises ``pytest.UsageError``."""
    _check_choice("--rollproof-profile", values["profile"], tuple(PROFILES))
    _check_choice("--rollproof-unknown", values["unknown"], _UNKNOWN)
    if values["github"] is not None:
        _check_choice("--rollproof-github", values["github"], _GITHUB)
    seed, gpus = values["seed"], values["gpus"]
    if seed is not None and not (seed.isascii() and seed.isdigit()):
        raise pytest.UsageError(
            f"--rollproof-seed={seed!r} is not a whole number >= 0, such as 0 or 12345."
        )
    if gpus is not None and not (gpus.isascii() and gpus.isdigit() and int(gpus)):
        raise pytest.UsageError(
            f"--rollproof-gpus={gpus!r} is not a number of GPUs, such as 1 or 4."
        )
    return Settings(
        profile=values["profile"],
        seed=None if seed is None else int(seed),
        only=tuple(values["only"]),
        report=_all_absolute(config, "rollproof_report"),
        github=values["github"],
        expected=_absolute(config, "rollproof_expected"),
        accept=bool(values["accept"]),
        unknown=values["unknown"],
        require_gpu=bool(values["require-gpu"]),
        gpus=None if gpus is None else int(gpus),
        full=bool(values["full"]),
        gpu_report=_absolute(config, "rollproof_gpu_report"),
        model=_absolute(config, "rollproof_model"),
        trainer=values["trainer"],
    )


def _check_choice(flag: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise pytest.UsageError(f"{flag}={value!r} is not one of: {', '.join(valid)}.")


def _free(key: str, taken: Mapping[str, Any]) -> str:
    """Return the key, with a number if it is taken."""
    free, number = key, 1
    while free in taken:
        number += 1
        free = f"{key}#{number}"
    return free


def _all_absolute(config: pytest.Config, dest: str) -> tuple[str, ...]:
    """Return the paths of an option that may be repeated, as ``_absolute`` does."""
    option, setting = config.getoption(dest), config.getini(dest)
    folder = config.invocation_params.dir if option else config.rootpath
    return tuple(str(folder / path) for path in option or setting)


def _absolute(config: pytest.Config, dest: str) -> str | None:
    """Return the path of an option.

    A path of the command line starts from the folder in which pytest was called, a path of the ini
    file from the root folder.
    """
    option, setting = config.getoption(dest), config.getini(dest)
    if option:
        return str(config.invocation_params.dir / str(option))
    return str(config.rootpath / setting) if setting else None


def _merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one JSON report.

    It is the only subject's, or has the worst verdict of each check over all subjects, with each
    subject's own report below ``reports``.
    """
    if len(reports) == 1:
        return reports[0]
    # Unknown outranks a pass: whoever reads one line must see that something is undecided.
    order = ("fail", "unknown", "expected fail", "pass", "not applicable")
    checks: dict[str, dict[str, Any]] = {}
    for report in reports:
        for check in report["checks"]:
            worst = checks.setdefault(check["id"], check)
            if order.index(check["verdict"]) < order.index(worst["verdict"]):
                checks[check["id"]] = check
    exercised: dict[str, int] = {}
    for report in reports:
        for name, count in report["exercised"].items():
            exercised[name] = exercised.get(name, 0) + count
    return {
        **reports[0],
        "subject": ", ".join(report["subject"] for report in reports),
        "summary": {
            verdict.replace(" ", "_"): sum(check["verdict"] == verdict for check in checks.values())
            for verdict in order
        },
        "checks": list(checks.values()),
        "exercised": exercised,
        "canary": min(
            (report["canary"] for report in reports if report["canary"]),
            key=lambda canary: canary["red"],
            default={},
        ),
        "cases": sum(report.get("cases", 0) for report in reports),
        "seconds": sum(report.get("seconds", 0) for report in reports),
        "reports": reports,
    }
