"""Verdicts on trainers in a file."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from rollproof.fakes.trainers.reference_trainers import OneExpert
from rollproof.verification.replay import judge_replay
from tools.judge_table import trainer_row, write_trainer_rows


class _Native(OneExpert):
    """Installs nothing."""

    def arm(self, *_: Any) -> None:
        for router in self.registry:
            router.action = None


def test_a_row_is_written_as_soon_as_it_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row holds versions, verdicts and first findings; rows of other names stay, and those before
    a failure are kept.
    """
    file = tmp_path / "results" / "numpy.json"
    factories = {"right": OneExpert, "native": _Native}

    def row(name: str) -> dict[str, Any]:
        report = judge_replay(factories[name], name=name, only=["replay.forward", "replay.models"])
        return trainer_row(
            report, packages=["numpy"], code="rollproof", parallel="", model="tiny", mode="R3"
        )

    write_trainer_rows(file, ["right"], row)
    with pytest.raises(KeyError):
        write_trainer_rows(file, ["native", "missing"], row)
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert {"right": "pass", "native": "fail"} == {
        name: one["verdicts"]["replay.forward"] for name, one in rows.items()
    }
    assert {"numpy": version("numpy")} == rows["right"]["versions"]
    assert ({}, ["replay.forward"]) == (rows["right"]["findings"], list(rows["native"]["findings"]))
    assert "right: no check fails\nnative: replay.forward\n" == capsys.readouterr().out
