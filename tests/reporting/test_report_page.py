"""The page of a report: everything that was found is on it, its links lead somewhere, it stays
small, and hostile texts stay texts.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollproof.cli.app import run
from rollproof.errors import ExtraError, UsageError
from rollproof.judging.checks import request_check
from rollproof.reporting.html.report_page import check_report_page_target, report_page_text
from rollproof.reporting.reported_run import ReportedRun, verdict_of
from tests.support.faulty_subjects import CONCAT
from tests.support.html_pages import HOSTILE, needs_browser, probe, rendered, tags_of
from tests.support.made_up_reports import checked, finding, moment, reported
from tests.support.shown_traces import traced, written

pytest.importorskip("jinja2", reason="the page needs rollproof[report]")


def page_of(*reports: Mapping[str, Any], **more: Any) -> str:
    merged = reports[0] if len(reports) == 1 else {**reports[0], "reports": list(reports)}
    return report_page_text(ReportedRun(report=merged, verdict=verdict_of(merged), **more))


def hostile_page() -> str:
    """Two subjects, with the hostile text wherever a report may have one."""
    verdicts = ("fail", "unknown", "expected fail", "pass", "not applicable")
    checks = [
        checked(f"{HOSTILE}{number}", verdict, [finding(HOSTILE)] * 2, HOSTILE)
        for number, verdict in enumerate(verdicts)
    ]
    report = reported(HOSTILE, *checks, text=HOSTILE)
    return page_of(
        {**report, "gaps": [gap(HOSTILE, "fail", HOSTILE)]},
        report,
        checks=[
            request_check(f"{HOSTILE}0", promise=HOSTILE, needs=HOSTILE, exercised_by=HOSTILE)(
                lambda view, out: None
            )
        ],
        problems=[HOSTILE],
        notes=[HOSTILE],
    )


def test_a_page_loads_nothing_and_its_links_lead_to_its_parts() -> None:
    """No script and no address but those of its own elements, each of which exists once."""
    text = hostile_page()
    tags = tags_of(text)

    assert 0 == tags.scripts
    assert set() == tags.tags & {"link", "img", "iframe", "object", "image", "base", "form"}
    assert "@import" not in text and "url(" not in text
    assert len(set(tags.ids)) == len(tags.ids)
    assert {f"#{name}" for name in tags.ids} >= set(tags.addresses)
    assert {"#s1", "#s2-1", "#c5", "#x2"} <= set(tags.addresses)
    assert "default-src 'none'; style-src 'unsafe-inline'" in text


def test_every_finding_of_a_failed_run_is_there() -> None:
    """Of each subject and check: title, place, story with its mark, expected, observed and hint.
    Findings that the judge only counted are said.
    """
    findings = [finding(f"finding {number}", kind="one kind") for number in range(8)]
    check = {**checked("routes.rows", "fail", findings), "found": 100}
    text = page_of(reported("A", check), reported("B", checked("routes.rows", "unknown")))

    for number in range(8):
        title = f"finding {number}"
        rows = ("where", "engine", "expected", "observed", "hint")
        values = (f"request {title}, {title} {title}", title, title, title, title)
        for name, value in zip(rows, values, strict=True):
            assert f"<dt>{name}</dt><dd><pre>{value}</pre></dd>" in text
        assert f"<b>broken here:</b> {title}" in text
        assert f"rollproof show &#39;{title}&#39;" in text
    assert "92 more findings of this check were counted." in text
    assert "Left out" not in text


def test_failures_come_first() -> None:
    """A failed subject stands above those that passed before it."""
    text = page_of(
        reported("good", checked("a", "pass")),
        reported("bad", checked("a", "fail", [finding("x")])),
    )
    assert text.index('id="s1"') < text.index("bad</h3>") < text.index("good</h3>")


def test_what_was_not_exercised_is_said() -> None:
    """A situation that did not arise is first in its table."""
    text = page_of(reported("A", checked("a", "pass")))
    situations = text[text.index('id="situations"') :]
    assert situations.index("not exercised") < situations.index("aborts")


def test_verdicts_are_those_of_the_exit_codes() -> None:
    """A self-test that no check detected fails the subject; without a pass nothing is known."""
    passed = reported("A", checked("a", "pass"))
    blind = {**passed, "canary": {**passed["canary"], "red": False}}
    ruled_out = reported("A", checked("a", "not applicable"))
    unknown = reported("A", checked("a", "pass"), checked("b", "unknown"))
    reports = (passed, blind, ruled_out, unknown)
    assert ["pass", "fail", "unknown", "unknown"] == [verdict_of(report) for report in reports]
    assert "NOT detected by aborts" in page_of(blind)


@pytest.mark.parametrize("length", [1_000, 100_000])
def test_a_page_stays_below_two_megabytes(length: int) -> None:
    """With 40 subjects that fail 30 checks each, stories of 64 events and long texts, one finding
    of each kind stays, and the page says what it leaves out.
    """
    story = [moment(number, f"event {number} " + "x" * 50) for number in range(63)]
    long = finding("y" * length, kind="kind", story=[*story, moment(99, "the end", broke=True)])
    checks = [checked(f"family.check-{number}", "fail", [long] * 4) for number in range(30)]
    text = page_of(*(reported(f"subject {number}", *checks) for number in range(40)))

    assert len(text.encode()) <= 2_000_000
    assert "Left out, so that the page stays below 2 MB" in text
    assert "findings of kinds that are shown" in text
    assert "3 more findings of this check were counted." in text
    assert "subject 0</h3>" in text


def gap(subject: str, verdict: str, text: str = "a text") -> dict[str, Any]:
    """The JSON form of a measured gap."""
    metric = {"value": 0.5, "low": 0.25, "high": 1.0, "threshold": 0.125, "side": "above"}
    return {
        "subject": subject,
        "verdict": verdict,
        "limits": "moe-bf16",
        "n_tokens": 4000,
        "n_sequences": 20,
        "metrics": {
            "k1": {"value": None, "low": None, "high": None, "threshold": None, "verdict": None},
            text: {**metric, "source": text, "verdict": verdict},
        },
        "diagnosis": [{"class": text, "confidence": 0.9, "because": text, "advice": text}],
        "notes": [text],
    }


def test_gaps_of_a_session_are_panels_of_its_page() -> None:
    """Their verdict counts in that of the page, metrics with limits come first, and the table of
    verdicts leads to them; a page may have gaps alone.
    """
    passed = reported("A", checked("a", "pass"))
    text = page_of({**passed, "gaps": [gap("mine", "fail", "k3"), gap("other", "pass", "k3")]})
    alone = reported("gaps")

    assert "<strong>FAIL</strong>" in text and "2 gaps: 1 fail, 1 pass" in text
    assert '<a href="#g1">mine</a>' in text and 'id="g2"' in text
    assert text.index("<code>k3</code>") < text.index("<code>k1</code>")
    assert "<td>0.5</td><td>0.25 to 1</td><td>\N{LESS-THAN OR EQUAL TO} 0.125</td>" in text
    assert "<strong>PASS</strong>" in page_of({**alone, "gaps": [gap("mine", "pass")]})
    assert "<strong>UNKNOWN</strong>" in page_of({**alone, "gaps": [gap("mine", "inconclusive")]})


def test_hostile_texts_add_no_element() -> None:
    """In every field of a report: no script and no image, and what is no text at all is escaped."""
    tags = tags_of(hostile_page())
    assert 0 == tags.scripts
    assert "img" not in tags.tags
    assert "a\\udcff" in page_of(reported("a\udcff", checked("a", "pass")))


@needs_browser
def test_a_phone_shows_hostile_texts_as_they_are(tmp_path: Path) -> None:
    """In a browser at 390 px: no script of a report runs, its texts are read as they are, and no
    part is wider than the screen but what scrolls by itself.
    """
    actions = """
      document.querySelectorAll("details").forEach((part) => { part.open = true; });
      return { title: document.title, images: document.images.length,
        scripts: document.scripts.length, heading: document.querySelector("h1").textContent,
        story: document.querySelector(".story li.broke").textContent,
        wide: document.documentElement.scrollWidth, screen: innerWidth };
    """
    found = probe(rendered(tmp_path, hostile_page(), actions))

    # the script that asks is the only one
    assert (0, 1) == (found["images"], found["scripts"])
    assert f"FAIL: {HOSTILE}" == found["title"]
    assert HOSTILE == found["heading"]
    assert found["story"].endswith(f"broken here: {HOSTILE}")
    assert found["wide"] <= found["screen"]


def test_verify_and_check_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--report`` of both commands: the verdict, the promise and the first finding of the checks
    that fail.
    """
    monkeypatch.chdir(tmp_path)
    trace = written(Path("t.arrow"), traced(2, shifted=[1]))
    for name, arguments in (
        ("verify", ["verify", "--subject", CONCAT, "--only", "routes.rows", "--flavour", "vllm"]),
        ("check", ["check", str(trace), "--only", "routes"]),
    ):
        assert 1 == run([*arguments, "--report", f"{name}.html"])
        text = Path(f"{name}.html").read_text(encoding="utf-8")
        printed = capsys.readouterr().out
        assert "<strong>FAIL</strong>" in text
        title = re.search(r"^    1\. (.*)$", printed, flags=re.MULTILINE)
        assert title is not None and f"<h4>{html.escape(title.group(1))}" in text
        assert "<b>broken here:</b>" in text
        assert re.search(r"<code>routes\.[a-z-]+</code> [A-Z]", text)


def test_a_check_of_a_damaged_file_says_so_on_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page must not read as a pass if a part of the input was not judged."""
    monkeypatch.chdir(tmp_path)
    trace = written(Path("t.arrow"), traced(2))
    Path("bad.json").write_text("{")
    arguments = ["check", str(trace), "bad.json", "--only", "routes.rows"]
    assert 2 == run([*arguments, "--report", "r.html"])
    text = Path("r.html").read_text(encoding="utf-8")
    assert "<strong>UNKNOWN</strong>" in text and "bad.json" in text


@pytest.mark.parametrize("command", [["verify"], ["check", "missing.arrow"]])
def test_a_page_that_cannot_be_written_is_refused_before_the_run(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As ``--json`` is."""
    monkeypatch.chdir(tmp_path)
    Path("plain").touch()
    assert 254 == run([*command, "--report", "plain/r.html"])
    assert "Cannot write plain/r.html: Not a directory" in capsys.readouterr().err


def test_a_page_without_jinja2_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the run."""
    with pytest.raises(UsageError, match="it is a folder"):
        check_report_page_target(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ExtraError, match=r"needs jinja2, which is not installed: pip install"):
        check_report_page_target(tmp_path / "r.html")
