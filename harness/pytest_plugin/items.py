"""The checks of a suite as pytest items: one item per check, over one run per subject.

The plugin calls in here for functions that carry a suite; nothing runs while pytest collects.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rollproof.core.files import check_folder, module_of
from rollproof.core.subjects import SubjectFactory
from rollproof.errors import RollproofError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.judging.report import Interrupted, Report, finding_dict
from rollproof.pytest_plugin.decorators import Conformance, check_profile, expected_of
from rollproof.pytest_plugin.session_state import State
from rollproof.pytest_plugin.short_summary import HEADLINE
from rollproof.pytest_plugin.suite_spec import Suite
from rollproof.reporting.setup_errors import setup_error_lines
from rollproof.reporting.text import KINDS, check_lines, finding_headline, finding_rows, text_of
from rollproof.stacks import StackPart
from rollproof.verification.argument_checks import as_flavours, as_seed
from rollproof.verification.counterexamples import delete_counterexamples
from rollproof.verification.expected_failures import Expectation, ExpectedFailures
from rollproof.verification.options import ROLLOUTS, Options
from rollproof.verification.subject_kinds import run

__all__ = ["parametrize", "run_item"]

_NO_SAMPLE = ("lifecycle.no-error-without-fault", "lifecycle.drops-only-as-declared")
"""The checks that report rollouts which raise, and which return nothing."""


def parametrize(metafunc: pytest.Metafunc, state: State) -> None:
    """Make one item per check of a function that carries a suite."""
    suite = _suite(metafunc.function, metafunc.cls)
    if suite is None:
        return
    only = suite.only or state.settings.only
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


def run_item(item: pytest.Function, state: State) -> None:
    """Judge an item before its body runs; the ``CheckResult`` replaces the id of the check."""
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
    problem = None
    try:
        check_profile(suite.profile)
        as_seed(suite.seed)
    except UsageError as error:
        problem = error
    if problem is not None:  # out of the handler, so that pytest shows the message once
        pytest.fail(f"@pytest.mark.rollproof: {problem}", pytrace=False)
    report = _report(state, suite, item)
    check_id = item.funcargs["check"]
    result = next(result for result in report.results if result.id == check_id)
    listed = _listed(state, suite, result.id)
    # For JUnit files, and for the plugin, which lists an unknown verdict as UNKNOWN. An item may
    # run again (pytest-rerunfailures).
    others = [pair for pair in item.user_properties if not pair[0].startswith("rollproof_")]
    item.user_properties[:] = [*others, *_properties(result, report)]
    _raise_outcome(item, result, report, state, listed)
    item.funcargs["check"] = result


def _raise_outcome(
    item: pytest.Function,
    result: CheckResult,
    report: Report,
    state: State,
    listed: Sequence[Expectation],
) -> None:
    """End the item by its verdict, unless the check passed as it should.

    ``listed`` are the entries of files of expected failures that speak about the check.
    """
    reason = report.expected.get(result.id)
    failed = result.verdict is Verdict.FAIL
    if failed and (reason is None or result.otherwise):
        _fail(item, _failure_text(item, result, report), finding_headline(_data(result, report)))
    if not state.settings.accept:
        _refuse_stale(result, reason, listed)
    if failed:
        pytest.xfail(reason or "")
    undecided = next((entry for entry in listed if entry.undecided), None)
    if result.verdict is Verdict.UNKNOWN and undecided is not None:
        pytest.skip(f"unknown, as listed: {undecided.explanation}")
    if result.verdict is Verdict.NOT_APPLICABLE:
        pytest.skip(f"not applicable: {result.reason}")
    if result.verdict is Verdict.UNKNOWN:
        if state.settings.unknown == "skip":
            pytest.skip(f"unknown: {result.reason}")
        _raise_cause(item, result, report, state)
        pytest.fail(
            f"unknown: {result.id} of {report.subject} was not decided: {result.reason}. An unknown"
            " verdict never counts as passed; set rollproof_unknown = skip to skip such items.",
            pytrace=False,
        )


def _refuse_stale(result: CheckResult, reason: str | None, listed: Sequence[Expectation]) -> None:
    """Fail the item if it is listed, and its verdict is another. Strict like xfail_strict; an
    unknown check has shown nothing of a failure, so its entry stays.
    """
    advice = "remove the entry, or run with --rollproof-accept to have the file rewritten."
    verdict = str(result.verdict)
    for entry in listed:
        complaint = entry.complaint(verdict, result.known)
        if complaint is not None:
            state_of_it = "undecided" if entry.undecided else "an expected failure"
            pytest.fail(
                f"{result.id} is listed as {state_of_it} ({entry.explanation}), but {complaint}:"
                f" {advice}",
                pytrace=False,
            )
    decorated = reason is not None and not listed
    if decorated and result.verdict not in (Verdict.UNKNOWN, Verdict.FAIL):
        pytest.fail(
            f"{result.id} is listed as an expected failure ({reason}), but its verdict is"
            f" {verdict}: {advice}",
            pytrace=False,
        )


def _listed(state: State, suite: Suite, check_id: str) -> tuple[Expectation, ...]:
    """Return the entries of files of expected failures that speak about a check of a suite.

    The suite must have run.
    """
    profile = suite.profile or state.settings.profile
    seed = suite.seed if suite.seed is not None else state.seed_of(profile)
    expected = state.listed[suite.run_key(profile, seed)]
    return tuple(entry for entry in expected.covering(suite.title) if entry.check == check_id)


def _raise_cause(item: pytest.Function, result: CheckResult, report: Report, state: State) -> None:
    """End an item that is unknown because no rollout delivered a sample.

    All such items have one cause, which another check reports: they are skipped with a pointer to
    its item. If that does not run in this session, the first of them fails with the cause, so that
    nothing is hidden.
    """
    cause = next((other for other in report.failed if other.id in _NO_SAMPLE), None)
    if cause is None or not report.undelivered:
        return
    key = f"{item.nodeid.partition('[')[0]} {report.subject}"
    shown_by = state.shown_by.get(key) or _item_of(item, cause.id) or item.nodeid
    state.shown_by[key] = shown_by
    if shown_by != item.nodeid:
        pytest.skip(f"unknown: {result.reason}. No rollout delivered a sample: see {shown_by}")
    # Listed as a failure and not as UNKNOWN: pytest prints the text of failures alone.
    item.user_properties.remove(("rollproof_verdict", str(Verdict.UNKNOWN)))
    _fail(
        item,
        f"{result.id} is unknown: {report.undelivered}.\n{_failure_text(item, cause, report)}",
        f"unknown: {report.undelivered}",
    )


def _properties(result: CheckResult, report: Report) -> list[tuple[str, str]]:
    """Return what JUnit files say of an item: its check, and the first finding."""
    facts = {
        "check": result.id,
        "verdict": str(result.verdict),
        "subject": report.subject,
        "profile": report.profile,
        "seed": str(report.seed),
    }
    if result.verdict is Verdict.FAIL and result.findings:
        finding = finding_dict(result.findings[0])
        facts["finding"] = finding["kind"] or finding["title"]
        facts["flavour"] = finding["flavour"]
        facts["rerun"] = dict(finding_rows(finding, result.id)).get("rerun", "")
    return [(f"rollproof_{name}", value) for name, value in facts.items() if value]


def _item_of(item: pytest.Function, check_id: str) -> str | None:
    """Return the id of the item with which this session judges another check of the same suite."""
    for other in item.session.items:
        if (
            isinstance(other, pytest.Function)
            and (other.function, other.cls) == (item.function, item.cls)
            and other.callspec.params.get("check") == check_id
            # a mark of the user's may keep it from failing, and then nothing would
            and not any(other.get_closest_marker(name) for name in ("skip", "skipif", "xfail"))
        ):
            return other.nodeid
    return None


def _fail(item: pytest.Function, text: str, headline: str) -> NoReturn:
    """Fail the item with ``text``, and with ``headline`` in pytest's short summary."""
    item.stash[HEADLINE] = headline
    pytest.fail(text, pytrace=False)


def _data(result: CheckResult, report: Report) -> Mapping[str, Any]:
    return next(check for check in report.to_dict()["checks"] if check["id"] == result.id)


def _failure_text(item: pytest.Function, result: CheckResult, report: Report) -> str:
    findings = None if item.config.get_verbosity() > 0 else KINDS
    lines = text_of(check_lines(_data(result, report), findings=findings, option="-v"))
    run = f"profile {report.profile}, seed {report.seed}"
    return f"{result.check.promise}\n{report.subject} does not keep this promise ({run}):\n{lines}"


def _report(state: State, suite: Suite, item: pytest.Function) -> Report:
    """Return the report of a suite.

    The subject runs when its first item needs the report, once per session: also a subject that
    cannot be run, whose error that item shows. The others are skipped with a pointer to it.
    """
    profile = suite.profile or state.settings.profile
    seed = suite.seed if suite.seed is not None else state.seed_of(profile)
    assert suite.factory is not None
    key = suite.run_key(profile, seed)
    if key not in state.runs:
        state.runs[key] = _run(state, suite, profile, seed, item)
    outcome = state.runs[key]
    if isinstance(outcome, Report):
        return outcome
    # An item that runs again (pytest-rerunfailures) must fail again, not be skipped.
    shown_by = state.shown_by.setdefault(key, item.nodeid)
    if shown_by != item.nodeid:
        pytest.skip(f"{suite.title} could not be run: see {shown_by}")
    # A fault of ours is raised with its traceback, an error of the user is told in a few lines.
    if not isinstance(outcome, RollproofError):
        raise outcome
    recipe = _recipe(suite.factory)
    subject = recipe.get("subject") if recipe is not None and suite.about == ROLLOUTS else None
    _fail(
        item,
        text_of(setup_error_lines(suite.title, outcome, subject=subject)),
        f"{suite.title} could not be run: {outcome}",
    )


def _run(
    state: State, suite: Suite, profile: str, seed: int, item: pytest.Item
) -> Report | Exception:
    """Run a subject. Returns its report, or the exception that kept it from running."""
    assert suite.factory is not None
    config = item.config
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    # One folder per xdist worker: two of them may run the same subject at the same time.
    root = config.rootpath / ".rollproof"
    folder, notes = _counterexample_folder(root / worker / suite.folder)
    only = suite.only or state.settings.only
    if suite.about == ROLLOUTS and not only:
        only = tuple(check.id for check in default_registry() if check.about == ROLLOUTS)
    key = suite.report_key(profile, seed)
    try:
        expected = _expected_failures(state, suite)
        state.listed[suite.run_key(profile, seed)] = expected
        options = Options(
            name=suite.title,
            profile=profile,
            seed=seed,
            only=only,
            expected={**(suite.expected or {}), **expected.reasons(suite.title)},
            known_failures=expected.ways(suite.title),
            recipe=_recipe(suite.factory),
            counterexample_dir=folder,
            keep_counterexamples=frozenset() if folder is None else _written_checks(state, folder),
            flavours=suite.flavours,
        )
        report = _judge(suite, options)
        report = replace(report, notes=(*report.notes, *notes))
        passed = {result.id for result in report.results if result.verdict is Verdict.PASS}
        # A session with xdist writes into a folder per worker, one without into the root: each
        # deletes what the other left of checks that pass now.
        others = [root / suite.folder] if worker else root.glob(f"gw*/{suite.folder}")
        for other in others:
            delete_counterexamples(other, passed, subject=suite.title)
    except Interrupted as interrupt:
        for partial in interrupt.reports:
            state.add_report(key, partial.to_dict(), item)
        raise
    except Exception as error:  # noqa: BLE001 - raised again for the first item
        return error
    state.add_report(key, report.to_dict(), item)
    return report


def _judge(suite: Suite, options: Options) -> Report:
    """Judge the subject, a part of a stack with the schedules that fit it."""
    factory = suite.factory
    assert factory is not None
    if not isinstance(factory, StackPart):
        return run(suite.about, factory, options)
    with factory.loaded():
        if suite.about == ROLLOUTS and suite.flavours is None:
            options = replace(
                options,
                flavours=factory.flavours,
                cases=factory.cases(options.profile, options.seed),
            )
        return run(suite.about, factory, options)


def _expected_failures(state: State, suite: Suite) -> ExpectedFailures:
    """Return the entries of the suite's own file and of the session's, which may be the same."""
    names = (suite.expected_file, state.settings.expected)
    files = dict.fromkeys(Path(name).resolve() for name in names if name is not None)
    return ExpectedFailures.joined(
        ExpectedFailures.read(file, missing_ok=state.settings.accept) for file in files
    )


def _counterexample_folder(folder: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Return the folder, or ``None`` and a note if nothing can be written there."""
    try:
        check_folder(folder)
    except UsageError as error:
        return None, (f"counterexamples are not written. {error}",)
    return folder, ()


def _written_checks(state: State, folder: Path) -> frozenset[str]:
    """Return the checks with counterexamples in ``folder`` from another run of this session.

    One subject may be run in several ways.
    """
    checks = [check for report in state.reports.values() for check in report["checks"]]
    return frozenset(
        check["id"]
        for check in checks
        for finding in check["findings"]
        if Path(finding["witness"] or "").parent == folder
    )


def _suite(function: Any, cls: type | None) -> Suite | None:
    """Return the suite of a function, completed from its class; ``None`` if it has none.

    Raises ``UsageError`` for a class without a subject.
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
        flavours=None if cls.flavours is None else as_flavours(cls.flavours),
        **expected_of(cls.expected),
        about=cls._about,
        module=cls.__module__,
        owner=cls,
        declared_by=cls.__qualname__,
    )


def _factory(cls: type[Conformance]) -> SubjectFactory:
    """Return the class attribute ``subject`` as a factory.

    A plain function with a parameter is a method, which is called on a fresh test object.
    """
    raw = inspect.getattr_static(cls, "subject")
    if inspect.isfunction(raw) and inspect.signature(raw).parameters:
        return lambda: getattr(cls(), "subject")()  # noqa: B009 - the attribute is a ClassVar to the type checkers, a method here
    factory: SubjectFactory = (
        raw.__get__(None, cls) if isinstance(raw, staticmethod | classmethod) else raw
    )
    return factory


def _recipe(factory: SubjectFactory) -> dict[str, str] | None:
    """Return how ``rollproof replay`` makes the subject; ``None`` for a factory without a name."""
    if isinstance(factory, StackPart):
        return factory.recipe
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "<")
    return {"subject": f"{_place(module)}:{name}"} if module and "<" not in name else None


def _place(module: str) -> str:
    """Return the name of a module, or its file if it cannot be imported from the current folder.

    pytest searches the folder of a test file, ``tests/`` without ``__init__.py`` for one; a command
    in the root folder does not.
    """
    name = getattr(sys.modules.get(module), "__file__", None)
    current = Path.cwd()
    if name is None or not (file := Path(name)).is_relative_to(current):
        return module
    folder, found_as = module_of(file)
    by_name = folder == current or found_as != module or "site-packages" in file.parts
    return module if by_name else file.relative_to(current).as_posix()
