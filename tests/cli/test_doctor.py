from __future__ import annotations

from email.message import Message
from importlib import metadata

import pytest

from rollproof.judging.report import ExitCode
from tests.support.command_line import output_of

pytestmark = pytest.mark.usefixtures("command_folder")


def test_the_doctor_says_which_extras_are_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extra needs all its packages, in any version, that a marker asks for on this Python."""
    requires = [
        "numpy>=1.26",
        "pytest==0.1; extra == 'here'",
        "rollproof-nothing==1; extra == 'absent'",
        "rollproof-nothing==1; python_version < '3' and extra == 'here'",
    ]

    class Distribution:
        """What importlib.metadata says of rollproof."""

        version = "0.1"

        def __init__(self) -> None:
            self.requires = requires
            self.metadata = Message()
            for extra in ("here", "absent"):
                self.metadata["Provides-Extra"] = extra

    distribution = metadata.distribution
    monkeypatch.setattr(
        metadata,
        "distribution",
        lambda name: Distribution() if name == "rollproof" else distribution(name),
    )
    printed = output_of(capsys, "doctor", code=ExitCode.PASS)

    assert "extra here     available" in printed
    assert "extra absent   needs rollproof-nothing: pip install 'rollproof[absent]'" in printed


def test_doctor_runs_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    """Doctor names versions, plugin and GPU, and runs one case."""
    text = output_of(capsys, "doctor", code=0)

    assert "pytest plugin  active" in text
    assert "one case       runs, in " in text
    assert "GPU            " in text


def test_doctor_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plugins switched off it says so and how to go on, and its exit code is 1."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    assert "run pytest with `-p rollproof.plugin`" in output_of(
        capsys, "doctor", code=ExitCode.FAIL
    )
