"""Reports in JSON form, with texts and verdicts at will."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["checked", "finding", "moment", "reported"]


def moment(index: int, text: str, **more: Any) -> dict[str, Any]:
    return {"index": index, "time": float(index), "text": text, **more}


def finding(
    text: str, kind: str = "", story: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """A finding whose texts are all ``text``."""
    return {
        "title": text,
        "kind": kind or text,
        "where": {"request": text, text: text},
        "expected": text,
        "observed": text,
        "hint": text,
        "witness": text,
        "flavour": text,
        "after": [text],
        "story": [moment(0, text), moment(3, text, broke=True)] if story is None else story,
    }


def checked(
    check: str, verdict: str, findings: Sequence[Mapping[str, Any]] = (), text: str = "a reason"
) -> dict[str, Any]:
    return {
        "id": check,
        "verdict": verdict,
        "reason": text,
        "exercised": {text: 2},
        "found": len(findings),
        "kinds": {},
        "known": [],
        "otherwise": {},
        "flavours": {},
        "findings": list(findings),
    }


def reported(subject: str, *checks: Mapping[str, Any], text: str = "aborts") -> dict[str, Any]:
    names = ("pass", "fail", "unknown", "not applicable", "expected fail")
    return {
        "schema": 1,
        "subject": subject,
        "profile": "pr",
        "seed": 0,
        "cases": 3,
        "seconds": 1.0,
        "summary": {
            name.replace(" ", "_"): sum(check["verdict"] == name for check in checks)
            for name in names
        },
        "checks": list(checks),
        "exercised": {text: 7, "never": 0},
        "canary": {"planted": text, "expected_by": text, "red": True, "reason": ""},
        "notes": [text],
    }
