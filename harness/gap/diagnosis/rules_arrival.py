"""The rule about updates that arrived in part, late, or at some engines alone."""

from __future__ import annotations

from collections.abc import Sequence

from rollproof.gap.column_checks import counted, listed
from rollproof.gap.diagnosis.arrival import Arrival
from rollproof.gap.diagnosis.causes import Cause, CauseName, Scene
from rollproof.gap.diagnosis.rules import DISTRIBUTION_RULES
from rollproof.gap.diagnosis.rules_groups import label_parts, scene_of

__all__ = ["arrival"]

# Chance by which a share may be called less than all
_MAX_CHANCE = 1e-3
# From this share on what is missing is too little to be called late
_ALL = 0.9
# Up to this lower end nothing may have arrived
_NOTHING = 0.1
# Share of tokens that neither weights come near, from which they are not what was sampled from
_APART = 0.1
_CONFIDENCE = 0.95
_MAX_LISTED = 4


def arrival(scene: Scene) -> Cause | None:
    """Find weights that are older than their tag says, in whole or in part.

    The scores under the tagged and the previous weights give it; they are pooled over tags.
    """
    if not scene.arrivals or scene.signs.shift is not None or _otherwise_explained(scene):
        return None
    late = [item for item in scene.arrivals if _is_late(item)]
    parts = [item for item in scene.arrivals if item.label]
    late_parts = [item for item in late if item.label]
    if late_parts and len(late_parts) < len(parts):
        masks = dict(label_parts(scene.pairs))
        return _cause(
            [
                item
                for item in late_parts
                if not _otherwise_explained(scene_of(scene.pairs.select(masks[item.label])))
            ]
        )
    return _cause([item for item in late if not item.label])


def _is_late(item: Arrival) -> bool:
    surely = item.if_all < _MAX_CHANCE and item.share.value < _ALL
    return surely and item.apart < _APART


def _otherwise_explained(scene: Scene) -> bool:
    """Whether the distribution of the logprobs has a cause of its own.

    Another temperature or a truncated support scales an update too, and logprobs of another text
    lie between any two.
    """
    return any(rule(scene) is not None for rule in DISTRIBUTION_RULES)


def _cause(late: Sequence[Arrival]) -> Cause | None:
    if not late:
        return None
    mixed = [item.mixture for item in late if item.mixture is not None and item.mixture.sure]
    partly = not mixed and any(item.share.low > _NOTHING for item in late)
    texts = []
    for item in late[:_MAX_LISTED]:
        place = f"at {item.label} alone " if item.label else ""
        texts.append(
            f"{place}{item.share.value:.2f} (95 % interval {item.share.low:.2f} to"
            f" {item.share.high:.2f}, {counted(item.sequences, 'sequence')})"
        )
    more = f" and {len(late) - len(texts)} more" if len(late) > len(texts) else ""
    because = (
        "the share of the update from the previous weights to the tagged ones that arrived is"
        f" {', '.join(texts)}{more}"
    )
    if mixed:
        old, new = sum(item.old for item in mixed), sum(item.new for item in mixed)
        because += (
            f": the previous weights fit {counted(old, 'sequence')}, and the tagged ones {new:,}"
        )
    return Cause(
        name=CauseName.PARTLY if partly else CauseName.STUCK,
        confidence=_CONFIDENCE,
        because=because,
        advice=(
            "Some tensors were not loaded, or calls ran on during the load: compare the checksum of"
            " each tensor at trainer and engine after an update. An engine of lower precision also"
            " loses a part of small updates."
            if partly
            else (
                "The engine answers from the weights before the update: it did not reach"
                f" {listed(item.label for item in late) if late[0].label else 'it'}, was not"
                " awaited, or is smaller than the engine's precision resolves."
            )
        ),
    )
