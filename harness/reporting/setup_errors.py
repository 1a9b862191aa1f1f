"""The error of a subject that could not be run, as lines: the reason, the user's code that raised,
and the next step.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator

from rollproof.core.error_text import user_frames
from rollproof.reporting.text import Line, Style, wrapped

__all__ = ["setup_error_lines"]

_FRAMES = 6
"""Frames of the user's code that are shown: the last ones, which are nearest to the error."""


def setup_error_lines(
    title: str, error: BaseException, *, subject: str | None = None
) -> Iterator[Line]:
    """Yield the lines.

    Args:
        title: The name of the subject.
        error: What kept it from running; its cause is what the user's code raised.
        subject: The subject as ``module:name`` if ``rollproof verify`` can run it.
    """
    yield Style.BAD, f"{title} could not be run: {type(error).__name__}: {error}"
    cause = error.__cause__
    frames = [] if cause is None else user_frames(cause)
    for frame, number in frames[-_FRAMES:]:
        code = frame.f_code
        yield Style.PLAIN, f'  File "{code.co_filename}", line {number}, in {code.co_name}'
        source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
        if source:
            yield Style.PLAIN, f"    {source}"
    traceback = (
        f" `rollproof verify --subject {subject} --debug` shows the whole traceback."
        if subject is not None and frames
        else ""
    )
    text = (
        f"next: correct this and run the test again.{traceback} The other items of {title} are"
        " skipped."
    )
    yield Style.PLAIN, wrapped(text)
