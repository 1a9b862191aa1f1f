"""Parts of replay bugs: episodes, the checks that wrong rows also break, and routers that fall
back.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollproof.core.events.replay import Action, Phase
from rollproof.core.records import FloatArray, IntArray
from rollproof.fakes.trainers.moe_model import chosen
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.fakes.trainers.trainer_parts import ReplayRouter

__all__ = ["RECOMPUTED", "WRONG_ROWS", "FallsBack", "routers"]

RECOMPUTED = ("full recompute", "failure in recompute")
# Checks of a self-replay that wrong rows also break.
WRONG_ROWS = ("replay.self-gradients",)


def routers(
    trainer: ReplayTrainer, layers: Sequence[int], kind: type[ReplayRouter]
) -> dict[tuple[int, int], ReplayRouter]:
    """Return routers of a class for all layers and ranks of a trainer, like ``make_routers``."""
    return {
        (layer, number): kind(layer, trainer.layout.top_k)
        for layer in layers
        for number in range(len(trainer.ranks))
    }


class FallsBack(ReplayRouter):
    """Chooses by itself, silently, if it has no target."""

    def choose(self, scores: FloatArray, phase: Phase) -> IntArray:
        # Megatron raises without a target; verl's copy of the class routes natively
        nothing = not self.queue if phase is Phase.RECOMPUTE else self.target is None
        return (
            chosen(scores, self.top_k)
            if self.action is Action.REPLAY and nothing
            else super().choose(scores, phase)
        )
