"""The scripts of docs/findings print what their pages show, on the release that each page names."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollproof.stacks import release_of
from tests.docs.test_findings import PAGES, Finding
from tests.stacks.test_released import CHECKOUTS

TRACK_RECORD = Path(__file__).parents[2] / "docs" / "track_record"
STACKS = {"miles-rl": "miles"}
"""Distributions whose stack has another name."""


def name_of(page: Path) -> str:
    """STACK-RELEASE-PAGE: ``nox -s upstream -- NAME --track-record`` selects those of a release."""
    finding = Finding.read(page)
    return f"{STACKS.get(finding.distribution, finding.distribution)}-{finding.version}-{page.stem}"


def root_of(finding: Finding) -> Path:
    """The folder that the places of a finding are relative to; skips where the release is not."""
    if finding.distribution in CHECKOUTS:
        variable = CHECKOUTS[finding.distribution]
        if variable not in os.environ:
            pytest.skip(f"{variable} does not name a checkout of {finding.distribution}")
        root = Path(os.environ[variable])
        head = ["git", "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
        if not commit.startswith(finding.version):
            pytest.skip(f"{root} is at {commit}, and the page is of {finding.version}")
        return root
    for name, version in {finding.distribution: finding.version, **finding.needs}.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
        if installed != version:
            pytest.skip(f"{name} {installed} is installed, and the page is of {version}")
    return Path(str(importlib.metadata.distribution(finding.distribution).locate_file("")))


def prelude(finding: Finding) -> str:
    """Code before the script, for packages that its page says were mocked, and for Python 3.11,
    where pydantic refuses the ``TypedDict`` of stacks that ask for a newer Python.
    """
    lines = [
        "import sys, typing, typing_extensions, warnings",
        "warnings.simplefilter('ignore')",
        "typing.TypedDict = typing_extensions.TypedDict",
        f"sys.path.insert(0, {str(TRACK_RECORD)!r})",
        "from common import stub_packages",
        *(
            f"stub_packages({name!r}, version={version!r}, even_if_installed=True)"
            for name, version in finding.mocks.items()
        ),
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_script_of_a_page_prints_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    """Line by line, in a process of its own: a script replaces parts of its framework."""
    finding = Finding.read(page)
    root = root_of(finding)
    script = tmp_path / "finding.py"
    script.write_text(prelude(finding) + finding.script, encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"TRANSFORMERS_VERBOSITY": "error", "ROLL_LOG_DIR": str(tmp_path)}
    if finding.distribution in CHECKOUTS:
        roots = release_of(finding.distribution).roots
        env["PYTHONPATH"] = os.pathsep.join(str(root / each) for each in roots)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr[-2000:]
    assert finding.printed == done.stdout


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_places_of_a_page_are_in_the_release(page: Path) -> None:
    """Each line exists, within the function that the page names."""
    finding = Finding.read(page)
    root = root_of(finding)
    for file, line, name in finding.places:
        node: ast.AST = ast.parse((root / file).read_text(encoding="utf-8"))
        for part in name.split(".") if name else ():
            (node,) = (
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and child.name == part
            )
        if name:
            assert node.lineno <= line <= node.end_lineno, (file, line, name)  # type: ignore[attr-defined]
