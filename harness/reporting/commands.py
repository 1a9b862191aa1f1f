"""The commands that a report prints for its reader to paste."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

__all__ = ["replay_command"]


def replay_command(finding: Mapping[str, Any], file: str | None = None) -> str:
    """Return the command that runs the counterexample of a finding again; "" if it has none.

    Args:
        finding: In its JSON form. ``rerun``, if it has that key, is the command itself.
        file: The counterexample as the reader is to write it; ``None``: as the finding has it.
    """
    # a report names the files that its own run wrote: their subjects have just been run
    witness = finding["witness"] if file is None else file
    trusted = f"rollproof replay {shlex.quote(witness)} --trust-subject" if witness else ""
    return str(finding.get("rerun", trusted))
