from __future__ import annotations

from dataclasses import fields

import pytest

from rollproof.cli.app import run
from rollproof.contracts.presets import PRESETS
from rollproof.core.contract import Contract
from rollproof.judging.report import ExitCode


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_shown_contract_is_source(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What `contract show` prints is Python that makes the preset's contract."""
    assert ExitCode.PASS == run(["contract", "show", name])
    shown = capsys.readouterr().out
    import rollproof

    made = eval(shown, {"rollproof": rollproof})  # noqa: S307 - our own output
    assert getattr(rollproof.contracts, name)() == made


def test_every_field_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """`contract fields` has a row for each field, with the values of its enumeration."""
    assert ExitCode.PASS == run(["contract", "fields"])
    listed = capsys.readouterr().out
    for field in fields(Contract):
        assert f" {field.name} " in listed
    assert "T, T-1, captured-prefix, none" in listed
    assert "a tuple of: Column" in listed
