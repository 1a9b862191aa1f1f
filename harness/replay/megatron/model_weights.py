"""Weights and gradients of a divided model, by the names of the undivided one.

A weight is a pure function of its parameter's name. So every division of a model has the same
weights, in whatever order its parts are made, and gradients of different divisions can be compared.
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

__all__ = ["Part", "fill", "gate_name", "named_parts", "undivided_gradients", "values_of"]

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One rank's part of a parameter.

    ``name`` is that in the undivided model, ``axis`` the one that tensor ranks divide.
    """

    name: str
    axis: int | None
    tensor: Any


def named_parts(chunk: Any, expert_offset: int, tensor_size: int) -> Iterator[Part]:
    """Yield the parameters and expert biases of one model chunk.

    Layers are named by their global index from 0, experts by theirs; experts are never divided
    (expert tensor parallel size 1).
    """
    layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    biases = [
        (name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")
    ]
    for name, tensor in [*chunk.named_parameters(), *biases]:
        undivided = _LAYER.sub(lambda match: f"layers.{layers[int(match[1])]}.", name)
        undivided = _EXPERT.sub(
            lambda match: f".experts.{int(match[1]) + expert_offset}.", undivided
        )
        divided = (
            tensor_size > 1
            and getattr(tensor, "tensor_model_parallel", False)
            and ".experts." not in undivided
        )
        yield Part(name=undivided, axis=tensor.partition_dim if divided else None, tensor=tensor)


def gate_name(layer: int) -> str:
    """Return the name of the gate weight of a layer."""
    return f"layers.{layer}.mlp.router.weight"


def fill(
    part: Part, rank: int, size: int, number: int, undivided: Mapping[str, Any] | None = None
) -> None:
    """Load the weights ``number`` into a part of tensor ``rank`` of ``size``.

    0 are the initial weights, n > 0 those plus noise seeded by n. ``undivided`` are the weights of
    a checkpoint by name.
    """
    import torch

    if undivided is not None:
        values = undivided[part.name]
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
    """Return the undivided weight of that name; ``number`` as for ``fill``."""
    values: npt.NDArray[np.float32] = np.array(_noise(name, 0, tuple(shape)))
    if number > 0:
        values = values + _noise(name, number, tuple(shape))
    return (1 + values / 2).astype(np.float32) if name.endswith("norm.weight") else values


@lru_cache(maxsize=4096)
def _noise(name: str, number: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    # not hash(), which Python salts anew in every process
    draws = np.random.default_rng([zlib.crc32(name.encode()), number]).standard_normal(shape)
    return (0.3 * draws).astype(np.float32)


def undivided_gradients(
    ranks: Iterable[tuple[int, Mapping[str, tuple[int | None, npt.NDArray[Any]]]]],
) -> dict[str, npt.NDArray[np.float32]]:
    """Join each rank's ``(tensor rank, {name: (axis, gradient)})`` to the undivided gradients."""
    # ranks with the same part saw other rows or other samples: their gradients add up
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
