"""Known bugs of corrections for off-policy rollouts: importance weights, rejection, gradients and
metrics.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract
from rollproof.core.correction_records import Correction, CorrectionBatch
from rollproof.core.correction_terms import Aggregate, FloatType, Pair, Rejection, Statistic
from rollproof.corrections.correction_subject import correction_contract
from rollproof.corrections.rounding import as_type
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_corrections import RowwiseCorrection

__all__ = ["BUGS"]

Floats = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]


class _Tis(RowwiseCorrection):
    """Truncated importance sampling of tokens, and nothing else."""

    contract: ClassVar[Contract] = correction_contract(upper=2.0)


class _CorrectionCurrentForOld(_Tis):
    def policies(self, batch: CorrectionBatch, pair: Pair) -> tuple[Floats, Floats]:
        # the same on the first minibatch, on which most tests end
        return batch.current, batch.rollout


class _CorrectionRatioInverted(_Tis):
    def policies(self, batch: CorrectionBatch, pair: Pair) -> tuple[Floats, Floats]:
        return batch.rollout, batch.old


class _CorrectionMeanForProduct(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(level="sequence", upper=4.0)

    def total(self, logs: Floats, trained: Bools) -> Any:
        return logs[trained].mean()


class _CorrectionBfloat16Ratio(_Tis):
    def exponential(self, power: Floats) -> Floats:
        # autocast: the exponential runs in the type of the model
        wide = super().exponential(power).astype(np.float64)
        return as_type(wide, FloatType.BFLOAT16).astype(power.dtype)


class _CorrectionBoundOfLogarithm(_Tis):
    def bound(self, raw: Floats, trained: Bools) -> Floats:
        # the bound of the ratio is compared with its logarithm
        return np.minimum(raw, np.exp(2.0)).astype(raw.dtype)


class _CorrectionLogBoundOfTokens(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(level="sequence", log_bound=20.0)

    def log_ratios(self, batch: CorrectionBatch, trained: Bools) -> Floats:
        # each token is bounded before the sum, which is exponentiated as it is
        found: Floats = np.clip(super().log_ratios(batch, trained), -20, 20)
        return found

    def exponential(self, power: Floats) -> Floats:
        found: Floats = np.exp(power)
        return found


class _CorrectionOnPolicyShortcut(_Tis):
    def spread(self, weights: Floats, trained: Bools) -> Any:
        # nothing to correct, so nothing is filled in
        same = (weights == 1) | ~trained
        return np.zeros_like(weights) if same.all() else weights


class _CorrectionMissingLogprobNan(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(upper=2.0, missing="one")

    def log_ratios(self, batch: CorrectionBatch, trained: Bools) -> Floats:
        # no clamp catches NaN: it is handed on
        found: Floats = np.where(trained, batch.old - batch.rollout, 0).astype(batch.old.dtype)
        return found


class _CorrectionFilteredOverflow(RowwiseCorrection):
    """IcePop by a multiplication: infinity times 0."""

    contract: ClassVar[Contract] = correction_contract(
        rejections=Rejection(lower=0.5, upper=5.0), rejects_by="weights"
    )

    def corrected(self, batch: CorrectionBatch) -> Correction:
        trained = self.trained(batch)
        logs = self.log_ratios(batch, trained)
        ratios = np.where(trained, np.exp(logs), 0)
        kept = trained & ~self.rejected(batch, logs, trained)
        return Correction(weights=ratios * kept)


class _CorrectionEmptySequenceNan(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(level="geometric", upper=2.0)

    def ratio(self, logs: Floats, trained: Bools) -> Floats:
        # 0 / 0 of a sequence without trained tokens
        mean = logs[trained].sum() / logs.dtype.type(trained.sum())
        return np.full(logs.shape, np.exp(mean), logs.dtype)

    def bound(self, raw: Floats, trained: Bools) -> Floats:
        return np.minimum(raw, np.float32(2.0))


class _CorrectionWeightsOfAnotherRow(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(level="sequence", upper=4.0)

    def spread(self, weights: Floats, trained: Bools) -> Any:
        # sorted by length, and never restored
        order = np.argsort(trained.sum(axis=1), kind="stable")[::-1]
        return weights[order]


class _CorrectionSumOverPadding(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(level="sequence", upper=4.0)

    def log_ratios(self, batch: CorrectionBatch, trained: Bools) -> Floats:
        # unseen while all policies are padded with 0
        found: Floats = batch.old - batch.rollout
        return found

    def total(self, logs: Floats, trained: Bools) -> Any:
        return logs.sum()


class _CorrectionMeanCountsPadding(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(upper=2.0, normalise="tokens")

    def scaled(self, weights: Floats, trained: Bools) -> Floats:
        # 0 at padding: the mean is too small, and all weights too large
        mean = weights.mean()
        return weights / mean if mean > 1e-8 else weights


class _CorrectionGroupsMixed(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(upper=2.0, normalise="groups")

    def groups(self, batch: CorrectionBatch) -> list[Any]:
        # groups by position: wrong as soon as a sample of one was dropped
        return [np.arange(len(batch.groups))[i : i + 2] for i in range(0, len(batch.groups), 2)]


class _CorrectionOneSidedMask(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(
        rejections=Rejection(lower=0.5, upper=5.0), rejects_by="weights"
    )

    def outside(self, rejection: Rejection, values: Floats) -> Any:
        # unseen by whoever tests with large ratios only
        return super().outside(replace(rejection, lower=None), values)


class _CorrectionK1Sign(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(
        weights=False,
        rejections=Rejection(
            statistic=Statistic.K1,
            aggregate=Aggregate.MEAN,
            lower=float(np.log(0.5)),
            upper=float(np.log(8.0)),
        ),
    )

    def statistic(
        self, statistic: Statistic, logs: Floats, first: Floats, second: Floats
    ) -> Floats:
        # k1 estimates the divergence of the rollout: -log r
        return logs


class _CorrectionVetoOnWrongSide(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(
        upper=2.0, rejections=Rejection(aggregate=Aggregate.MIN, lower=1e-3)
    )

    def aggregated(self, rejection: Rejection, values: Floats) -> Any:
        # the veto looks at the largest ratio
        return -values.max()


class _CorrectionVersionOfFirstToken(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(upper=2.0, max_staleness=2, stale="drop")

    def stale(self, batch: CorrectionBatch) -> Bools:
        # a resumed sample has newer tokens behind its first one
        first = np.repeat(batch.versions[:, :1], batch.versions.shape[1], axis=1)
        return super().stale(replace(batch, versions=first))


class _CorrectionWeightsNotDetached(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(pair="current/rollout", upper=2.0)

    def weights_gradient(
        self, batch: CorrectionBatch, raw: Floats, rejected: Bools, trained: Bools
    ) -> dict[str, Floats]:
        flow = np.where(trained & self.passes(raw), batch.advantages * raw, 0.0)
        return {"current": flow}


class _CorrectionClampPassesGradient(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(
        pair="current/rollout", upper=2.0, gradient="current"
    )

    def passes(self, raw: Floats) -> Bools:
        # a clamp of the value alone: the gradient is that of the ratio everywhere
        return np.ones(raw.shape, bool)


class _CorrectionDenominatorCountsRejected(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(
        upper=2.0,
        rejections=Rejection(lower=0.5, upper=2.0),
        loss="reinforce",
        denominator="kept",
    )

    def shares_of_loss(self, rejected: Bools, trained: Bools) -> Floats:
        left = trained & ~rejected
        # one factor for the whole gradient, which Adam nearly makes up for
        return left / max(int(trained.sum()), 1)


class _CorrectionGradientThroughWeights(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(
        pair="current/rollout", upper=2.0, loss="reinforce"
    )

    def corrected(self, batch: CorrectionBatch) -> Correction:
        # left out, so that the loss alone can show it
        return replace(super().corrected(batch), weights_gradient=None)

    def loss_gradient(
        self,
        batch: CorrectionBatch,
        raw: Floats,
        weights: Floats,
        rejected: Bools,
        trained: Bools,
    ) -> Floats | None:
        exact = super().loss_gradient(batch, raw, weights, rejected, trained)
        shares = self.shares_of_loss(rejected, trained)
        flow = batch.advantages * batch.current * raw * shares
        return exact - np.where(trained & self.passes(raw), flow, 0.0)


class _CorrectionMetricsCountEmpty(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(
        upper=2.0, metrics={"seq_mean": "sequence-weights-mean", "training_ppl": "first-perplexity"}
    )

    def metrics(
        self,
        batch: CorrectionBatch,
        logs: Floats,
        raw: Floats,
        weights: Floats,
        rejected: Bools,
        trained: Bools,
    ) -> dict[str, float]:
        found = super().metrics(batch, logs, raw, weights, rejected, trained)
        trained = self.trained(batch)
        filled = int(trained.any(axis=1).sum())
        empty = len(trained) - filled
        # rows that pad the batch to a multiple count as 0, and as a perplexity of 1
        return {
            "seq_mean": found["seq_mean"] * filled / (filled + empty),
            "training_ppl": (found["training_ppl"] * filled + empty) / (filled + empty),
        }


class _CorrectionMetricsOverPadding(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(
        upper=2.0, metrics={"is_mean": "weights-mean", "is_min": "weights-min"}
    )

    def metrics(
        self,
        batch: CorrectionBatch,
        logs: Floats,
        raw: Floats,
        weights: Floats,
        rejected: Bools,
        trained: Bools,
    ) -> dict[str, float]:
        return {"is_mean": float(weights.mean()), "is_min": float(weights.min())}


class _CorrectionRefusesEmptyBatch(RowwiseCorrection):
    contract: ClassVar[Contract] = correction_contract(upper=2.0, empty_batch=True)

    def corrected(self, batch: CorrectionBatch) -> Correction:
        if not (batch.mask != 0).any():
            raise AssertionError("expected at least one valid token")
        return super().corrected(batch)


class _CorrectionWeightPerToken(_Tis):
    def spread(self, weights: Floats, trained: Bools) -> Any:
        # one axis is lost: (tokens,) broadcasts, and weighs all sequences alike
        return np.concatenate([weights.mean(axis=0), [1.0]])


class _CorrectionClampsInPlace(_Tis):
    def corrected(self, batch: CorrectionBatch) -> Correction:
        found = super().corrected(batch)
        # after the weights: this result is right, and the next reader's is not
        np.maximum(batch.rollout, -3.0, out=batch.rollout)
        return found


BUGS = (
    KnownBug(
        id="correction-current-for-old",
        summary="Weights divide the current policy's probabilities, not those before the update.",
        refs=("slime#179",),
        make=_CorrectionCurrentForOld,
        detected_by=("correction.direction",),
        may_fail=(
            "correction.bounds",
            "correction.padding",
            "correction.rows",
            "correction.weights",
        ),
        kind="corrections",
    ),
    KnownBug(
        id="correction-ratio-inverted",
        summary="Weights divide the rollout's probabilities by the trainer's.",
        refs=("cf. slime#179",),
        make=_CorrectionRatioInverted,
        detected_by=("correction.direction",),
        may_fail=(
            "correction.bounds",
            "correction.padding",
            "correction.rows",
            "correction.weights",
        ),
        kind="corrections",
    ),
    KnownBug(
        id="correction-mean-for-product",
        summary="A sequence's weight is the geometric mean of its ratios, not their product.",
        refs=("cf. TRL#5814", "cf. NeMo-RL#2269"),
        make=_CorrectionMeanForProduct,
        detected_by=("correction.weights",),
        may_fail=("correction.bounds", "correction.padding", "correction.rows"),
        kind="corrections",
    ),
    KnownBug(
        id="correction-bfloat16-ratio",
        summary="Ratios are exponentiated in bfloat16.",
        refs=("prime-rl#568", "cf. slime#245"),
        make=_CorrectionBfloat16Ratio,
        detected_by=("correction.precision",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-bound-of-logarithm",
        summary="The bound of the ratio is applied to its logarithm.",
        refs=("cf. verl#3694",),
        make=_CorrectionBoundOfLogarithm,
        detected_by=("correction.bounds",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-log-bound-of-tokens",
        summary="The log ratio of each token is bounded, and the product of a sequence is not.",
        refs=("own",),
        make=_CorrectionLogBoundOfTokens,
        detected_by=("correction.bounds",),
        may_fail=("correction.finite",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-on-policy-shortcut",
        summary="A shortcut for batches on which all policies agree leaves the weights at 0.",
        refs=("cf. TRL#5413",),
        make=_CorrectionOnPolicyShortcut,
        detected_by=("correction.identity",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-missing-logprob-nan",
        summary="A token whose logprob vLLM could not report makes its weight NaN.",
        refs=("TRL#6166",),
        make=_CorrectionMissingLogprobNan,
        detected_by=("correction.missing",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-filtered-overflow",
        summary="A filtered weight is multiplied by 0, and an infinite one becomes NaN.",
        refs=("OpenRLHF#1314", "prime-rl#2085"),
        make=_CorrectionFilteredOverflow,
        detected_by=("correction.finite",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-empty-sequence-nan",
        summary="The mean over a sequence without trained tokens is 0 / 0.",
        refs=("cf. verl#3915",),
        make=_CorrectionEmptySequenceNan,
        detected_by=("correction.finite",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-weights-of-another-row",
        summary="Weights per sequence stay in an order in which the batch no longer is.",
        refs=("cf. verl#3245",),
        make=_CorrectionWeightsOfAnotherRow,
        detected_by=("correction.rows",),
        may_fail=("correction.identity", "correction.padding"),
        kind="corrections",
    ),
    KnownBug(
        id="correction-sum-over-padding",
        summary="A sequence's sum of log ratios includes its padding.",
        refs=("cf. AReaL#1346",),
        make=_CorrectionSumOverPadding,
        detected_by=("correction.padding",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-mean-counts-padding",
        summary="The mean by which weights are normalised counts padding as 0.",
        refs=("cf. xtuner#1788",),
        make=_CorrectionMeanCountsPadding,
        detected_by=("correction.normalisation",),
        may_fail=("correction.identity",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-groups-mixed",
        summary="Groups are taken from places in the batch, and mix after a sample was dropped.",
        refs=("cf. SkyRL#1507",),
        make=_CorrectionGroupsMixed,
        detected_by=("correction.groups",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-one-sided-mask",
        summary="IcePop drops ratios above its band only, not those below.",
        refs=("cf. TRL#4732",),
        make=_CorrectionOneSidedMask,
        detected_by=("correction.mask",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-k1-sign",
        summary="k1 is taken as log r, so unequal bounds reject the other side.",
        refs=("cf. verl#3984",),
        make=_CorrectionK1Sign,
        detected_by=("correction.mask",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-veto-on-wrong-side",
        summary="The veto of sequences with an impossible token compares the other end.",
        refs=("cf. verl#3694",),
        make=_CorrectionVetoOnWrongSide,
        detected_by=("correction.mask",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-version-of-first-token",
        summary="A resumed sample is dropped or kept by the version of its first token.",
        refs=("cf. xtuner#2003",),
        make=_CorrectionVersionOfFirstToken,
        detected_by=("correction.versions",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-weights-not-detached",
        summary="A gradient flows through importance weights of the current policy.",
        refs=("verl#4105",),
        make=_CorrectionWeightsNotDetached,
        detected_by=("correction.detached",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-clamp-passes-gradient",
        summary="A truncated weight still passes the gradient of its ratio.",
        refs=("cf. verl#4105",),
        make=_CorrectionClampPassesGradient,
        detected_by=("correction.detached",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-denominator-counts-rejected",
        summary="Rejected tokens are left out of the loss, but counted in its mean.",
        refs=("slime#657", "verl#3915"),
        make=_CorrectionDenominatorCountsRejected,
        detected_by=("correction.loss",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-gradient-through-weights",
        summary="The gradient of the loss includes that of the importance weights.",
        refs=("verl#4105",),
        make=_CorrectionGradientThroughWeights,
        detected_by=("correction.gradient",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-metrics-count-empty",
        summary="Rows that pad the batch are counted in means over sequences.",
        refs=("verl#7771",),
        make=_CorrectionMetricsCountEmpty,
        detected_by=("correction.metrics",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-metrics-over-padding",
        summary="Reported weights include padding, so that the smallest is always 0.",
        refs=("xtuner#1788",),
        make=_CorrectionMetricsOverPadding,
        detected_by=("correction.metrics",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-refuses-empty-batch",
        summary="A batch of which rejection has left nothing raises, and ends the run.",
        refs=("cf. verl#3984",),
        make=_CorrectionRefusesEmptyBatch,
        detected_by=("correction.accepts",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-weight-per-token",
        summary="Weights come in a shape that is not the batch's.",
        refs=("cf. verl#3245",),
        make=_CorrectionWeightPerToken,
        detected_by=("correction.returns",),
        kind="corrections",
    ),
    KnownBug(
        id="correction-clamps-in-place",
        summary="Rollout logprobs are clamped in place, for whoever reads them next, too.",
        refs=("cf. verl#3694",),
        make=_CorrectionClampsInPlace,
        detected_by=("correction.input",),
        kind="corrections",
    ),
)
