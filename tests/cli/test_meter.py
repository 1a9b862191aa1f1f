"""Progress of a long run where standard error is a file or a pipe."""

from __future__ import annotations

import pytest

from rollproof.cli import output
from rollproof.core.progress import Progress


def test_a_log_hears_of_a_run_after_two_seconds_and_then_now_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Short runs say nothing; a longer one says at once where it is, and goes on every twenty
    seconds.
    """
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    with output.Meter() as meter:
        for now in (101.0, 102.5, 110.0, 121.0, 123.0):
            meter(Progress(done=1, total=4, what=f"at {now:g}"))
    assert [
        "  ... 1/4 at 102.5 (2 s)",
        "  ... 1/4 at 123 (23 s)",
    ] == capsys.readouterr().err.splitlines()
