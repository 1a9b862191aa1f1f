"""Panels of measured gaps on pages of reports: metrics against their limits, and the diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["gap_panel"]

_WORST_FIRST = ("fail", "inconclusive", "pass", None)
_SIGNS = {"above": "\N{LESS-THAN OR EQUAL TO}", "below": "\N{GREATER-THAN OR EQUAL TO}"}
_OTHER = "\N{PLUS-MINUS SIGN}"
_METRICS = 60


def gap_panel(gap: Mapping[str, Any], cut: Callable[[str], str] = str) -> dict[str, Any]:
    """Return what the macro ``gap_panel`` of parts.html shows.

    Args:
        gap: The JSON form of a gap's report, or of a shortened one.
        cut: Shortens a text.
    """
    metrics = sorted(
        gap["metrics"].items(), key=lambda item: _WORST_FIRST.index(item[1].get("verdict"))
    )
    return {
        "verdict": gap["verdict"],
        "size": f"{gap['n_tokens']:,} tokens in {gap['n_sequences']:,} sequences",
        "limits": gap["limits"],
        "rows": [
            {
                "metric": name,
                "verdict": metric.get("verdict") or "",
                "value": _number(metric["value"]),
                "interval": _interval(metric),
                "limit": _limit(metric),
                "source": cut(metric.get("source") or ""),
            }
            for name, metric in metrics[:_METRICS]
        ],
        "causes": [
            {name: cut(str(cause.get(name, ""))) for name in ("class", "because", "advice")}
            for cause in gap["diagnosis"]
        ],
        "notes": [cut(note) for note in gap.get("notes", ())],
    }


def _limit(metric: Mapping[str, Any]) -> str:
    if metric.get("threshold") is None:
        return ""
    sign = _SIGNS.get(metric["side"], _OTHER) if metric.get("side") else ""
    return f"{sign} {_number(metric['threshold'])}".strip()


def _interval(metric: Mapping[str, Any]) -> str:
    ends = metric.get("low"), metric.get("high")
    return "" if None in ends else f"{_number(ends[0])} to {_number(ends[1])}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
