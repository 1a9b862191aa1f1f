"""The truncated importance sampling of slime, and of miles, which took it over: functions that
multiply a loss per token by weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rollproof.core.contract import Contract
from rollproof.core.correction_records import Correction, CorrectionBatch
from rollproof.core.correction_terms import Rejection
from rollproof.core.subjects import SubjectFactory
from rollproof.corrections.correction_subject import correction_contract
from rollproof.stacks._support.packed_rows import response_length

__all__ = ["truncated_is"]


class LossFunctionCorrection:
    """``vanilla_tis_function`` or ``icepop_function``.

    Both take lists with one tensor a sample, as the trainer has them after packing: padding is
    never in them. Of a loss of 1 for each token the weights are left.
    """

    def __init__(self, function: Any, arguments: SimpleNamespace, contract: Contract) -> None:
        self.contract = contract
        self._function = function
        self._arguments = arguments

    def correct(self, batch: CorrectionBatch) -> Correction:
        """Return the weights, and the numbers as the trainer averages them."""
        import torch

        lengths = [response_length(row) for row in batch.mask]
        old = [row[:length] for row, length in zip(batch.old.detach(), lengths, strict=True)]
        rollout = [
            row[:length] for row, length in zip(batch.rollout.detach(), lengths, strict=True)
        ]
        masks = [row[:length] for row, length in zip(batch.mask, lengths, strict=True)]
        weights, _, metrics = self._function(
            self._arguments,
            pg_loss=torch.ones(sum(lengths)),
            train_log_probs=old,
            rollout_log_probs=rollout,
            loss_masks=masks,
            total_lengths=lengths,
            response_lengths=lengths,
        )
        whole = torch.zeros(batch.mask.shape, dtype=weights.dtype)
        for row, part in enumerate(weights.split(lengths)):
            whole[row, : lengths[row]] = part
        chosen = torch.cat(masks).bool()
        return Correction(
            weights=whole,
            metrics={name: value[chosen].mean() for name, value in metrics.items()},
        )


def truncated_is(module: Any) -> dict[str, SubjectFactory]:
    """Return the judged configurations of ``module``, which has the two functions."""
    shared: dict[str, Any] = {"arrays": "torch", "masked": "finite"}
    metrics = {"tis": "ratio-mean"}
    bounds = SimpleNamespace(tis_clip_low=0.5, tis_clip=2.0)
    return {
        "tis": lambda: LossFunctionCorrection(
            module().vanilla_tis_function,
            bounds,
            correction_contract(
                lower=0.5,
                upper=2.0,
                metrics={**metrics, "tis_clipfrac": "clipped-fraction"},
                **shared,
            ),
        ),
        "icepop": lambda: LossFunctionCorrection(
            module().icepop_function,
            bounds,
            correction_contract(
                rejections=Rejection(lower=0.5, upper=2.0),
                rejects_by="weights",
                metrics={**metrics, "tis_clipfrac": "rejected-fraction"},
                **shared,
            ),
        ),
    }
