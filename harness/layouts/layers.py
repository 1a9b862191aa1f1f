"""Layers: which layers have a router, and which column of a payload belongs to which of them.

Layers count from 0 over the transformer layers of the main model; the layers of a
multi-token-prediction head are none of them (Megatron numbers those from 1 again, so that they
alias the first layers: NeMo-RL#3903). A payload has a column for every layer (engines: dense
columns are filler) or for MoE layers only; indexing the first as if it were the second shifts every
layer behind a dense one (verl#5037, slime#819).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from rollproof.core.contract import LayerAxis
from rollproof.errors import LayoutError

__all__ = ["columns_of", "moe_layers"]


def moe_layers(
    num_layers: int, frequency: int | Sequence[int] = 1, first_dense: int = 0
) -> tuple[int, ...]:
    """The layers that have a router.

    ``frequency`` is Megatron's ``moe_layer_freq``: n for every n-th layer from layer 0 on, or one
    0/1 per layer. The first ``first_dense`` layers are dense (DeepSeek's
    ``first_k_dense_replace``). Raises ``LayoutError`` for a pattern of another length.
    """
    if isinstance(frequency, int):
        if frequency < 1:
            raise LayoutError(
                f"moe_layer_freq={frequency} must be a whole number >= 1, or a list of 0 and 1."
            )
        pattern = [int(layer % frequency == 0) for layer in range(num_layers)]
    else:
        pattern = list(frequency)
    if len(pattern) != num_layers or set(pattern) - {0, 1}:
        raise LayoutError(
            f"moe_layer_freq={pattern} must hold one 0 or 1 for each of {num_layers} layers."
        )
    return tuple(layer for layer in range(first_dense, num_layers) if pattern[layer])


@lru_cache(maxsize=1024)
def columns_of(moe: tuple[int, ...], axis: LayerAxis) -> Mapping[int, int]:
    """For each MoE layer the column of the payload that holds its choices: itself, or its ordinal
    among MoE layers.
    """
    return {layer: layer if axis is LayerAxis.ALL else ordinal for ordinal, layer in enumerate(moe)}
