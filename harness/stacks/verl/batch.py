"""verl's conversions of finished samples into training batches, as batch subjects.

There are two: ``AgentLoopOutput.as_dict`` (trainers with ``use_v1``) makes unpadded tensors of each
sample; ``AgentLoopWorker._agent_loop_postprocess`` and ``_postprocess`` pad and stack them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollproof.core.contract import Contract, MissingLogprobs, ResumeBy, Rows, Versions
from rollproof.core.records import BatchRow, LogprobArray, Rollout
from rollproof.stacks._support.batches import array_of, batch_contract, mask_of, prefixed
from rollproof.stacks._support.tokenizer import IdTokenizer
from rollproof.stacks._support.upstream import imported
from rollproof.stacks.verl.upstream import Verl

__all__ = ["PaddedBatch", "SampleDicts", "UnpaddedBatch"]

_SLACK = 3
"""Tokens by which the configured lengths exceed the longest sample: every sample is padded."""
_NAME = "rollproof_request"


def verl_batch_contract(dtype: str) -> Contract:
    """Samples as verl's agent loops return them.

    For tokens without a captured route verl's batches hold zeros: expert 0, ``top_k`` times.
    """
    return batch_contract(
        rows=Rows.CAPTURED_PREFIX,
        resume=ResumeBy.CLIENT,
        versions=Versions.MIN_MAX,
        # "empty token sequences" are handled (verl#6675): an abort before the first token with
        # partial rollout off, and a prompt that leaves no room, end in one
        abort_surfaces=True,
        missing_logprobs=MissingLogprobs.MASKED,
        loss_mask=True,
        finish_reason=False,
        dtype=dtype,
    )


def _output_of(sample: Rollout, verl: Verl) -> Any:
    """An ``AgentLoopOutput``."""
    loops, mask = verl.agent_loop, mask_of(sample)
    return loops.AgentLoopOutput(
        prompt_ids=list(sample.prompt_ids),
        response_ids=list(sample.response_ids),
        response_mask=mask,
        response_logprobs=None if sample.logprobs is None else _filled(sample.logprobs, mask),
        routed_experts=sample.routes,
        num_turns=2,
        metrics=loops.AgentLoopMetrics(),
        extra_fields={
            "min_global_steps": sample.min_version,
            "max_global_steps": sample.max_version,
            _NAME: sample.request_id,
        },
    )


def _filled(logprobs: LogprobArray, mask: list[int]) -> list[float]:
    """Logprobs with 0.0 for masked tokens that have none, as verl's loops write it."""
    flags = [*mask, *[1] * (len(logprobs) - len(mask))]
    return [
        0.0 if np.isnan(value) and not flag else float(value)
        for value, flag in zip(logprobs, flags, strict=False)
    ]


class SampleDicts:
    """``as_dict``: the batch is a list of dictionaries, one a sample, without padding."""

    contract: Contract

    def __init__(self, verl: Verl) -> None:
        self._verl = verl
        self.contract = verl_batch_contract(verl.facts.dict_routes)

    def collate(self, samples: list[Rollout]) -> list[Mapping[str, Any]]:
        """``as_dict`` of each."""
        return [_output_of(sample, self._verl).as_dict() for sample in samples]

    def rows(self, batch: list[Mapping[str, Any]]) -> list[BatchRow]:
        """The dictionaries as they are: prompt, then response."""
        return [self._row(sample) for sample in batch]

    def _row(self, sample: Mapping[str, Any]) -> BatchRow:
        prompt, response = array_of(sample["prompts"]), array_of(sample["responses"])
        logprobs, routes = sample.get("rollout_log_probs"), sample.get("routed_experts")
        ids = np.concatenate([prompt, response])
        return BatchRow(
            request_id=sample["extra_fields"][_NAME],
            token_ids=ids,
            attention=np.ones(len(ids), dtype=np.int64),
            loss_mask=prefixed(len(prompt), array_of(sample["response_mask"]), 0),
            logprobs=(
                None
                if logprobs is None
                else prefixed(len(prompt), array_of(logprobs).astype(np.float64), np.nan)
            ),
            routes=None if routes is None else array_of(routes),
        )


class PaddedBatch:
    """``_agent_loop_postprocess`` of each sample, then ``_postprocess``: prompts padded on the
    left, responses on the right.

    The worker is made without its constructor, which loads a model's tokenizer, and has the fields
    that the two methods read.
    """

    contract: Contract

    def __init__(self, verl: Verl) -> None:
        self._verl = verl
        self.contract = verl_batch_contract(verl.facts.padded_routes)

    async def collate(self, samples: list[Rollout]) -> Any:
        """The ``DataProto`` of verl."""
        # Made without its constructor: these are the fields that its methods read.
        worker = object.__new__(self._verl.agent_loop.AgentLoopWorker)
        lengths = SimpleNamespace(
            prompt_length=max((len(sample.prompt_ids) for sample in samples), default=0) + _SLACK,
            response_length=max((len(sample.response_ids) for sample in samples), default=0)
            + _SLACK,
        )
        worker.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=lengths))
        worker.rollout_config = lengths
        worker.tokenizer = IdTokenizer()
        worker.processor = None
        worker.reward_loop_worker_handles = None
        worker.distillation_enabled = False
        worker.mm_processor_kwargs = {}
        worker.teacher_client = None
        padded = [
            await worker._agent_loop_postprocess(
                _output_of(sample, self._verl), False, raw_prompt=[]
            )
            for sample in samples
        ]
        return worker._postprocess(padded)

    def rows(self, batch: Any) -> list[BatchRow]:
        """One row a sample, padding included."""
        tensors = {name: array_of(batch.batch[name]) for name in batch.batch.keys()}  # noqa: SIM118 - a TensorDict iterates over its rows
        names = batch.non_tensor_batch[_NAME]
        width = tensors["prompts"].shape[1]
        logprobs, routes = tensors.get("rollout_log_probs"), tensors.get("routed_experts")
        return [
            BatchRow(
                request_id=str(names[i]),
                token_ids=tensors["input_ids"][i],
                attention=tensors["attention_mask"][i],
                loss_mask=prefixed(width, tensors["response_mask"][i], 0),
                logprobs=(
                    None
                    if logprobs is None
                    else prefixed(width, logprobs[i].astype(np.float64), np.nan)
                ),
                routes=None if routes is None else routes[i],
            )
            for i in range(len(names))
        ]


class UnpaddedBatch(PaddedBatch):
    """``left_right_2_no_padding`` after ``_postprocess``, as trainers call it: ids and routes lose
    their padding, other fields keep it.
    """

    def __init__(self, verl: Verl) -> None:
        super().__init__(verl)
        self._unpad = imported("verl.workers.utils.padding:left_right_2_no_padding")

    async def collate(self, samples: list[Rollout]) -> Any:
        """A ``TensorDict`` with nested tensors, and the names of the samples in it."""
        padded = await super().collate(samples)
        return self._unpad(padded.batch), padded.non_tensor_batch[_NAME]

    def rows(self, batch: Any) -> list[BatchRow]:
        """One row a sample; the response's fields are cut to its length."""
        tensors, names = batch
        ids = [array_of(sequence) for sequence in tensors["input_ids"].unbind()]
        routes = tensors["routed_experts"].unbind() if "routed_experts" in tensors.keys() else None  # noqa: SIM118 - as above
        logprobs = tensors["rollout_log_probs"] if "rollout_log_probs" in tensors.keys() else None  # noqa: SIM118 - as above
        width = tensors["prompts"].shape[1]
        rows = []
        for i, sequence in enumerate(ids):
            response = int(tensors["attention_mask"][i, width:].sum())
            prompt = len(sequence) - response
            rows.append(
                BatchRow(
                    request_id=str(names[i]),
                    token_ids=sequence,
                    attention=np.ones(len(sequence), dtype=np.int64),
                    loss_mask=prefixed(prompt, array_of(tensors["loss_mask"][i, :response]), 0),
                    logprobs=(
                        None
                        if logprobs is None
                        else prefixed(
                            prompt, array_of(logprobs[i, :response]).astype(np.float64), np.nan
                        )
                    ),
                    routes=None if routes is None else array_of(routes[i]),
                )
            )
        return rows
