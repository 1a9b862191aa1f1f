"""Events of adapters, and of the checksums of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from rollproof.core.events.base import Event
from rollproof.core.records import Version

__all__ = ["Adapter", "AdapterChange", "Checksums"]


class AdapterChange(StrEnum):
    """What happened to an adapter of a server. That one was loaded is a ``Weights`` event."""

    IGNORED = "ignored"
    """A load was ignored: the server has an adapter of that name, and was not told to replace
    it.
    """
    UNLOADED = "unloaded"
    """The server knows the name no more."""
    EVICTED = "evicted"
    """The adapter had to make room; the server loads it again when a call needs it."""
    RELOADED = "reloaded"
    """The server loaded an evicted adapter again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter(Event):
    """Something other than a load happened to the adapter ``name`` of a server.

    Attributes:
        version: The version of the adapter, if it is known; of an ignored load, that of the adapter
            which was not loaded.
        true_scale: As in ``Weights``, of an adapter that was loaded again.
    """

    kind: ClassVar[str] = "adapter"
    server_id: str
    name: str
    change: AdapterChange
    version: Version = None
    true_scale: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checksums(Event):
    """A trainer or a server said what the checksums of its tensors are.

    Attributes:
        version: The weights; ``None``: those that the server loaded last.
        digests: The checksum of each tensor, by the tensor's name.
        server_id: The server; ``None``: the trainer.
        adapter: The adapter that has the tensors; ``None``: the base model.
    """

    kind: ClassVar[str] = "checksums"
    version: Version
    digests: Mapping[str, str]
    server_id: str | None = None
    adapter: str | None = None
