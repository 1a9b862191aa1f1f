"""Running commands in this process, and their command lines for another one."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from rollproof.cli.app import run

__all__ = ["command", "output_of", "verified"]


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """What a command prints to both streams, once it has ended with ``code`` and without a
    traceback.
    """
    assert code == run(arguments)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out + captured.err


def verified(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> dict[str, Any]:
    """The JSON report of ``verify --json -``, which must be alone on standard output."""
    assert code == run(["verify", *arguments, "--json", "-"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from rollproof.cli import main; main()", *arguments]
