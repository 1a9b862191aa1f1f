"""The weight updates of a trace: which labels were published for which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rollproof.core.events.rollout import Update, UpdatePhase, Weights
from rollproof.core.records import Version

__all__ = ["Key", "WeightHistory", "key"]

Key: TypeAlias = "int | str | None"
"""A label in the form in which labels are compared: ``"7"`` and ``7`` are one label (SGLang's are
strings).
"""


def key(label: Version) -> Key:
    """Return the label for comparison: integers as ints, also if an engine spells them as
    strings.
    """
    if isinstance(label, str):
        # SGLang's weight_version is a string, verl's global_steps an int: "7" and 7 are the same
        # weights.
        text = label.strip()
        return int(text) if text.isascii() and text.removeprefix("-").isdigit() else text
    return label


def _index(event: Update | Weights) -> int:
    return event.index


@dataclass(slots=True)
class WeightHistory:
    """Weight updates so far, per server and in order, and the labels that were published.

    ended: The updates that the stack was asked for and that ended without an error, in order, each
        with the index of the event that asked for it.
    requested: The updates that the stack was asked for, in order.
    """

    updates: list[Weights] = field(default_factory=list)
    ended: list[tuple[int, Update]] = field(default_factory=list)
    requested: list[Update] = field(default_factory=list)
    _begun: dict[tuple[Version, Version], int] = field(default_factory=dict)
    _open: dict[Key, Version] = field(default_factory=dict)
    _last: tuple[Key, Version] | None = None
    _misplaced: set[int] = field(default_factory=set)
    _misplaced_at: set[tuple[str, Key]] = field(default_factory=set)
    _read: int = 0
    _labels: dict[Version, list[Version]] = field(default_factory=dict)
    _carried: dict[Version, dict[Version, None]] = field(default_factory=dict)
    _serving: dict[str, tuple[Version, Version]] = field(default_factory=dict)
    _named_at: dict[tuple[str, Version], int] = field(default_factory=dict)
    _unlabelled: set[Version] = field(default_factory=set)
    _left_with_old_label: set[Version] = field(default_factory=set)
    _loaded_by_harness: set[str] = field(default_factory=set)
    _relabelled_by_harness: set[Key] = field(default_factory=set)
    _first_published: dict[Version, int] = field(default_factory=dict)
    _of_stack: set[Key] = field(default_factory=set)
    _asked_unlabelled: set[Version] = field(default_factory=set)
    _asked_labelled: set[Version] = field(default_factory=set)
    _loaded_labelled: set[Version] = field(default_factory=set)

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
        them counts only if they never got one of their own, and one may yet come.
        """
        history = self._updated()
        own = history._labels.get(version)
        if own or version in history._left_with_old_label:
            return own or ()
        return tuple(history._carried.get(version, ()))

    def carried_of(self, version: Version) -> frozenset[Version]:
        """Return labels of other weights that servers still showed for weights ``version``."""
        history = self._updated()
        # vLLM's update names no version: weights are loaded first, and a request of its own
        # publishes their label.
        return frozenset(history._carried.get(version, ())).difference(self.labels_of(version))

    def is_known_to_stack(self, label: Version) -> bool:
        """Return whether the stack was asked to publish a label, or did: others are those that the
        harness published without it.
        """
        return key(label) in self._of_stack

    @property
    def labels_unlabelled(self) -> bool:
        """Whether the stack gave labels of its own to all weights that it was asked to load without
        one.
        """
        history = self._updated()
        return (
            bool(history._asked_unlabelled)
            and history._asked_unlabelled <= history._loaded_labelled
            and not history._unlabelled
        )

    def asked(self, update: Update) -> None:
        """Take in that an update was asked for, or has ended: its label is that of its weights."""
        name = update.version, update.label
        if update.phase is UpdatePhase.ASKED:
            self.requested.append(update)
            self._begun[name] = update.index
        elif update.phase is UpdatePhase.ENDED and name in self._begun:
            self.ended.append((self._begun.pop(name), update))
            if update.label is None:
                self._note_old_labels(update.version)
        if update.label is None:
            self._asked_unlabelled.add(update.version)
            # now other weights are the latest, and a label of the stack's own may be theirs
            self._last = None
            return
        self._asked_labelled.add(update.version)
        label = key(update.label)
        self._of_stack.add(label)
        if update.phase is UpdatePhase.ASKED:
            self._open[label] = update.version
            self._last = (label, update.version)
        else:
            self._open.pop(label, None)

    def _note_old_labels(self, version: Version) -> None:
        """Note whether a server still shows the label of other weights for ``version``, whose
        update without a label has ended.

        While an update runs, a label may follow the load. None follows its end: none was asked for.
        A label of the harness decides nothing: a stack that counts its updates itself may come to
        the same one.
        """
        if version in self._asked_labelled:
            return
        carried = self._updated()._carried.get(version, {})
        if any(
            serving == version
            and label in carried
            and key(label) not in self._relabelled_by_harness
            and server not in self._loaded_by_harness
            for server, (serving, label) in self._serving.items()
        ):
            self._left_with_old_label.add(version)

    def published(self, event: Weights) -> None:
        """Take in that a server has other weights, or shows another label."""
        if self.is_misplaced(event):
            self._misplaced.add(len(self.updates))
            self._misplaced_at.add((event.server_id, key(event.label)))
        if event.label is not None and not event.by_harness:
            self._of_stack.add(key(event.label))
        elif event.label is not None and not event.loaded:
            self._relabelled_by_harness.add(key(event.label))
        self.updates.append(event)

    def is_misplaced(self, event: Weights) -> bool:
        """Return whether the label is that of an update which asked for other weights.

        Only updates that run, and the latest one, are looked at: a stack that counts by itself may
        come to a number that an earlier update had, or another one that runs.
        """
        if event.label is None or event.by_harness:
            return False
        running = dict((*self._open.items(), *([self._last] if self._last else ())))
        asked = running.get(key(event.label))
        return asked is not None and event.version not in running.values()

    def was_misplaced(self, server_id: str, label: Version) -> bool:
        """Return whether ``server_id`` ever showed ``label`` for other weights than it was asked
        for.
        """
        return (server_id, key(label)) in self._misplaced_at

    def named_at(self, server_id: str, version: Version) -> int | None:
        """Return the index of the event from which a server showed a label of their own for weights
        ``version``, or ``None``.
        """
        return self._updated()._named_at.get((server_id, version))

    def rank_of(self, label: Version) -> int | None:
        """Return how many labels were published before ``label`` first was, or ``None``."""
        return self._updated()._first_published.get(label)

    def named_before(self, moment: int) -> Sequence[tuple[Version, Version]]:
        """Return the weights that were published or requested under a label before the event
        ``moment``, each with that label, in order and each pair once.
        """
        events: list[Update | Weights] = [*self.updates, *self.requested]
        events.sort(key=_index)
        return tuple(
            dict.fromkeys(
                (event.version, event.label)
                for event in events
                if event.index < moment and event.label is not None
            )
        )

    def unlabelled(self) -> frozenset[Version]:
        """Return the versions that were loaded without a label (an update with ``None``), or under
        the label of other weights, which servers went on showing.
        """
        history = self._updated()
        return frozenset(history._unlabelled | history._left_with_old_label)

    def _updated(self) -> WeightHistory:
        """Take in the updates since the last call."""
        # a property looks here many times for each update
        if self._read == len(self.updates):
            return self
        for number, update in enumerate(self.updates[self._read :], self._read):
            before = self._serving.get(update.server_id)
            self._serving[update.server_id] = (update.version, update.label)
            if update.loaded and update.by_harness:
                self._loaded_by_harness.add(update.server_id)
            elif update.loaded:
                self._loaded_by_harness.discard(update.server_id)
            # SGLang and vLLM accept an update without a version; the old label then stays visible.
            if update.label is None:
                if update.loaded:
                    self._unlabelled.add(update.version)
                continue
            self._first_published.setdefault(update.label, len(self._first_published))
            if self._is_carried(update, before):
                self._carried.setdefault(update.version, {})[update.label] = None
                continue
            # A stack may show the label of an update while the server has other weights.
            if number in self._misplaced:
                # with its weights it becomes their own, not one that they carry over
                self._serving[update.server_id] = (update.version, None)
                continue
            if update.loaded and not update.by_harness:
                self._loaded_labelled.add(update.version)
            self._named_at.setdefault((update.server_id, update.version), update.index)
            labels = self._labels.setdefault(update.version, [])
            if update.label in labels:
                # A retag moves the label to the end: the latest one is the current one.
                labels.remove(update.label)
            labels.append(update.label)
        self._read = len(self.updates)
        return self

    @staticmethod
    def _is_carried(update: Weights, before: tuple[Version, Version] | None) -> bool:
        """Return whether the server still showed its old label for new weights: it belongs to the
        old ones.
        """
        return (
            update.loaded
            and before is not None
            and before[0] != update.version
            and before[1] == update.label
        )
