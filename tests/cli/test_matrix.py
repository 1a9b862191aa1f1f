"""``rollproof matrix add`` stores reports, and ``rollproof matrix build`` makes a site of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollproof.judging.report import ExitCode
from rollproof.reporting.report_files import json_text
from tests.support.command_line import output_of
from tests.support.made_up_reports import checked, finding, reported

pytestmark = pytest.mark.usefixtures("command_folder")


@pytest.fixture
def report(tmp_path: Path) -> Path:
    data = {
        **reported("verl.client", checked("routes.rows", "fail", [finding("lost rows")])),
        "recipe": {"stack": "verl", "version": "0.9.1", "part": "client"},
    }
    file = tmp_path / "report.json"
    file.write_text(json_text(data))
    return file


def test_a_report_becomes_a_site(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, report: Path
) -> None:
    pytest.importorskip("jinja2", reason="the site needs rollproof[report]")
    results, site = str(tmp_path / "results"), tmp_path / "site"
    said = output_of(capsys, "matrix", "add", str(report), "--to", results, code=ExitCode.PASS)
    assert "stored verl 0.9.1" in said
    said = output_of(capsys, "matrix", "build", results, "--out", str(site), code=ExitCode.PASS)
    assert "shows 1 releases" in said
    assert "lost rows" in (site / "stack-verl-0.9.1.html").read_text()


def test_bad_input_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, report: Path
) -> None:
    """A file that is missing, no JSON, no report, or damaged; a folder without results; and a
    target that cannot be written.
    """
    text = report.read_text()
    cut, edited, other = (tmp_path / name for name in ("cut.json", "edited.json", "other.json"))
    cut.write_text(text[:50])
    edited.write_text(text.replace("lost rows", "kept rows"))
    other.write_text(json.dumps([1]))
    results = str(tmp_path / "results")
    for file, message in {
        "missing.json": "cannot be opened",
        str(cut): "is no report in JSON",
        str(edited): "does not fit its checksum",
        str(other): "is no report of `rollproof verify --json`",
    }.items():
        said = output_of(capsys, "matrix", "add", file, "--to", results, code=ExitCode.USAGE)
        assert message in said
    said = output_of(capsys, "matrix", "add", str(report), "--to", str(report), code=ExitCode.USAGE)
    assert "Cannot write" in said
    (tmp_path / "empty").mkdir()
    said = output_of(
        capsys,
        *("matrix", "build", str(tmp_path / "empty"), "--out", str(tmp_path / "site")),
        code=ExitCode.USAGE,
    )
    assert "There are no stored runs there" in said
