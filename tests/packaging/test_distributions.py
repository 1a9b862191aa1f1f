from __future__ import annotations

import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import build, pip

ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".typed", ".txt", ".toml", ".html", ".css", ".js", ".csv")
FOLDERS = {
    "harness": "rollproof",
    "fakes": "rollproof.fakes",
    "invariants": "rollproof.invariants",
    "gpu_suites": "rollproof.gpu_suites",
}
PROBE = """
import importlib, importlib.metadata, importlib.util, pathlib
import rollproof, rollproof.fakes.coded.policy, rollproof.invariants, rollproof.engines.gpus
import rollproof.stacks
root = pathlib.Path(rollproof.__file__).parent
assert (root / "py.typed").is_file(), "py.typed is not shipped"
requirements = pathlib.Path(rollproof.stacks.requirements_file("verl"))
assert requirements.is_file(), "requirements of stacks are not shipped"
folders = ("harness", "fakes", "invariants", "gpu_suites", "tests", "docs", "benchmarks")
importable = [name for name in folders if importlib.util.find_spec(name)]
assert not importable, f"importable under a bare name: {importable}"
entries = importlib.metadata.entry_points()
plugins = entries.select(group="pytest11", name="rollproof")
assert [entry.value for entry in plugins] == ["rollproof.plugin"]
scripts = entries.select(group="console_scripts", name="rollproof")
assert [entry.value for entry in scripts] == ["rollproof.cli:main"]
print("sound")
"""


def sound(python: Path, folder: Path) -> str:
    """What the probe says of the installed package, away from any checkout."""
    done = subprocess.run(
        [str(python), "-c", PROBE], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_every_folder_that_could_be_imported_is_a_listed_package() -> None:
    """A new folder below the mapped ones must be named in pyproject.toml to be shipped; one of
    data, so that setuptools does not warn.
    """
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]["packages"]
    found = {
        ".".join([package, *file.parent.relative_to(ROOT / folder).parts])
        for folder, package in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.name == "__init__.py"
        or (file.suffix in (".txt", ".toml") and file.parent.name.isidentifier())
    }

    assert found == set(listed)


def test_wheel_and_sdist_hold_the_same_modules(built: Path, source: Path) -> None:
    """Every module and data file of the four folders is in the wheel, and in the sdist together
    with licence and readme.
    """
    wheel = {
        name
        for name in zipfile.ZipFile(next(built.glob("*.whl"))).namelist()
        if name.startswith("rollproof/")
    }
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        path.relative_to(source)
        for folder in FOLDERS
        for path in (source / folder).rglob("*")
        if path.suffix in SUFFIXES
    }

    assert {str(path) for path in expected} <= sdist
    assert {"LICENSE", "README.md", "pyproject.toml"} <= sdist
    assert {
        str(Path(FOLDERS[path.parts[0]].replace(".", "/"), *path.parts[1:])) for path in expected
    } == wheel


def test_a_wheel_can_be_built_again_byte_for_byte(
    built: Path, source: Path, python: Path, tmp_path: Path
) -> None:
    """Whoever doubts a release can compare: neither the folder, nor the times of its files, nor the
    way over an sdist matter.
    """
    again = tmp_path / "elsewhere"
    shutil.copytree(
        source, again, copy_function=shutil.copy, ignore=shutil.ignore_patterns("*.egg-info")
    )
    build(python, again, tmp_path, "--wheel")
    first, second = (next(folder.glob("*.whl")) for folder in (built, tmp_path))

    assert (first.name, first.read_bytes()) == (second.name, second.read_bytes())


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_an_installation_is_sound(
    kind: str, built: Path, source: Path, python: Path, tmp_path: Path
) -> None:
    """Wheel, sdist and editable all import rollproof and its parts, ship py.typed, and leave no
    bare folder name importable.
    """
    requirements = {
        "wheel": [str(next(built.glob("*.whl")))],
        "sdist": [str(next(built.glob("*.tar.gz")))],
        "editable": ["-e", str(source)],
    }[kind]
    pip(python, "install", "--no-deps", "--no-build-isolation", "--force-reinstall", *requirements)

    assert "sound\n" == sound(python, tmp_path)
