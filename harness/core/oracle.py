"""Protocols of an oracle, which computes what a policy would have answered, independent of any
engine.

Rollproof's coded policy is an oracle (``rollproof.fakes.coded.policy``), and so is a forward of a
Hugging Face model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollproof.core.records import IntArray, LogprobArray, Version

__all__ = ["Chooser", "Oracle"]


class Oracle(Protocol):
    """Values as pure functions of weight version and token ids. Layers are global and count every
    hidden layer.
    """

    def logprobs(self, version: Version, ids: Sequence[int], start: int) -> LogprobArray:
        """Return the log-probability of ``ids[i]`` given ``ids[:i]`` for ``i >= start``:
        ``(len(ids) - start,)`` float64, at temperature 1.
        """
        ...

    def routes(self, version: Version, ids: Sequence[int], start: int = 0) -> IntArray:
        """Return the experts that the forward of each token from ``start`` on chooses: ``(len(ids)
        - start, num_layers, top_k)``.
        """
        ...


class Chooser(Oracle, Protocol):
    """An oracle that also knows the next token, as the coded policy does. With it a resumed rollout
    can be compared with an uninterrupted one.
    """

    eos_id: int
    """The token after which nothing is sampled."""

    def choices(self, version: Version, ids: Sequence[int], start: int = 0) -> IntArray:
        """Return the token that ``version`` samples after ``ids[:i]`` for ``i >= start``:
        ``(len(ids) - start,)``.
        """
        ...

    def drawn(self, version: Version, ids: Sequence[int], draw: int) -> int:
        """Return the token of draw number ``draw`` after ``ids``; draw 0 is that of ``choices``."""
        ...
