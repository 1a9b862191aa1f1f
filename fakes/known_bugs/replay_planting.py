"""Planting replay bugs: a faulty trainer, the episodes in which it shows, and what its wrong rows do to results."""

from __future__ import annotations

from functools import partial

from rollproof.fakes.replaying import ReplayTrainer
from rollproof.known_bug import KnownBug
from rollproof.replay.driving import record_replay

__all__ = ["RECOMPUTED", "WRONG_ROWS", "bug"]

SELF = ("self-replay",)
RECOMPUTED = ("full recompute", "failure in recompute")
WRONG_ROWS = ("replay.self-gradients",)
"""What a self-replay shows beside, where rows are wrong."""


def bug(
    name: str,
    summary: str,
    refs: tuple[str, ...],
    make: type[ReplayTrainer],
    *kills: str,
    also: tuple[str, ...] = (),
    episodes: tuple[str, ...] = SELF,
) -> KnownBug:
    """A known bug of a trainer, which shows in the episodes that are named."""
    record = partial(record_replay, make, name=name, only=episodes)
    return KnownBug(id=name, summary=summary, refs=refs, record=record, kills=kills, also=also)
