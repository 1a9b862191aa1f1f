"""The option ``--follow`` of ``check``: alarms while traces are written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from rollproof.cli.metrics import LOOPBACK, MetricsPage, serve_metrics
from rollproof.errors import UsageError
from rollproof.judging.report import finding_dict
from rollproof.reporting.text import Line, Style, finding_headline
from rollproof.verification.followed import Alarm, FollowedTraces
from rollproof.verification.judged_files import FilesJudged, UnitSettings

__all__ = ["alarm_dict", "follow"]

_INTERVAL = 0.5
"""Seconds between two looks."""


def follow(
    paths: Sequence[Path],
    settings: UnitSettings,
    judged: FilesJudged,
    *,
    alarm: Callable[[Alarm, Line], None],
    say: Callable[[str], None],
    metrics: int | None = None,
) -> None:
    """Judge traces while they are written, until their writers close them, or Ctrl-C.

    Args:
        paths: Files, and folders in which files appear; a folder is followed until Ctrl-C.
        settings: How they are judged.
        judged: Gets the results.
        alarm: Called with what was found, and its line, as soon as it is found.
        say: Called with what a user wants to know at the beginning.
        metrics: The port of a Prometheus endpoint.
    """
    for path in paths:
        if not path.exists():
            raise UsageError(f"There is no trace at {path}: check the path.")
    followed = FollowedTraces(paths, settings, judged)
    with (
        nullcontext(None) if metrics is None else serve_metrics(metrics) as page,
        _stop_signal() as stopped,
    ):
        if page is not None:
            say(f"metrics on http://{LOOPBACK}:{page.port}/metrics")
        say(f"following {', '.join(map(str, paths))}; Ctrl-C ends it with the report")
        while True:
            _tell(followed, followed.look(), alarm, page)
            if followed.ended or stopped.wait(_INTERVAL):
                break
        # what was written since the last look counts, too
        if not followed.ended:
            _tell(followed, followed.look(), alarm, page)
        _tell(followed, followed.finish(), alarm, page)


def _tell(
    followed: FollowedTraces,
    alarms: Sequence[Alarm],
    alarm: Callable[[Alarm, Line], None],
    page: MetricsPage | None,
) -> None:
    if page is not None:
        page.show(followed.snapshot())
    for item in alarms:
        alarm(item, _line(item))


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, or SIGTERM, which ends containers: no event of a trace is judged
    by half. A second signal ends the command as usual.
    """
    stopped = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def stop(*_: object) -> None:
        stopped.set()
        for each, handler in before.items():
            signal.signal(each, handler)

    # Python lets no other thread set a handler
    in_main = threading.current_thread() is threading.main_thread()
    try:
        for number in signals if in_main else ():
            signal.signal(number, stop)
        yield stopped
    finally:
        for number, handler in before.items() if in_main else ():
            signal.signal(number, handler)


def alarm_dict(alarm: Alarm) -> dict[str, Any]:
    """Return the JSON form of an alarm."""
    out: dict[str, Any] = {"file": alarm.path}
    if alarm.error:
        return {"alarm": "unjudged", **out, "error": alarm.error}
    if alarm.finding is None:
        return {"alarm": "more", **out, "check": alarm.check, "count": alarm.count}
    return {
        "alarm": "finding",
        **out,
        "check": alarm.check,
        "finding": finding_dict(alarm.finding),
    }


def _line(alarm: Alarm) -> Line:
    now = datetime.now().astimezone().strftime("%H:%M:%S")
    if alarm.error:
        return Style.BAD, f"{now}  UNJUDGED  {alarm.error}"
    if alarm.finding is None:
        plural = "s" if alarm.count > 1 else ""
        text = f"{alarm.count:,} more finding{plural} of kinds that were told"
        return Style.BAD, f"{now}  FAIL  {alarm.check}: {text} in {alarm.path}"
    told = finding_headline({"findings": [finding_dict(alarm.finding)]})
    return Style.BAD, f"{now}  FAIL  {alarm.check}: {told} in {alarm.path}"
