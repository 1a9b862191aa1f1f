"""TRL's packing of scored samples into rows, as batch subjects: queue, planner, and
``DataCollatorForRollout``.

Rows are prefix tries: what samples share is forwarded once. A sample is read back as the path from
the root to its last token.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from rollproof.core.contract import Contract, MissingLogprobs, ResumeBy, Rows, Versions
from rollproof.core.records import BatchRow, Rollout
from rollproof.stacks._support.batches import batch_contract, logprobs_or_zero
from rollproof.stacks._support.tokenizer import PAD_ID
from rollproof.stacks.trl.upstream import Trl

__all__ = ["PackedRows"]

_RANKS = 2


class PackedRows:
    """``RolloutQueueDataset``, then ``FixedCountBatcher`` or, with a ``budget``,
    ``TokenBudgetBatcher``, then the collator, over two ranks.

    Both planners leave no rank without a sample; where there is one sample only, there is one rank.
    """

    contract: Contract = batch_contract(
        rows=Rows.NONE,
        resume=ResumeBy.ENGINE,
        versions=Versions.SAMPLE,
        missing_logprobs=MissingLogprobs.MASKED,
        loss_mask=True,
        finish_reason=False,
    )

    def __init__(self, trl: Trl, *, budget: int) -> None:
        self._trl = trl
        self._budget = budget

    def collate(self, samples: list[Rollout]) -> Any:
        """All micro-batches, and the names of the samples; a sample's advantage is its index."""
        trainer, ranks = self._trl.trainer, min(_RANKS, len(samples))
        source = _Source(
            trainer, [self._sample(sample, index) for index, sample in enumerate(samples)]
        )
        metrics: dict[str, list[float]] = defaultdict(list)
        if self._budget:
            # A planner closes a micro-batch when the next sample does not fit: without more samples
            # the last one would stay open.
            filler = [
                self._sample(_filler(self._budget), len(samples) + i) for i in range(ranks + 1)
            ]
            source.rows += filler
            planner = trainer.TokenBudgetBatcher(source, ranks, self._budget, metrics)
        else:
            planner = trainer.FixedCountBatcher(source, ranks, len(samples))
        collator = trainer.DataCollatorForRollout(
            pad_token_id=PAD_ID, num_processes=ranks, metrics=metrics, token_budget=self._budget
        )
        batches = []
        with suppress(_Drained):
            for rows in planner:
                batches.append(collator([rows]))  # noqa: PERF401 - the batches before the queue was empty count
        return batches, [sample.request_id for sample in samples]

    def rows(self, batch: Any) -> list[BatchRow]:
        """The samples of all rows of all micro-batches, in their order."""
        batches, names = batch
        found: dict[int, BatchRow] = {}
        for tensors in batches:
            for rank in range(len(tensors["input_ids"])):
                found.update(_samples({key: value[rank] for key, value in tensors.items()}, names))
        return [found[index] for index in sorted(found)]

    def _sample(self, sample: Rollout, index: int) -> Any:
        """A ``RolloutSample`` as the loop makes it of a conversation of one turn."""
        worker = self._trl.worker
        logprobs = logprobs_or_zero(sample)
        if logprobs is None:
            logprobs = [0.0] * len(sample.response_ids)
        mask = None if sample.loss_mask is None else [int(flag) for flag in sample.loss_mask]
        turn = worker.TurnRecord(list(sample.prompt_ids), list(sample.response_ids), logprobs, mask)
        # 1024: longer than any sample, so that a conversation is one sequence
        (sequence,), _ = worker._chain_to_sequences([turn], sample.request_id, 1024)
        return worker.RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.asarray(sequence.input_ids, dtype=np.int64),
            completion_mask=np.asarray(sequence.completion_mask, dtype=np.int64),
            old_log_probs=np.asarray(sequence.old_log_probs, dtype=np.float32),
            advantage=float(index),
            model_version=1,
            group_id=index,
            metrics={},
        )


class _Drained(Exception):
    """The queue is empty, where TRL would wait."""


class _Source:
    """``RolloutQueueDataset`` without its thread for traces."""

    def __init__(self, trainer: Any, samples: list[Any]) -> None:
        self.rows = samples
        self._trainer = trainer

    def __iter__(self) -> Any:
        feed: queue.Queue[Any] = queue.Queue()
        for sample in self.rows:
            feed.put(sample)

        def empty(_seconds: float) -> None:
            raise _Drained

        dataset = object.__new__(self._trainer.RolloutQueueDataset)
        dataset.__dict__.update(
            queue=feed,
            model_version_fn=lambda: 1,
            check_health_fn=empty,
            stale_after_s=0.0,
            metrics=defaultdict(list),
            wait_s=0.0,
            max_staleness=3,
            poll_interval_s=0.0,
            report_to=[],
            _trace_log_interval=8,
            _last_traced_version=-1,
        )
        return iter(dataset)


def _filler(length: int) -> Rollout:
    """A sample that shares a row with no other."""
    ids = tuple(range(100_000, 100_000 + length))
    return Rollout(
        request_id="filler",
        prompt_ids=ids[:1],
        response_ids=ids[1:],
        finish_reason=None,
        logprobs=np.zeros(length - 1),
    )


def _samples(row: dict[str, Any], names: list[str]) -> dict[int, BatchRow]:
    """The samples of a rank's row, by their advantage."""
    ids = row["input_ids"].numpy()
    positions = row["token_index"].numpy()
    trained = positions >= 0
    positions, segments = positions[trained], row["segment_id"].numpy()[trained]
    logprobs = row["old_log_probs"].numpy()[trained]
    advantages = row["advantages"].numpy()[trained]
    paths = _paths(row)
    found = {}
    for segment in dict.fromkeys(segments.tolist()):
        in_segment = segments == segment
        indexes = set(advantages[in_segment].tolist())
        index = int(indexes.pop()) if len(indexes) == 1 else -1
        if not 0 <= index < len(names):
            continue
        terms = positions[in_segment].tolist()
        # a row is a tree: a segment's tokens are on the path to its end
        path = next(path for path in paths if set(terms) < set(path))
        place_in_path = {position: i for i, position in enumerate(path)}
        mask, values = np.zeros(len(path), dtype=np.int64), np.full(len(path), np.nan)
        for term, value in zip(terms, logprobs[in_segment].tolist(), strict=True):
            # the loss term of a token is at the position that predicts it
            place = place_in_path[term] + 1
            mask[place], values[place] = 1, value
        found[index] = BatchRow(
            request_id=names[index],
            token_ids=ids[path].copy(),
            attention=row["attention_mask"].numpy()[path].copy(),
            loss_mask=mask,
            logprobs=values,
        )
    return found


def _paths(row: dict[str, Any]) -> list[list[int]]:
    """Positions from the root to the end of each segment that nothing continues."""
    bounds = [int(bound) for bound in row["tree_cu_seqlens_k"] if bound >= 0]
    index = [int(position) for position in row["tree_kv_index"] if position >= 0]
    paths = [index[low:high] for low, high in pairwise(bounds)]
    return [
        path
        for path in paths
        if not any(path != other and path == other[: len(path)] for other in paths)
    ]
