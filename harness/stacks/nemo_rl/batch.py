"""NeMo-RL's conversions of finished rollouts into what the data-parallel ranks train on, as batch
subjects.

``ShardedBatch`` is the SingleController's: a record, its payload, the data plane, and the columns
that each rank fetches. ``AsyncBatch`` is that of asynchronous GRPO: a replay buffer, padded
columns, shards of packed sequences, and their micro-batches.
"""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    MissingLogprobs,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.records import BatchRow, Rollout
from rollproof.stacks._support.batches import batch_contract, mask_of
from rollproof.stacks._support.tokenizer import PAD_ID, spell
from rollproof.stacks.nemo_rl.rows import message_rows
from rollproof.stacks.nemo_rl.upstream import NemoRl

__all__ = ["AsyncBatch", "ShardedBatch"]

_RANKS = 2
_PARTITION = "train"
_PACKED = 64
"""Tokens in a micro-batch of packed sequences."""

_CONTRACT = batch_contract(
    rows=Rows.ALL,
    final_row=Filler.ARANGE,
    resume=ResumeBy.ENGINE,
    versions=Versions.BOUNDS,
    kv_policy=KvPolicy.KEEP,
    missing_logprobs=MissingLogprobs.MASKED,
    loss_mask=True,
    finish_reason=False,
    dtype="int16",
    # of the rollouts that it is given: see rollout_contract
    provenance=Provenance.AS_SAMPLED,
)


class ShardedBatch:
    """Each sample is a prompt group of its own, committed to the replay buffer; the groups are
    trained on together, by two ranks.
    """

    contract: Contract = _CONTRACT

    def __init__(self, nemo: NemoRl) -> None:
        self._nemo = nemo

    def collate(self, samples: list[Rollout]) -> Any:
        """The columns of each rank, with the names of its samples."""
        nemo = self._nemo
        plane = nemo.plane.NoOpDataPlaneClient()
        plane.register_partition(_PARTITION, [], len(samples), ["train"])
        buffer = nemo.buffers.TQReplayBuffer(
            plane,
            _PARTITION,
            pad_value_dict={"token_ids": PAD_ID},
            require_routed_experts=any(s.routes is not None for s in samples),
        )
        committed = []
        for sample in samples:
            # the group's id is the sample's name: the shards are read back by it
            group = buffer.reserve(weight_version=1, group_id=sample.request_id)
            committed.append(
                asyncio.run(
                    buffer.commit(
                        group, self._record(sample), start_weight_version=1, end_weight_version=1
                    )
                )
            )
        meta = committed[0].concat(*committed[1:])
        shards, _ = nemo.preshard.shard_meta_for_dp(
            meta, dp_world=_ranks(len(samples)), batch_size=len(samples)
        )
        return [
            (
                shard,
                nemo.columns.read_columns(
                    plane, shard, shard.fields, pad_value_dict={"input_ids": PAD_ID}
                ),
            )
            for shard in shards
        ]

    def rows(self, batch: Any) -> list[BatchRow]:
        """One row a sample."""
        return [
            _row({key: column[i] for key, column in columns.items()}, name.rpartition("_g")[0])
            for shard, columns in batch
            for i, name in enumerate(shard.sample_ids)
        ]

    def _record(self, sample: Rollout) -> Any:
        nemo, log = self._nemo, message_log(sample)
        completion = nemo.records.Completion(
            message_log=log, env_extras=None, truncated=False, reward=0.0
        )
        return nemo.records.PromptGroupRecord(
            prompt_idx=0,
            prompt=log[:1],
            extra_env_info=None,
            metadata={},
            completions=[completion],
            rollout_metrics={},
        )


class AsyncBatch:
    """Each sample is a group of one in the replay buffer. ``async_grpo_train`` takes them out, and
    the ranks get them in micro-batches.
    """

    contract: Contract = replace(_CONTRACT, versions=Versions.SAMPLE)

    def __init__(self, nemo: NemoRl) -> None:
        self._nemo = nemo

    def collate(self, samples: list[Rollout]) -> Any:
        """All micro-batches, after a journey by pickle, and the names of the samples."""
        nemo, count = self._nemo, len(samples)
        buffer = nemo.buffers.ReplayBufferImpl(
            max_size=count, drop_incomplete_targets_on_restore=True
        )
        for index, sample in enumerate(samples):
            buffer.add({"batch": self._group(sample, index)}, 1, 1)
        groups = buffer.sample(num_prompt_groups=count, current_weight_version=1, max_age_steps=1)[
            "trajectories"
        ]
        batch = nemo.batched.BatchedDataDict.from_batches([group["batch"] for group in groups])
        train, _ = message_rows(
            nemo, batch, routes=any(sample.routes is not None for sample in samples)
        )
        # carried through packing and sharding: samples are recognised by it
        train["place"] = batch["place"]
        longest = int(train["input_ids"].shape[1])
        shards, _ = train.shard_by_batch_size(
            _ranks(count),
            batch_size=count,
            sequence_packing_args={
                "max_tokens_per_microbatch": max(_PACKED, longest),
                "input_key": "input_ids",
                "input_lengths_key": "input_lengths",
                "algorithm": "modified_first_fit_decreasing",
                "sequence_length_pad_multiple": 8,
            },
        )
        received = pickle.loads(pickle.dumps(shards))  # noqa: S301 - pickled in the same line
        micro_batches = [
            micro_batch
            for shard in received
            for micro_batch in shard.make_microbatch_iterator_for_packable_sequences()
        ]
        return micro_batches, [sample.request_id for sample in samples]

    def rows(self, batch: Any) -> list[BatchRow]:
        """One row a sample, in their order."""
        micro_batches, names = batch
        rows = {
            int(index): _row({key: columns[key][i] for key in columns}, names[int(index)])
            for columns in micro_batches
            for i, index in enumerate(columns["place"])
        }
        return [rows[index] for index in sorted(rows)]

    def _group(self, sample: Rollout, index: int) -> Any:
        import torch

        return self._nemo.batched.BatchedDataDict(
            {
                "message_log": [message_log(sample)],
                "loss_multiplier": torch.ones(1),
                "place": torch.tensor([index]),
            }
        )


def message_log(sample: Rollout) -> list[dict[str, Any]]:
    """The messages that a rollout of NeMo-RL's would have made of the sample: sampled tokens are
    the assistant's.

    Raises:
        ValueError: The mask has another length: NeMo-RL has no mask but the roles of its messages.
    """
    import torch

    ids = [*sample.prompt_ids, *sample.response_ids]
    prompt, mask = len(sample.prompt_ids), mask_of(sample)
    if len(mask) != len(sample.response_ids):
        raise ValueError(
            f"A mask of {len(mask)} for {len(sample.response_ids)} tokens: NeMo-RL has none but the"
            " roles of its messages."
        )
    sampled = [False] * prompt + [bool(flag) for flag in mask]
    bounds = [
        0,
        *(i for i in range(1, len(ids)) if sampled[i] != sampled[i - 1] or i == prompt),
        len(ids),
    ]
    log = []
    for start, end in pairwise(bounds):
        message: dict[str, Any] = {
            "role": "assistant" if sampled[start] else "user" if start < prompt else "environment",
            "content": spell(ids[start:end]),
            "token_ids": torch.tensor(ids[start:end], dtype=torch.long),
        }
        # surplus values belong to the last message
        last = end == len(ids)
        if sampled[start] and sample.logprobs is not None:
            values = sample.logprobs[start - prompt : None if last else end - prompt]
            message["generation_logprobs"] = torch.tensor(values, dtype=torch.float32)
        if sample.routes is not None:
            message["routed_experts"] = torch.tensor(
                sample.routes[start : None if last else end], dtype=torch.int16
            )
        log.append(message)
    return log


def _ranks(count: int) -> int:
    """The number of ranks: NeMo-RL asks for one that divides the batch evenly."""
    return _RANKS if count % _RANKS == 0 else 1


def _row(columns: dict[str, Any], name: str) -> BatchRow:
    ids, length = columns["input_ids"].numpy(), int(columns["input_lengths"])
    attention = np.zeros(len(ids), dtype=np.int64)
    # the trainer's attention is causal, up to the row's length
    attention[:length] = 1
    mask = columns["token_mask"].numpy().astype(np.int64)
    routes = columns.get("routed_experts")
    return BatchRow(
        request_id=name,
        token_ids=ids.copy(),
        attention=attention,
        loss_mask=mask,
        logprobs=np.where(
            mask == 1, columns["generation_logprobs"].numpy().astype(np.float64), np.nan
        ),
        routes=None if routes is None else routes.numpy().copy(),
    )
