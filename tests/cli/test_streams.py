"""Broken pipes, closed and full streams, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from rollproof.cli import app as app_module
from rollproof.fakes.known_bugs._planting import ABORTED
from rollproof.store import dump_trace
from rollproof.verification.runner import run_case
from tests.support.command_line import command
from tests.support.faulty_subjects import Concat

pytestmark = pytest.mark.usefixtures("command_folder")


def test_a_closed_pipe_is_no_error() -> None:
    """`rollproof checks | true` ends quietly, and not with the exit code of a failing check."""
    with subprocess.Popen(
        command("checks"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()

    assert b"" == error
    assert app_module.BROKEN_PIPE == process.returncode


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("rollproof checks stitch >&-", 0, ""),
        (
            "rollproof checks stitch >/dev/full",
            0,
            "standard output could not be written (No space left on device); the exit code",
        ),
        ("rollproof --help >/dev/full", 0, "standard output could not be written"),
        (
            "rollproof check concat.json --only routes.rows >/dev/full",
            1,
            "the exit code is still the verdict",
        ),
        ("rollproof check concat.json --only routes.rows >&- <&-", 1, ""),
        (
            "rollproof check concat.json --only routes.rows --json - >/dev/full",
            1,
            "No space left on device. It was kept as /",
        ),
        (
            "rollproof checks stitch --json - >/dev/full",
            254,
            "The JSON did not fit into standard output: No space left on device",
        ),
        (
            "rollproof checks stitch --json - >&-",
            254,
            "--json - writes to standard output, which cannot be written: it is closed.",
        ),
        ("rollproof checks nosuch 2>&-", 254, ""),
        ("rollproof checks nosuch 2>/dev/full", 254, ""),
        ("PYTHONIOENCODING=ascii rollproof checks stitch >/dev/null", 0, ""),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_broken_streams_cost_no_verdict(
    tmp_path: Path, command: str, code: int, message: str
) -> None:
    """Closed or full standard streams leave the exit code as it is, unless JSON was asked for
    there; then it is kept elsewhere.
    """
    dump_trace(run_case(Concat, ABORTED), tmp_path / "concat.json")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env=environment, check=False
    )

    assert (code, "") == (done.returncode, done.stdout)
    assert "Traceback" not in done.stderr
    assert message in done.stderr if message else done.stderr == ""


def test_an_interrupt_is_exit_code_130(tmp_path: Path) -> None:
    """Ctrl-C ends a run with one line and the code that shells expect."""
    heed = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a runner in the background hands on an ignored SIGINT
    soak = command("verify", "--profile", "soak")
    with subprocess.Popen(
        soak, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, preexec_fn=heed
    ) as process:
        try:
            time.sleep(4)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=30)
        finally:
            process.kill()

    assert app_module.INTERRUPTED == process.returncode
    assert error.decode().strip().endswith("rollproof: interrupted")
