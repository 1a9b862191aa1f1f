"""prime-rl's conversion of samples into what its data-parallel ranks train on, as a batch subject.

That is ``prepare_batch`` (packed, padded, balanced; no sample is so long that it is cut), msgpack,
and ``DataLoader``'s tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    MissingLogprobs,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.records import BatchRow, Rollout
from rollproof.stacks._support.batches import batch_contract, logprobs_or_zero, mask_of
from rollproof.stacks.prime_rl.upstream import PrimeRl

__all__ = ["MicroBatches"]

_RANKS = 2
_LONGEST, _MULTIPLE = 64, 8


class MicroBatches:
    """Samples are packed into micro-batches. A sample is recognised by its advantage, which is its
    index counted from 1.
    """

    contract: Contract = batch_contract(
        rows=Rows.ALL,
        final_row=Filler.PREVIOUS,
        resume=ResumeBy.ENGINE,
        versions=Versions.NONE,
        # the turns of verifiers, as they are: see branch_contract there
        abort_surfaces=True,
        kv_policy=KvPolicy.KEEP,
        missing_logprobs=MissingLogprobs.MASKED,
        loss_mask=True,
        finish_reason=False,
    )

    def __init__(self, prime: PrimeRl) -> None:
        self._prime = prime

    def collate(self, samples: list[Rollout]) -> Any:
        """The tensors of all ranks, and the names of the samples."""
        import msgspec

        batch, transport = self._prime.batch, self._prime.transport
        by_rank = batch.prepare_batch(
            [self._sample(sample, index) for index, sample in enumerate(samples)],
            seq_len=_LONGEST,
            num_train_workers=_RANKS,
            bin_cost=batch.build_bin_cost(None),
            pad_to_multiple_of=_MULTIPLE,
        )
        # made without its constructor: only its conversion to tensors is called
        loader = object.__new__(self._prime.data.DataLoader)
        decode = msgspec.msgpack.Decoder(transport.MicroBatch).decode
        tensors = [
            loader._micro_batch_to_tensor(decode(msgspec.msgpack.encode(micro_batch)))
            for micro_batches in by_rank
            for micro_batch in micro_batches
        ]
        return tensors, [sample.request_id for sample in samples]

    def rows(self, batch: Any) -> list[BatchRow]:
        """The samples of all micro-batches that are trained on, in their order."""
        micro_batches, names = batch
        rows: dict[int, BatchRow] = {}
        for tensors in micro_batches:
            start = 0
            for length in tensors["seq_lens"].tolist():
                piece = slice(start, start + length)
                start += length
                indexes = {
                    int(index) for index in tensors["advantages"][0, piece].tolist() if index > 0
                }
                # none in padding; two would be a sequence of two samples
                if len(indexes) == 1:
                    (index,) = indexes
                    rows[index] = _row(tensors, piece, names[index - 1])
        return [rows[index] for index in sorted(rows)]

    def _sample(self, sample: Rollout, index: int) -> Any:
        """A ``TrainingSample`` of a branch of one turn, as ``trace_to_samples`` and the sink leave
        it.
        """
        ids = [*sample.prompt_ids, *sample.response_ids]
        prompt = len(sample.prompt_ids)
        logprobs = logprobs_or_zero(sample)
        if logprobs is None:
            logprobs = [0.0] * len(sample.response_ids)
        return self._prime.transport.TrainingSample(
            token_ids=ids,
            mask=[False] * prompt + [bool(flag) for flag in mask_of(sample)],
            logprobs=[0.0] * prompt + logprobs,
            temperatures=[1.0] * len(ids),
            env_name="rollproof",
            advantages=[float(index + 1)] * len(ids),
            routed_experts=self._prime.trajectories._encode_routed_experts(sample.routes, len(ids)),
        )


def _row(tensors: Any, piece: slice, name: str) -> BatchRow:
    routes, advantages = tensors["routed_experts"], tensors["advantages"][0, piece].numpy()
    mask = tensors["loss_mask"][0, piece].numpy().astype(np.int64)
    return BatchRow(
        request_id=name,
        token_ids=tensors["input_ids"][0, piece].numpy(),
        attention=(advantages > 0).astype(np.int64),
        loss_mask=mask,
        logprobs=np.where(
            mask > 0, tensors["inference_logprobs"][0, piece].numpy().astype(np.float64), np.nan
        ),
        routes=None if routes is None else routes[0, piece].numpy(),
    )
