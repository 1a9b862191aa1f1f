from __future__ import annotations

from itertools import pairwise

import torch

from rollproof.corrections import Correction, Rejection, correction_contract


class PackedGeometric:
    """One long line of tokens with offsets, in bfloat16, computed in float32; per-sequence results."""

    contract = correction_contract(
        pair="current/rollout",
        level="geometric",
        upper=1.6,
        arrays="torch",
        dtype="bfloat16",
        precision="float32",
        rejections=Rejection(statistic="k2", aggregate="max", upper=1.0),
        rejects_by="mask",
        metrics={"kept": "rejected-fraction"},
        empty_batch=True,
    )

    def correct(self, batch):
        train = batch.mask.bool()
        offsets = [0, *torch.cumsum(train.sum(1), 0).tolist()]
        line = batch.current.detach().float()[train] - batch.rollout.detach().float()[train]
        weights, keeps = [], []
        for start, end in pairwise(offsets):
            if start == end:
                weights.append(1.0), keeps.append(1)
                continue
            part = line[start:end]
            weights.append(min(part.mean().exp().item(), 1.6))
            keeps.append(int(part.abs().max().item() <= 2.0**0.5))
        lost = sum((1 - k) * (e - s) for k, s, e in zip(keeps, offsets, offsets[1:], strict=False))
        return Correction(weights=weights, mask=keeps, metrics={"kept": lost / max(offsets[-1], 1)})


class LogSpace:
    """Weights are clamped as logarithms; masked places hold NaN, since the loss selects by the mask."""

    contract = correction_contract(
        level="sequence",
        lower=0.5,
        upper=3.0,
        masked="any",
        arrays="torch",
        dtype="float64",
        gradient="none",
        normalise="sequences",
        loss="reinforce",
        aggregation="token-sum",
    )

    def correct(self, batch):
        hidden = batch.mask == 0
        gap = (batch.old - batch.rollout).masked_fill(hidden, 0).sum(1, keepdim=True).detach()
        bounds = torch.tensor([0.5, 3.0], dtype=torch.float64).log()
        rows = gap.clamp(*bounds.tolist()).exp()
        some = (~hidden).any(1, keepdim=True)
        rows = rows / rows[some].mean()
        weights = rows.expand_as(batch.old).masked_fill(hidden, float("nan"))
        # selected before they are multiplied: the gradient of a NaN times 0 is NaN
        parts = [values[~hidden] for values in (weights, batch.advantages, batch.current)]
        return Correction(weights=weights, loss=-(parts[0] * parts[1] * parts[2]).sum())
