"""A program that holds an engine: what it answers, how its end is told, and that nothing of it is
left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollproof.engines.host.host_client import EngineProcess, _spawn
from rollproof.errors import EngineDied, EngineHung, EngineRefused, EngineStartError

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(),
    reason="processes of a session are found in /proc, which is Linux's",
)

ROOT = Path(__file__).parents[2]


async def started(start: str = "", deadline: float = 30.0, **options: Any) -> EngineProcess:
    return await EngineProcess.start(
        "tests.support.echo_host",
        {"start": start},
        name="echo",
        environment={"PYTHONPATH": str(ROOT)},
        deadline=deadline,
        **options,
    )


def on_host(work: Callable[[EngineProcess], Awaitable[None]]) -> EngineProcess:
    """Run ``work`` on a host, and stop it."""

    async def main() -> EngineProcess:
        host = await started()
        try:
            await work(host)
        finally:
            await host.stop()
        return host

    return asyncio.run(main())


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_answers() -> None:
    """A call gives the host's answer, a stream all of its answers in order, and calls run side by
    side.
    """

    async def work(host: EngineProcess) -> None:
        hanging = asyncio.ensure_future(host.call("hang"))
        assert await host.call("echo", text="one") == "one"
        assert [number async for number in host.stream("count", to=3)] == [0, 1, 2]
        hanging.cancel()

    on_host(work)


def test_refusal() -> None:
    """What the host raises reaches the caller, with the name of its class; the host goes on."""

    async def work(host: EngineProcess) -> None:
        with pytest.raises(
            EngineRefused, match=r"^echo refused 'refuse': 'unknown handle'$"
        ) as caught:
            await host.call("refuse")
        assert caught.value.kind == "KeyError"
        assert await host.call("echo", text="still here") == "still here"

    on_host(work)


def test_death_is_reported_with_the_log() -> None:
    """A call on a host that dies raises, with how it died and the end of its log; so does every
    later call.
    """

    async def work(host: EngineProcess) -> None:
        with pytest.raises(
            EngineDied, match=r"killed by SIGKILL(.|\n)*the scheduler hit an exception"
        ):
            await host.call("die")
        with pytest.raises(EngineDied, match="echo is gone"):
            await host.call("echo", text="anybody?")

    on_host(work)


def test_hang_is_reported() -> None:
    """A call that is not answered within its deadline raises, and says what was asked and that the
    process still runs.
    """

    async def work(host: EngineProcess) -> None:
        message = (
            rf"did not answer 'hang' within 0.2 s; process {host.pid} still runs(.|\n)*loading the"
            r" weights"
        )
        with pytest.raises(EngineHung, match=message):
            await host.call("hang", deadline=0.2)

    on_host(work)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("die", r"echo died while it started \(exit code 3\)(.|\n)*loading the weights"),
        ("refuse", r"echo cannot be started: ValueError: no such model"),
        ("hang", r"echo was not ready after 3 s(.|\n)*loading the weights"),
        ("files", r"Too many open files(.|\n)*raise the limit \(`ulimit -n`\)"),
        ("ports", r"Address already in use(.|\n)*A port that the engine chose is in use"),
        ("full", r"No space left on device(.|\n)*df -h /dev/shm"),
    ],
)
def test_failed_starts(
    start: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that dies, is refused, hangs or exhausts a resource raises with the reason and what
    to do, and leaves no folder.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(EngineStartError, match=message):
        asyncio.run(started(start, deadline=3.0 if start == "hang" else 30.0))
    assert list(tmp_path.iterdir()) == []


def test_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of temporary files that cannot be written to is told before anything runs."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(
        EngineStartError, match="echo cannot be started: no temporary folder can be made"
    ):
        asyncio.run(started())


def test_shared_memory_that_nobody_has_any_more() -> None:
    """What a child made that died before anybody saw it is named after the engine, and goes with
    the failed start; others' stays.
    """
    folder = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory
    (folder / "echo_of_before").touch()
    try:
        with pytest.raises(EngineStartError, match="a child died"):
            asyncio.run(started("orphan"))
        assert ["echo_of_before"] == [path.name for path in folder.glob("echo_*")]
    finally:
        (folder / "echo_of_before").unlink()


def test_no_interpreter() -> None:
    """An interpreter that does not exist is named."""
    with pytest.raises(
        EngineStartError, match=r"echo cannot be started: '/nowhere/python' does not run"
    ):
        asyncio.run(started(python="/nowhere/python"))


def test_progress_is_reported() -> None:
    """While the host starts, the caller is told how long it has taken and what the log says."""
    told: list[str] = []
    with pytest.raises(EngineStartError):
        asyncio.run(started("hang", deadline=1.0, progress=told.append))
    assert told and told[0].startswith("echo is starting, 0 s: ")


def test_nothing_is_left() -> None:
    """Stopping a host ends the processes that it started and removes its shared memory and its
    folder; stopping twice is stopping once.
    """
    seen: dict[str, Any] = {}

    async def work(host: EngineProcess) -> None:
        seen.update(
            child=await host.call("child"), shared=await host.call("share"), folder=host.folder
        )
        assert (
            alive(seen["child"]) and os.access(seen["shared"], os.R_OK) and seen["folder"].exists()
        )

    host = on_host(work)
    asyncio.run(host.stop())
    assert gone(host.pid) and gone(seen["child"])
    assert not Path(seen["shared"]).exists() and not seen["folder"].exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_caller_ends(how: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, a termination and a kill of the caller end the host and what it started, and remove
    its folder.
    """
    program = textwrap.dedent("""
        import asyncio, signal
        from tests.engines.test_host import started

        # it is ignored if the tests run in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)

        async def main():
            host = await started()
            try:
                print(host.pid, await host.call("child"), flush=True)
                await asyncio.sleep(600)
            finally:
                await host.stop()

        asyncio.run(main())
    """)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    ) as caller:
        assert caller.stdout is not None
        host, child = map(int, caller.stdout.readline().split())
        caller.send_signal(how)
        try:
            caller.wait(30)
        finally:
            caller.kill()
    assert gone(host) and gone(child)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_caller_ends_during_a_start(
    how: signal.Signals, tmp_path: Path
) -> None:
    """A host whose engine is still loading, and which reads nothing yet, ends with its caller all
    the same.
    """
    program = (
        "import asyncio\nfrom tests.engines.test_host import started\nasyncio.run(started('hang',"
        " 600.0))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.DEVNULL, env=environment
    ) as caller:
        end = time.monotonic() + 60
        while not any("loading" in log.read_text() for log in tmp_path.glob("*/log")):
            assert time.monotonic() < end, "the host did not come up"
            time.sleep(0.05)
        hosts = [
            int(pid)
            for task in Path(f"/proc/{caller.pid}/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
        caller.send_signal(how)
        caller.wait(30)
    assert hosts
    assert all(gone(host) for host in hosts)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "said",
    [b"", b'{"start": ', b'{"start": "hang"}\n', b'{"start": "refuse"}\n', b'{"start": ""}\n'],
)
def test_the_end_of_the_line_is_the_end_of_the_caller(said: bytes, tmp_path: Path) -> None:
    """A caller whose line has ended while it still is the parent, as for a moment in every death,
    leaves nothing, however far it came.
    """
    (tmp_path / "tmp").mkdir()
    process, line = _spawn(
        [sys.executable, "-m", "tests.support.echo_host"], tmp_path, {"PYTHONPATH": str(ROOT)}
    )
    with process, line:
        line.sendall(said)
        line.close()
        process.wait(60)
    assert not tmp_path.exists()
