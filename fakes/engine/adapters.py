"""Adapters (LoRA) of a fake engine: loaded by name, over the base model.

An adapter of version v, at its own scale and over the base model that it was trained on, computes
what weights v compute. At another scale, or over another base model, it computes what no version
does: such values are coded under an ``AlteredKey``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollproof.core.events.weights import Adapter, AdapterChange
from rollproof.core.records import Version
from rollproof.core.trace import Recorder
from rollproof.fakes.engine.exceptions import BadCall

__all__ = ["AdapterTable", "AlteredKey", "LoadedAdapter"]


class AlteredKey(str):
    """The key of values that the weights of no version give."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter in a server. Calls refer to it, so that one that is replaced in place changes
    under the calls that run.

    Attributes:
        base: The weights of the base model that it was trained on.
        scale: The scale at which it is applied, in multiples of its own.
        number: A number of the load: the identity of an adapter that another one of its name does
            not share.
        evicted: Whether it must be loaded again before it can serve.
    """

    name: str
    version: int
    base: int
    label: Version
    scale: float
    number: int
    evicted: bool = False

    def key(self, base: Version) -> Version:
        """Return the key of forwards over the base model ``base``."""
        if self.scale == 1 and base == self.base:
            return self.version
        return AlteredKey(f"adapter {self.version} over {base!r}, {self.scale:g} times its scale")


class AdapterTable:
    """The adapters of one server, by name.

    ``trained_on`` returns the base model on which the adapter of a version was trained.
    """

    def __init__(self, server_id: str, recorder: Recorder) -> None:
        self.loaded: dict[str, LoadedAdapter] = {}
        self.trained_on: Callable[[int], int] = _first_weights
        self._server_id = server_id
        self._recorder = recorder
        self._loads = 0

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter of that name. Raises ``BadCall`` if there is none."""
        try:
            return self.loaded[name]
        except KeyError:
            raise BadCall(
                f"The model {name!r} does not exist: no adapter of that name is loaded on"
                f" {self._server_id}, which has {sorted(self.loaded)}."
            ) from None

    def make(self, name: str, version: int, label: Version, scale: float) -> LoadedAdapter:
        """Return a new adapter, which is not yet in the table."""
        self._loads += 1
        return LoadedAdapter(
            name, version, self.trained_on(version), label, scale, number=self._loads
        )

    def unload(self, name: str) -> LoadedAdapter:
        """Forget an adapter; calls that have it go on. Raises ``BadCall`` if there is none."""
        adapter = self.find(name)
        del self.loaded[name]
        self._record(adapter, AdapterChange.UNLOADED)
        return adapter

    def ignore(self, name: str, version: int) -> None:
        """Note that a load was ignored, since an adapter has that name."""
        self._recorder.record(
            Adapter(
                server_id=self._server_id, name=name, change=AdapterChange.IGNORED, version=version
            )
        )

    def evict(self, name: str) -> None:
        """Let an adapter make room until a call needs it."""
        adapter = self.loaded.get(name)
        if adapter is not None and not adapter.evicted:
            adapter.evicted = True
            self._record(adapter, AdapterChange.EVICTED)

    def reload(self, adapter: LoadedAdapter) -> None:
        """Load an evicted adapter again, from where it came."""
        adapter.evicted = False
        self._recorder.record(
            Adapter(
                server_id=self._server_id,
                name=adapter.name,
                change=AdapterChange.RELOADED,
                version=adapter.version,
                true_scale=adapter.scale,
            )
        )

    def _record(self, adapter: LoadedAdapter, change: AdapterChange) -> None:
        self._recorder.record(
            Adapter(
                server_id=self._server_id,
                name=adapter.name,
                change=change,
                version=adapter.version,
            )
        )


def _first_weights(_version: int) -> int:
    return 0
