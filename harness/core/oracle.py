"""Oracle: what a policy of a given weight version would have answered, independent of any engine.

Rollproof's coded policy is one (``rollproof.fakes.coded.policy``); a forward of a Hugging Face
model is another.
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
        """Log-probability of ``ids[i]`` given ``ids[:i]`` for ``i >= start``: ``(len(ids) -
        start,)`` float64, T = 1.
        """
        ...

    def routes(self, version: Version, ids: Sequence[int], start: int = 0) -> IntArray:
        """Experts chosen by the forward of each token from ``start`` on: ``(len(ids) - start,
        num_layers, top_k)``.
        """
        ...


class Chooser(Oracle, Protocol):
    """An oracle that also knows the next token, as the coded policy does: then a resumed rollout
    has an unbroken twin.
    """

    eos_id: int
    """The token after which nothing is sampled."""

    def choices(self, version: Version, ids: Sequence[int], start: int = 0) -> IntArray:
        """The token that ``version`` samples after ``ids[:i]`` for ``i >= start``: ``(len(ids) -
        start,)``.
        """
        ...
