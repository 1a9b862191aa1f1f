"""All targets of fuzzing."""

from __future__ import annotations

import importlib.util

from tools.fuzz.command_targets import COMMANDS
from tools.fuzz.endpoint_targets import ENDPOINTS
from tools.fuzz.file_targets import FILES
from tools.fuzz.recording_targets import RECORDINGS
from tools.fuzz.target import Target

__all__ = ["TARGETS", "unavailable"]

TARGETS: dict[str, Target] = {**FILES, **COMMANDS, **ENDPOINTS, **RECORDINGS}


def unavailable(name: str) -> str:
    """Return why a target cannot be fuzzed here; empty if it can."""
    needed = TARGETS[name].needs
    found = not needed or importlib.util.find_spec(needed) is not None
    return "" if found else f"{needed} is not installed"
