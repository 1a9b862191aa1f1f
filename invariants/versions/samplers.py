"""Which labels are right for which tokens of a delivered sample, and how far that is known.

Ground truth is the version that the fake engine says sampled a token, under every label that those
weights were ever published with (a retag makes two of them right). Without it, the spans that an
engine shows are believed, and so is the single label of a call during which its server's weights
and label did not change. All else is unknown, and an unknown version equals nothing. A stack is not
blamed for what its engine showed it: if that was wrong (``versions.engine-tags``) or coarser than
the truth, either reading is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollproof.core.contract import Versions
from rollproof.core.records import Version
from rollproof.invariants._shared.delivery import delivery
from rollproof.judging.weight_history import Key, key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.stitching import Stretch
    from rollproof.judging.weight_history import WeightHistory

__all__ = [
    "Key",
    "Sampler",
    "engines_show_versions",
    "key",
    "order",
    "published",
    "reply_samplers",
    "samplers",
]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Response tokens of one attempt that were sampled by one version.

    start: The first token.
    end: The token after the last one.
    attempt: The index of the attempt.
    labels: The right labels (empty: the weights never had one; ``None``: unknown).
    shown: The label that the engine showed.
    accepted: ``labels``, and labels that a stack may take for right, since the engine showed them;
        ``None`` if no tag can be called wrong.
    unlabelled: Whether the weights were loaded and never published.
    exact: Whether ``accepted`` is the truth alone.
    carried: Labels of other weights that servers still showed for these, before they got their own.
    """

    start: int
    end: int
    attempt: int
    labels: frozenset[Key] | None
    shown: Key
    accepted: frozenset[Key] | None
    unlabelled: bool = False
    exact: bool = True
    carried: frozenset[Key] = frozenset()

    @property
    def misled(self) -> bool:
        """Whether the engine showed a label that the truth contradicts."""
        return (
            bool(self.labels)
            and self.shown is not None
            and self.shown not in (self.labels or ())
            and self.shown not in self.carried
        )


def samplers(view: RequestView) -> tuple[Sampler, ...] | None:
    """Return the samplers of the delivered response in order; ``None`` if tokens and reference do
    not align.
    """
    delivered = delivery(view)
    if delivered is None or not delivered.reliable or not delivered.aligned:
        return None
    parts = reply_samplers(view)
    if delivered.count == len(delivered.reference.response_ids):
        return parts
    return tuple(
        replace(part, end=min(part.end, delivered.count))
        for part in parts
        if part.start < delivered.count
    )


def reply_samplers(view: RequestView) -> tuple[Sampler, ...]:
    """Return the samplers of all tokens that the engines delivered, computed once."""
    if "samplers" not in view.memo:
        view.memo["samplers"] = _samplers(view)
    out: tuple[Sampler, ...] = view.memo["samplers"]
    return out


def engines_show_versions(view: RequestView) -> bool:
    """Return whether the engines show version labels, by contract or by what this request was
    shown.
    """
    if view.engine is not None:
        return view.engine.versions is not Versions.NONE
    return any(
        reply.output.version is not None or reply.output.spans
        for attempt in view.attempts
        for reply in attempt.replies
    )


def published(history: WeightHistory, label: Version) -> bool:
    """Return whether the label was ever published, in either spelling."""
    return _rank(history, label) is not None


def order(history: WeightHistory, labels: Iterable[Key]) -> dict[Key, int] | None:
    """Return the rank of each label: by number if all are numbers, otherwise by first publication;
    ``None`` if one was never published.
    """
    names = set(labels)
    # Numbers order themselves, even if they were published out of order by a lagging replica.
    if all(isinstance(label, int) for label in names):
        return {label: label for label in names if isinstance(label, int)}
    ranks = {label: _rank(history, label) for label in names}
    out = {label: rank for label, rank in ranks.items() if rank is not None}
    return out if len(out) == len(ranks) else None


def _rank(history: WeightHistory, label: Version) -> int | None:
    rank = history.rank_of(label)
    if rank is None and label is not None:
        rank = history.rank_of(str(label) if isinstance(label, int) else key(label))
    return rank


def _samplers(view: RequestView) -> tuple[Sampler, ...]:
    by_attempt: dict[int, list[Stretch]] = {}
    for stretch in view.stitched.stretches:
        if stretch.attempt >= 0:
            by_attempt.setdefault(stretch.attempt, []).append(stretch)
    engine_shows = engines_show_versions(view)
    return tuple(
        part
        for number, stretches in by_attempt.items()
        for part in _call_samplers(view, view.attempts[number], stretches, engine_shows)
    )


def _call_samplers(
    view: RequestView, attempt: Attempt, stretches: Sequence[Stretch], engine_shows: bool
) -> list[Sampler]:
    reply = attempt.consumed
    spans = bool(reply is not None and reply.output.spans)
    truths = [_truth(view, attempt, stretch, spans) for stretch in stretches]
    # One label for a call that several versions sampled names one of them only by convention
    # (admission or emission).
    ambiguous = not spans and len({truth for truth, _ in truths}) > 1
    all_labels = frozenset().union(*(truth for truth, _ in truths if truth is not None))
    out = []
    for stretch, (labels, unlabelled) in zip(stretches, truths, strict=True):
        shown = key(stretch.shown)
        carried = (
            frozenset(key(label) for label in view.history.carried_of(stretch.true))
            if stretch.true is not None
            else frozenset()
        )
        accepted: frozenset[Key] | None
        if labels is None or (shown is None and (unlabelled or engine_shows)):
            # versions.unknown-stays-unknown judges a tag where none was shown.
            accepted = None
        elif unlabelled or ambiguous:
            accepted = all_labels | {shown} if ambiguous else frozenset({shown})
        else:
            before_own_label = shown is None or _before_own_label(view, attempt, stretch.true)
            accepted = (
                labels
                | (carried if before_own_label else frozenset())
                | ({shown} if shown is not None else frozenset())
            )
        out.append(
            Sampler(
                start=stretch.start,
                end=stretch.end,
                attempt=stretch.attempt,
                labels=labels,
                shown=shown,
                accepted=accepted,
                unlabelled=unlabelled,
                exact=accepted is not None and accepted == labels,
                carried=carried,
            )
        )
    return out


def _before_own_label(view: RequestView, attempt: Attempt, version: Version) -> bool:
    """Return whether the call was made before its server had a label of their own for weights
    ``version``.
    """
    named = view.history.named_at(attempt.call.server_id, version)
    return named is None or attempt.call.index < named


def _truth(
    view: RequestView, attempt: Attempt, stretch: Stretch, spans: bool
) -> tuple[frozenset[Key] | None, bool]:
    """Return the labels of the weights that sampled the stretch, and whether those weights were
    loaded but never published.
    """
    history = view.history
    if stretch.true is not None:
        labels = history.labels_of(stretch.true)
        if labels:
            return frozenset(key(label) for label in labels), False
        if stretch.true in history.unlabelled():
            return frozenset(), True
    if stretch.shown is not None and (spans or _weights_unchanged(view, attempt)):
        return frozenset({key(stretch.shown)}), False
    return None, False


def _weights_unchanged(view: RequestView, attempt: Attempt) -> bool:
    """Return whether the server's weights and label stayed the same while it worked on the call."""
    reply = attempt.consumed
    if reply is None or not view.history.updates:
        return False
    server, first, last = attempt.call.server_id, attempt.call.index, reply.index
    # Recent updates decide, and a long run has thousands.
    for update in reversed(view.history.updates):
        if update.index < first:
            return True
        if update.server_id == server and update.index < last:
            return False
    return True
