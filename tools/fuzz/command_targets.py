"""Command lines, and what a shell asks for its completion."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.fuzz.file_targets import sound_trace
from tools.fuzz.mutations import Changes, word
from tools.fuzz.target import CODES, Broken, Target, run_command

__all__ = ["COMMANDS"]

_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("verify", "--subject", "nosuch:x"),  # without it, it would judge all references
    ("check",),
    ("show",),
    ("replay",),
    ("seal", "--check"),
    ("gap",),
    ("serve", "--as", "vllm", "--top-k", "99"),  # refused, or it would serve
    ("known-bugs", "nosuch"),
    ("checks",),
    ("contract",),
    ("contract", "from"),
    ("nosuch",),
    (),
)
_OPTIONS = [
    "--json",
    "--html",
    "--report",
    "--only",
    "--seed",
    "--profile",
    "--expected",
    "--accept",
    "--witness-dir",
    "--flavour",
    "--jobs",
    "--stack",
    "--part",
    "--checkout",
    "--engine",
    "--request",
    "--finding",
    "--subject",
    "--trust-subject",
    "--contract",
    "--trace",
    "--port",
    "--host",
    "--token",
    "--workers",
    "--router",
    "--routes",
    "--limits",
    "--metrics",
    "--sequence",
    "--rollout",
    "--trainer",
    "--help",
    "-h",
    "-v",
    "--version",
    "--unfinished-ok",
]


_VALUES = ["trace.json", ".", "/", "/dev/null", "-1", "1e9", "routes.rows", "vllm", "nosuch.json"]


def _command_line(changes: Changes) -> list[str]:
    random = changes.random
    line = list(random.choice(_COMMANDS))
    for _ in range(random.randrange(6)):
        value = random.choice([random.choice(_OPTIONS), random.choice(_VALUES), word(random)])
        if changes.made():
            line.append(value)
    return line


def _read_command_line(arguments: list[str], folder: Any) -> None:
    encodable = [word.encode("utf-8", "replace").decode() for word in arguments]
    folder.count += 1
    if folder.count % 500:
        run_command(*encodable)
        return
    # and now and then as a shell would
    done = subprocess.run(
        [sys.executable, "-m", "rollproof", *encodable],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    if done.returncode not in CODES:
        raise Broken(f"{encodable} ended with {done.returncode}: {done.stderr[-600:]}")


class _Counted:
    count = 0


@contextlib.contextmanager
def _folder() -> Iterator[_Counted]:
    """A folder with a trace, from which a command line may name files and in which it may write."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        sound_trace(Path(folder))
        os.chdir(folder)
        try:
            yield _Counted()
        finally:
            os.chdir(before)


COMMANDS: dict[str, Target] = {
    "command-line": Target(inputs=lambda: _command_line, read=_read_command_line, around=_folder),
}
