from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rollproof.core.extras import MODULES
from tests.packaging.conftest import ROOT

EXAMPLE = ROOT / "docs" / "example"


@dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """An environment with the wheel and some of its dependencies."""

    python: Path
    folder: Path
    distributions: frozenset[str]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
        }
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            env={**environment, "COLUMNS": "120"},
        )


def _closure(requirements: Iterable[str]) -> set[str]:
    """The distributions that pip would install for these, with nothing of any extra."""
    names: set[str] = set()
    pending = [Requirement(text) for text in requirements]
    while pending:
        requirement = pending.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(name)
        pending += map(Requirement, metadata.requires(requirement.name) or ())
    return names


def _link(distribution: str, folder: Path) -> None:
    """Link the modules of an installed distribution into a folder."""
    located = metadata.distribution(distribution)
    for file in located.files or ():
        name = file.parts[0]
        if name not in ("..", "__pycache__") and not (folder / name).exists():
            (folder / name).symlink_to(Path(str(located.locate_file(name))))


@pytest.fixture
def install(built: Path, tmp_path: Path) -> Callable[..., Installation]:
    """Installs the wheel with its dependencies, but for those named."""

    def installed(*, without: tuple[str, ...] = ()) -> Installation:
        venv.create(tmp_path / "venv", with_pip=False)
        site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
        zipfile.ZipFile(next(built.glob("*.whl"))).extractall(site)
        declared = metadata.Distribution.at(next(site.glob("rollproof-*.dist-info"))).requires or []
        needed = [text for text in declared if Requirement(text).name not in without]
        distributions = _closure(needed)
        for distribution in distributions:
            _link(distribution, site)
        folder = tmp_path / "project"
        folder.mkdir()
        return Installation(
            python=tmp_path / "venv" / "bin" / "python",
            folder=folder,
            distributions=frozenset(distributions),
        )

    return installed


def test_a_subject_is_judged_without_command_line_servers_and_scipy(
    install: Callable[..., Installation],
) -> None:
    """Checks, in-process fakes and the pytest plugin need neither typer, starlette, uvicorn nor
    scipy; the command line says what it lacks.
    """
    thin = install(without=MODULES["cli"])
    for name in ("test_my_stack.py", "my_client.py"):
        shutil.copy(EXAMPLE / name, thin.folder)

    assert not {"typer", "starlette", "uvicorn", "scipy"} & thin.distributions
    done = thin.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_stack.py")
    # the README has the numbers, and a test of its own
    assert re.match(r"1 failed, \d\d+ passed", done.stdout.splitlines()[-1]), done.stdout
    assert "FAILED test_my_stack.py::test_rollouts[routes.rows]" in done.stdout
    refused = thin.run("-m", "rollproof", "checks")
    assert (254, "") == (refused.returncode, refused.stdout)
    assert (
        "rollproof: error: The commands of rollproof need typer, rich, which are not installed:"
        " pip install 'rollproof[cli]'.\n" == refused.stderr
    )


def test_a_plain_install_has_what_the_readme_begins_with(
    install: Callable[..., Installation],
) -> None:
    """`rollproof init`, the test that it writes, and the commands that a failure names run in a
    plain install; servers and the gap name the extra that they need.
    """
    plain = install()

    assert not {"starlette", "uvicorn", "scipy"} & plain.distributions
    assert 0 == plain.run("-m", "rollproof", "init", "--like", "verl").returncode
    done = plain.run("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert 0 == done.returncode, done.stdout
    shown = plain.run("-m", "rollproof", "checks", "routes.rows")
    assert (0, "") == (shown.returncode, shown.stderr)
    for command, extra in ((("serve", "--as", "vllm"), "serve"), (("gap", "a.jsonl"), "gap")):
        refused = plain.run("-m", "rollproof", *command)
        assert 254 == refused.returncode, refused.stdout
        assert f"pip install 'rollproof[{extra}]'." in refused.stderr
