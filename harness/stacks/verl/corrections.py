"""verl's rollout correction (``verl.trainer.ppo.rollout_corr_helper``) and its bypass loss, on
tensors, as the driver and the actor call them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollproof.core.contract import Contract
from rollproof.core.correction_records import Correction, CorrectionBatch
from rollproof.core.correction_terms import Aggregate, CorrectionTerms, Rejection, Statistic
from rollproof.core.subjects import SubjectFactory
from rollproof.corrections.correction_subject import correction_contract

__all__ = ["corrections"]

_SAFETY = 20.0
"""``SAFETY_BOUND`` of the helper."""
_PREFIX = "rollout_corr/"
_METRICS = {
    "rollout_is_mean": "weights-mean",
    "rollout_is_eff_sample_size": "effective-samples",
    "rollout_is_seq_mean": "sequence-weights-mean",
    "rollout_is_seq_max": "sequence-weights-max",
    "rollout_is_seq_min": "sequence-weights-min",
}
_TOKEN_METRICS = {
    "rollout_is_max": "weights-max",
    "rollout_is_min": "weights-min",
    "rollout_is_ratio_fraction_high": "above-fraction",
}
_OFF_POLICY = {
    "kl": "k1-mean",
    "k3_kl": "k3-mean",
    "training_ppl": "first-perplexity",
    "rollout_ppl": "second-perplexity",
}
_REJECTED = {
    "rollout_rs_masked_fraction": "rejected-fraction",
    "rollout_rs_seq_masked_fraction": "rejected-sequences",
}


class HelperCorrection:
    """``compute_rollout_correction_and_rejection_mask`` with one configuration."""

    def __init__(self, options: Mapping[str, Any], contract: Contract) -> None:
        self.contract = contract
        self._options = options
        self._helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")

    def correct(self, batch: CorrectionBatch) -> Correction:
        """Return weights, mask and metrics."""
        weights, mask, metrics = self._helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=batch.old,
            rollout_log_prob=batch.rollout,
            response_mask=batch.mask,
            **self._options,
        )
        return Correction(
            weights=None if weights is None else weights.batch["rollout_is_weights"],
            mask=mask,
            metrics=metrics,
        )


@dataclass(frozen=True, slots=True)
class _Settings:
    """The parts of an actor's configuration that the losses read."""

    policy_loss: Mapping[str, Any]
    global_batch_info: Mapping[str, Any]


class BypassLoss:
    """The loss of bypass mode, of kind ``reinforce``.

    It returns no weights: those that it multiplies by are asked of the helper, as it asks itself.
    """

    def __init__(self, options: Mapping[str, Any], contract: Contract) -> None:
        self.contract = contract
        self._inner = HelperCorrection(options, contract)
        self._settings = _Settings(
            policy_loss={"rollout_correction": {"loss_type": "reinforce", **options}},
            global_batch_info={},
        )
        self._loss = importlib.import_module("verl.trainer.ppo.core_algos")

    def correct(self, batch: CorrectionBatch) -> Correction:
        """Return the loss, its weights and mask, and the metrics."""
        # the actor computes them from what it differentiates, under no_grad
        detached = replace(batch, old=batch.current.detach(), rollout=batch.rollout.detach())
        inner = self._inner.correct(detached)
        loss, metrics = self._loss.compute_policy_loss_bypass_mode(
            old_log_prob=batch.rollout,
            log_prob=batch.current,
            advantages=batch.advantages,
            response_mask=batch.mask,
            config=self._settings,
        )
        return replace(inner, loss=loss, metrics=metrics)


def _contract(*, metrics: Mapping[str, str], **declared: Any) -> Contract:
    terms = CorrectionTerms.from_dict(
        {
            "arrays": "torch",
            "masked": "zero",
            "log_bound": _SAFETY,
            "metrics": {_PREFIX + name: metric for name, metric in metrics.items()},
            **declared,
        }
    )
    return correction_contract(terms)


def corrections() -> dict[str, SubjectFactory]:
    """Return the judged configurations, by name."""
    token = {**_METRICS, **_TOKEN_METRICS, **_OFF_POLICY}
    rejections = (
        Rejection(statistic=Statistic.K3, upper=0.5),
        # verl compares k1 with the logarithms of its thresholds
        Rejection(
            statistic=Statistic.K1,
            aggregate=Aggregate.MEAN,
            lower=math.log(0.5),
            upper=math.log(2.0),
        ),
        Rejection(statistic=Statistic.K2, aggregate=Aggregate.MAX, upper=2.0),
    )
    rejecting = {"rollout_rs": "token_k3,seq_mean_k1,seq_max_k2"} | {
        "rollout_rs_threshold": "0.5,0.5_2.0,2.0"
    }
    return {
        "token-tis": lambda: HelperCorrection(
            {"rollout_is": "token", "rollout_is_threshold": 2.0},
            _contract(upper=2.0, metrics=token),
        ),
        "normalised-token-tis": lambda: HelperCorrection(
            {
                "rollout_is": "token",
                "rollout_is_threshold": 2.0,
                "rollout_is_batch_normalize": True,
            },
            _contract(upper=2.0, normalise="tokens", metrics=token),
        ),
        "sequence-tis": lambda: HelperCorrection(
            {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
            _contract(level="sequence", upper=2.0, metrics=_METRICS),
        ),
        "icepop": lambda: HelperCorrection(
            {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
            _contract(
                rejections=Rejection(lower=0.5, upper=5.0),
                rejects_by="weights",
                metrics={**_METRICS, "rollout_is_oob_ratio": "rejected-fraction"},
            ),
        ),
        "rejection": lambda: HelperCorrection(
            rejecting,
            _contract(weights=False, rejections=rejections, metrics=_REJECTED),
        ),
        "bypass-reinforce": lambda: BypassLoss(
            {"rollout_is": "token", "rollout_is_threshold": 2.0, **rejecting},
            _contract(
                pair="current/rollout",
                upper=2.0,
                rejections=rejections,
                loss="reinforce",
                denominator="kept",
                metrics=_OFF_POLICY,
            ),
        ),
    }
