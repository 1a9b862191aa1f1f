"""What the parts of a fake engine that load weights need of the whole engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from rollproof.core.records import Version
from rollproof.fakes.engine.harness_acts import acts_for_harness

if TYPE_CHECKING:
    from rollproof.core.trace import Recorder
    from rollproof.fakes.engine.scheduler import Scheduler

__all__ = ["Transferring"]


class Transferring(ABC):
    """An engine that receives weights; ``FakeEngine`` implements it.

    Attributes:
        server_id: Its name.
        published: The weights and the label that it last published, if any.
    """

    server_id: str
    published: tuple[int, Version] | None
    _recorder: Recorder
    _scheduler: Scheduler

    def _note_published(self, version: int, label: Version) -> None:
        """Note weights that the stack, not the harness, has brought under a label."""
        if label is not None and not acts_for_harness():
            self.published = (version, label)

    @abstractmethod
    def progress(self) -> dict[int, int]:
        """Return the tokens sampled by each call in flight, by call id."""

    @abstractmethod
    def _refuse_dead(self) -> None:
        """Raise ``ServerDied`` if the server is dead."""

    @abstractmethod
    def _transferred(self) -> AbstractAsyncContextManager[None]:
        """Wait as long as a transfer of weights takes."""
