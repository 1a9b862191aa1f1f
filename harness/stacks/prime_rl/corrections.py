"""prime-rl's losses: their correction is a ratio of the trainer's to the engine's probability, and
a trust region that leaves tokens out.
"""

from __future__ import annotations

from typing import Any

from rollproof.core.contract import Contract
from rollproof.core.correction_records import Correction, CorrectionBatch
from rollproof.core.correction_terms import Rejection, Sign, Statistic
from rollproof.core.subjects import SubjectFactory
from rollproof.corrections.correction_subject import correction_contract
from rollproof.stacks._support.packed_rows import response_length
from rollproof.stacks.prime_rl.upstream import PrimeRl

__all__ = ["corrections"]

_HIGH, _LOW = 0.2, 0.1
"""Bounds of the trust region that differ: prime-rl's own are equal, so that one in the place of the
other would not show.
"""


class PackedLoss:
    """``compute_loss`` with the loss of one configuration, on sequences without padding."""

    def __init__(self, prime: PrimeRl, config: Any, contract: Contract) -> None:
        self.contract = contract
        self._compute = prime.loss.compute_loss
        self._loss = prime.loss.setup_rl_loss_fn(config)

    def correct(self, batch: CorrectionBatch) -> Correction:
        """Return the weights and the loss."""
        import torch

        lengths = [response_length(row) for row in batch.mask]
        advantages = batch.advantages.detach().clone().requires_grad_()

        def sequences(array: Any) -> list[Any]:
            return [row[:length] for row, length in zip(array, lengths, strict=True)]

        loss, _ = self._compute(
            trainer_logprobs=sequences(batch.current),
            inference_logprobs=sequences(batch.rollout.detach()),
            ref_logprobs=None,
            advantages=sequences(advantages),
            loss_mask=sequences(batch.mask.bool()),
            rl_weights=None,
            ce_weights=None,
            ref_kl_weights=None,
            rl_loss_fn=self._loss,
            rl_scale=1,
            ce_scale=1,
            ref_kl_scale=1,
        )
        # it returns no weights, but its loss is the sum of -weight * advantage
        (gradient,) = torch.autograd.grad(loss, advantages, create_graph=True)
        return Correction(weights=-gradient, loss=loss)


def corrections(prime: PrimeRl) -> dict[str, SubjectFactory]:
    """Return the judged configurations, by name."""
    # the penalty on the squared log ratio is a term of its own, which no correction promises
    plain = {"kl_tau": 0.0, "adv_tau": 1.0}
    shared: dict[str, Any] = {
        "pair": "current/rollout",
        "rejects_by": "weights",
        "masked": "zero",
        "gradient": "current",
        "loss": "surrogate",
        "aggregation": "token-sum",
        "arrays": "torch",
    }
    change = Statistic.PROBABILITY_CHANGE
    return {
        "dppo": lambda: PackedLoss(
            prime,
            prime.config.DefaultLossConfig(dppo_mask_high=_HIGH, dppo_mask_low=_LOW, **plain),
            correction_contract(
                rejections=(
                    Rejection(statistic=change, upper=_HIGH, advantages=Sign.POSITIVE),
                    Rejection(statistic=change, lower=-_LOW, advantages=Sign.NOT_POSITIVE),
                ),
                **shared,
            ),
        ),
        "ipo": lambda: PackedLoss(
            prime,
            prime.config.IPOLossConfig(ipo_threshold=_HIGH, **plain),
            correction_contract(
                rejections=Rejection(statistic=Statistic.TV, upper=_HIGH), **shared
            ),
        ),
    }
