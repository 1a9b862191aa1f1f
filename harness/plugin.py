"""pytest plugin of rollproof: its options, fixtures and hooks.

PYTEST_DONT_REWRITE: every pytest session on a machine with rollproof imports this module, so it
imports nothing beyond pytest and the standard library and holds no assertion. The work is in
``rollproof.pytest_plugin``, which is imported when a session first uses it (budget: 10 ms and two
modules; tests/pytest_plugin/test_overhead.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from rollproof.gap import GapReport
    from rollproof.judging.report import Report
    from rollproof.pytest_plugin.session_state import State
    from rollproof.recording.recorder import Recording
    from rollproof.recording.served_fleet import ServedFleet

__all__ = ["OPTIONS", "Option", "state_of"]

_ANNOTATION = "rollproof_annotation"
"""The attribute of a report of pytest that holds its annotation, in builtin types: pytest-xdist
delivers it to the controller.
"""
_UNKNOWN_PROPERTY = ("rollproof_verdict", "unknown")


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


# Here and not in pytest_plugin, because every session needs the names for its command line.
OPTIONS = (
    Option("profile", "how much is run: pr, nightly, soak", "NAME", default="pr"),
    Option(
        "seed",
        "seed of every random choice, a whole number >= 0; default: the profile's seed",
        "N",
    ),
    Option("only", "run only this check or family; may be repeated", "ID", "args", ()),
    Option(
        "report",
        "write the report to this file: one HTML page if its name ends in .html, SARIF 2.1.0 if in"
        " .sarif, else JSON (schema 1); may be repeated, one a line in the ini file",
        "FILE",
        "linelist",
        (),
    ),
    Option(
        "github",
        "annotations and a step summary for GitHub Actions: on or off; default: on if"
        " GITHUB_ACTIONS is true",
        "on|off",
    ),
    Option("expected", "file of expected failures (TOML; see docs/options.md)", "FILE"),
    Option(
        "accept",
        "rewrite the file of expected failures so that it lists what fails in this session",
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
        "fail the GPU suites that cannot run on this host's GPUs, instead of skipping them",
        None,
        "bool",
        False,
    ),
    Option(
        "gpus",
        "number of GPUs of this host that the GPU suites may use; tests that need more are"
        " deselected; default: all",
        "N",
    ),
    Option(
        "full",
        "run the GPU suites in every setting, not only in those that take ten minutes on one GPU",
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
        "measure the gap with this trainer only: hf, megatron, megatron-tp2, ... or your own as"
        " module:factory (docs/gpu.md)",
        "SPEC",
    ),
)

_FLEETS = pytest.StashKey["list[ServedFleet]"]()
"""The fake servers that a test has started."""
_FRESH_SEED = pytest.StashKey[int]()
_STATE: pytest.StashKey[State] = pytest.StashKey()


def state_of(config: pytest.Config) -> State:
    """Return the session's state; it is made when it is first used."""
    if _STATE not in config.stash:
        from rollproof.pytest_plugin.session_state import State, read_settings

        values = {option.name: _value(config, option) for option in OPTIONS}
        config.stash[_STATE] = State(
            settings=read_settings(config, values), fresh_seed=config.stash[_FRESH_SEED]
        )
    return config.stash[_STATE]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rollproof", "rollproof: conformance of rollout stacks")
    for option in OPTIONS:
        kind: dict[str, Any] = (
            {"action": "store_true"} if option.metavar is None else {"metavar": option.metavar}
        )
        if option.ini in ("args", "linelist"):
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
    # The controller draws one seed for profiles without a seed, so that all xdist workers use it.
    # (pytest-xdist sets workerinput in its workers, and nowhere else.)
    worker = getattr(config, "workerinput", {})
    config.stash[_FRESH_SEED] = worker.get("rollproof_seed", int.from_bytes(os.urandom(3)))
    if any(_is_set(config, option) for option in OPTIONS):
        # A wrong option ends the session here, and not after everything was run.
        state_of(config).check_settings(writes=not hasattr(config, "workerinput"))


def _is_set(config: pytest.Config, option: Option) -> bool:
    return config.getoption(option.dest) not in (None, []) or bool(
        option.ini and config.getini(option.dest)
    )


def _value(config: pytest.Config, option: Option) -> Any:
    value = config.getoption(option.dest)
    if value in (None, []) and option.ini:
        value = config.getini(option.dest)
    return option.default if value in (None, [], "") else value


def pytest_report_header(config: pytest.Config) -> str | None:
    state = config.stash.get(_STATE, None)
    if state is not None:
        values = state.settings._asdict()
    elif config.get_verbosity() > 0:
        values = {option.name: option.default for option in OPTIONS}
    else:
        return None
    shown = (
        f"{name}={value!r}" for name, value in values.items() if value not in (None, False, ())
    )
    return f"rollproof: {', '.join(shown)}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if hasattr(metafunc.function, "_rollproof_suite"):
        from rollproof.pytest_plugin.items import parametrize

        parametrize(metafunc, state_of(metafunc.config))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    if hasattr(pyfuncitem.function, "_rollproof_suite"):
        from rollproof.pytest_plugin.items import run_item

        run_item(pyfuncitem, state_of(pyfuncitem.config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Judge the fake servers of a test when its body has ended well: a finding is a failure of the
    test, and not an error of its teardown.
    """
    outcome = yield
    fleets = item.stash.get(_FLEETS, None)
    if fleets:
        from rollproof.pytest_plugin.served_fleets import judge_fleets

        judge_fleets(item, fleets, state_of(item.config))
    return outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shorten failures of ours to one line in pytest's short summary."""
    report = yield
    # Loaded by the first use of rollproof: a session without it must not import more.
    if call.excinfo is not None and "rollproof.errors" in sys.modules:
        from rollproof.pytest_plugin.short_summary import shorten

        shorten(item, call.excinfo.value, report)
        if report.failed and _on_github(item.config):
            from rollproof.pytest_plugin.github_actions import annotation_of

            annotation = annotation_of(item, call.excinfo.value, report)
            if annotation is not None:
                vars(report)[_ANNOTATION] = annotation
    return report


def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport,
) -> tuple[str, str, str] | None:
    """List an unknown verdict, which fails the session like a failure, as UNKNOWN."""
    if (
        report.when == "call"
        and report.failed
        # xdist delivers the properties as lists
        and any(tuple(pair) == _UNKNOWN_PROPERTY for pair in report.user_properties)
    ):
        return "unknown", "U", "UNKNOWN"
    return None


@pytest.fixture(scope="session")
def rollproof_profile(pytestconfig: pytest.Config) -> str:
    """The profile in force: ``pr``, ``nightly`` or ``soak``."""
    return state_of(pytestconfig).settings.profile


@pytest.fixture(scope="session")
def rollproof_seed(pytestconfig: pytest.Config) -> int:
    """The seed in force: the option, else the profile's own, else one drawn for this session."""
    state = state_of(pytestconfig)
    return state.seed_of(state.settings.profile)


@pytest.fixture
def rollproof_gap(request: pytest.FixtureRequest) -> Callable[..., GapReport]:
    """``rollproof.gap.measure``; it fails the test, with the report as the reason, unless the gap
    is within its limits.

    With ``trainer=`` the first argument is rollouts, or the path of a trace, which that trainer
    scores (``measure_rollouts``). An inconclusive measurement fails too, or skips the test if
    ``rollproof_unknown = skip``.
    """
    from rollproof.gap import GapTrainer, GapVerdict, gap_lines, measure, measure_rollouts

    state = state_of(request.config)

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
        state.add_gap(report.to_dict(), request.node)
        if report.verdict is GapVerdict.INCONCLUSIVE and state.settings.unknown == "skip":
            pytest.skip("\n".join(text for _, text in gap_lines(report)))
        report.require()
        return report

    return check


@pytest.fixture
def rollproof_record(request: pytest.FixtureRequest) -> Callable[..., Recording]:
    """``rollproof.record``; its verdicts also appear in the session's summary and report, under
    the test's own id.

    ``only`` is the session's ``--rollproof-only`` unless the test gives its own.
    """
    from rollproof.recording.recorder import record

    state = state_of(request.config)

    def start(contract: Any, **options: Any) -> Recording:
        def add(report: Mapping[str, Any]) -> None:
            state.add_report(request.node.nodeid, report, request.node)

        return record(
            contract,
            **{
                "name": request.node.nodeid,
                "on_report": add,
                "only": state.only_of("rollouts"),
                **options,
            },
        )

    return start


@pytest.fixture
def rollproof_sglang(request: pytest.FixtureRequest) -> Iterator[Callable[..., ServedFleet]]:
    """Start fake SGLang servers for a test, and judge what they saw when it ends.

    ``fleet = rollproof_sglang(contract)`` starts them; ``fleet.url`` is their address. Findings
    fail the test; one in which nothing could be judged is unknown. Arguments as in
    ``rollproof.recording.served_fleet.ServedFleet``; ``only`` is the session's
    ``--rollproof-only`` unless the test gives its own.
    """
    from rollproof.pytest_plugin.served_fleets import start_fleets

    yield from start_fleets("sglang", request, _FLEETS, state_of(request.config))


@pytest.fixture
def rollproof_vllm(request: pytest.FixtureRequest) -> Iterator[Callable[..., ServedFleet]]:
    """The same as ``rollproof_sglang``, with fake vLLM servers."""
    from rollproof.pytest_plugin.served_fleets import start_fleets

    yield from start_fleets("vllm", request, _FLEETS, state_of(request.config))


@pytest.fixture
def rollproof_replay(
    request: pytest.FixtureRequest, rollproof_profile: str, rollproof_seed: int
) -> Callable[..., Report]:
    """Judge a trainer with routing replay in a test of your own: ``rollproof_replay(MyTrainer,
    only=["replay.forward"])``.

    Profile and seed are those of the session; the verdicts appear in its summary and report, under
    the test's own id. Raises ``ConformanceError`` with the findings of checks that fail.
    """
    from rollproof.verification.replay import judge_replay
    from rollproof.verification.reports import raise_for_failures

    state = state_of(request.config)

    def judge(factory: Callable[[], Any], **options: Any) -> Report:
        arguments = {
            "name": request.node.nodeid,
            "profile": rollproof_profile,
            "seed": rollproof_seed,
            **options,
        }
        arguments.setdefault("only", state.only_of("replay"))
        report = judge_replay(factory, **arguments)
        state.add_report(request.node.nodeid, report.to_dict(), request.node)
        raise_for_failures(report)
        return report

    return judge


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the controller's fresh seed to an xdist worker."""
    node.workerinput["rollproof_seed"] = node.config.stash[_FRESH_SEED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the reports of an xdist worker (a worker that crashed has no ``workeroutput``)."""
    delivered = getattr(node, "workeroutput", {}).get("rollproof")
    if delivered:
        import json

        reports, gaps = json.loads(delivered)
        state_of(node.config).reports.update(reports)
        state_of(node.config).gaps.update(gaps)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Deliver the reports of a worker to the controller, which alone writes files."""
    state = session.config.stash.get(_STATE, None)
    if state is None:
        return
    if hasattr(session.config, "workerinput"):
        if state.reports or state.gaps:
            import json

            # As text, because a report may hold subclasses of the builtin types (a StrEnum, a numpy
            # integer), which execnet does not serialise.
            session.config.workeroutput["rollproof"] = json.dumps([state.reports, state.gaps])  # type: ignore[attr-defined]  # set by xdist in its workers
    elif state.settings.report or state.settings.accept:
        written = state.write_files(int(session.exitstatus), session.config.rootpath)
        if not written and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR


def _on_github(config: pytest.Config) -> bool:
    choice = _value(config, next(option for option in OPTIONS if option.name == "github"))
    return choice == "on" or (choice is None and os.environ.get("GITHUB_ACTIONS") == "true")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode
) -> None:
    config = terminalreporter.config
    state = config.stash.get(_STATE, None)
    if state is not None and (state.reports or state.summary):
        _write_reports(terminalreporter, state)
    annotated = [
        report
        for category in ("failed", "error", "unknown")
        for report in terminalreporter.stats.get(category, ())
        if hasattr(report, _ANNOTATION)
    ]
    if _on_github(config) and (annotated or (state is not None and (state.reports or state.gaps))):
        from rollproof.pytest_plugin.github_actions import show_session

        annotations = [(report, getattr(report, _ANNOTATION)) for report in annotated]
        show_session(terminalreporter, annotations, state, int(exitstatus))


def _write_reports(terminalreporter: pytest.TerminalReporter, state: State) -> None:
    from rollproof.reporting.text import report_lines

    terminalreporter.section("rollproof")
    verbose = terminalreporter.config.get_verbosity() > 0
    for report in state.reports.values():
        # An item has shown its findings with its failure, and a recording in the error of its test:
        # the summary only counts them.
        for style, text in report_lines(
            report, verbose=verbose, findings=0, gather=report["profile"] == "recorded"
        ):
            terminalreporter.write_line(text, **style.markup)
    for line in state.summary:
        terminalreporter.write_line(line)
