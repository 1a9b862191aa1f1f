"""Serve fake servers for one command, and judge what it did: ``rollproof serve --run``."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rollproof.cli.check import check_served
from rollproof.core.events.rollout import Call
from rollproof.core.trace import Header
from rollproof.errors import UsageError
from rollproof.http_clients.server_addresses import environment
from rollproof.judging.checks import Verdict
from rollproof.judging.report import ExitCode, Report
from rollproof.reporting.text import NOT_EXERCISED, wrapped
from rollproof.store import TraceWriter, open_trace

if TYPE_CHECKING:
    from rollproof.fakes.http.fault_plan import FaultPlan
    from rollproof.fakes.http.gateway import RouterKind
    from rollproof.fakes.http.serve_options import ServeOptions

__all__ = ["run_served", "split_command"]

_BEYOND_A_RUN = (
    "a recording does not",
    "the clock of a recording does not",
    "no request has a budget",
    "the trace has no other request",
    "no two requests of a trace ended by length at budgets three times apart",
)
"""How reasons of unknown checks begin that no change of the client's replies or samples decides:
what a fake server cannot see, and promises that the client does not report.
"""
_GRACE = 5.0
"""Seconds for which a command that was told to end may go on."""


def split_command(command: str) -> list[str]:
    """Return the words of a command, as a shell would split it.

    Raises:
        UsageError: it cannot be split, or there is no such program.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--run {command!r} cannot be split into words: {error}.") from error
    if not words:
        raise UsageError("--run needs a command, such as --run 'python client.py'.")
    # not a shell: what it runs would outlive it when it is told to end
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"--run: there is no program {words[0]!r}. The command runs without a shell: name a"
            " program on PATH, or `sh -c '...'`."
        )
    return words


def run_served(
    command: Sequence[str],
    server: str,
    options: ServeOptions,
    sockets: Sequence[socket.socket],
    *,
    header: Header,
    trace: Path | None,
    plan: FaultPlan | None,
    kind: RouterKind,
) -> int:
    """Serve until the command ends, judge the trace, and return the exit code.

    It is that of ``check``, but 0 in place of 2 if samples were judged, everything that arose
    passed, and the rest is unknown only because its situation did not arise, or because no fake
    server can see it: a run of a few requests never meets every situation.

    Args:
        command: the program and its arguments.
        server: ``sglang`` or ``vllm``.
        options: what each server is.
        sockets: one for a single server; of several the first is the router's.
        header: the header of the trace.
        trace: where the trace is kept; ``None``: nowhere.
        plan: what goes wrong.
        kind: the router to emulate.

    Raises:
        RollproofError: the trace could not be written, or the command not be started.
        KeyboardInterrupt: the run was interrupted; the command has ended.
    """
    from rollproof.fakes.http.serving import ServingThread

    with tempfile.TemporaryDirectory(prefix="rollproof-") as folder:
        file = trace or Path(folder) / "served.arrow"
        file.parent.mkdir(parents=True, exist_ok=True)
        with TraceWriter(file, header, trusted=True) as writer:
            servers = ServingThread(server, options, sockets, sinks=[writer], plan=plan, kind=kind)
            try:
                ended = _run(command, {**os.environ, **environment(servers.urls)})
            finally:
                summary = servers.stop()
        for line in summary:
            typer.echo(line, err=True)
        if not any(isinstance(event, Call) for event in open_trace(file)):
            typer.echo(
                f"No call reached the servers. The command must call {servers.urls[0]}, which it"
                " finds in ROLLPROOF_URL and, with the openai client, in OPENAI_BASE_URL.",
                err=True,
            )
        report = check_served(file)
    if ended:
        typer.echo(f"The command {_ending(ended)}: what it did not reach is not judged.", err=True)
    if report.exit_code != ExitCode.UNKNOWN:
        return report.exit_code
    planned = not any("did not happen" in line or "applied to 0 of" in line for line in summary)
    if ended or not planned or not _all_that_arose_passed(report):
        return ExitCode.UNKNOWN
    passed, unknown = report.summary["pass"], report.summary["unknown"]
    text = (
        f"  everything that arose passed: {passed} checks (exit code 0). {unknown} checks could not"
        " be exercised by this run; `rollproof check` of its trace counts them as unknown."
    )
    typer.echo(wrapped(text))
    return ExitCode.PASS


def _all_that_arose_passed(report: Report) -> bool:
    """Return whether samples were judged, and nothing is unknown that the client could decide."""
    unknown = [result for result in report.results if result.verdict is Verdict.UNKNOWN]
    judged = any(
        result.verdict is Verdict.PASS and result.check.request is not None
        for result in report.results
    )
    return judged and all(
        result.reason.startswith((f"{NOT_EXERCISED}:", *_BEYOND_A_RUN))
        and " traces: " not in result.reason  # another reason than that of most traces
        for result in unknown
    )


def _run(command: Sequence[str], variables: dict[str, str]) -> int:
    """Run a command to its end. An interruption ends it, too."""
    with _terminated_as_interrupted():
        try:
            process = subprocess.Popen(command, env=variables)  # noqa: S603 - the user's own command
        except OSError as error:
            raise UsageError(f"--run: {command[0]!r} cannot be started: {error}.") from error
        try:
            return process.wait()
        except KeyboardInterrupt:
            # of Ctrl-C it has been told by the terminal
            _end(process)
            raise


def _end(process: subprocess.Popen[Any]) -> None:
    """Wait for the end of the command; terminate it if it does not come, and then kill it."""
    for tell in (process.terminate, process.kill):
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            tell()
    process.wait()


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM interrupt the block: the command must not outlive its servers."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
