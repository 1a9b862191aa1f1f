"""The files of a report: one HTML page, SARIF or JSON, as the ending of their name says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollproof.core.checksums import with_checksum
from rollproof.core.files import check_target
from rollproof.reporting.html.report_page import check_report_page_target, report_page_text
from rollproof.reporting.reported_run import ReportedRun
from rollproof.reporting.sarif import sarif_text

__all__ = ["ReportForm", "check_report_target", "json_text", "report_text"]


class ReportForm(StrEnum):
    """A form of a report."""

    PAGE = "page"
    SARIF = "sarif"
    JSON = "json"

    @classmethod
    def of(cls, path: Path) -> ReportForm:
        """Return the form that a file's name asks for."""
        forms = {".html": cls.PAGE, ".htm": cls.PAGE, ".sarif": cls.SARIF}
        return forms.get(path.suffix.lower(), cls.JSON)


def check_report_target(path: Path) -> None:
    """Check, before a long run, that a report can be made and written.

    Raises ``ExtraError`` if the page needs a package that is missing, ``UsageError`` if the path
    cannot be written to.
    """
    if ReportForm.of(path) is ReportForm.PAGE:
        check_report_page_target(path)
    else:
        check_target(path)


def report_text(run: ReportedRun, form: ReportForm) -> str:
    """Return a report in a form."""
    match form:
        case ReportForm.PAGE:
            return report_page_text(run)
        case ReportForm.SARIF:
            return sarif_text(run)
        case ReportForm.JSON:
            return json_text(run.report)


def json_text(data: Mapping[str, Any]) -> str:
    """Return JSON as every command writes it, with a checksum."""
    return json.dumps(with_checksum(data), indent=2, ensure_ascii=False) + "\n"
