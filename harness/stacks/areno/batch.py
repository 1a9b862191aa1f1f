"""AReno's merging of rollouts, as a batch subject."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollproof.core.contract import Contract, Filler, Logprobs, ResumeBy, Rows, Versions
from rollproof.core.records import BatchRow, Rollout
from rollproof.stacks._support.batches import batch_contract

__all__ = ["MergedRollouts"]

_RANKS = 2


class MergedRollouts:
    """Each sample is a chunk (``_build_rollout_from_rows``). Chunks are merged on their rank, and
    ranks in the order of the prompts.
    """

    contract: Contract = batch_contract(
        rows=Rows.FORWARDED,
        resume=ResumeBy.NONE,
        versions=Versions.NONE,
        logprobs=Logprobs.TEMPERATURE_SCALED,
        filler=Filler.NONE,
    )

    def __init__(self, module: Any) -> None:
        self._module = module

    def collate(self, samples: list[Rollout]) -> Any:
        """The merged rollout, and the names of the samples."""
        ranks = min(_RANKS, len(samples))
        outputs = [
            self._module._merge_rollouts([self._chunk(sample) for sample in samples[rank::ranks]])
            for rank in range(ranks)
        ]
        merged = self._module._merge_dp_rollouts_in_input_order(outputs, len(samples))
        return merged, [sample.request_id for sample in samples]

    def rows(self, batch: Any) -> list[BatchRow]:
        """One row a sample, in the order of the prompts."""
        merged, names = batch
        return [self._row(merged, i, name) for i, name in enumerate(names)]

    def _row(self, merged: Any, i: int, name: str) -> BatchRow:
        prompt, response = len(merged.prompt_ids[i]), len(merged.response_ids[i])
        logprobs = np.full(merged.input_ids.shape[1], np.nan)
        logprobs[prompt : prompt + response] = merged.logprobs[i, :response].numpy()
        return BatchRow(
            request_id=name,
            token_ids=merged.input_ids[i].numpy(),
            attention=merged.attention_mask[i].numpy(),
            loss_mask=merged.response_mask[i].numpy(),
            logprobs=logprobs,
            routes=None if merged.routed_experts is None else merged.routed_experts[i].numpy(),
        )

    def _chunk(self, sample: Rollout) -> Any:
        """What AReno's worker makes of the calls of one sample."""
        import torch

        logprobs = torch.tensor(
            [] if sample.logprobs is None else sample.logprobs, dtype=torch.float32
        )
        routes = (
            None if sample.routes is None else [torch.from_numpy(sample.routes.astype(np.int32))]
        )
        return self._module._build_rollout_from_rows(
            [list(sample.prompt_ids)],
            [list(sample.response_ids)],
            ["length"],
            [logprobs],
            metrics=None,
            routed_experts=routes,
        )
