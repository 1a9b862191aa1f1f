"""SkyRL's conversions of finished samples into training batches, as batch subjects.

``convert_prompts_responses_to_batch_tensors`` pads and stacks. The trainer's
``convert_to_training_input`` calls it, and its batches are padded to a multiple of the
data-parallel ranks, chunked, pickled to the workers and concatenated again.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from rollproof.core.batch_columns import Column
from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    MissingLogprobs,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.records import BatchRow, IntArray, Rollout
from rollproof.stacks._support.batches import (
    array_of,
    batch_contract,
    logprobs_or_zero,
    mask_of,
    prefixed,
)
from rollproof.stacks._support.tokenizer import IdTokenizer
from rollproof.stacks._support.upstream import imported
from rollproof.stacks.skyrl.release import RouteForm
from rollproof.stacks.skyrl.upstream import SkyRL

__all__ = ["BatchTensors", "TrainingInput"]

_FIELDS = (
    "sequences",
    "attention_mask",
    "response_mask",
    "rewards",
    "loss_mask",
    "rollout_logprobs",
    "rollout_expert_indices",
)
"""What ``convert_prompts_responses_to_batch_tensors`` returns first, in order."""
_RANKS = 2


def skyrl_batch_contract(skyrl: SkyRL) -> Contract:
    """Samples as SkyRL's generator returns them.

    Since 0.4.0 a sample without tokens does not get so far: the client refuses it if routes are
    requested.
    """
    arrays = skyrl.facts.routes is RouteForm.ARRAYS
    return batch_contract(
        rows=Rows.CAPTURED_PREFIX,
        resume=ResumeBy.ENGINE,
        versions=Versions.NONE,
        abort_surfaces=not arrays,
        kv_policy=KvPolicy.KEEP,
        missing_logprobs=MissingLogprobs.MASKED,
        loss_mask=True,
        # zeros until 0.3.0, by the docstring of get_turn_rollout_expert_indices; then SkyRL#1908
        filler=Filler.ARANGE if arrays else Filler.ZEROS,
        dtype=skyrl.facts.batch_dtype,
        columns=(Column(name="rewards", filler=0.0),),
    )


class BatchTensors:
    """``convert_prompts_responses_to_batch_tensors``: sequences padded on the left, fields of the
    response aligned with its end.
    """

    contract: Contract

    def __init__(self, skyrl: SkyRL) -> None:
        self._skyrl = skyrl
        self.contract = skyrl_batch_contract(skyrl)

    def collate(self, samples: list[Rollout]) -> Any:
        """The tensors by name, and the names of the samples in their order."""
        output = generator_output(samples, self._skyrl)
        tokenizer = IdTokenizer()
        converted = self._skyrl.convert(
            tokenizer.pad_token_id if self._skyrl.facts.takes_pad_id else tokenizer,
            output["prompt_token_ids"],
            output["response_ids"],
            output["rewards"],
            output["loss_masks"],
            output["rollout_logprobs"],
            output["rollout_expert_indices"],
        )
        return dict(zip(_FIELDS, converted, strict=False)), [
            sample.request_id for sample in samples
        ]

    def rows(self, batch: Any) -> list[BatchRow]:
        """One row a sample."""
        tensors, names = batch
        return [self._row(tensors, i, name) for i, name in enumerate(names)]

    def _row(self, tensors: Any, i: int, name: str) -> BatchRow:
        ids, attention = array_of(tensors["sequences"][i]), array_of(tensors["attention_mask"][i])
        before = len(ids) - tensors["loss_mask"].shape[1]
        logprobs, padding = tensors.get("rollout_logprobs"), tensors.get("router_padding_mask")
        return BatchRow(
            request_id=name,
            token_ids=ids,
            attention=attention,
            loss_mask=prefixed(before, array_of(tensors["loss_mask"][i]).astype(np.int64), 0),
            logprobs=(
                None
                if logprobs is None
                else prefixed(before, array_of(logprobs[i]).astype(np.float64), np.nan)
            ),
            routes=self._routes(
                tensors.get("rollout_expert_indices"), i, int(len(ids) - attention.sum())
            ),
            routed=None if padding is None else 1 - array_of(padding[i]).astype(np.int64),
            columns={"rewards": prefixed(before, array_of(tensors["rewards"][i]), 0.0)},
        )

    def _routes(self, routes: Any, i: int, pad: int) -> IntArray | None:
        """Rows at their positions. Packed routes have none for the padding before a sample."""
        if routes is None:
            return None
        if not hasattr(routes, "segment"):
            return array_of(routes[i])  # type: ignore[no-any-return]  # a numpy array
        # `arange` is what SkyRL fills where nothing was captured
        rows = array_of(routes.segment(i))
        return np.concatenate(
            [
                np.broadcast_to(np.arange(rows.shape[2]), (pad, *rows.shape[1:])).astype(
                    rows.dtype
                ),
                rows,
            ]
        )


class TrainingInput(BatchTensors):
    """``convert_to_training_input``, ``stage_chunks`` over two ranks, pickle, and ``cat``."""

    def __init__(self, skyrl: SkyRL) -> None:
        super().__init__(skyrl)
        package = "skyrl.backends.skyrl_train."
        self._trainer = imported("skyrl.train.trainer:RayPPOTrainer")
        self._batch = imported(package + "training_batch:TrainingInputBatch")
        self._dispatch = imported(package + "distributed.dispatch:MeshDispatch")

    def collate(self, samples: list[Rollout]) -> Any:
        """The batch that the workers have together, without the dummy rows at its end, and the
        names of the samples.
        """
        names = [sample.request_id for sample in samples]
        batch = self._trainer.convert_to_training_input(
            _trainer(len(samples)), generator_output(samples, self._skyrl), names
        )
        # Ray's store would copy the chunk into another process.
        module = self._dispatch.__module__
        with mock.patch(f"{module}.ray", SimpleNamespace(put=lambda chunk: pickle.dumps(chunk))):
            staged = self._dispatch.stage_chunks(_RANKS, batch, [(0, len(samples))])
        chunks = [pickle.loads(chunk) for chunk in staged[0]]  # noqa: S301 - pickled two lines above
        return self._batch.cat(chunks), names


def _trainer(size: int) -> Any:
    """The fields of the trainer that ``convert_to_training_input`` reads: one mini-batch of all
    samples, each of a prompt of its own.
    """
    correction = SimpleNamespace(tis_ratio_type=None, sequence_mask_metric=None)
    trainer = SimpleNamespace(
        algorithm=SimpleNamespace(off_policy_correction=correction, max_seq_len=None),
        train_batch_size=size,
        policy_mini_batch_size=size,
        critic_mini_batch_size=size,
        critic=SimpleNamespace(model=SimpleNamespace(path=None)),
        logger="none",
    )
    generator = SimpleNamespace(n_samples_per_prompt=1, step_wise_trajectories=False)
    return SimpleNamespace(
        tokenizer=IdTokenizer(),
        cfg=SimpleNamespace(trainer=trainer, generator=generator),
        dispatch=SimpleNamespace(get_lcm_dp_size=lambda: _RANKS),
        all_metrics={},
    )


def generator_output(samples: list[Rollout], skyrl: SkyRL) -> dict[str, Any]:
    """A ``GeneratorOutput`` of finished samples, as the generator writes it: 0.0 on masked tokens
    without a logprob.
    """
    routes = [_route(sample, skyrl) for sample in samples]
    logprobs = [logprobs_or_zero(sample) for sample in samples]
    return {
        "prompt_token_ids": [list(sample.prompt_ids) for sample in samples],
        "response_ids": [list(sample.response_ids) for sample in samples],
        "rewards": [sample.columns["rewards"].tolist() for sample in samples],
        "loss_masks": [mask_of(sample) for sample in samples],
        "stop_reasons": ["stop" for _ in samples],
        "rollout_logprobs": None if all(values is None for values in logprobs) else logprobs,
        "rollout_expert_indices": None if all(rows is None for rows in routes) else routes,
    }


def _route(sample: Rollout, skyrl: SkyRL) -> Any:
    """Routes in the type of the release; the generator makes arrays of the smallest of its three
    dtypes.
    """
    if sample.routes is None:
        return None
    if skyrl.facts.routes is RouteForm.LISTS:
        return sample.routes.tolist()
    module = "skyrl.backends.skyrl_train.utils.routed_experts"
    return imported(module + ":compact_routed_expert_indices")(sample.routes)
