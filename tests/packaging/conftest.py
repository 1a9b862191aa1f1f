from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked and new files of the checkout: building leaves traces in the tree that
    it builds.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: there is nothing to build from")
    target = tmp_path_factory.mktemp("source")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())
    return target


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the dependencies of this one, but without its rollproof."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    executable = folder / "bin" / "python"
    pip(
        executable, "uninstall", "-y", "setuptools"
    )  # Python 3.11 puts an old one in, which would win over that of the tests
    site = subprocess.run(
        [str(executable), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # A path entry alone runs no .pth file of that folder, so an editable rollproof there stays out;
    # an installed one comes last.
    (Path(site) / "dependencies.pth").write_text(
        f"{Path(np.__file__).parents[1]}\n", encoding="utf-8"
    )
    return executable


@pytest.fixture(scope="module")
def built(source: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one wheel and one sdist."""
    target = tmp_path_factory.mktemp("dist")
    build(python, source, target)
    return target


def build(python: Path, source: Path, target: Path, *options: str) -> None:
    """Build as a release is built: the time in the archives is that of the commit."""
    command = [str(python), "-m", "build", "--no-isolation", *options, "--outdir", str(target)]
    done = subprocess.run(
        [*command, str(source)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1760000000"},
    )
    assert not done.returncode, done.stdout + done.stderr
