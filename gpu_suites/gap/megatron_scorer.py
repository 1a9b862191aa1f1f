"""A megatron-core trainer of any parallel sizes as a scorer of the gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from rollproof.core.events.replay import Action, Purpose, Step
from rollproof.core.records import IntArray, LogprobArray
from rollproof.core.replay_contract import Recompute
from rollproof.gpu_suites.gap.engine_rollouts import Unit
from rollproof.gpu_suites.gap.scorers import Routes, Scored, rollout_of
from rollproof.replay.megatron.checkpoint import checkpoint_setup
from rollproof.replay.megatron.megatron_trainer import MegatronTrainer
from rollproof.replay.process_group import Ranks

__all__ = ["MegatronScorer"]

_STEPS = count()


class MegatronScorer:
    """megatron-core on ``ranks`` with the weights of ``checkpoints`` (folders by version);
    ``sizes`` are those of a ``MegatronSetup``.

    ``batch`` samples of similar length make a microbatch of all data-parallel ranks together.
    ``recompute`` is how the model is configured: a forward pass alone is the same under each.
    """

    def __init__(
        self,
        checkpoints: Mapping[str, Path],
        dtype: str,
        ranks: Ranks,
        *,
        batch: int = 16,
        recompute: Recompute = Recompute.NONE,
        **sizes: Any,
    ) -> None:
        self._versions = list(checkpoints)
        setup = checkpoint_setup(tuple(checkpoints.values()), dtype=dtype, **sizes)
        self._trainer = MegatronTrainer(setup, ranks)
        self._batch, self._recompute = batch, recompute
        self.name: str = f"megatron {setup.words}" if setup.world_size > 1 else "megatron"
        self.dtype: str = dtype
        self.records: bool = True

    def score(self, units: Sequence[Unit], routes: Routes, *, other: bool = False) -> Scored:
        """See ``Scorer``. Raises ``RankError`` if a rank fails; the other ranks are ended."""
        return self._scored(units, routes, other=other)

    def repeated(self, units: Sequence[Unit], native: Scored) -> Scored:
        """See ``Scorer``."""
        # RouterReplay gives every row a target, padding too. Another target there sends experts
        # another number of rows, and in float32 cuBLAS sums a row in an order that depends on the
        # number of rows. So each version is recorded once more, and replayed row by row.
        return self._scored(units, None, in_place=True)

    def _scored(
        self, units: Sequence[Unit], routes: Routes, *, other: bool = False, in_place: bool = False
    ) -> Scored:
        logprobs: list[LogprobArray | None] = [None] * len(units)
        executed: list[IntArray | None] = [None] * len(units)
        dp = self._trainer.setup.dp
        # a microbatch is divided evenly over the data-parallel ranks
        size = max(dp, self._batch // (4 if other else 1) // dp * dp)
        for version in dict.fromkeys(unit.version for unit in units):
            mine = sorted(
                (i for i, unit in enumerate(units) if unit.version == version),
                key=lambda i: len(units[i].ids),
            )
            samples = {
                number: rollout_of(
                    number, units[number], None if routes is None else routes[number]
                )
                for number in mine
            }
            microbatches = [
                tuple(samples[number] for number in mine[begin : begin + size])
                for begin in range(0, len(mine), size)
            ]
            pp = self._trainer.setup.pp
            if self._trainer.setup.vpp > 1:
                # an interleaved schedule takes complete groups of microbatches
                microbatches += [microbatches[-1][:0]] * (-len(microbatches) % pp)
            self._trainer.set_weights(self._versions.index(version))
            step = Step(
                episode="gap",
                name=f"score-{next(_STEPS)}",
                action=Action.RECORD if routes is None else Action.REPLAY,
                purpose=Purpose.OLD_LOGPROB,
                recompute=self._recompute,
                microbatches=tuple(microbatches),
            )
            outcome = self._trainer.score(step)
            recorded = outcome.recorded
            if in_place:
                again = replace(step, name=f"score-{next(_STEPS)}", action=Action.REPLAY)
                outcome = self._trainer.score(again, in_place=True)
            for number in mine:
                logprobs[number] = outcome.logprobs[str(number)]
                executed[number] = recorded[str(number)] if routes is None else routes[number]
        return Scored(
            logprobs=tuple(own for own in logprobs if own is not None),
            routes=tuple(own for own in executed if own is not None),
        )

    def close(self) -> None:
        """Do nothing: the owner of the ranks closes them."""
