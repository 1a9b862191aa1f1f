"""slime's conversion of samples into what the ranks train on, as a batch subject.

That is ``_convert_samples_to_train_data``, ``_split_train_data_by_dp`` and
``process_rollout_data``.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from rollproof.core.contract import (
    Contract,
    Filler,
    Logprobs,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.records import BatchRow, Rollout
from rollproof.stacks._support.batches import LAYERS, TOP_K, batch_contract, prefixed
from rollproof.stacks._support.upstream import undecorated_class
from rollproof.stacks.slime.upstream import Slime

__all__ = ["RankData"]

_RANKS = 2


class RankData:
    """Samples go in as a list and come out as what the data-parallel ranks hold, without padding.

    Each rank gets its share; a single sample goes to a single rank.
    """

    contract: Contract = batch_contract(
        rows=Rows.FORWARDED,
        resume=ResumeBy.CLIENT,
        versions=Versions.CALL,
        logprobs=Logprobs.TEMPERATURE_SCALED,
        loss_mask=True,
        filler=Filler.NONE,
        provenance=Provenance.LATEST_PREFILL,
    )

    def __init__(self, slime: Slime) -> None:
        self._slime = slime
        self._manager = undecorated_class(slime.manager.RolloutManager)

    def collate(self, samples: list[Rollout]) -> Any:
        """What each rank holds after a journey by pickle, and the names of the samples."""
        ranks = min(_RANKS, len(samples))
        # Made without its constructor: these are the fields that its methods read.
        manager = object.__new__(self._manager)
        manager.args = self.arguments(len(samples))
        manager.custom_convert_samples_to_train_data_func = None
        manager.custom_reward_post_process_func = None
        manager.train_parallel_config = {
            "dp_size": ranks,
            "cp_size": 1,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
        }
        ray = SimpleNamespace(put=pickle.dumps, get=pickle.loads)
        with (
            mock.patch.object(self._slime.manager, "ray", ray),
            mock.patch.object(self._slime.data, "ray", ray),
        ):
            data = manager._convert_samples_to_train_data(
                [self._sample(sample, index) for index, sample in enumerate(samples)]
            )
            staged = self.split(manager, data, ranks)
            by_rank = [
                self._slime.data.process_rollout_data(manager.args, staged, rank, ranks)
                for rank in range(ranks)
            ]
        return by_rank, [sample.request_id for sample in samples]

    def arguments(self, size: int) -> Any:
        """The command line that the methods read."""
        return SimpleNamespace(
            advantage_estimator="none",
            rewards_normalization=False,
            reward_key=None,
            n_samples_per_prompt=1,
            rollout_batch_size=size,
            global_batch_size=size,
            use_dynamic_batch_size=True,
            use_dynamic_global_batch_size=False,
            max_tokens_per_gpu=64,
            micro_batch_size=1,
            balance_data=False,
            balance_by_flops=False,
            use_rollout_routing_replay=True,
            num_layers=LAYERS,
            moe_router_topk=TOP_K,
            moe_layer_freq=[0, 1, 1, 1],
            rollout_top_p=1.0,
        )

    def split(self, manager: Any, data: Any, ranks: int) -> Any:
        """Put the share of each rank into Ray's store."""
        return manager._split_train_data_by_dp(data)

    def rows(self, batch: Any) -> list[BatchRow]:
        """One row a sample, in the order of the samples (``sample_indices``)."""
        by_rank, names = batch
        rows = {
            int(index): self._row(data, i, names[int(index)])
            for data in by_rank
            for i, index in enumerate(data["sample_indices"])
        }
        return [rows[index] for index in sorted(rows)]

    def _row(self, data: dict[str, Any], i: int, name: str) -> BatchRow:
        ids = np.asarray(data["tokens"][i])
        prompt = len(ids) - int(data["response_lengths"][i])
        logprobs, routes = (
            data[field][i] if field in data else None
            for field in ("rollout_log_probs", "rollout_routed_experts")
        )
        return BatchRow(
            request_id=name,
            token_ids=ids,
            attention=np.ones(len(ids), dtype=np.int64),
            loss_mask=prefixed(prompt, np.asarray(data["loss_masks"][i]).astype(np.int64), 0),
            logprobs=(
                None
                if logprobs is None
                else prefixed(prompt, np.asarray(logprobs, dtype=np.float64), np.nan)
            ),
            routes=None if routes is None else np.asarray(routes),
        )

    def _sample(self, sample: Rollout, index: int) -> Any:
        """A finished ``Sample``."""
        types = self._slime.types
        # miles has no such field
        fields = {"rollout_id": index} if "rollout_id" in types.Sample.__dataclass_fields__ else {}
        return types.Sample(
            index=index,
            **fields,
            tokens=[*sample.prompt_ids, *sample.response_ids],
            response_length=len(sample.response_ids),
            reward=0.0,
            loss_mask=(
                None if sample.loss_mask is None else [int(flag) for flag in sample.loss_mask]
            ),
            rollout_log_probs=(
                None if sample.logprobs is None else [float(value) for value in sample.logprobs]
            ),
            rollout_routed_experts=(
                None if sample.routes is None else sample.routes.astype(np.int32)
            ),
            status=types.Sample.Status.TRUNCATED,
        )
