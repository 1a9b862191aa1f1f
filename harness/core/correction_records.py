"""Records of a correction: the batch that it gets, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Correction", "CorrectionBatch"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CorrectionBatch:
    """A batch of responses, padded on the right: numpy arrays, or CPU tensors if the contract
    declares ``arrays="torch"``.

    Attributes:
        rollout: Logprobs that the engine reported, ``(sequences, tokens)``, of the contract's
            ``dtype``.
        old: Those of the trainer before its update, likewise.
        current: Those of the trainer now, likewise.
        mask: 1 where a token is trained, ``(sequences, tokens)``, integers. 0 at padding, at tokens
            of the environment, and in sequences that are not trained.
        advantages: ``(sequences, tokens)``, the same for all tokens of a sequence.
        groups: The group of each sequence (the samples of one prompt), ``(sequences,)``, integers.
        versions: The version of the weights that sampled each token, ``(sequences, tokens)``,
            integers; -1 at padding and at tokens of the environment.
        current_version: The version of the current weights.
    """

    rollout: Any
    old: Any
    current: Any
    mask: Any
    advantages: Any
    groups: Any
    versions: Any
    current_version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Correction:
    """What a correction made of a batch; arrays, tensors or lists.

    Attributes:
        weights: Importance weights: ``(sequences, tokens)``, or one per sequence as ``(sequences,
            1)`` or ``(sequences,)``. ``None`` if the contract declares none.
        mask: The mask after rejection, ``(sequences, tokens)``, or one number per sequence, by
            which the given mask is multiplied; ``None`` if nothing is rejected by the mask.
        metrics: The reported numbers by name.
        loss: The loss, if the contract declares one.
        weights_gradient: The derivative of the sum over trained tokens of advantage times weight,
            by the name of the logprobs (``rollout``, ``old``, ``current``), ``(sequences,
            tokens)``. Of tensors it is taken by autograd; without them a subject may report it, and
            what is not reported is not judged.
        loss_gradient: The derivative of the loss to the current logprobs, likewise.
    """

    weights: Any = None
    mask: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    loss: Any = None
    weights_gradient: Mapping[str, Any] | None = None
    loss_gradient: Any = None
