"""The findings of all known bugs, as text: what a check says, counts and leaves open.

``python -m tests.support.bug_findings`` records them again in
``tests/fakes/recorded/bug_findings.json``. A diff of that file shows what a change of a check, of a
known bug or of the fakes does to every message.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from rollproof.fakes.known_bugs import KNOWN_BUGS
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.invariants import default_registry
from rollproof.judging.checks import Finding
from rollproof.judging.judge import Judgement, Tally
from rollproof.verification.kill_matrix import tally_of

RECORDED = Path(__file__).parent.parent / "fakes" / "recorded" / "bug_findings.json"


@cache
def _tally(bug_id: str) -> Tally:
    return tally_of(next(bug for bug in KNOWN_BUGS if bug.id == bug_id))


def judgement_of(bug: KnownBug) -> Judgement:
    """The verdicts on a known bug."""
    return _tally(bug.id).judgement()


def findings_of(bug: KnownBug) -> dict[str, Any]:
    """By failing check: the number of findings of each kind, and the first of each kind."""
    out = {}
    for result in judgement_of(bug).results:
        first: dict[str, Finding] = {}
        for finding in result.findings:
            first.setdefault(finding.kind, finding)
        if result.found:
            out[result.id] = {
                "found": dict(result.kinds),
                "first": [_text(finding) for finding in first.values()],
            }
    return out


def _text(finding: Finding) -> dict[str, Any]:
    return {
        "title": finding.title,
        "expected": _rounded(without_lines(finding.expected)),
        "observed": _rounded(without_lines(finding.observed)),
        "where": dict(finding.where),
        "hint": finding.hint,
    }


def without_lines(text: str) -> str:
    """Return the words of a finding without the numbers of lines of code."""
    # errors say where they were raised, and lines move with every edit and every Python
    return re.sub(r"\.py:\d+", ".py:LINE", text)


def _rounded(text: str) -> str:
    """Return a text with its computed numbers to ten digits."""
    # the last digits of a sum depend on the release of numpy and its BLAS
    return re.sub(r"\d+\.\d{12,}(e[-+]\d+)?", lambda found: f"{float(found[0]):.10g}", text)


def counts_of_checks() -> dict[str, Any]:
    """By check, over all known bugs: how often each situation was counted, and how often a trace
    was left open for each reason.
    """
    situations: dict[str, Counter[str]] = {name: Counter() for name in default_registry().ids}
    reasons: dict[str, Counter[str]] = {name: Counter() for name in default_registry().ids}
    for bug in KNOWN_BUGS:
        tally = _tally(bug.id)
        for check in tally.registry:
            collector = tally.collector(check)
            situations[check.id].update(collector.counters)
            reasons[check.id].update(collector.reasons)
            reasons[check.id].update(collector.excused)
    return {
        name: {
            "situations": dict(sorted(situations[name].items())),
            "left open": dict(sorted(reasons[name].items())),
        }
        for name in sorted(situations)
    }


@cache
def recorded() -> dict[str, Any]:
    """What is recorded."""
    contents: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return contents


def main() -> None:
    """Record the findings of all known bugs."""
    contents = {
        "bugs": {bug.id: findings_of(bug) for bug in KNOWN_BUGS},
        "checks": counts_of_checks(),
    }
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
