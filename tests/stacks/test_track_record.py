"""docs/track-record.md lists the faults of the scripts of docs/track_record; the text files next to
them hold what they print.
"""

from __future__ import annotations

import ast
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
SCRIPTS = sorted((DOCS / "track_record").glob("*_faults.py"))


def faults_of(script: Path) -> list[str]:
    """The names of the functions that a script runs, from its last call of ``run``."""
    (call,) = (
        node
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "run"
    )
    return [ast.unparse(argument) for argument in call.args]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_fault_is_listed_says_what_it_shows_and_is_short(script: Path) -> None:
    """Each fault has its line in the table, a docstring, and at most 60 lines of code; scripts know
    nothing of rollproof but how to start SGLang on a CPU.
    """
    text = script.read_text(encoding="utf-8")
    functions = {
        node.name: node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for name in faults_of(script):
        assert f"[{name}](track_record/{script.name})" in RECORD
        assert ast.get_docstring(functions[name])
        function = functions[name]
        assert function.end_lineno - function.body[0].end_lineno <= 60, name
    imports = [line for line in text.splitlines() if "import" in line and "rollproof" in line]
    allowed = ["    from rollproof.engines.sglang import sglang_cpu"]
    assert imports in ([], allowed if script.stem == "sglang_faults" else [])


def test_every_fault_that_the_record_links_to_exists() -> None:
    """No dead links."""
    linked = set(re.findall(r"\[(\w+)\]\(track_record/(\w+\.py)\)", RECORD))
    assert {(name, path.name) for path in SCRIPTS for name in faults_of(path)} == linked


@pytest.mark.parametrize(
    "stack", ["verl", "skyrl", "trl", "openrlhf", "miles", "areno", "areal", "verifiers", "rlinf"]
)
def test_the_files_hold_what_the_scripts_print_on_the_installed_release(stack: str) -> None:
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
    command = [sys.executable, str(DOCS / "track_record" / f"{stack}_faults.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    prefix = f"{stack} {version}: "
    printed = [line for line in done.stdout.splitlines() if line.startswith(prefix)]
    text = (DOCS / "track_record" / f"{stack}_faults.txt").read_text(encoding="utf-8")
    recorded = [line for line in text.splitlines() if line.startswith(prefix)]
    assert sorted(recorded) == sorted(printed)


def test_the_numbers_of_faults_are_those_of_the_rows() -> None:
    """The head of the record counts its rows, and the README says the same number."""
    rows = re.findall(r"^\| \d+ \| .*$", RECORD, re.MULTILINE)
    choices = sum("*Choice" in row for row in rows)
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert f"\n{len(rows)} faults of released, unmodified frameworks" in RECORD
    assert f": {len(rows) - choices} faults and {choices} choices. " in RECORD
    assert f"\n{len(rows)} faults and traps in released, unmodified frameworks" in readme
