"""Correct corrections: one sequence after the other, in plain numpy and with gradients by hand.

They share nothing with the reference of ``rollproof.corrections``, which judges them. Known bugs
override their methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract
from rollproof.core.correction_records import Correction, CorrectionBatch
from rollproof.core.correction_terms import (
    Aggregate,
    Aggregation,
    CorrectionTerms,
    Denominator,
    Gradient,
    Level,
    LossKind,
    Metric,
    Normalise,
    Pair,
    Rejection,
    RejectionChannel,
    Sign,
    StaleTokens,
    Statistic,
)
from rollproof.corrections.correction_subject import correction_contract, correction_terms_of

__all__ = ["REFERENCES", "BypassGeometric", "RowwiseCorrection", "SequenceMis", "TokenTis"]

Floats = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]


class RowwiseCorrection:
    """A ``CorrectionSubject`` that keeps any terms. A subclass sets ``contract``."""

    contract: ClassVar[Contract]

    @cached_property
    def terms(self) -> CorrectionTerms:
        """Its terms."""
        return correction_terms_of(self.contract)

    def correct(self, batch: CorrectionBatch) -> Correction:
        """Return weights, mask, metrics and loss, with their gradients."""
        # what is not bounded may overflow
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return self.corrected(batch)

    def corrected(self, batch: CorrectionBatch) -> Correction:
        """Return the same, with numpy's warnings."""
        terms, kind = self.terms, batch.rollout.dtype
        trained = self.trained(batch)
        logs = self.log_ratios(batch, trained)
        raw = np.zeros(trained.shape, kind)
        for row, own in enumerate(trained):
            raw[row] = self.ratio(logs[row], own)
        bounded = self.bound(raw, trained)
        rejected = self.rejected(batch, logs, trained)
        applied = bounded
        if terms.rejects and terms.rejects_by is not RejectionChannel.MASK:
            applied = np.where(rejected, kind.type(0), bounded)
        weights = self.normalised(applied, batch, trained)
        kept = self.mask(trained, rejected)
        return Correction(
            weights=self.spread(weights, trained) if terms.weights else None,
            mask=kept if terms.rejects and terms.rejects_mask else None,
            metrics=self.metrics(batch, logs, raw, applied, rejected, trained),
            loss=self.loss(batch, weights, rejected, trained),
            weights_gradient=(
                self.weights_gradient(batch, raw, rejected, trained) if terms.weights else None
            ),
            loss_gradient=self.loss_gradient(batch, raw, weights, rejected, trained),
        )

    def trained(self, batch: CorrectionBatch) -> Bools:
        """Return which tokens count."""
        found: Bools = batch.mask != 0
        return found

    def policies(self, batch: CorrectionBatch, pair: Pair) -> tuple[Floats, Floats]:
        """Return the logprobs of a pair."""
        old = batch.old
        if self.terms.pair is Pair.INTERPOLATED_ROLLOUT:
            old = self.interpolated(batch)
        if pair is Pair.OLD_ROLLOUT:
            return batch.old, batch.rollout
        if pair is Pair.CURRENT_ROLLOUT:
            return batch.current, batch.rollout
        return (batch.current, old) if pair is Pair.CURRENT_OLD else (old, batch.rollout)

    def interpolated(self, batch: CorrectionBatch) -> Floats:
        """Return the old logprobs between those of the rollout and the current ones."""
        share = self.shares(batch).astype(batch.rollout.dtype)
        found: Floats = batch.rollout + share * (batch.current - batch.rollout)
        return found

    def shares(self, batch: CorrectionBatch) -> Floats:
        """Return how far each interpolated token is on the way."""
        behind = batch.current_version - batch.versions
        sampled = (behind > 0) & (batch.versions >= 0)
        found: Floats = np.where(sampled, (behind - 1) / np.maximum(behind, 1), 0.0)
        return found

    def log_ratios(self, batch: CorrectionBatch, trained: Bools) -> Floats:
        """Return the log ratio of each trained token; 0 elsewhere."""
        first, second = self.policies(batch, self.terms.pair)
        logs = np.where(trained, first - second, 0)
        # before any sum: one NaN would make the whole sequence NaN
        found: Floats = np.where(np.isnan(logs), 0, logs).astype(batch.rollout.dtype)
        return found

    def ratio(self, logs: Floats, trained: Bools) -> Floats:
        """Return the weights of one sequence before bounds."""
        if not trained.any():
            return np.zeros(logs.shape, logs.dtype)
        if self.terms.level is Level.TOKEN:
            power = logs
        else:
            total = self.total(logs, trained)
            mean = self.terms.level is Level.GEOMETRIC
            power = np.full(logs.shape, total / trained.sum() if mean else total, logs.dtype)
        return np.where(trained, self.exponential(power), logs.dtype.type(0))

    def total(self, logs: Floats, trained: Bools) -> Any:
        """Return the sum of the log ratios of one sequence."""
        return logs[trained].sum()

    def exponential(self, power: Floats) -> Floats:
        """Return ratios."""
        bound = self.terms.log_bound
        if bound is not None:
            power = np.clip(power, -bound, bound)
        with np.errstate(over="ignore"):
            found: Floats = np.exp(power)
        return found

    def bound(self, raw: Floats, trained: Bools) -> Floats:
        """Return weights within the bounds."""
        terms = self.terms
        if terms.lower is None and terms.upper is None:
            return raw
        low = -np.inf if terms.lower is None else terms.lower
        high = np.inf if terms.upper is None else terms.upper
        found: Floats = np.where(trained, np.clip(raw, low, high), 0).astype(raw.dtype)
        return found

    def rejected(self, batch: CorrectionBatch, logs: Floats, trained: Bools) -> Bools:
        """Return the trained tokens that are rejected."""
        found = np.zeros(trained.shape, bool)
        for rejection in self.terms.rejections:
            found |= self.rejected_by(rejection, batch, logs, trained)
        if self.terms.max_staleness is not None:
            stale: Floats = trained & self.stale(batch)
            if self.terms.stale is StaleTokens.DROP_SEQUENCE:
                rows = np.any(stale, axis=1, keepdims=True)
                stale = np.repeat(rows, trained.shape[1], axis=1)
            found |= stale
        return found & trained

    def stale(self, batch: CorrectionBatch) -> Bools:
        """Return the tokens that are too old."""
        allowed = self.terms.max_staleness or 0
        found: Bools = batch.versions < batch.current_version - allowed
        return found

    def rejected_by(
        self, rejection: Rejection, batch: CorrectionBatch, logs: Floats, trained: Bools
    ) -> Bools:
        """Return what one bound rejects."""
        first, second = self.policies(batch, self.terms.pair)
        found = np.zeros(trained.shape, bool)
        for row, own in enumerate(trained):
            if not own.any():
                continue
            values = self.statistic(rejection.statistic, logs[row], first[row], second[row])
            if rejection.aggregate is Aggregate.TOKEN:
                outside = self.outside(rejection, values)
                advantages = batch.advantages[row]
            else:
                found_value = self.aggregated(rejection, values[own])
                outside = np.full(own.shape, self.outside(rejection, np.array(found_value)))
                advantages = np.full(own.shape, batch.advantages[row][own][0])
            if rejection.advantages is Sign.POSITIVE:
                outside &= advantages > 0
            elif rejection.advantages is Sign.NEGATIVE:
                outside &= advantages < 0
            elif rejection.advantages is Sign.NOT_POSITIVE:
                outside &= advantages <= 0
            found[row] = outside & own
        return found

    def statistic(
        self, statistic: Statistic, logs: Floats, first: Floats, second: Floats
    ) -> Floats:
        """Return the statistic of each token of a sequence: of ``ratio``, its logarithm."""
        p, q = np.exp(first), np.exp(second)
        near_p, near_q = np.clip(p, 1e-6, 1 - 1e-6), np.clip(q, 1e-6, 1 - 1e-6)
        made: dict[Statistic, Callable[[], Floats]] = {
            Statistic.RATIO: lambda: logs,
            Statistic.LOG_RATIO: lambda: logs,
            Statistic.K1: lambda: -logs,
            Statistic.K2: lambda: logs * logs / 2,
            # expm1 keeps the digits that r - 1 loses near 1
            Statistic.K3: lambda: np.expm1(logs) - logs,
            Statistic.TV: lambda: np.abs(p - q),
            Statistic.PROBABILITY_CHANGE: lambda: p - q,
            Statistic.BINARY_KL: lambda: (
                near_q * np.log(near_q / near_p)
                + (1 - near_q) * np.log((1 - near_q) / (1 - near_p))
            ),
        }
        with np.errstate(over="ignore"):
            return made[statistic]()

    def aggregated(self, rejection: Rejection, values: Floats) -> Any:
        """Return the statistic of a sequence."""
        made: Mapping[Aggregate, Callable[[Floats], Any]] = {
            Aggregate.SUM: np.sum,
            Aggregate.MEAN: np.mean,
            Aggregate.MAX: np.max,
            Aggregate.MIN: np.min,
        }
        return made[rejection.aggregate](values)

    def outside(self, rejection: Rejection, values: Floats) -> Any:
        """Return whether a statistic is outside its bounds."""
        edge = np.log if rejection.statistic is Statistic.RATIO else float
        found = np.zeros(values.shape, bool)
        if rejection.lower is not None:
            found |= values < edge(rejection.lower)
        if rejection.upper is not None:
            found |= values > edge(rejection.upper)
        return found

    def mask(self, trained: Bools, rejected: Bools) -> Any:
        """Return the mask after rejection."""
        return (trained & ~rejected).astype(np.int64)

    def normalised(self, weights: Floats, batch: CorrectionBatch, trained: Bools) -> Floats:
        """Return weights with a mean of 1."""
        terms = self.terms
        if terms.normalise is Normalise.NONE:
            return weights
        if terms.normalise is Normalise.GROUPS:
            scaled = weights.copy()
            for rows in self.groups(batch):
                scaled[rows] = self.scaled(weights[rows], trained[rows])
            return scaled
        return self.scaled(weights, trained)

    def groups(self, batch: CorrectionBatch) -> list[Any]:
        """Return the rows of each group."""
        return [np.flatnonzero(batch.groups == group) for group in np.unique(batch.groups)]

    def scaled(self, weights: Floats, trained: Bools) -> Floats:
        """Divide weights by their mean."""
        if not trained.any():
            return weights
        if self.terms.normalise is Normalise.SEQUENCES:
            means = [
                row[own].mean() for row, own in zip(weights, trained, strict=True) if own.any()
            ]
            mean = np.mean(means)
        else:
            mean = weights[trained].mean()
        return (weights / mean).astype(weights.dtype) if mean > 1e-8 else weights

    def spread(self, weights: Floats, trained: Bools) -> Any:
        """Return the weights as they are handed over."""
        return weights

    def metrics(
        self,
        batch: CorrectionBatch,
        logs: Floats,
        raw: Floats,
        weights: Floats,
        rejected: Bools,
        trained: Bools,
    ) -> dict[str, float]:
        """Return the declared metrics."""
        if not trained.any():
            return dict.fromkeys((name for name, _ in self.terms.metrics), 0.0)
        first, second = self.policies(batch, self.terms.pair)
        own, ratios = weights[trained], np.exp(logs[trained])
        rows = [row for row, chosen in enumerate(trained) if chosen.any()]
        means = [weights[row][trained[row]].mean() for row in rows]
        low = -np.inf if self.terms.lower is None else self.terms.lower
        high = np.inf if self.terms.upper is None else self.terms.upper
        made: Mapping[Metric, Callable[[], Any]] = {
            Metric.WEIGHTS_MEAN: own.mean,
            Metric.WEIGHTS_MAX: own.max,
            Metric.WEIGHTS_MIN: own.min,
            Metric.SEQUENCE_WEIGHTS_MEAN: lambda: np.mean(means),
            Metric.SEQUENCE_WEIGHTS_MAX: lambda: np.max(means),
            Metric.SEQUENCE_WEIGHTS_MIN: lambda: np.min(means),
            Metric.EFFECTIVE_SAMPLES: lambda: own.sum() ** 2 / (own.size * (own**2).sum()),
            Metric.CLIPPED_FRACTION: lambda: ((raw < low) | (raw > high))[trained].mean(),
            Metric.ABOVE_FRACTION: lambda: (raw > high)[trained].mean(),
            Metric.REJECTED_FRACTION: lambda: rejected[trained].mean(),
            Metric.REJECTED_SEQUENCES: lambda: np.mean([rejected[row].any() for row in rows]),
            Metric.RATIO_MEAN: ratios.mean,
            Metric.K1_MEAN: lambda: -logs[trained].mean(),
            Metric.K3_MEAN: lambda: (ratios - 1 - logs[trained]).mean(),
            Metric.LOG_RATIO_ABS_MEAN: lambda: np.abs(logs[trained]).mean(),
            Metric.LOG_RATIO_ABS_MAX: lambda: np.abs(logs[trained]).max(),
            Metric.FIRST_PERPLEXITY: lambda: _perplexity(first, trained, rows),
            Metric.SECOND_PERPLEXITY: lambda: _perplexity(second, trained, rows),
        }
        return {name: float(made[metric]()) for name, metric in self.terms.metrics}

    def shares_of_loss(self, rejected: Bools, trained: Bools) -> Floats:
        """Return what the loss of each token is multiplied by in the sum of all."""
        terms = self.terms
        left = trained & ~rejected
        counted = left if terms.denominator is Denominator.KEPT else trained
        if terms.aggregation is Aggregation.TOKEN_SUM:
            return left.astype(np.float64)
        if terms.aggregation is Aggregation.TOKEN_MEAN:
            return left / max(int(counted.sum()), 1)
        rows = [row for row in range(len(trained)) if counted[row].any()]
        found = np.zeros(trained.shape)
        for row in rows:
            found[row] = left[row] / counted[row].sum() / len(rows)
        return found

    def policy_ratio(self, batch: CorrectionBatch, trained: Bools) -> Floats:
        """Return PPO's own ratio."""
        first, second = self.policies(batch, self.terms.policy_ratio)
        found: Floats = np.exp(np.where(trained, first - second, 0))
        return found

    def loss(
        self, batch: CorrectionBatch, weights: Floats, rejected: Bools, trained: Bools
    ) -> float | None:
        """Return the declared loss."""
        terms = self.terms
        if terms.loss is LossKind.NONE:
            return None
        factor = self.loss_factor(batch, trained)
        own = weights if terms.weights else np.ones(trained.shape)
        each = -np.where(trained, own * factor, 0.0)
        return float((each * self.shares_of_loss(rejected, trained)).sum())

    def loss_factor(self, batch: CorrectionBatch, trained: Bools) -> Floats:
        """Return what the weights are multiplied by."""
        terms = self.terms
        if terms.loss is LossKind.SURROGATE:
            factor: Floats = batch.advantages
        elif terms.loss is LossKind.REINFORCE:
            factor = batch.advantages * batch.current
        else:
            ratio = self.policy_ratio(batch, trained)
            clipped = np.clip(ratio, 1 - terms.clip_low, 1 + terms.clip_high)
            factor = np.minimum(ratio * batch.advantages, clipped * batch.advantages)
        return factor

    def weights_gradient(
        self, batch: CorrectionBatch, raw: Floats, rejected: Bools, trained: Bools
    ) -> dict[str, Floats]:
        """Return the derivatives of the sum of advantage times weight."""
        none = np.zeros(trained.shape)
        flow = none
        if self.terms.gradient is Gradient.CURRENT:
            flow = self.flow(batch, raw, rejected, trained, batch.advantages)
        return {"rollout": none, "old": none, "current": flow}

    def flow(
        self,
        batch: CorrectionBatch,
        raw: Floats,
        rejected: Bools,
        trained: Bools,
        factors: Floats,
    ) -> Floats:
        """Return the derivative of the sum of factors times weights to the current logprobs."""
        terms = self.terms
        share = np.ones(trained.shape)
        if terms.pair is Pair.INTERPOLATED_ROLLOUT:
            share = self.shares(batch)
        passes = trained & self.passes(raw)
        if terms.rejects and terms.rejects_by is not RejectionChannel.MASK:
            passes = passes & ~rejected
        each = np.where(passes, factors * raw, 0.0)
        if terms.level is Level.TOKEN:
            return each * share
        found = np.zeros(trained.shape)
        for row, own in enumerate(trained):
            if own.any():
                total = each[row].sum()
                found[row][own] = total / (own.sum() if terms.level is Level.GEOMETRIC else 1)
        return found * share

    def passes(self, raw: Floats) -> Bools:
        """Return where a clamp lets a gradient through."""
        terms = self.terms
        low = -np.inf if terms.lower is None else terms.lower
        high = np.inf if terms.upper is None else terms.upper
        if terms.log_bound is not None:
            # at the edge the logarithm is clamped, and passes nothing; the margin covers rounding
            low = max(low, np.exp(-terms.log_bound) * 1.001)
            high = min(high, np.exp(terms.log_bound) * 0.999)
        found: Bools = (raw >= low) & (raw <= high)
        return found

    def loss_gradient(
        self,
        batch: CorrectionBatch,
        raw: Floats,
        weights: Floats,
        rejected: Bools,
        trained: Bools,
    ) -> Floats | None:
        """Return the derivative of the loss to the current logprobs."""
        terms = self.terms
        if terms.loss is LossKind.NONE:
            return None
        own = weights if terms.weights else np.ones(trained.shape)
        shares = self.shares_of_loss(rejected, trained)
        direct = np.zeros(trained.shape)
        if terms.loss is LossKind.REINFORCE:
            direct = own * batch.advantages
        elif terms.loss is LossKind.PPO:
            ratio = self.policy_ratio(batch, trained)
            clipped = np.clip(ratio, 1 - terms.clip_low, 1 + terms.clip_high)
            active = ratio * batch.advantages <= clipped * batch.advantages
            direct = np.where(active, own * batch.advantages * ratio, 0.0)
        found: Floats = -np.where(trained, direct * shares, 0.0)
        if terms.gradient is Gradient.CURRENT:
            factor = np.where(trained, self.loss_factor(batch, trained) * shares, 0.0)
            found = found - self.flow(batch, raw, rejected, trained, factor)
        return found


def _perplexity(logs: Floats, trained: Bools, rows: list[int]) -> Any:
    return np.mean([np.exp(-logs[row][trained[row]].mean()) for row in rows])


class TokenTis(RowwiseCorrection):
    """Truncated importance sampling of each token, old over rollout, with IcePop's mask."""

    contract: ClassVar[Contract] = correction_contract(
        upper=2.0,
        masked="zero",
        # wider than the clamp: from 2 to 8 a token is clamped, and kept
        rejections=Rejection(lower=0.2, upper=8.0),
        metrics={
            "is/mean": "weights-mean",
            "is/max": "weights-max",
            "is/clipped": "clipped-fraction",
            "is/rejected": "rejected-fraction",
            "is/rejected_sequences": "rejected-sequences",
            "is/sequences": "sequence-weights-mean",
            "is/samples": "effective-samples",
            "kl": "k1-mean",
            "k3": "k3-mean",
            "ppl": "first-perplexity",
        },
        normalise="tokens",
        max_staleness=2,
        stale="drop",
        missing="one",
        empty_batch=True,
        loss="reinforce",
    )


class SequenceMis(RowwiseCorrection):
    """Masked importance sampling of sequences, normalised by group, with a veto."""

    contract: ClassVar[Contract] = correction_contract(
        level="sequence",
        lower=0.25,
        upper=4.0,
        rejections=(
            Rejection(aggregate=Aggregate.SUM, lower=0.2, upper=5.0),
            Rejection(aggregate=Aggregate.MIN, lower=1e-3),
            Rejection(statistic=Statistic.K3, aggregate=Aggregate.MEAN, upper=0.5),
        ),
        rejects_by="both",
        log_bound=20.0,
        normalise="groups",
        loss="ppo",
        aggregation="sequence-mean",
        denominator="kept",
    )


class BypassGeometric(RowwiseCorrection):
    """The current policy over the rollout, as one geometric weight a sequence with a gradient."""

    contract: ClassVar[Contract] = correction_contract(
        pair="current/rollout",
        level="geometric",
        upper=1.5,
        gradient="current",
        loss="surrogate",
        max_staleness=1,
        stale="drop-sequence",
        rejects_by="mask",
    )


REFERENCES: Mapping[str, Callable[[], RowwiseCorrection]] = {
    "token-tis-correction": TokenTis,
    "sequence-mis-correction": SequenceMis,
    "bypass-correction": BypassGeometric,
}
"""The references that ``rollproof verify`` judges."""
