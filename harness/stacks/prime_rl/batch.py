"""prime-rl's way from samples to what its data-parallel ranks train on, as a batch subject.

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
    LayerAxis,
    Logprobs,
    MissingLogprobs,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.records import BatchRow, Rollout
from rollproof.stacks.prime_rl.upstream import PrimeRl

__all__ = ["MicroBatches"]

_RANKS = 2
_LAYERS, _TOP_K = 4, 3
_LONGEST, _MULTIPLE = 64, 8


class MicroBatches:
    """Samples are packed into micro-batches; one is read back by its advantage, which is its place
    in the order, counted from 1.
    """

    contract: Contract = Contract(
        rows=Rows.ALL,
        final_row=Filler.PREVIOUS,
        resume=ResumeBy.ENGINE,
        versions=Versions.NONE,
        logprobs=Logprobs.RAW,
        abort_surfaces=True,
        kv_policy=KvPolicy.KEEP,
        missing_logprobs=MissingLogprobs.MASKED,
        loss_mask=True,
        finish_reason=False,
        layer_axis=LayerAxis.ALL,
        num_layers=_LAYERS,
        moe_layers=(1, 2, 3),
        num_experts=300,
        top_k=_TOP_K,
        filler=Filler.ZEROS,
        dtype="uint16|int16|int32|int64",
        provenance=Provenance.AS_SAMPLED,
    )

    def __init__(self, prime: PrimeRl) -> None:
        self._prime = prime

    def collate(self, samples: list[Rollout]) -> Any:
        """The tensors of all ranks, and the names of the samples."""
        import msgspec

        batch, transport = self._prime.batch, self._prime.transport
        made = batch.prepare_batch(
            [self._sample(sample, place) for place, sample in enumerate(samples)],
            seq_len=_LONGEST,
            num_train_workers=_RANKS,
            bin_cost=batch.build_bin_cost(None),
            pad_to_multiple_of=_MULTIPLE,
        )
        loader = object.__new__(self._prime.data.DataLoader)
        decode = msgspec.msgpack.Decoder(transport.MicroBatch).decode
        held = [
            loader._micro_batch_to_tensor(decode(msgspec.msgpack.encode(one)))
            for rank in made
            for one in rank
        ]
        return held, [sample.request_id for sample in samples]

    def rows(self, batch: Any) -> list[BatchRow]:
        """The samples of all micro-batches that are trained on, in the order in which they were
        given.
        """
        held, names = batch
        found: dict[int, BatchRow] = {}
        for tensors in held:
            start = 0
            for length in tensors["seq_lens"].tolist():
                piece = slice(start, start + length)
                start += length
                places = {
                    int(place) for place in tensors["advantages"][0, piece].tolist() if place > 0
                }
                if len(places) == 1:
                    (place,) = places
                    found[place] = _row(tensors, piece, names[place - 1])
        return [found[place] for place in sorted(found)]

    def _sample(self, sample: Rollout, place: int) -> Any:
        """A ``TrainingSample`` of a branch of one turn, as ``trace_to_samples`` and the sink leave
        it.
        """
        ids = [*sample.prompt_ids, *sample.response_ids]
        prompt = len(sample.prompt_ids)
        mask = (
            [1] * len(sample.response_ids)
            if sample.loss_mask is None
            else sample.loss_mask.tolist()
        )
        logprobs = (
            [0.0] * len(sample.response_ids)
            if sample.logprobs is None
            else np.nan_to_num(sample.logprobs).tolist()
        )
        return self._prime.transport.TrainingSample(
            token_ids=ids,
            mask=[False] * prompt + [bool(flag) for flag in mask],
            logprobs=[0.0] * prompt + logprobs,
            temperatures=[1.0] * len(ids),
            env_name="rollproof",
            advantages=[float(place + 1)] * len(ids),
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
