"""OpenRLHF's ``PolicyLoss``: its correction is inside the loss.

The loss returns no weights. They are read off its gradient: with the current logprobs equal to the
old ones, the derivative of the loss of a token is its weight times advantage.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rollproof.core.contract import Contract
from rollproof.core.correction_records import Correction, CorrectionBatch
from rollproof.core.correction_terms import Aggregate, Rejection, Statistic
from rollproof.core.subjects import SubjectFactory
from rollproof.corrections.correction_subject import correction_contract
from rollproof.stacks._support.stand_ins import stub_packages

__all__ = ["corrections"]


_UNUSED = ("deepspeed", "flash_attn", "peft", "ring_flash_attn", "transformers")


class PolicyLossCorrection:
    """``PolicyLoss`` with one configuration."""

    def __init__(self, options: Mapping[str, Any], contract: Contract) -> None:
        self.contract = contract
        # the package of the loss imports models at its head, which need more than a CPU has
        with stub_packages(_UNUSED):
            module = importlib.import_module("openrlhf.models.loss")
        self._loss = module.PolicyLoss(**options)

    def correct(self, batch: CorrectionBatch) -> Correction:
        """Return the weights, the loss, and the share of what it filters."""
        old, rollout = batch.old.detach(), batch.rollout.detach()
        loss, _, _, kl, filtered = self._loss(
            batch.current,
            old,
            batch.advantages,
            action_mask=batch.mask,
            rollout_log_probs=rollout,
        )
        return Correction(
            weights=self._weights(batch),
            loss=loss,
            metrics={"vllm_kl": kl, "is_filter_ratio": filtered},
        )

    def _weights(self, batch: CorrectionBatch) -> Any:
        at_old = batch.old.detach().clone().requires_grad_()
        # advantages of -1 undo the sign of the loss: its gradient is the weight
        loss, *_ = self._loss(
            at_old,
            batch.old.detach(),
            -batch.advantages.new_ones(batch.advantages.shape),
            action_mask=batch.mask,
            rollout_log_probs=batch.rollout.detach(),
        )
        loss.backward()
        # the loss is a mean over trained tokens: this takes their number out again
        return at_old.grad * batch.mask.sum()


def corrections() -> dict[str, SubjectFactory]:
    """Return the judged configurations, by name."""
    shared: dict[str, Any] = {
        "arrays": "torch",
        "loss": "ppo",
        "rejects_by": "weights",
        "masked": "any",
    }
    metrics = {"vllm_kl": "k1-mean", "is_filter_ratio": "rejected-fraction"}
    by_sequence = {"vllm_kl": "k1-mean", "is_filter_ratio": "rejected-sequences"}
    return {
        "tis": lambda: PolicyLossCorrection(
            {
                "is_correction_level": "token",
                "is_correction_mode": "clip",
                "is_correction_threshold": [0.1, 2.0],
            },
            correction_contract(
                lower=0.1,
                upper=2.0,
                metrics={**metrics, "is_filter_ratio": "clipped-fraction"},
                **shared,
            ),
        ),
        "icepop": lambda: PolicyLossCorrection(
            {"is_correction_level": "token", "is_correction_threshold": [0.5, 5.0]},
            correction_contract(
                rejections=Rejection(lower=0.5, upper=5.0), metrics=metrics, **shared
            ),
        ),
        # the statistic of the sequence is a gate only: kept tokens keep ratios of their own
        "sequence-mask": lambda: PolicyLossCorrection(
            {"is_correction_level": "seq", "is_correction_threshold": [0.5, 2.0]},
            correction_contract(
                rejections=Rejection(aggregate=Aggregate.MEAN, lower=0.5, upper=2.0),
                metrics=by_sequence,
                **shared,
            ),
        ),
        "sequence-binary-kl": lambda: PolicyLossCorrection(
            {
                "is_correction_level": "seq",
                "is_correction_gating": "binary_kl",
                "is_correction_threshold": [0.0, 0.05],
            },
            correction_contract(
                rejections=Rejection(
                    statistic=Statistic.BINARY_KL, aggregate=Aggregate.MEAN, upper=0.05
                ),
                metrics=by_sequence,
                **shared,
            ),
        ),
        "token-tv": lambda: PolicyLossCorrection(
            {
                "is_correction_level": "token",
                "is_correction_gating": "tv",
                "is_correction_threshold": [0.0, 0.1],
            },
            correction_contract(
                rejections=Rejection(statistic=Statistic.TV, upper=0.1), metrics=metrics, **shared
            ),
        ),
    }
