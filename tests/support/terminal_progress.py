"""Progress of a long run on the terminal, also while pytest captures what tests print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from rollproof.core.progress import Progress


def shown(config: pytest.Config) -> Callable[[Progress], None]:
    """A callback for ``run_experiments`` that writes each step to the terminal of this session."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")

    def show_progress(progress: Progress) -> None:
        with capture.global_and_fixture_disabled():
            print(  # noqa: T201 - the terminal of the session is its purpose
                f"\n  {progress.done}/{progress.total} {progress.what}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    return show_progress
