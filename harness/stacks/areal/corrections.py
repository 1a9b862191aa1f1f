"""AReaL's decoupled PPO: its rejection sampling and its actor loss."""

from __future__ import annotations

import importlib
from typing import Any

from rollproof.core.contract import Contract
from rollproof.core.correction_records import Correction, CorrectionBatch
from rollproof.core.correction_terms import Aggregate, Rejection, Statistic
from rollproof.core.subjects import SubjectFactory
from rollproof.corrections.correction_subject import correction_contract

__all__ = ["corrections"]


class DecoupledCorrection:
    """``apply_rejection_sampling`` and ``ppo_actor_loss_fn`` with one configuration."""

    def __init__(self, options: dict[str, Any], contract: Contract) -> None:
        self.contract = contract
        self._functions = importlib.import_module("areal.utils.functional.functional")
        arguments = importlib.import_module("areal.api.cli_args")
        self._config = arguments.RejectionSamplingConfig(**options)

    def correct(self, batch: CorrectionBatch) -> Correction:
        """Return weights, mask, the share of what is filtered, and the loss."""
        mask = batch.mask.bool()
        # not detached: whether the weights stop the gradient is what is judged
        found = self._functions.apply_rejection_sampling(
            proximal_logprobs=batch.old,
            old_logprobs=batch.rollout,
            loss_mask=mask,
            cu_seqlens=None,
            config=self._config,
        )
        loss, _ = self._functions.ppo_actor_loss_fn(
            logprobs=batch.current,
            proximal_logprobs=batch.old.detach(),
            old_logprobs=batch.rollout.detach(),
            advantages=batch.advantages,
            eps_clip=0.2,
            loss_mask=mask,
            rejection_sampling=self._config,
        )
        return Correction(
            weights=found.behave_imp_weight,
            mask=found.loss_mask,
            loss=loss,
            metrics={"filtered_fraction": found.filtered_fraction},
        )


def corrections() -> dict[str, SubjectFactory]:
    """Return the judged configurations, by name."""
    shared: dict[str, Any] = {"arrays": "torch", "masked": "zero", "loss": "ppo"}
    rejects: dict[str, Any] = {
        "rejects_by": "both",
        "metrics": {"filtered_fraction": "rejected-fraction"},
    }
    clamps: dict[str, Any] = {"metrics": {"filtered_fraction": "clipped-fraction"}}
    return {
        "token-mask": lambda: DecoupledCorrection(
            {"level": "token", "action": "mask", "metric": "ratio", "upper": 5.0, "lower": 0.5},
            correction_contract(rejections=Rejection(lower=0.5, upper=5.0), **rejects, **shared),
        ),
        "token-clamp": lambda: DecoupledCorrection(
            {"level": "token", "action": "clamp", "metric": "ratio", "upper": 2.0, "lower": 0.5},
            correction_contract(lower=0.5, upper=2.0, **clamps, **shared),
        ),
        "sequence-mask": lambda: DecoupledCorrection(
            {"level": "sequence", "action": "mask", "metric": "ratio", "upper": 2.0, "lower": 0.5},
            correction_contract(
                level="geometric",
                rejections=Rejection(aggregate=Aggregate.MEAN, lower=0.5, upper=2.0),
                **rejects,
                **shared,
            ),
        ),
        "sequence-clamp": lambda: DecoupledCorrection(
            {"level": "sequence", "action": "clamp", "metric": "ratio", "upper": 2.0, "lower": 0.5},
            correction_contract(level="geometric", lower=0.5, upper=2.0, **clamps, **shared),
        ),
        "token-k2": lambda: DecoupledCorrection(
            {"level": "token", "action": "mask", "metric": "kl_k2", "upper": 0.5},
            correction_contract(
                rejections=Rejection(statistic=Statistic.K2, upper=0.5), **rejects, **shared
            ),
        ),
        # its documentation: "k3 = r - log(r) - 1", r the proximal policy over the behaviour's
        "token-k3": lambda: DecoupledCorrection(
            {"level": "token", "action": "mask", "metric": "kl_k3", "upper": 0.5},
            correction_contract(
                rejections=Rejection(statistic=Statistic.K3, upper=0.5), **rejects, **shared
            ),
        ),
        "sequence-k3": lambda: DecoupledCorrection(
            {"level": "sequence", "action": "mask", "metric": "kl_k3", "agg": "mean", "upper": 0.5},
            correction_contract(
                rejections=Rejection(statistic=Statistic.K3, aggregate=Aggregate.MEAN, upper=0.5),
                **rejects,
                **shared,
            ),
        ),
    }
