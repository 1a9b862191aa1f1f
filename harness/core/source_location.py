"""Where something of the user's is written: a subject, or the test that judges it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["SourceLocation", "source_location"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLocation:
    """A line of a file, counted from 1. The path is absolute."""

    file: Path
    line: int

    def to_dict(self, root: Path) -> dict[str, Any]:
        """Return the JSON form: the file relative to ``root``, if it is below it."""
        below = self.file.is_relative_to(root)
        file = self.file.relative_to(root) if below else self.file
        return {"file": file.as_posix(), "line": self.line}


def source_location(thing: object) -> SourceLocation | None:
    """Return where a class or a function is defined; ``None`` for what was not read from a file."""
    while isinstance(thing, partial):
        thing = thing.func
    # an object that is called is defined by its class
    found: Any = thing if inspect.isclass(thing) or inspect.isroutine(thing) else type(thing)
    try:
        found = inspect.unwrap(found)
        file = inspect.getsourcefile(found)
        line = inspect.getsourcelines(found)[1]
    except (OSError, TypeError, ValueError):
        return None
    # From Python 3.13 on, code made from a text has the lines of whatever was run as <string>.
    if file is None or not Path(file).is_file():
        return None
    return SourceLocation(file=Path(file).resolve(), line=max(line, 1))
