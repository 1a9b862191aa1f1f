"""Weights of a divided model: a pure function of a parameter's name in the undivided model, and its
gradient put together again.

So every division of a model has the same weights, whatever the order in which its parts are made,
and gradients of different divisions can be compared by name.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Part", "fill", "gate_name", "named_parts", "values_of", "whole_gradients"]

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One rank's part of a parameter: its name in the undivided model, the axis along which tensor
    ranks divide it (or ``None``).
    """

    name: str
    axis: int | None
    tensor: Any


def named_parts(chunk: Any, expert_offset: int, tensor_size: int) -> Iterator[Part]:
    """The parameters and expert biases of one model chunk.

    Layers are named by their global index from 0, experts by theirs; experts are never divided
    (expert tensor parallel size 1).
    """
    layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    biases = [
        (name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")
    ]
    for name, tensor in [*chunk.named_parameters(), *biases]:
        whole = _LAYER.sub(lambda found: f"layers.{layers[int(found[1])]}.", name)
        whole = _EXPERT.sub(lambda found: f".experts.{int(found[1]) + expert_offset}.", whole)
        divided = (
            tensor_size > 1
            and getattr(tensor, "tensor_model_parallel", False)
            and ".experts." not in whole
        )
        yield Part(name=whole, axis=tensor.partition_dim if divided else None, tensor=tensor)


def gate_name(layer: int) -> str:
    """The name of the gate weight of a layer."""
    return f"layers.{layer}.mlp.router.weight"


def fill(
    part: Part, rank: int, size: int, number: int, whole: Mapping[str, Any] | None = None
) -> None:
    """Give a part of tensor ``rank`` of ``size`` the weights ``number``: 0 the first ones, n > 0
    those plus noise seeded by n.

    ``whole`` are the undivided weights by name, where they come from a checkpoint.
    """
    import torch

    if whole is not None:
        values = whole[part.name]
    else:
        shape = list(part.tensor.shape)
        if part.axis is not None:
            shape[part.axis] *= size
        values = torch.from_numpy(values_of(part.name, number, shape))
    if part.axis is not None:
        values = values.chunk(size, dim=part.axis)[rank]
    with torch.no_grad():
        part.tensor.copy_(values)


def values_of(name: str, number: int, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """The whole weight of that name: ``number`` as for ``fill``."""
    values: npt.NDArray[np.float32] = np.array(_noise(name, 0, tuple(shape)))
    if number > 0:
        values = values + _noise(name, number, tuple(shape))
    return (1 + values / 2).astype(np.float32) if name.endswith("norm.weight") else values


@lru_cache(maxsize=4096)
def _noise(name: str, number: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    draws = np.random.default_rng([zlib.crc32(name.encode()), number]).standard_normal(shape)
    return (0.3 * draws).astype(np.float32)


def whole_gradients(
    ranks: Iterable[tuple[int, Mapping[str, tuple[int | None, npt.NDArray[Any]]]]],
) -> dict[str, npt.NDArray[np.float32]]:
    """The gradients of the undivided model, from each rank's ``(tensor rank, {name: (axis,
    gradient)})``.

    Ranks that hold the same part saw different rows, or different samples: their gradients are
    added. Parts of tensor ranks are joined.
    """
    sums: dict[str, dict[int, npt.NDArray[Any]]] = {}
    axes: dict[str, int | None] = {}
    for rank, gradients in ranks:
        for name, (axis, gradient) in gradients.items():
            axes[name] = axis
            parts = sums.setdefault(name, {})
            place = rank if axis is not None else 0
            parts[place] = parts[place] + gradient if place in parts else gradient
    return {
        name: (
            parts[0]
            if (axis := axes[name]) is None
            else np.concatenate([parts[rank] for rank in sorted(parts)], axis=axis)
        )
        for name, parts in sums.items()
    }
