"""pytest plugin of rollproof: options, fixtures, hand-over between xdist workers, and the closing
summary.

PYTEST_DONT_REWRITE: every pytest session imports this module, also those that never use it, so it
imports nothing beyond pytest and the standard library, and holds no assertion (budget: 10 ms and 5
modules; tests/pytest_plugin/test_overhead.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from rollproof.gap import GapReport
    from rollproof.judging.report import Report
    from rollproof.recording.recorder import Recording

__all__ = ["OPTIONS", "PROFILES", "STATE", "Option", "Settings", "State"]

PROFILES = ("pr", "nightly", "soak")
"""Names of the profiles; ``rollproof.verification.schedules`` says what they run."""
_UNKNOWN = ("fail", "skip")
_UNDECIDED = ("rollproof_verdict", "unknown")


class Option(NamedTuple):
    """One option: ``--rollproof-NAME`` on the command line and, unless ``ini`` is empty, the key
    ``rollproof_NAME`` in the ini file.
    """

    name: str
    help: str
    metavar: str | None = None
    ini: str = "string"
    default: Any = None

    @property
    def flag(self) -> str:
        """The spelling on the command line."""
        return f"--rollproof-{self.name}"

    @property
    def dest(self) -> str:
        """The ini key, also the attribute of pytest's namespace."""
        return f"rollproof_{self.name.replace('-', '_')}"


OPTIONS = (
    Option("profile", f"how much is run: {', '.join(PROFILES)}", "NAME", default="pr"),
    Option(
        "seed",
        "seed of everything that is drawn, a whole number >= 0; default: what the profile says",
        "N",
    ),
    Option("only", "run only this check or family; may be repeated", "ID", "args", ()),
    Option("report", "write the JSON report (schema 1) to this file", "FILE"),
    Option("expected", "file of expected failures (TOML; see docs/options.md)", "FILE"),
    Option(
        "accept",
        "rewrite the file of expected failures so that it says what this session found",
        None,
        "",
    ),
    Option(
        "unknown",
        "what an unknown verdict does to its item: fail (it never counts as passed) or skip",
        "fail|skip",
        default="fail",
    ),
    Option(
        "require-gpu",
        "fail instead of skipping what the GPU suites cannot run on this host's GPUs",
        None,
        "bool",
        False,
    ),
    Option(
        "gpus",
        "GPUs of this host that the GPU suites may count on; what needs more is left out; default:"
        " all that it has",
        "N",
    ),
    Option(
        "full",
        "run the GPU suites in every setting, not in those alone that take ten minutes on one GPU",
        None,
        "bool",
        False,
    ),
    Option("gpu-report", "folder for the report of the GPU suites (run.json, run.html)", "DIR"),
    Option(
        "model",
        "folder of a MoE checkpoint on which the GPU suites measure the gap; default: a"
        " generated one",
        "DIR",
    ),
    Option(
        "trainer",
        "the one trainer of the gap: hf, megatron, megatron-tp2, ... or your own as module:factory"
        " (docs/gpu.md)",
        "SPEC",
    ),
)


class Settings(NamedTuple):
    """The values in force: command line before ini file before default. Paths are absolute."""

    profile: str
    seed: int | None
    only: tuple[str, ...]
    report: str | None
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
    """What a session gathers (no dataclass: making one costs every session more than this whole
    module).

    ``fresh_seed`` is drawn by the controller for profiles without a seed of their own, so that all
    workers use one. ``reports`` are JSON reports by key: two workers that ran one subject hand over
    one. ``cache`` holds what each subject's run came to, ``told`` the keys of failed runs whose
    reason an item has told, ``closing`` lines for the closing summary.
    """

    def __init__(self, *, settings: Settings, given: bool, fresh_seed: int) -> None:
        self.settings = settings
        self.given = given
        self.fresh_seed = fresh_seed
        self.reports: dict[str, dict[str, Any]] = {}
        self.cache: dict[str, Any] = {}
        self.told: set[str] = set()
        self.closing: list[str] = []


STATE = pytest.StashKey[State]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rollproof", "rollproof: conformance of rollout stacks")
    for option in OPTIONS:
        kind: dict[str, Any] = (
            {"action": "store_true"} if option.metavar is None else {"metavar": option.metavar}
        )
        if option.ini == "args":
            kind["action"] = "append"
        group.addoption(option.flag, dest=option.dest, default=None, help=option.help, **kind)
        if option.ini:
            parser.addini(option.dest, option.help, type=option.ini)  # type: ignore[arg-type]  # a Literal that mypy does not see through the table


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "rollproof(profile=None, seed=None): a conformance item; the arguments override the options"
        " of the same name.",
    )
    given = [option for option in OPTIONS if _given(config, option)]
    settings = _settings(config)
    fresh = getattr(config, "workerinput", {}).get("rollproof_seed", int.from_bytes(os.urandom(3)))
    config.stash[STATE] = State(settings=settings, given=bool(given), fresh_seed=fresh)
    if settings.only or settings.expected or settings.accept:
        _check_names(settings)
    if (settings.report or settings.accept) and not hasattr(config, "workerinput"):
        _check_places(settings)


def _given(config: pytest.Config, option: Option) -> bool:
    return config.getoption(option.dest) not in (None, []) or bool(
        option.ini and config.getini(option.dest)
    )


def _value(config: pytest.Config, option: Option) -> Any:
    value = config.getoption(option.dest)
    if value in (None, []) and option.ini:
        value = config.getini(option.dest)
    return option.default if value in (None, [], "") else value


def _settings(config: pytest.Config) -> Settings:
    values = {option.name: _value(config, option) for option in OPTIONS}
    _one_of("--rollproof-profile", values["profile"], PROFILES)
    _one_of("--rollproof-unknown", values["unknown"], _UNKNOWN)
    seed = values["seed"]
    if seed is not None and not (seed.isascii() and seed.isdigit()):
        raise pytest.UsageError(
            f"--rollproof-seed={seed!r} is not a whole number >= 0, such as 0 or 12345."
        )
    gpus = values["gpus"]
    if gpus is not None and not (gpus.isascii() and gpus.isdigit() and int(gpus)):
        raise pytest.UsageError(
            f"--rollproof-gpus={gpus!r} is not a number of GPUs, such as 1 or 4."
        )
    return Settings(
        profile=values["profile"],
        seed=None if seed is None else int(seed),
        only=tuple(values["only"]),
        report=_path(config, "rollproof_report"),
        expected=_path(config, "rollproof_expected"),
        accept=bool(values["accept"]),
        unknown=values["unknown"],
        require_gpu=bool(values["require-gpu"]),
        gpus=None if gpus is None else int(gpus),
        full=bool(values["full"]),
        gpu_report=_path(config, "rollproof_gpu_report"),
        model=_path(config, "rollproof_model"),
        trainer=values["trainer"],
    )


def _one_of(flag: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise pytest.UsageError(f"{flag}={value!r} is not one of: {', '.join(valid)}.")


def _path(config: pytest.Config, dest: str) -> str | None:
    """Paths of the command line start from where pytest was called, those of the ini file from the
    root folder.
    """
    given, kept = config.getoption(dest), config.getini(dest)
    if given:
        return str(config.invocation_params.dir / str(given))
    return str(config.rootpath / kept) if kept else None


def _check_names(settings: Settings) -> None:
    """Refuse checks that do not exist and a file of expected failures that cannot be used."""
    from rollproof.errors import RollproofError
    from rollproof.invariants import default_registry
    from rollproof.verification.expected_failures import ExpectedFailures

    if settings.expected is None and settings.accept:
        raise pytest.UsageError(
            "--rollproof-accept rewrites the file of expected failures: say which one with"
            " --rollproof-expected=FILE."
        )
    try:
        default_registry().select(settings.only)
        if settings.expected is not None:
            ExpectedFailures.read(settings.expected, missing_ok=settings.accept)
    except RollproofError as error:
        raise pytest.UsageError(str(error)) from None


def _check_places(settings: Settings) -> None:
    """Refuse files that cannot be written to, before the session and not at its end."""
    from pathlib import Path

    from rollproof.core.files import check_target
    from rollproof.errors import UsageError

    try:
        for place in (settings.report, settings.expected if settings.accept else None):
            if place is not None:
                check_target(Path(place))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str | None:
    state = config.stash.get(STATE, None)
    if state is None or not (state.given or config.get_verbosity() > 0):
        return None
    used = ", ".join(
        f"{name}={value!r}"
        for name, value in state.settings._asdict().items()
        if value not in (None, False, ())
    )
    return f"rollproof: {used}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if hasattr(metafunc.function, "_rollproof_suite"):
        from rollproof.pytest_plugin.items import parametrize

        parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    if hasattr(pyfuncitem.function, "_rollproof_suite"):
        from rollproof.pytest_plugin.items import run_item

        run_item(pyfuncitem)


def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport,
) -> tuple[str, str, str] | None:
    """An unknown verdict fails the session like a failure, but is listed as what it is."""
    if (
        report.when == "call"
        and report.failed
        and any(tuple(pair) == _UNDECIDED for pair in report.user_properties)
    ):
        return "unknown", "U", "UNKNOWN"
    return None


@pytest.fixture(scope="session")
def rollproof_profile(pytestconfig: pytest.Config) -> str:
    """The profile in force: ``pr``, ``nightly`` or ``soak``."""
    return pytestconfig.stash[STATE].settings.profile


@pytest.fixture(scope="session")
def rollproof_seed(pytestconfig: pytest.Config) -> int:
    """The seed in force: the option, else the profile's own, else one drawn for this session."""
    from rollproof.pytest_plugin.items import seed_of

    state = pytestconfig.stash[STATE]
    return seed_of(state, state.settings.profile)


@pytest.fixture
def rollproof_gap(request: pytest.FixtureRequest) -> Callable[..., GapReport]:
    """``rollproof.gap.measure`` that fails the test unless the gap is within its limits, with the
    report as the reason.

    With ``trainer=`` the first argument is rollouts, or the path of a trace, which that trainer
    scores (``measure_rollouts``). A measurement that decides nothing fails too, or skips the test
    where ``rollproof_unknown = skip``.
    """
    from rollproof.gap import GapTrainer, GapVerdict, gap_lines, measure, measure_rollouts

    state = request.config.stash[STATE]

    def check(
        rollout: Any,
        trainer_logprob: Any = None,
        *,
        trainer: GapTrainer | None = None,
        **columns: Any,
    ) -> GapReport:
        named = {"subject": request.node.nodeid, **columns}
        report = (
            measure(rollout, trainer_logprob, **named)
            if trainer is None
            else measure_rollouts(rollout, trainer, **named)
        )
        if report.verdict is GapVerdict.INCONCLUSIVE and state.settings.unknown == "skip":
            pytest.skip("\n".join(text for _, text in gap_lines(report)))
        report.require()
        return report

    return check


@pytest.fixture
def rollproof_record(request: pytest.FixtureRequest) -> Callable[..., Recording]:
    """``rollproof.record`` whose verdicts also appear in the session's summary and report, under
    the test's own id.

    ``only`` is the session's ``--rollproof-only`` unless the test gives its own.
    """
    from rollproof.recording.recorder import record

    state = request.config.stash[STATE]

    def start(contract: Any, **options: Any) -> Recording:
        def hand_over(report: Mapping[str, Any]) -> None:
            state.reports[f"{request.node.nodeid}#{len(state.reports)}"] = dict(report)

        return record(
            contract,
            **{
                "name": request.node.nodeid,
                "on_report": hand_over,
                "only": _only(state, "rollouts"),
                **options,
            },
        )

    return start


@pytest.fixture
def rollproof_replay(
    request: pytest.FixtureRequest, rollproof_profile: str, rollproof_seed: int
) -> Callable[..., Report]:
    """Judge a trainer with routing replay in a test of your own: ``rollproof_replay(MyTrainer,
    only=["replay.forward"])``.

    Profile and seed are those of the session; the verdicts appear in its summary and report, under
    the test's own id. Raises ``ConformanceError`` with the findings of checks that fail.
    """
    from rollproof.verification.replay import judge_replay, raise_for_failures

    state = request.config.stash[STATE]

    def judge(factory: Callable[[], Any], **options: Any) -> Report:
        asked = {
            "name": request.node.nodeid,
            "profile": rollproof_profile,
            "seed": rollproof_seed,
            **options,
        }
        asked.setdefault("only", _only(state, "replay"))
        report = judge_replay(factory, **asked)
        state.reports[f"{request.node.nodeid}#{len(state.reports)}"] = report.to_dict()
        raise_for_failures(report)
        return report

    return judge


def _only(state: State, about: str) -> tuple[str, ...]:
    """The checks that the session is limited to among those of one kind of subject; skips the test
    where it has none.
    """
    if not state.settings.only:
        return ()
    from rollproof.invariants import default_registry

    ids = tuple(
        check.id for check in default_registry().select(state.settings.only) if check.judges(about)
    )
    if not ids:
        pytest.skip(
            f"no check of {about} is among those that --rollproof-only names:"
            f" {', '.join(state.settings.only)}"
        )
    return ids


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the controller's fresh seed to an xdist worker."""
    node.workerinput["rollproof_seed"] = node.config.stash[STATE].fresh_seed


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what an xdist worker hands over (``workeroutput`` is missing where it crashed)."""
    handed = getattr(node, "workeroutput", {}).get("rollproof")
    if handed:
        import json

        node.config.stash[STATE].reports.update(json.loads(handed))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its reports over; the controller alone writes files."""
    state = session.config.stash.get(STATE, None)
    if state is None:
        return
    if hasattr(session.config, "workerinput"):
        if state.reports:
            import json

            # As text: what to_dict holds need not be of the exact builtin types that execnet takes.
            session.config.workeroutput["rollproof"] = json.dumps(state.reports)  # type: ignore[attr-defined]  # set by xdist in its workers
    elif state.settings.report or state.settings.accept:
        from rollproof.pytest_plugin.items import write_files

        state.closing, whole = write_files(state)
        if not whole and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    state = terminalreporter.config.stash.get(STATE, None)
    if state is None or not (state.reports or state.closing):
        return
    from rollproof.reporting.text import report_lines

    terminalreporter.section("rollproof")
    verbose = terminalreporter.config.get_verbosity() > 0
    for report in state.reports.values():
        # An item has shown its findings; those of recordings were in the error of the test.
        for style, text in report_lines(
            report, verbose=verbose, findings=0, gather=report["profile"] == "recorded"
        ):
            terminalreporter.write_line(text, **style.markup)
    for line in state.closing:
        terminalreporter.write_line(line)
