"""Known bugs of replay: weights of replayed experts that are wrong, or lack a gradient or half of
it.
"""

from __future__ import annotations

import numpy as np

from rollproof.core.events.replay import Action, Step
from rollproof.core.records import FloatArray, IntArray
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.moe_model import MoeModel, chosen
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer

__all__ = ["BUGS"]


class _OwnModel(ReplayTrainer):
    """A trainer whose models compute gates in their own way."""

    kind: type[MoeModel] = MoeModel

    def make_model(self, seed: int, extra: int) -> MoeModel:
        model = super().make_model(seed, extra)
        model.__class__ = self.kind
        return model


class _AfterTopK(MoeModel):
    """Zeroes scores outside the native top-k before it gathers gates."""

    def gates(self, scores: FloatArray, ids: IntArray) -> FloatArray:
        return np.take_along_axis(scores * self._native_mask(scores), ids, axis=1)

    def logits_backward(
        self, scores: FloatArray, ids: IntArray, weights: FloatArray, d_weights: FloatArray
    ) -> FloatArray:
        return super().logits_backward(
            scores,
            ids,
            weights,
            d_weights * np.take_along_axis(self._native_mask(scores), ids, axis=1),
        )

    def _native_mask(self, scores: FloatArray) -> FloatArray:
        mask = np.zeros_like(scores)
        np.put_along_axis(mask, chosen(scores, self.top_k), 1.0, axis=1)
        return mask


class _ReplayScoresAfterTopK(_OwnModel):
    kind = _AfterTopK


class _Detached(MoeModel):
    """Gate values have no graph."""

    replaying: bool = False

    def logits_backward(
        self, scores: FloatArray, ids: IntArray, weights: FloatArray, d_weights: FloatArray
    ) -> FloatArray:
        return super().logits_backward(
            scores, ids, weights, d_weights * (0.0 if self.replaying else 1.0)
        )


class _Uniform(_Detached):
    """Replayed experts all have the weight 1 / top_k."""

    def gates(self, scores: FloatArray, ids: IntArray) -> FloatArray:
        return (
            np.full(ids.shape, 1.0 / self.top_k) if self.replaying else super().gates(scores, ids)
        )


class _HalfGraph(_Detached):
    """Loses the gradient through the normalisation of scores."""

    def logits_backward(
        self, scores: FloatArray, ids: IntArray, weights: FloatArray, d_weights: FloatArray
    ) -> FloatArray:
        if not self.replaying:
            return super().logits_backward(scores, ids, weights, d_weights)
        d_scores = np.zeros_like(scores)
        np.add.at(d_scores, (np.arange(len(ids))[:, None], ids), d_weights)
        return scores * d_scores


class _ReplayAware(_OwnModel):
    """Tells its model whether a step replays."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        if isinstance(self.model, _Detached):
            self.model.replaying = step.action is Action.REPLAY and step.model == "policy"


class _ReplayGatesDetached(_ReplayAware):
    kind = _Detached


class _ReplayGatesUniform(_ReplayAware):
    kind = _Uniform


class _ReplayGatesHalfTheGraph(_ReplayAware):
    kind = _HalfGraph


class _OverNative(MoeModel):
    """Divides weights by the sum over the native top-k, whatever is executed."""

    def gates(self, scores: FloatArray, ids: IntArray) -> FloatArray:
        own = np.take_along_axis(scores, np.sort(chosen(scores, self.top_k), axis=1), axis=1)
        return np.asarray(np.take_along_axis(scores, ids, axis=1) / own.sum(axis=1, keepdims=True))


class _ReplayNormalisedOverNative(_OwnModel):
    kind = _OverNative
    normalised = True


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="replay-scores-after-top-k",
        summary=(
            "Gates are gathered from scores that are zero outside the native top-k: experts that"
            " differ have zero gates and no gradient."
        ),
        refs=("ISEEKYAN/Megatron-LM#79", "ISEEKYAN/Megatron-LM#49"),
        kind="replay",
        make=_ReplayScoresAfterTopK,
        only=("drift",),
        detected_by=("replay.gate-gradients",),
    ),
    KnownBug(
        id="replay-gates-detached",
        summary="The gate values of replayed experts have no graph.",
        refs=("cf. ISEEKYAN/Megatron-LM#79",),
        kind="replay",
        make=_ReplayGatesDetached,
        only=("drift",),
        detected_by=("replay.gate-gradients", "replay.gate-slope", "replay.self-gradients"),
    ),
    KnownBug(
        id="replay-gates-uniform",
        summary="Replayed experts all have the weight 1 / top_k.",
        refs=("cf. miles#2722",),
        kind="replay",
        make=_ReplayGatesUniform,
        only=("self-replay",),
        detected_by=("replay.self-loss", "replay.self-gradients", "replay.gate-gradients"),
    ),
    KnownBug(
        id="replay-gates-half-the-graph",
        summary=("The gradient of replayed gates leaves out the normalisation of the scores."),
        refs=("cf. ISEEKYAN/Megatron-LM#79",),
        kind="replay",
        make=_ReplayGatesHalfTheGraph,
        only=("drift",),
        detected_by=("replay.gate-slope", "replay.self-gradients"),
    ),
    KnownBug(
        id="replay-normalised-over-native",
        summary="Replayed gates are divided by the sum over the native top-k, as a constant.",
        refs=("cf. ISEEKYAN/Megatron-LM#49",),
        kind="replay",
        make=_ReplayNormalisedOverNative,
        only=("drift",),
        detected_by=("replay.gate-slope",),
    ),
)
