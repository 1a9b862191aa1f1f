"""Inner test files for tests of the pytest plugin, and what their runs leave behind (with
``fake_campaign``).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

__all__ = ["SUITE", "report", "runs", "suite", "summary"]

SUITE = """
import rollproof

class MyStack:
    verdicts = {verdicts!r}

@rollproof.conformance(MyStack)
def test_rollouts(check):
    "Rollouts keep every promise."
"""


def suite(**verdicts: str) -> str:
    """A test file whose subject has these verdicts, ids written with _ for the dot."""
    return SUITE.format(
        verdicts={name.replace("_", "."): verdict for name, verdict in verdicts.items()}
    )


def summary(result: pytest.RunResult) -> str:
    """The closing section of rollproof."""
    return str(result.stdout).partition(" rollproof =")[2].partition("\n=")[0]


def runs(pytester: pytest.Pytester) -> list[str]:
    """One line per run of a subject."""
    return (pytester.path / "runs").read_text(encoding="utf-8").splitlines()


def report(pytester: pytest.Pytester, *arguments: str) -> dict[str, Any]:
    """The JSON report of a run."""
    pytester.runpytest_inprocess("--rollproof-report=out.json", *arguments)
    loaded: dict[str, Any] = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))
    return loaded
