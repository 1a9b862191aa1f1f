"""Subjects for tests of the doors: one correct, one with the field's most frequent fault, one
unfinished; few cases each.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rollproof.core.case import Case
from rollproof.core.records import EngineOutput
from rollproof.fakes.clients.reference_clients import AsSampled, PartialSample
from rollproof.fakes.known_bugs._planting import ABORTED, CLEAN, SYNCED

__all__ = ["CONCAT", "CORRECT", "Concat", "Correct", "Unfinished"]

CONCAT = "tests.support.faulty_subjects:Concat"
CORRECT = "tests.support.faulty_subjects:Correct"


class Correct(AsSampled):
    """A reference manager, run on three small cases."""

    @staticmethod
    def cases(profile: str, seed: int | None) -> Iterable[Case]:
        """The cases that the command line runs in place of the profile's."""
        return (CLEAN, ABORTED, SYNCED)


class Concat(Correct):
    """Appends the routes of the whole sequence to those of the calls before (verl#6029)."""

    def routes_start(self, sample: PartialSample) -> int:
        """Every call returns all rows."""
        return 0

    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        """The fault."""
        if output.routes is not None:
            sample.rows = (
                output.routes
                if sample.rows is None
                else np.concatenate([sample.rows, output.routes])
            )


class Unfinished:
    """Has two of the five methods."""

    def start(self, fleet: object) -> None:
        """Nothing."""

    def rollout(self, request: object) -> None:
        """Nothing."""
