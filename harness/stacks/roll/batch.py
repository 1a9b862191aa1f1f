"""ROLL's conversion of engine outputs for the ranks, as a batch subject:
``postprocess_output_data``, ``DataProto.concat``, and its chunks.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from rollproof.core.contract import Contract, Filler, Provenance, ResumeBy, Rows, Versions
from rollproof.core.records import BatchRow, Rollout
from rollproof.stacks._support.batches import batch_contract
from rollproof.stacks._support.tokenizer import PAD_ID
from rollproof.stacks.roll.upstream import Roll

__all__ = ["OutputBatch"]

_PROMPT, _SEQUENCE = 8, 32
"""``prompt_length`` and ``sequence_length``, in tokens: every row is padded to them."""
_RANKS = 2
_EOS = 1


class OutputBatch:
    """Each sample is the only output of a request of its own. Two ranks get a chunk each, pickled
    and unpickled.
    """

    contract: Contract = batch_contract(
        rows=Rows.ALL,
        final_row=Filler.ZEROS,
        resume=ResumeBy.CLIENT,
        versions=Versions.NONE,
        finish_reason=False,
        dtype="uint8|int16",
        provenance=Provenance.AS_SAMPLED,
    )

    def __init__(self, roll: Roll) -> None:
        self._roll = roll

    def collate(self, samples: list[Rollout]) -> Any:
        """The chunks of both ranks, and the names of the samples."""
        outputs = [self._output(sample, index) for index, sample in enumerate(samples)]
        data = self._roll.protocol.DataProto.concat(outputs)
        ranks = _RANKS if len(samples) % _RANKS == 0 else 1
        chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in data.chunk(chunks=ranks)]  # noqa: S301 - pickled by the same expression
        return chunks, [sample.request_id for sample in samples]

    def rows(self, batch: Any) -> list[BatchRow]:
        """One row a sample, in the order of the samples."""
        chunks, names = batch
        rows = {}
        for chunk in chunks:
            for i, index in enumerate(chunk.non_tensor_batch["place"]):
                rows[index] = _row(
                    {name: chunk.batch[name][i] for name in list(chunk.batch.keys())}, names[index]
                )
        return [rows[index] for index in sorted(rows)]

    def _output(self, sample: Rollout, index: int) -> Any:
        import torch

        # prompts are padded on the left, as ROLL's data loader does
        pad = _PROMPT - len(sample.prompt_ids)
        mask = torch.tensor([[0] * pad + [1] * len(sample.prompt_ids)])
        request = self._roll.protocol.DataProto.from_single_dict(
            {
                "input_ids": torch.tensor([[PAD_ID] * pad + list(sample.prompt_ids)]),
                "attention_mask": mask,
                "position_ids": torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0),
                "place": np.array([index], dtype=object),
            }
        )
        meta_info: dict[str, Any] = {
            "output_token_ids": [list(sample.response_ids)],
            "eos_token_id": [_EOS, PAD_ID],
            "pad_token_id": PAD_ID,
        }
        if sample.logprobs is not None:
            meta_info["output_logprobs"] = [sample.logprobs.tolist()]
        if sample.routes is not None:
            # an engine returns T-1 rows
            meta_info["routed_experts"] = [
                torch.tensor(sample.routes[: len(sample.routes) - 1].astype(np.int32))
            ]
        data = self._roll.protocol.DataProto(meta_info=meta_info)
        return self._roll.loop.postprocess_output_data(request, data, _SEQUENCE)


def _row(columns: dict[str, Any], name: str) -> BatchRow:
    ids, mask = (
        columns["input_ids"].numpy().copy(),
        columns["response_mask"].numpy().astype(np.int64),
    )
    logprobs, routes = columns.get("infer_logprobs"), columns.get("routed_experts")
    values = (
        None
        if logprobs is None
        else np.concatenate([[np.nan], logprobs.numpy().astype(np.float64)])
    )
    return BatchRow(
        request_id=name,
        token_ids=ids,
        attention=columns["attention_mask"].numpy().astype(np.int64),
        loss_mask=mask,
        logprobs=None if values is None else np.where(mask == 1, values, np.nan),
        routes=None if routes is None else routes.numpy().copy(),
    )
