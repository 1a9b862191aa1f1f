"""A target of fuzzing: a strategy that damages sound inputs, and what reads them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from rollproof.cli.app import run

__all__ = ["CODES", "Broken", "Target", "run_command"]

CODES = {0, 1, 2, 254}
"""Exit codes of a command that did what it should."""


class Broken(AssertionError):
    """An input that was not read, and not refused as it should be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Something to fuzz.

    Attributes:
        inputs: the strategy, made once.
        read: reads one input; raises if that went wrong.
        around: what runs while inputs are read, such as a server; what it yields goes to ``read``.
        needs: the module without which nothing can be read; empty if there is none.
    """

    inputs: Callable[[], st.SearchStrategy[Any]]
    read: Callable[[Any, Any], None]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    needs: str = ""


def run_command(*arguments: str) -> str:
    """Run a command line; return what it printed. Raises ``Broken`` for an exit code of a fault."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    if code not in CODES or "Traceback" in err.getvalue():
        raise Broken(f"{list(arguments)} ended with {code}: {err.getvalue()[-600:]}")
    return out.getvalue()
