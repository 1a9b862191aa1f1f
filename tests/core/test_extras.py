from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rollproof.core import extras
from rollproof.errors import ExtraError

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
PROJECT = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
OPTIONAL = PROJECT["optional-dependencies"]


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize("extra", extras.MODULES)
def test_an_extra_installs_the_modules_that_are_asked_for(extra: str) -> None:
    """What the message tells a user to install brings every module that was missing."""
    assert set(extras.MODULES[extra]) <= _names(OPTIONAL[extra])


def test_a_plain_install_has_the_command_line_and_no_server() -> None:
    """The README begins with `rollproof init`, so typer comes with a plain install, at the same
    versions as in its extra; servers and scipy do not come.
    """
    assert set(OPTIONAL["cli"]) <= set(PROJECT["dependencies"])
    assert not _names(PROJECT["dependencies"]) & _names(OPTIONAL["serve"] + OPTIONAL["gap"])


def test_a_missing_module_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is missing, and only that, and what to type."""
    monkeypatch.setitem(extras.MODULES, "serve", ("json", "no_such_a", "no_such_b"))

    with pytest.raises(
        ExtraError,
        match=r"^Fakes need no_such_a, no_such_b, which are not installed: pip install"
        r" 'rollproof\[serve\]'\.$",
    ):
        extras.require_extra("serve", "Fakes")


def test_installed_modules_are_enough() -> None:
    """Nothing is raised if all modules can be found."""
    extras.require_extra("cli", "Commands")
