"""Items: the checks of a suite as pytest items, one per check, over one run per subject.

The plugin calls in here for functions that carry a suite; nothing runs while pytest collects.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollproof.core.files import check_folder, write_or_keep
from rollproof.core.subjects import SubjectFactory
from rollproof.errors import RollproofError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.judging.report import Interrupted, Report
from rollproof.plugin import STATE, State
from rollproof.pytest_plugin.decorators import Conformance, check_profile
from rollproof.pytest_plugin.suite_spec import Suite
from rollproof.reporting.text import check_lines, text_of
from rollproof.verification.argument_checks import as_seed
from rollproof.verification.counterexamples import delete_counterexamples
from rollproof.verification.expected_failures import ExpectedFailures, Outcome
from rollproof.verification.options import ROLLOUTS, Options
from rollproof.verification.schedules import profile_named
from rollproof.verification.subject_kinds import run

__all__ = ["parametrize", "run_item", "seed_of", "write_files"]


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make one item per check of a function that carries a suite (called by the plugin while pytest
    collects).
    """
    suite = _suite(metafunc.function, metafunc.cls)
    if suite is None:
        return
    only = suite.only or metafunc.config.stash[STATE].settings.only
    registry = default_registry()
    ids = [
        check.id
        for check in (registry.select(only) if only else registry)
        if check.judges(suite.about)
    ]
    metafunc.parametrize(
        "check",
        [pytest.param(check_id, id=check_id, marks=pytest.mark.rollproof) for check_id in ids],
    )


def run_item(item: pytest.Function) -> None:
    """Judge one item, and put the ``CheckResult`` in place of its id (called by the plugin before
    the body runs).
    """
    suite = _suite(item.function, item.cls)
    if suite is None:
        return
    for mark in item.iter_markers("rollproof"):
        if mark.args or set(mark.kwargs) - {"profile", "seed"}:
            pytest.fail(
                "@pytest.mark.rollproof takes profile= and seed=, not"
                f" {mark.args or sorted(mark.kwargs)}.",
                pytrace=False,
            )
        suite = replace(suite, **mark.kwargs)
    try:
        check_profile(suite.profile)
        as_seed(suite.seed)
    except UsageError as error:
        pytest.fail(f"@pytest.mark.rollproof: {error}", pytrace=False)
    state = item.config.stash[STATE]
    report = _report(state, suite, item.config)
    check_id = item.funcargs["check"]
    result = next(result for result in report.results if result.id == check_id)
    item.user_properties.append(("rollproof_verdict", str(result.verdict)))
    _conclude(result, report, state)
    item.funcargs["check"] = result


def seed_of(state: State, profile: str) -> int:
    """The seed that a run of ``profile`` uses in this session."""
    own = profile_named(profile).seed
    if state.settings.seed is not None:
        return state.settings.seed
    return state.fresh_seed if own is None else own


def write_files(state: State) -> tuple[list[str], bool]:
    """Write the report and the file of expected failures, as the options ask; what to say about it,
    and whether both are in place.
    """
    said = []
    reports = list(state.reports.values())
    whole = True
    if state.settings.report is not None and not reports:
        said.append(f"report: nothing was judged, {state.settings.report} was not written")
    elif state.settings.report is not None:
        trouble = write_or_keep(
            Path(state.settings.report),
            json.dumps(_joined(reports), indent=2, ensure_ascii=False) + "\n",
        )
        said.append(f"report: {trouble or state.settings.report}")
        whole = trouble is None
    if state.settings.accept and state.settings.expected is not None:
        try:
            listed = ExpectedFailures.read(state.settings.expected, missing_ok=True)
            said += listed.accept(Outcome.of_report(report) for report in reports)
        except RollproofError as error:
            said.append(f"expected failures: {error}")
            whole = False
    return said, whole


def _conclude(result: CheckResult, report: Report, state: State) -> None:
    """End the item by its verdict, unless the check passed as it should."""
    reason = report.expected.get(result.id)
    if result.verdict is Verdict.FAIL:
        if reason is not None and not result.otherwise:
            pytest.xfail(reason)
        pytest.fail(_told(result, report), pytrace=False)
    if reason is not None and result.verdict is not Verdict.UNKNOWN and not state.settings.accept:
        pytest.fail(
            f"{result.id} is listed as an expected failure ({reason}), but its verdict is"
            f" {result.verdict}: remove the entry, or run with --rollproof-accept to have the file"
            " rewritten.",
            pytrace=False,
        )
    if result.verdict is Verdict.NOT_APPLICABLE:
        pytest.skip(f"not applicable: {result.reason}")
    if result.verdict is Verdict.UNKNOWN:
        if state.settings.unknown == "skip":
            pytest.skip(f"unknown: {result.reason}")
        pytest.fail(
            f"unknown: {result.id} of {report.subject} was not decided: {result.reason}. An unknown"
            " verdict never counts as passed; set rollproof_unknown = skip to skip such items.",
            pytrace=False,
        )


def _told(result: CheckResult, report: Report) -> str:
    data = next(check for check in report.to_dict()["checks"] if check["id"] == result.id)
    return (
        f"{result.check.promise}\n{report.subject} does not keep this"
        f" promise:\n{text_of(check_lines(data))}"
    )


def _report(state: State, suite: Suite, config: pytest.Config) -> Report:
    """The report of a suite: run when its first item asks for it, kept for the session."""
    profile = suite.profile or state.settings.profile
    seed = suite.seed if suite.seed is not None else seed_of(state, profile)
    assert suite.factory is not None
    key = suite.run_key(profile, seed)
    if key not in state.cache:
        state.cache[key] = _run(state, suite, profile, seed, config)
    kept = state.cache[key]
    if isinstance(kept, Report):
        return kept
    if key in state.told:
        pytest.fail(
            f"{suite.title} could not be run; the first item of this subject says why.",
            pytrace=False,
        )
    state.told.add(key)
    if not isinstance(kept, RollproofError):
        raise kept
    pytest.fail(f"{suite.title} could not be run: {type(kept).__name__}: {kept}", pytrace=False)


def _run(
    state: State, suite: Suite, profile: str, seed: int, config: pytest.Config
) -> Report | Exception:
    """The report, or the exception that there is none for: either is kept, so that a broken subject
    is not run once per item.
    """
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    listed = (
        ExpectedFailures.read(state.settings.expected, missing_ok=state.settings.accept)
        if state.settings.expected
        else None
    )
    root = config.rootpath / ".rollproof"
    folder, notes = _place(root / worker / suite.folder)
    only = suite.only or state.settings.only
    if suite.about == ROLLOUTS and not only:
        only = tuple(check.id for check in default_registry() if check.about == ROLLOUTS)
    options = Options(
        name=suite.title,
        profile=profile,
        seed=seed,
        only=only,
        expected={**(suite.expected or {}), **(listed.reasons(suite.title) if listed else {})},
        known_failures=listed.ways(suite.title) if listed else {},
        recipe=None if suite.factory is None else _recipe(suite.factory),
        counterexample_dir=folder,
        keep_counterexamples=frozenset() if folder is None else _written(state, folder),
        flavours=suite.flavours,
    )
    try:
        assert suite.factory is not None
        report = run(suite.about, suite.factory, options)
        report = replace(report, notes=(*report.notes, *notes))
        passed = {result.id for result in report.results if result.verdict is Verdict.PASS}
        others = [root / suite.folder] if worker else root.glob(f"gw*/{suite.folder}")
        for other in others:  # what sessions with xdist leave to those without, and back
            delete_counterexamples(other, passed, subject=suite.title)
    except Interrupted as interrupt:
        for found in interrupt.reports:
            _hand_over(state, suite.report_key(profile, seed), found)
        raise
    except Exception as error:  # noqa: BLE001 - raised again for the first item
        return error
    _hand_over(state, suite.report_key(profile, seed), report)
    return report


def _place(folder: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Where counterexamples go; nowhere, and a note that says so, where nothing can be written
    below the root folder.
    """
    try:
        check_folder(folder)
    except UsageError as error:
        return None, (f"counterexamples are not kept. {error}",)
    return folder, ()


def _hand_over(state: State, key: str, report: Report) -> None:
    """Keep a report for the summary. A key that is taken, by a suite that cannot be told from this
    one, is numbered.
    """
    taken = sum(known.partition("#")[0] == key for known in state.reports)
    state.reports[f"{key}#{taken + 1}" if taken else key] = report.to_dict()


def _written(state: State, folder: Path) -> frozenset[str]:
    """The checks whose counterexamples another run of this session wrote there: one subject may be
    run in several ways.
    """
    checks = [check for report in state.reports.values() for check in report["checks"]]
    return frozenset(
        check["id"]
        for check in checks
        for finding in check["findings"]
        if Path(finding["witness"] or "").parent == folder
    )


def _suite(function: Any, cls: type | None) -> Suite | None:
    """The suite of a function, completed from its class. Raises ``UsageError`` where a class has no
    subject.
    """
    suite = getattr(function, "_rollproof_suite", None)
    if not isinstance(suite, Suite) or suite.factory is not None:
        return suite if isinstance(suite, Suite) else None
    if cls is None or not issubclass(cls, Conformance) or cls.subject is None:
        raise pytest.UsageError(
            f"{cls.__name__ if cls else function} must set `subject`: a factory, or a method that"
            " returns a fresh subject."
        )
    return Suite(
        factory=_factory(cls),
        name=cls.__name__,
        profile=cls.profile,
        seed=cls.seed,
        only=tuple(cls.only),
        flavours=None if cls.flavours is None else tuple(cls.flavours),
        expected=cls.expected,
        about=cls._about,
        module=cls.__module__,
        owner=cls,
        asked_by=cls.__qualname__,
    )


def _factory(cls: type[Conformance]) -> SubjectFactory:
    """The class attribute as a factory: a plain function with a parameter is a method, and made on
    a fresh test object.
    """
    raw = inspect.getattr_static(cls, "subject")
    if inspect.isfunction(raw) and inspect.signature(raw).parameters:
        return lambda: getattr(cls(), "subject")()  # noqa: B009 - the attribute is a ClassVar to the type checkers, a method here
    made: SubjectFactory = (
        raw.__get__(None, cls) if isinstance(raw, staticmethod | classmethod) else raw
    )
    return made


def _recipe(factory: SubjectFactory) -> dict[str, str] | None:
    """How ``rollproof replay`` makes the subject again; ``None`` where it cannot be named."""
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "<")
    return {"subject": f"{module}:{name}"} if module and "<" not in name else None


def _joined(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One JSON report: that of the only subject, or the worst verdict of each check over all, with
    each subject's below ``reports``.
    """
    if len(reports) == 1:
        return reports[0]
    order = ("fail", "unknown", "expected fail", "pass", "not applicable")
    checks: dict[str, dict[str, Any]] = {}
    for report in reports:
        for check in report["checks"]:
            known = checks.setdefault(check["id"], check)
            if order.index(check["verdict"]) < order.index(known["verdict"]):
                checks[check["id"]] = check
    counts = {
        verdict: sum(check["verdict"] == verdict for check in checks.values()) for verdict in order
    }
    exercised: dict[str, int] = {}
    for report in reports:
        for name, count in report["exercised"].items():
            exercised[name] = exercised.get(name, 0) + count
    return {
        **reports[0],
        "subject": ", ".join(report["subject"] for report in reports),
        "summary": {
            verdict.replace("not applicable", "not_applicable").replace(
                "expected fail", "expected_fail"
            ): n
            for verdict, n in counts.items()
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
