"""pytest's short summary: one line for each failure, and skips at the place of their tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollproof.core.error_text import one_line
from rollproof.errors import ConformanceError, RollproofError
from rollproof.pytest_plugin.item_location import item_location

__all__ = ["HEADLINE", "shorten"]

HEADLINE = pytest.StashKey[str]()
"""What the short summary says of a failing item."""


def shorten(item: pytest.Item, error: BaseException, report: pytest.TestReport) -> None:
    """Give the report of a failure of ours one line for the short summary.

    Under ``CI`` pytest prints the entire message there, which repeats every finding. JUnit files
    and annotations (pytest-github-actions-annotate-failures) take the same line, and the place of
    the test. A skip of ours gets the place of the test too.
    """
    if report.skipped and isinstance(report.longrepr, tuple):
        if Path(report.longrepr[0]).parent == Path(__file__).parent:
            place = item_location(item)
            report.longrepr = (str(place.file), place.line, report.longrepr[2])
        return
    # an attribute of every representation that pytest makes of an exception
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return
    headline = item.stash.get(HEADLINE, None)
    if headline is not None:
        del item.stash[HEADLINE]  # the item may run again
        crash.message = one_line(headline)
        place = item_location(item)
        crash.path, crash.lineno = str(place.file), place.line
        # pytest counts these lines from 0
        file = os.path.relpath(place.file, item.config.rootpath)
        report.location = (file, place.line - 1, report.location[2])
    elif isinstance(error, RollproofError):
        text = error.headline if isinstance(error, ConformanceError) else str(error)
        crash.message = f"{type(error).__name__}: {one_line(text)}"
