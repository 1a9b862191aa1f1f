"""How a session spends its time, and how much of it is rollproof's own work.

Engines and trainers account for their own time. All other time is rollproof's: making models,
independent forwards, judging, and everything that was not measured.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

__all__ = ["Part", "Spending", "Stopwatch"]


class Part(StrEnum):
    """What the seconds of a session are spent on."""

    STARTING = "engines: starting and stopping"
    EXPERIMENTS = "engines: experiments"
    SAMPLING = "engines: sampling for the gap"
    TRAINING = "trainers: steps and forwards"
    LIBRARIES = "importing torch and transformers"
    MODELS = "making models"
    REFERENCE = "independent forwards"
    JUDGING = "judging and comparing"
    REST = "everything else: pytest, gating, waiting for memory"

    @property
    def ours(self) -> bool:
        """Whether it is rollproof's own work."""
        return self in (Part.MODELS, Part.REFERENCE, Part.JUDGING, Part.REST)


class Spending:
    """The seconds of a session by part; ``began`` is the ``time.perf_counter()`` at its start."""

    def __init__(self, began: float | None = None) -> None:
        self._began = time.perf_counter() if began is None else began
        self._seconds: defaultdict[Part, float] = defaultdict(float)

    def add(self, spent: Mapping[Part, float]) -> None:
        """Add seconds that were measured elsewhere."""
        for part, seconds in spent.items():
            self._seconds[part] += seconds

    @contextmanager
    def on(self, part: Part) -> Iterator[None]:
        """Count the time inside the context as ``part``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """All seconds so far."""
        return time.perf_counter() - self._began

    def to_dict(self) -> dict[str, float]:
        """Return the seconds by part; time that was not measured is the rest."""
        total = self.seconds
        counted = {part: self._seconds[part] for part in Part}
        counted[Part.REST] += max(0.0, total - sum(counted.values()))
        return {str(part): round(seconds, 1) for part, seconds in counted.items()}

    @property
    def ours(self) -> float:
        """Seconds of rollproof's own work."""
        parts = self.to_dict()
        return sum(parts[part] for part in Part if part.ours)


class Stopwatch:
    """A proxy of a trainer, and of its variants, that records the seconds of their methods."""

    def __init__(self, subject: Any, seconds: list[float]) -> None:
        self._subject, self._seconds = subject, seconds

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._subject, name)
        if not callable(attribute) or name.startswith("_"):
            return attribute

        # judging reads names and signatures of methods
        @functools.wraps(attribute)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                out = attribute(*args, **kwargs)
            finally:
                self._seconds.append(time.perf_counter() - began)
            # a variant of a trainer is a trainer whose time counts too
            return Stopwatch(out, self._seconds) if callable(getattr(out, "run", None)) else out

        return timed
