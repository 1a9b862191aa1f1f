"""The weight updates of a trace: which labels were published for which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollproof.core.events.rollout import Weights
from rollproof.core.records import Version

__all__ = ["WeightHistory"]


@dataclass(slots=True)
class WeightHistory:
    """Weight updates so far, per server and in order, and the labels that were published."""

    updates: list[Weights] = field(default_factory=list)
    _read: int = 0
    _labels: dict[Version, list[Version]] = field(default_factory=dict)
    _carried: dict[Version, dict[Version, None]] = field(default_factory=dict)
    _serving: dict[str, tuple[Version, Version]] = field(default_factory=dict)
    _named_at: dict[tuple[str, Version], int] = field(default_factory=dict)
    _unlabelled: set[Version] = field(default_factory=set)
    _first_published: dict[Version, int] = field(default_factory=dict)

    @property
    def labels(self) -> frozenset[Version]:
        """Every label that was ever published."""
        return frozenset(self._updated()._first_published)

    def label_of(self, version: Version) -> Version:
        """Return the label under which weights ``version`` were last published, or ``None``."""
        labels = self.labels_of(version)
        return labels[-1] if labels else None

    def labels_of(self, version: Version) -> Sequence[Version]:
        """Return every label under which weights ``version`` were published, the latest last.

        There is more than one after a retag. A label that a server still showed when it had loaded
        them counts only if they never got one of their own.
        """
        history = self._updated()
        return history._labels.get(version) or tuple(history._carried.get(version, ()))

    def carried_of(self, version: Version) -> frozenset[Version]:
        """Return labels of other weights that servers still showed for weights ``version``."""
        history = self._updated()
        # vLLM's update names no version: weights are loaded first, and a request of its own
        # publishes their label.
        return frozenset(history._carried.get(version, ())).difference(self.labels_of(version))

    def named_at(self, server_id: str, version: Version) -> int | None:
        """Return the index of the event from which a server showed a label of their own for weights
        ``version``, or ``None``.
        """
        return self._updated()._named_at.get((server_id, version))

    def rank_of(self, label: Version) -> int | None:
        """Return how many labels were published before ``label`` first was, or ``None``."""
        return self._updated()._first_published.get(label)

    def unlabelled(self) -> frozenset[Version]:
        """Return the versions that were loaded without a label (an update with ``None``)."""
        return frozenset(self._updated()._unlabelled)

    def _updated(self) -> WeightHistory:
        """Take in the updates since the last call."""
        for update in self.updates[self._read :] if self._read < len(self.updates) else ():
            before = self._serving.get(update.server_id)
            self._serving[update.server_id] = (update.version, update.label)
            # SGLang and vLLM accept an update without a version; the old label then stays visible.
            if update.label is None:
                if update.loaded:
                    self._unlabelled.add(update.version)
                continue
            self._first_published.setdefault(update.label, len(self._first_published))
            if (
                update.loaded
                and before is not None
                and before[0] != update.version
                # The server still showed its old label for new weights: the label belongs to the
                # old ones.
                and before[1] == update.label
            ):
                self._carried.setdefault(update.version, {})[update.label] = None
                continue
            self._named_at.setdefault((update.server_id, update.version), update.index)
            labels = self._labels.setdefault(update.version, [])
            if update.label in labels:
                # A retag moves the label to the end: the latest one is the current one.
                labels.remove(update.label)
            labels.append(update.label)
        self._read = len(self.updates)
        return self
