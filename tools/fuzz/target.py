"""A target of fuzzing: what damages sound inputs, and what reads them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollproof.cli.app import run
from tools.fuzz.mutations import Inputs

__all__ = ["CODES", "Broken", "Target", "run_command"]

CODES = {0, 1, 2, 254}
"""Exit codes of a command that did what it should."""


class Broken(AssertionError):
    """An input that was not read, and not refused as it should be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Something to fuzz.

    Attributes:
        inputs: makes what makes the inputs, once for each process.
        read: reads one input; raises if that went wrong.
        around: what runs while inputs are read, such as a server; what it yields goes to ``read``.
        needs: the module without which nothing can be read; empty if there is none.
        imports: modules that reading imports late, so that each process need not do it again.
    """

    inputs: Callable[[], Inputs]
    read: Callable[[Any, Any], None]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    needs: str = ""
    imports: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules to import before processes are forked."""
        return (self.needs, *self.imports) if self.needs else self.imports


def run_command(*arguments: str) -> str:
    """Run a command line; return what it printed. Raises ``Broken`` for an exit code of a fault."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    if code not in CODES or "Traceback" in err.getvalue():
        raise Broken(f"{list(arguments)} ended with {code}: {err.getvalue()[-600:]}")
    return out.getvalue()
