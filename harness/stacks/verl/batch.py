"""verl's conversions of finished samples into training batches, as batch subjects.

There are two paths: ``AgentLoopOutput.as_dict`` (trainers with ``use_v1``) makes unpadded tensors
of each sample; ``AgentLoopWorker._agent_loop_postprocess`` and ``_postprocess`` pad and stack them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
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
from rollproof.core.records import BatchRow, IntArray, LogprobArray, Rollout
from rollproof.stacks import attributes
from rollproof.stacks._support.tokenizer import IdTokenizer
from rollproof.stacks.verl.upstream import Verl

__all__ = ["PaddedBatch", "SampleDicts", "UnpaddedBatch"]

_SLACK = 3
"""Places by which the configured lengths exceed the longest sample, so that every sample is padded."""
_NAME = "rollproof_request"


def _contract(dtype: str) -> Contract:
    """Samples as verl's agent loops hand them over; more experts than a byte can count, a dense
    layer before the MoE layers.

    Where no route was captured verl's batches hold zeros: expert 0, ``top_k`` times.
    """
    return Contract(
        rows=Rows.CAPTURED_PREFIX,
        resume=ResumeBy.CLIENT,
        versions=Versions.MIN_MAX,
        logprobs=Logprobs.RAW,
        abort_surfaces=False,
        kv_policy=KvPolicy.RECOMPUTE,
        missing_logprobs=MissingLogprobs.MASKED,
        loss_mask=True,
        finish_reason=False,
        layer_axis=LayerAxis.ALL,
        num_layers=4,
        moe_layers=(1, 2, 3),
        num_experts=300,
        top_k=3,
        filler=Filler.ZEROS,
        dtype=dtype,
        provenance=Provenance.AS_SAMPLED,
    )


def _output_of(sample: Rollout, verl: Verl) -> Any:
    """An ``AgentLoopOutput``. On masked tokens without a logprob verl's loops write 0.0."""
    loops = verl.agent_loop
    mask = (
        [1] * len(sample.response_ids)
        if sample.loss_mask is None
        else [int(flag) for flag in sample.loss_mask]
    )
    return loops.AgentLoopOutput(
        prompt_ids=list(sample.prompt_ids),
        response_ids=list(sample.response_ids),
        response_mask=mask,
        response_logprobs=None if sample.logprobs is None else _filled(sample.logprobs, mask),
        routed_experts=None if sample.routes is None else sample.routes.copy(),
        num_turns=2,
        metrics=loops.AgentLoopMetrics(),
        extra_fields={
            "min_global_steps": sample.min_version,
            "max_global_steps": sample.max_version,
            _NAME: sample.request_id,
        },
    )


def _filled(logprobs: LogprobArray, mask: list[int]) -> list[float]:
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
        self.contract = _contract(verl.facts.dict_routes)

    def collate(self, samples: list[Rollout]) -> list[Mapping[str, Any]]:
        """``as_dict`` of each."""
        return [_output_of(sample, self._verl).as_dict() for sample in samples]

    def rows(self, batch: list[Mapping[str, Any]]) -> list[BatchRow]:
        """The dictionaries as they are: prompt, then response."""
        return [self._row(sample) for sample in batch]

    def _row(self, sample: Mapping[str, Any]) -> BatchRow:
        prompt, response = _array(sample["prompts"]), _array(sample["responses"])
        logprobs, routes = sample.get("rollout_log_probs"), sample.get("routed_experts")
        ids = np.concatenate([prompt, response])
        return BatchRow(
            request_id=sample["extra_fields"][_NAME],
            token_ids=ids,
            attention=np.ones(len(ids), dtype=np.int64),
            loss_mask=_after(len(prompt), _array(sample["response_mask"]), 0),
            logprobs=(
                None
                if logprobs is None
                else _after(len(prompt), _array(logprobs).astype(np.float64), np.nan)
            ),
            routes=None if routes is None else _array(routes),
        )


class PaddedBatch:
    """``_agent_loop_postprocess`` of each sample, then ``_postprocess``: prompts padded on the
    left, responses on the right.

    The worker is made without its constructor, which loads a model's tokenizer; it has the fields
    that the two methods read.
    """

    contract: Contract

    def __init__(self, verl: Verl) -> None:
        self._verl = verl
        self.contract = _contract(verl.facts.padded_routes)

    async def collate(self, samples: list[Rollout]) -> Any:
        """The ``DataProto`` of verl."""
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
        tensors = {name: _array(batch.batch[name]) for name in batch.batch.keys()}  # noqa: SIM118 - a TensorDict iterates over its rows
        names = batch.non_tensor_batch[_NAME]
        width = tensors["prompts"].shape[1]
        logprobs, routes = tensors.get("rollout_log_probs"), tensors.get("routed_experts")
        return [
            BatchRow(
                request_id=str(names[i]),
                token_ids=tensors["input_ids"][i],
                attention=tensors["attention_mask"][i],
                loss_mask=_after(width, tensors["response_mask"][i], 0),
                logprobs=(
                    None
                    if logprobs is None
                    else _after(width, logprobs[i].astype(np.float64), np.nan)
                ),
                routes=None if routes is None else routes[i],
            )
            for i in range(len(names))
        ]


class UnpaddedBatch(PaddedBatch):
    """``left_right_2_no_padding`` behind ``_postprocess``, as trainers do it: ids and routes
    without padding, the rest padded still.
    """

    def __init__(self, verl: Verl) -> None:
        super().__init__(verl)
        (self._unpad,) = attributes("verl.workers.utils.padding", "left_right_2_no_padding")

    async def collate(self, samples: list[Rollout]) -> Any:
        """A ``TensorDict`` with nested tensors, and the names of the samples in it."""
        padded = await super().collate(samples)
        return self._unpad(padded.batch), padded.non_tensor_batch[_NAME]

    def rows(self, batch: Any) -> list[BatchRow]:
        """One row a sample; the response's fields are cut to its length."""
        tensors, names = batch
        ids = [_array(one) for one in tensors["input_ids"].unbind()]
        routes = tensors["routed_experts"].unbind() if "routed_experts" in tensors.keys() else None  # noqa: SIM118 - as above
        logprobs = tensors["rollout_log_probs"] if "rollout_log_probs" in tensors.keys() else None  # noqa: SIM118 - as above
        width = tensors["prompts"].shape[1]
        out = []
        for i, sequence in enumerate(ids):
            response = int(tensors["attention_mask"][i, width:].sum())
            prompt = len(sequence) - response
            out.append(
                BatchRow(
                    request_id=str(names[i]),
                    token_ids=sequence,
                    attention=np.ones(len(sequence), dtype=np.int64),
                    loss_mask=_after(prompt, _array(tensors["loss_mask"][i, :response]), 0),
                    logprobs=(
                        None
                        if logprobs is None
                        else _after(
                            prompt, _array(logprobs[i, :response]).astype(np.float64), np.nan
                        )
                    ),
                    routes=None if routes is None else _array(routes[i]),
                )
            )
        return out


def _array(tensor: Any) -> Any:
    """A numpy copy of a CPU tensor."""
    return tensor.detach().cpu().numpy().copy()


def _after(count: int, values: Any, before: float) -> Any:
    """``values`` behind ``count`` places that hold ``before``."""
    head: IntArray | LogprobArray = np.full(count, before, dtype=values.dtype)
    return np.concatenate([head, values])
