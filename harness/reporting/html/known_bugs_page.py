"""The known bugs and the checks that detect them, as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollproof.core.files import text_bytes
from rollproof.judging.checks import Check
from rollproof.reporting.html.pages import page_template

__all__ = ["known_bugs_page_text"]


def known_bugs_page_text(data: Mapping[str, Any], *, summary: str, checks: Iterable[Check]) -> str:
    """Return the HTML; bugs with a wrong outcome come first.

    Args:
        data: The JSON of ``rollproof known-bugs`` (schema 1).
        summary: The result in one line.
        checks: All checks, for their promises.
    """
    bugs = sorted(data["bugs"], key=_is_right)
    promises = {check.id: check.promise for check in checks}
    named = dict.fromkeys(name for bug in bugs for name in (*bug["expected_by"], *bug["by"]))
    # in the order of the registry
    order = sorted(named, key=list(promises).index)
    numbers = {check_id: number for number, check_id in enumerate(order, 1)}
    values = {
        "verdict": "pass" if all(map(_is_right, bugs)) else "fail",
        "summary": summary,
        "bugs": [_bug(bug, number, numbers) for number, bug in enumerate(bugs, 1)],
        "checks": [
            {
                "id": check_id,
                "number": number,
                "promise": promises.get(check_id, ""),
                "bugs": [
                    (place, bug["id"]) for place, bug in enumerate(bugs, 1) if check_id in bug["by"]
                ],
            }
            for check_id, number in numbers.items()
        ],
    }
    template = page_template("rollproof.reporting.html", "known_bugs.html")
    return text_bytes(template.render(page=values)).decode()


def _is_right(bug: Mapping[str, Any]) -> bool:
    return bool(bug["killed"]) and not bug["blamed_wrongly"]


def _bug(bug: Mapping[str, Any], number: int, numbers: Mapping[str, int]) -> dict[str, Any]:
    states = dict.fromkeys(bug["by"], "") | dict.fromkeys(bug["blamed_wrongly"], "wrong")
    missed = [name for name in bug["expected_by"] if name not in bug["by"]]
    outcome = "DETECTED" if bug["killed"] else "NOT DETECTED"
    return {
        "id": bug["id"],
        "number": number,
        "summary": bug["summary"],
        "refs": bug["refs"],
        "cases": bug["examples"],
        "verdict": "pass" if _is_right(bug) else "fail",
        "outcome": "WRONG CHECK" if bug["killed"] and bug["blamed_wrongly"] else outcome,
        "checks": [
            {"id": name, "number": numbers[name], "state": state}
            for name, state in (dict.fromkeys(missed, "missed") | states).items()
        ],
    }
