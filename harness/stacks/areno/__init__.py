"""AReno, released and unmodified: how rollouts of chunks and data-parallel ranks are put back into
the order of their prompts.

Its rollouts run on an engine of its own, which needs a GPU; what its worker makes of a chunk is
made here of a sample.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    LayerAxis,
    Logprobs,
    MissingLogprobs,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.records import BatchRow, Rollout
from rollproof.stacks import Found, Release, Stack, missing_dependency

__all__ = ["RELEASE", "MergedRollouts", "load"]

RELEASE = Release(distribution="areno", versions=("0.10.0",), stack="areno")
_RANKS = 2


def load(found: Found) -> Stack:
    """Import AReno's merging (3 s) and give it. Raises ``StackError`` where it cannot be imported."""
    try:
        module = importlib.import_module("areno.engine.runtime.rollout")
    except ImportError as error:
        raise missing_dependency("areno", found.version, error, RELEASE) from error
    return Stack(
        name="areno",
        version=found.version,
        parts={},
        batches={"merged-rollouts": lambda: MergedRollouts(module)},
    )


class MergedRollouts:
    """A chunk for each sample (``_build_rollout_from_rows``), merged on its rank, and the ranks
    merged in the order of the prompts.
    """

    contract: Contract = Contract(
        rows=Rows.FORWARDED,
        resume=ResumeBy.NONE,
        versions=Versions.NONE,
        logprobs=Logprobs.TEMPERATURE_SCALED,
        abort_surfaces=False,
        kv_policy=KvPolicy.RECOMPUTE,
        missing_logprobs=MissingLogprobs.NEVER,
        layer_axis=LayerAxis.ALL,
        num_layers=4,
        moe_layers=(1, 2, 3),
        num_experts=300,
        top_k=3,
        filler=Filler.NONE,
        dtype="uint16|int16|int32|int64",
        provenance=Provenance.AS_SAMPLED,
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
