"""A report as SARIF 2.1.0, which code scanning services and editors read.

A rule is a check; a result is a finding, one of each kind of a check of a subject, at the line of
the subject or of its test. A check that is unknown is no result but a notification: nothing was
found.
https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rollproof.judging.checks import Check
from rollproof.reporting.reported_run import ReportedRun
from rollproof.reporting.text import finding_rows, first_of_each_kind, self_test_text

__all__ = ["sarif_text"]

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_ROOT = "%SRCROOT%"
_RESULTS = 5_000
"""GitHub shows no more results of a run."""
_CHARACTERS = 2_000
"""Characters of a text."""
_DESCRIPTION = 1_000
"""Characters of the description of a rule: GitHub takes 1,024."""
_NOTIFICATIONS = 1_000


def sarif_text(run: ReportedRun) -> str:
    """Return the SARIF log of a run."""
    checks = {check.id: check for check in run.checks}
    listed = list(
        dict.fromkeys(check["id"] for report in run.reports for check in report["checks"])
    )
    numbers = {check_id: number for number, check_id in enumerate(listed)}
    results = list(_results(run, numbers))
    notifications = list(_notifications(run, numbers, left=len(results) - _RESULTS))
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                # no automationDetails: an id here would win over the category that a workflow gives
                # the upload, and two files of one commit would have the same
                "tool": {
                    "driver": {
                        "name": "rollproof",
                        "version": metadata.version("rollproof"),
                        "rules": [_rule(check_id, checks.get(check_id)) for check_id in listed],
                    }
                },
                "originalUriBaseIds": {
                    _ROOT: {"description": {"text": "The root folder of the run."}}
                },
                # a run that found something did what it should
                "invocations": [
                    {"executionSuccessful": True, "toolExecutionNotifications": notifications}
                ],
                "results": results[:_RESULTS],
                "properties": {
                    "verdict": run.verdict,
                    "summary": dict(run.report["summary"]),
                    "profile": run.report["profile"],
                    "seed": run.report["seed"],
                },
            }
        ],
    }
    return json.dumps(log, indent=1, ensure_ascii=False) + "\n"


def _rule(check_id: str, check: Check | None) -> dict[str, Any]:
    # GitHub demands both descriptions and a help text of every rule
    promise, tags = "A check of another version of rollproof.", []
    help_lines = [f"`rollproof checks {check_id}` says which known bugs it detects."]
    if check is not None:
        promise, tags = check.promise, [check.family]
        help_lines = [
            check.promise,
            f"It needs {check.needs}.",
            f"It is exercised by: {', '.join(check.exercised_by)}.",
            *help_lines,
        ]
    return {
        "id": check_id,
        "defaultConfiguration": {"level": "error"},
        "shortDescription": {"text": _cut(promise, _DESCRIPTION)},
        "fullDescription": {"text": _cut(promise, _DESCRIPTION)},
        "help": {"text": "\n".join(help_lines)},
        "properties": {"tags": ["rollproof", *tags]},
    }


def _results(run: ReportedRun, numbers: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    identities = _identities(run)
    for verdict in ("fail", "expected fail"):
        for report, check in run.with_verdict(verdict):
            for finding in first_of_each_kind(check["findings"]):
                result = _result(report, check, finding, run.root, identities[id(report)])
                yield {**result, "ruleIndex": numbers[check["id"]]}


def _identities(run: ReportedRun) -> dict[int, str]:
    """Return what tells the subject of each report from all others, by the ``id`` of the report.

    It is the name alone if no other subject has it: so an alert stays the same if a test moves to
    another file.
    """
    # in the order of the run: that of `run.reports` changes with the verdicts
    reports = run.report.get("reports") or [run.report]
    names = Counter(report["subject"] for report in reports)
    seen: Counter[str] = Counter()
    identities: dict[int, str] = {}
    for report in reports:
        identity = report["subject"]
        if names[identity] > 1:
            identity += f"\n{(report.get('location') or {}).get('file', '')}"
        seen[identity] += 1
        number = seen[identity]
        identities[id(report)] = identity if number == 1 else f"{identity}\n{number}"
    return identities


def _result(
    report: Mapping[str, Any],
    check: Mapping[str, Any],
    finding: Mapping[str, Any],
    root: Path,
    subject: str,
) -> dict[str, Any]:
    kind = finding.get("kind") or finding["title"]
    facts = {
        "subject": report["subject"],
        "kind": kind,
        "flavour": finding.get("flavour", ""),
        "profile": report["profile"],
        "seed": report["seed"],
        "counterexample": finding["witness"] or "",
        "found": check.get("kinds", {}).get(kind, 0),
    }
    # by what does not change with the place of the finding, so that a service knows it again
    identity = "\n".join((subject, check["id"], kind))
    # a subject's name may hold bytes of a file name that are no UTF-8
    fingerprint = hashlib.sha256(identity.encode("utf-8", "backslashreplace")).hexdigest()
    result: dict[str, Any] = {
        "ruleId": check["id"],
        "level": "error",
        "message": {"text": _cut(_message(report, check["id"], finding))},
        "locations": _locations(report, finding, root),
        # GitHub reads only this name. Left out, it is computed from the text of the line, which
        # all kinds of findings of a check have in common
        "partialFingerprints": {"primaryLocationLineHash": fingerprint},
        "properties": {
            name: _cut(value) if isinstance(value, str) else value
            for name, value in facts.items()
            if value not in ("", None)
        },
    }
    # left out, it would look fixed to a service, and new on the day its entry is removed
    if check["verdict"] == "expected fail":
        justification = {"kind": "external", "justification": _cut(check["reason"])}
        result["suppressions"] = [justification]
    return result


def _message(report: Mapping[str, Any], check_id: str, finding: Mapping[str, Any]) -> str:
    rows = [("subject", report["subject"]), *finding_rows(finding, check_id)]
    # services show the first sentence in their lists
    title = str(finding["title"])
    head = title if title.endswith((".", "!", "?")) else f"{title}."
    return "\n".join([head, *(f"{name}: {value}" for name, value in rows)])


def _locations(
    report: Mapping[str, Any], finding: Mapping[str, Any], root: Path
) -> list[dict[str, Any]]:
    """Return the line of the subject or its test, else the trace or the counterexample, else the
    subject's name: GitHub refuses a file with a result that has no location.
    """
    location = report.get("location")
    line = location["line"] if location else 1
    named = location["file"] if location else finding["where"].get("file") or finding["witness"]
    file = Path(named or report["subject"])
    path = root / file
    below = path.is_relative_to(root)
    artifact: dict[str, Any] = (
        {"uri": _uri(path.relative_to(root).as_posix()), "uriBaseId": _ROOT}
        if below
        else {"uri": f"file://{_uri(path.as_posix())}"}
    )
    # only the line is known; GitHub demands its columns too
    region = {"startLine": line, "startColumn": 1, "endLine": line, "endColumn": 1}
    return [{"physicalLocation": {"artifactLocation": artifact, "region": region}}]


def _uri(path: str) -> str:
    # a space or a `%` is no part of a URI; bytes that are no UTF-8 are quoted as they are
    return quote(path, errors="surrogateescape")


def _notifications(
    run: ReportedRun, numbers: Mapping[str, int], *, left: int
) -> Iterator[dict[str, Any]]:
    """Yield what made the run fail beside findings, what is unknown, and what was left out."""
    if left > 0:
        yield _notification(f"{left:,} more findings are not in this file.", "warning")
    for text in run.problems[:_NOTIFICATIONS]:
        yield _notification(text, "error")
    for report in run.reports:
        canary = report["canary"]
        if canary and canary["planted"] is not None and not canary["red"]:
            yield _notification(f"{report['subject']}: {self_test_text(canary)}", "error")
    unknown = list(run.with_verdict("unknown"))
    for report, check in unknown[:_NOTIFICATIONS]:
        text = f"{report['subject']}: {check['id']} is unknown: {check['reason']}"
        rule = {"id": check["id"], "index": numbers[check["id"]]}
        yield {**_notification(text, "warning"), "associatedRule": rule}
    if len(unknown) > _NOTIFICATIONS:
        more = len(unknown) - _NOTIFICATIONS
        yield _notification(f"{more:,} more checks are unknown.", "warning")


def _notification(text: str, level: str) -> dict[str, Any]:
    return {"level": level, "message": {"text": _cut(text)}}


def _cut(text: str, characters: int = _CHARACTERS) -> str:
    text = str(text)
    return text if len(text) <= characters else f"{text[:characters]} ..."
