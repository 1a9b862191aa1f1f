"""A trainer without torch that has the most frequent fault of replay: the routes of every sample stand one row behind their tokens."""

from __future__ import annotations

import numpy as np

from rollproof.fakes.trainers.replay_trainer import (
    ReplayTrainer,
)  # a numpy trainer of rollproof's own, which is correct


class ShiftedTrainer(ReplayTrainer):
    def payload(self, sample):
        return np.roll(super().payload(sample), 1, axis=0)
