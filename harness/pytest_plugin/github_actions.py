"""What GitHub Actions shows of a session: annotations of failing tests, and the step's summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollproof.core.error_text import one_line
from rollproof.errors import RollproofError
from rollproof.pytest_plugin.item_location import item_location
from rollproof.pytest_plugin.session_state import State
from rollproof.reporting.annotations import Annotation, command_lines
from rollproof.reporting.step_summary import append_step_summary

__all__ = ["annotation_of", "show_session"]

_OTHER = "pytest_github_actions_annotate_failures"
"""A plugin that annotates every failing call, also those of rollproof."""


def annotation_of(
    item: pytest.Item, error: BaseException, report: pytest.TestReport
) -> dict[str, Any] | None:
    """Return the fields of the annotation of a failing test of rollproof, in builtin types: a
    conformance item, or one that an error of ours ended. ``None`` for other tests.
    """
    if item.get_closest_marker("rollproof") is None and not isinstance(error, RollproofError):
        return None
    crash = getattr(report.longrepr, "reprcrash", None)
    headline = one_line(crash.message if crash is not None else str(error))
    text = report.longreprtext
    # pytest puts the class of the outcome before a message of ``pytest.fail``
    repeated = headline.removeprefix("Failed: ") in one_line(text)
    return {
        "title": item.nodeid,
        "text": text if repeated else f"{headline}\n\n{text}",
        "location": item_location(item).to_dict(item.config.rootpath),
    }


def show_session(
    terminalreporter: pytest.TerminalReporter,
    annotations: Sequence[tuple[pytest.TestReport, Mapping[str, Any]]],
    state: State | None,
    exit_status: int,
) -> None:
    """Print the annotations of a session, and append its summary to that of the step.

    Args:
        terminalreporter: The reporter of the session.
        annotations: Each failing report, and the fields of its annotation.
        state: What the session gathered.
        exit_status: Its exit status.
    """
    config = terminalreporter.config
    other = config.pluginmanager.hasplugin(_OTHER)
    shown = [
        Annotation(**fields)
        for report, fields in annotations
        if not (other and report.when == "call")
    ]
    for line in command_lines(shown, config.rootpath):
        terminalreporter.ensure_newline()
        terminalreporter.write_line(line)
    judged = state is not None and bool(state.reports or state.gaps)
    run = state.reported_run(exit_status, config.rootpath) if state is not None and judged else None
    not_judged = [
        Annotation(**fields)
        for report, fields in annotations
        if not any(name == "rollproof_verdict" for name, _ in report.user_properties)
    ]
    if run is None and not not_judged:
        return
    if (trouble := append_step_summary(run, not_judged)) is not None:
        terminalreporter.write_line(f"rollproof: {trouble}")
