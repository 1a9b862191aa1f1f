"""Each ``rollproof`` command of docs/track-record.md, as a person would run it: in a process of its
own, to its end.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rollproof.engines.engine_targets import REAL
from rollproof.stacks import installed_version, release_of, requirements_file
from tests.stacks.test_released import CHECKOUTS
from tests.stacks.test_replay_layouts import KNOWN

RECORD = Path(__file__).parents[2] / "docs" / "track-record.md"
COMMAND = re.compile(r"^(?:nox [^#]*#.*: )?(rollproof [^#\n]*?) *(?:# *([\w, ]+))?$", re.MULTILINE)
"""A command at the start of its line or behind the session of nox that runs it, and a comment that
names other subjects for its last.
"""


def documented() -> list[str]:
    """The commands, one for each subject that a comment names beside them."""
    commands = []
    for block in re.findall(
        r"^```\n(.*?)^```$", RECORD.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        for command, comment in COMMAND.findall(re.sub(r" *# or: .*", "", block)):
            module, colon, _ = command.rpartition(":")
            commands += [
                command,
                *(f"{module}:{name}" for name in comment.split(", ") if colon and name),
            ]
    return commands


def test_the_commands_are_found() -> None:
    """Every subject with known verdicts is one, so are stacks and engines, and nothing that the
    record runs is passed over.
    """
    commands = documented()
    assert {command.rpartition(":")[2] for command in commands if "--subject" in command} == set(
        KNOWN
    )
    assert {
        "rollproof verify --stack verl",
        "rollproof verify --engine vllm",
        "rollproof verify --engine sglang",
    } <= set(commands)
    text = RECORD.read_text(encoding="utf-8")
    assert text.count("rollproof verify") == len(
        [command for command in commands if command in text]
    )


@pytest.mark.parametrize("command", documented())
def test_a_documented_command_ends_as_the_record_says(command: str, tmp_path: Path) -> None:
    """With 1 where faults are known and 0 where none is or they are expected, with nothing
    undecided, and never by a signal.
    """
    words = shlex.split(command)
    allowed = _exit_codes(words)
    if "--checkout" in words:
        words[words.index("--checkout") + 1] = os.environ[
            CHECKOUTS[words[words.index("--stack") + 1]]
        ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = [sys.executable, "-m", "rollproof", *words[1:]]
    done = subprocess.run(
        run, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=900, check=False
    )
    assert done.returncode in allowed, (
        f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )


def _exit_codes(words: list[str]) -> tuple[int, ...]:
    """The codes that a command may end with; skips where what it judges is not installed."""
    _, name = words[2:4]
    match words[2]:
        case "--subject":
            module, _, subject = name.partition(":")
            framework = module.split(".")[2]
            for package in ("torch", "megatron", framework):
                _needed(package, f"pip install --no-deps {framework} megatron-core")
            return (1,) if KNOWN[subject] else (0,)
        case "--stack" if name in CHECKOUTS:
            if CHECKOUTS[name] not in os.environ:
                pytest.skip(
                    f"{name} is a checkout: {CHECKOUTS[name]} names its folder (see"
                    f" {requirements_file(name)})"
                )
        case "--stack":
            release = release_of(name)
            _needed(name, f"see {requirements_file(name)}")
            if installed_version(release.distribution) not in release.versions:
                pytest.skip(
                    f"{name} is installed in another version than {', '.join(release.versions)}"
                )
        case _:
            _needed(REAL[name].module, f"see harness/engines/{REAL[name].module}/requirements.txt")
            return (0, 1)  # what fails differs between a CPU and a GPU
    return (0,) if "--matrix" in words else (1,)


def _needed(package: str, how: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: {how}")
