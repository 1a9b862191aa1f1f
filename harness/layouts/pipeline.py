"""Pipeline parallelism: layers of each stage, columns of MoE layers, order of microbatches.

Layers count from 0 over the transformer layers of the main model; the layers of a
multi-token-prediction head are none of them (Megatron numbers those from 1 again, so that they
alias the first layers: NeMo-RL#3903). A payload has a column for every layer (engines: dense
columns are filler) or for MoE layers only; indexing the first as if it were the second shifts every
layer after a dense one (verl#5037, slime#819).

With virtual stages, chunk v of rank r follows chunk v of rank r - 1, and chunk v + 1 of rank 0
follows chunk v of the last rank: with 8 layers, pp 2 and vpp 2, rank 0 builds ``(0, 1), (4, 5)``
(Megatron ``get_transformer_layer_offset``).

Target k belongs to microbatch k in every chunk, in the forward pass and in the recompute of its
backward pass. The order is Megatron's: ``get_schedule_table``,
``forward_backward_pipelining_without_interleaving`` (1F1B) and ``..._with_interleaving``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rollproof.core.contract import LayerAxis
from rollproof.errors import LayoutError

__all__ = [
    "Chunks",
    "Operation",
    "Stages",
    "columns_of",
    "expected_targets",
    "moe_layers",
    "operations",
    "schedule_table",
]


def moe_layers(
    num_layers: int, frequency: int | Sequence[int] = 1, first_dense: int = 0
) -> tuple[int, ...]:
    """Return the layers with a router.

    ``frequency`` is Megatron's ``moe_layer_freq``: n for every n-th layer from layer 0 on, or one
    0/1 per layer. The first ``first_dense`` layers are dense (DeepSeek's
    ``first_k_dense_replace``). Raises ``LayoutError`` for a pattern of another length.
    """
    if isinstance(frequency, int):
        if frequency < 1:
            raise LayoutError(
                f"moe_layer_freq={frequency} must be an integer >= 1, or a list of 0 and 1."
            )
        pattern = [int(layer % frequency == 0) for layer in range(num_layers)]
    else:
        pattern = list(frequency)
    if len(pattern) != num_layers or set(pattern) - {0, 1}:
        raise LayoutError(
            f"moe_layer_freq={pattern} must have one 0 or 1 for each of {num_layers} layers."
        )
    return tuple(layer for layer in range(first_dense, num_layers) if pattern[layer])


@lru_cache(maxsize=1024)
def columns_of(moe: tuple[int, ...], axis: LayerAxis) -> Mapping[int, int]:
    """Return the payload column of each MoE layer: its number, or its index among MoE layers."""
    # engines return all layers (SGLang, vLLM) or MoE layers only (TensorRT-LLM)
    return {layer: layer if axis is LayerAxis.ALL else ordinal for ordinal, layer in enumerate(moe)}


Chunks = tuple[tuple[tuple[int, ...], ...], ...]
"""The layers of chunk v on pipeline rank r: ``chunks[r][v]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """How layers are divided over pipeline ranks: evenly, unless something is set.

    ``first`` and ``last`` are the layers of the first and the last rank (Megatron's
    ``num_layers_in_first_pipeline_stage``); the others share the rest. ``embedding`` and ``loss``
    count the embedding and the loss as a layer of the first and the last chunk
    (``account_for_embedding_in_pipeline_split``). ``custom[r][v]`` are explicit counts; a stage may
    be empty.
    """

    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    custom: tuple[tuple[int, ...], ...] | None = None

    def counts(self, num_layers: int, pp: int, vpp: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the number of layers of each chunk, ``counts[r][v]``.

        Raises ``LayoutError`` if they do not divide.
        """
        if self.custom is not None:
            return self._custom(num_layers, pp, vpp)
        uneven = self.first is not None or self.last is not None
        if uneven and (self.embedding or self.loss):
            raise LayoutError(
                "Counting the embedding or the loss as a layer cannot be combined with uneven"
                " stages."
            )
        slots = num_layers + self.embedding + self.loss
        rest = slots - (self.first or 0) - (self.last or 0)
        others = pp - (self.first is not None) - (self.last is not None)
        if rest < 0 or (others == 0 and rest) or (others > 0 and rest % others) or others < 0:
            raise LayoutError(
                f"{rest} layers do not divide over {others} of {pp} pipeline ranks ({self})."
            )
        share = rest // others if others else 0
        ranks = [share] * pp
        if self.first is not None:
            ranks[0] = self.first
        if self.last is not None:
            ranks[-1] = self.last
        if any(count % vpp for count in ranks):
            raise LayoutError(f"Stages of {ranks} layers do not divide over {vpp} chunks each.")
        # Megatron counts the embedding and the loss as a layer of the first and the last chunk, and
        # builds one layer less there (account_for_embedding_in_pipeline_split)
        counts = [[count // vpp] * vpp for count in ranks]
        counts[0][0] -= self.embedding
        counts[-1][-1] -= self.loss
        return tuple(tuple(chunks) for chunks in counts)

    def layers(self, num_layers: int, pp: int, vpp: int = 1) -> Chunks:
        """Return the layers of each chunk. Raises ``LayoutError``."""
        return _dealt(self, num_layers, pp, vpp)

    def _custom(self, num_layers: int, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
        custom: Sequence[Sequence[int]] = self.custom or ()
        if (
            len(custom) != pp
            or any(len(chunks) != vpp for chunks in custom)
            or sum(map(sum, custom)) != num_layers
        ):
            raise LayoutError(
                f"Custom stages {self.custom} must have {pp} x {vpp} counts that add up to"
                f" {num_layers} layers."
            )
        if any(count < 0 for chunks in custom for count in chunks):
            raise LayoutError(f"Custom stages {self.custom} have a negative count.")
        return tuple(tuple(chunks) for chunks in custom)


@lru_cache(maxsize=1024)
def _dealt(stages: Stages, num_layers: int, pp: int, vpp: int) -> Chunks:
    # cached: every router of every rank needs the chunks of all ranks
    counts = stages.counts(num_layers, pp, vpp)
    out: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    start = 0
    # chunk by chunk over all ranks: a rank's layers are not contiguous (verl#7106, NeMo-RL#2740)
    for chunk in range(vpp):
        for rank in range(pp):
            out[rank].append(tuple(range(start, start + counts[rank][chunk])))
            start += counts[rank][chunk]
    return tuple(tuple(chunks) for chunks in out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One pass of one microbatch through one chunk.

    A ``backward`` pass runs the forward pass again if activations are recomputed.
    """

    microbatch: int
    chunk: int = 0
    backward: bool = False


def schedule_table(
    microbatches: int, vpp: int = 1, group: int | None = None
) -> tuple[tuple[int, int], ...]:
    """Return ``(microbatch, chunk)`` in the order of forward passes.

    ``group`` microbatches run through one chunk before the next chunk begins (Megatron's
    ``microbatch_group_size_per_vp_stage``, by default the pipeline size; without virtual stages it
    makes no difference). Raises ``LayoutError`` for sizes below 1.
    """
    size = microbatches if group is None else group
    if vpp < 1 or size < (1 if microbatches else 0) or microbatches < 0:
        raise LayoutError(
            f"{microbatches} microbatches in groups of {group} over {vpp} chunks cannot be"
            " scheduled."
        )
    # as Megatron's get_schedule_table: the last group may be smaller
    return tuple(
        (microbatch, chunk)
        for start in range(0, microbatches, size or 1)
        for chunk in range(vpp)
        for microbatch in range(start, min(start + size, microbatches))
    )


def operations(
    microbatches: int, *, pp: int = 1, rank: int = 0, vpp: int = 1, group: int | None = None
) -> tuple[Operation, ...]:
    """Return what pipeline ``rank`` does in one step: warm-up, forward and backward passes in turn,
    cool-down.

    Raises ``LayoutError`` if, with virtual stages, the number of microbatches is no multiple of
    ``pp``.
    """
    if vpp > 1 and microbatches % pp:
        raise LayoutError(
            f"{microbatches} microbatches are not a multiple of pp={pp}, which interleaving needs."
        )
    size = group or pp
    forward = schedule_table(microbatches, vpp, size if vpp > 1 else None)
    # the same microbatches in the same order, through the chunks in reverse, as Megatron's
    # get_model_chunk_id has it: the queues of a chunk stay first in, first out
    backward = [(microbatch, vpp - 1 - chunk) for microbatch, chunk in forward]
    # passes of the warm-up, as in Megatron's get_pp_rank_microbatches
    ahead = (pp - rank - 1) if vpp == 1 else (pp - rank - 1) * 2 + (vpp - 1) * size
    ahead = min(ahead, len(forward))
    out = [Operation(microbatch=m, chunk=c) for m, c in forward[:ahead]]
    for i, (m, c) in enumerate(backward):
        if ahead + i < len(forward):
            later = forward[ahead + i]
            out.append(Operation(microbatch=later[0], chunk=later[1]))
        out.append(Operation(microbatch=m, chunk=c, backward=True))
    return tuple(out)


def expected_targets(order: Sequence[Operation], *, recompute: bool) -> list[tuple[int, int]]:
    """Return the ``(microbatch, chunk)`` of the target of each router call: its own."""
    return [
        (operation.microbatch, operation.chunk)
        for operation in order
        if recompute or not operation.backward
    ]
