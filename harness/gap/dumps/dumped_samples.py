"""The samples of a dump: what was sampled, and the trainer's logprobs where they were written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.core.records import FloatArray, IntArray, Rollout, Version
from rollproof.errors import GapError

__all__ = ["Dump", "DumpedSample", "whole_sequence"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DumpedSample:
    """One sample.

    Attributes:
        rollout: its tokens, the engine's logprobs and the loss mask.
        trainer_logprobs: ``(response,)``, in nats; ``None`` if the dump has none.
    """

    rollout: Rollout
    trainer_logprobs: FloatArray | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dump:
    """What a framework wrote.

    Attributes:
        framework: its name, for messages.
        samples: the samples, each with a name of its own.
        lacking: why there are no logprobs of the trainer, as a sentence; empty if there are.
    """

    framework: str
    samples: Sequence[DumpedSample]
    lacking: str = ""

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts, in order."""
        return [sample.rollout for sample in self.samples]

    @property
    def trainer_logprobs(self) -> dict[str, FloatArray]:
        """The trainer's logprobs of each sample that has them, by request id."""
        return {
            sample.rollout.request_id: sample.trainer_logprobs
            for sample in self.samples
            if sample.trainer_logprobs is not None
        }


def whole_sequence(
    name: str,
    *,
    token_ids: Any,
    mask: Any,
    rollout_logprobs: Any,
    trainer_logprobs: Any = None,
    version: Version = None,
    first: int | None = None,
) -> DumpedSample:
    """Return a sample whose columns are over prompt and response together.

    Args:
        name: what the report calls the sample.
        token_ids: ``(total,)``.
        mask: ``(total,)``, 1 where the loss counts the token.
        rollout_logprobs: ``(total,)``; those of the prompt are not used.
        trainer_logprobs: ``(total,)`` likewise, or ``None``.
        version: the weights that sampled it, if they are known.
        first: where the response begins (default: at the first token that the loss counts).

    Raises:
        GapError: the columns differ in length.
    """
    columns: dict[str, Any] = {
        "mask": np.asarray(mask) != 0,
        "rollout logprobs": np.asarray(rollout_logprobs, dtype=np.float64),
    }
    if trainer_logprobs is not None:
        columns["trainer logprobs"] = np.asarray(trainer_logprobs, dtype=np.float64)
    for column, values in columns.items():
        if values.shape != (len(token_ids),):
            raise GapError(
                f"Sample {name} of the dump has {len(token_ids):,} tokens and {column} of shape"
                f" {values.shape}: one is needed for each token."
            )
    counted: IntArray = np.flatnonzero(columns["mask"])
    # such a dump does not say where its prompt ends. One without a trained token is all prompt, and
    # adds nothing to the gap
    if first is None:
        first = int(counted[0]) if len(counted) else len(token_ids)
    rollout = Rollout(
        request_id=name,
        prompt_ids=tuple(map(int, token_ids[:first])),
        response_ids=tuple(map(int, token_ids[first:])),
        finish_reason=None,
        logprobs=columns["rollout logprobs"][first:],
        loss_mask=columns["mask"][first:].astype(np.int64),
        version=version,
    )
    trainer = columns.get("trainer logprobs")
    return DumpedSample(
        rollout=rollout, trainer_logprobs=None if trainer is None else trainer[first:]
    )
