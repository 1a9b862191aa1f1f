"""docs/track-record.md says what the scripts beside it print."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollproof.stacks import installed_version, release_of, requirements_file

DOCS = Path(__file__).parents[2] / "docs"
RECORD = (DOCS / "track-record.md").read_text(encoding="utf-8")
SCRIPTS = sorted(
    path for path in (DOCS / "track_record").glob("*_*.py") if not path.stem.endswith("stub")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_listed_says_what_it_shows_and_is_short(script: Path) -> None:
    """Each reproduction has its line in the table, a first sentence, and at most 25 lines of code
    that know nothing of rollproof.
    """
    text = script.read_text(encoding="utf-8")
    assert f"(track_record/{script.name})" in RECORD
    assert re.match(r'""".*[.!:]', text)
    body = text.split('"""', 2)[2]
    assert "rollproof" not in body
    assert len([line for line in body.splitlines() if line.strip()]) <= 25


def test_every_script_that_the_record_links_to_exists() -> None:
    """No dead links."""
    assert {path.name for path in SCRIPTS} == set(re.findall(r"\(track_record/(\w+\.py)\)", RECORD))


@pytest.mark.parametrize(
    "stack", ["verl", "skyrl", "trl", "openrlhf", "miles", "areno", "areal", "verifiers", "rlinf"]
)
def test_the_record_holds_what_the_scripts_print_on_the_installed_release(stack: str) -> None:
    """Line by line, in a process of its own: the scripts and rollproof's adapters put different
    stand-ins into a framework.
    """
    if importlib.util.find_spec(stack) is None:
        pytest.skip(f"{stack} is not installed: see {requirements_file(stack)}")
    release = release_of(stack)
    version = installed_version(release.distribution)
    if version not in release.versions:
        pytest.skip(
            f"{stack} {version} is installed, and the record is of {', '.join(release.versions)}"
        )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, str(DOCS / "track_record" / "run.py"), f"{stack}_"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    prefix = f"{stack} {version}: "
    printed = [line for line in done.stdout.splitlines() if line.startswith(prefix)]
    recorded = [line for line in RECORD.splitlines() if line.startswith(prefix)]
    assert sorted(recorded) == sorted(printed)
