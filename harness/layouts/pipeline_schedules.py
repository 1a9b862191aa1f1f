"""Schedules: the order in which a pipeline rank runs microbatches through its chunks, forward and
backward.

Target k belongs to microbatch k in every chunk, in the forward pass and in the recompute of its
backward pass. Megatron's order: ``get_schedule_table``,
``forward_backward_pipelining_without_interleaving`` (1F1B) and ``..._with_interleaving``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollproof.errors import LayoutError

__all__ = ["Operation", "operations", "schedule_table", "served_by_queues", "wanted_targets"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One pass of one microbatch through one chunk: ``backward`` runs the forward pass again where
    activations are recomputed.
    """

    microbatch: int
    chunk: int = 0
    backward: bool = False


def schedule_table(
    microbatches: int, vpp: int = 1, group: int | None = None
) -> tuple[tuple[int, int], ...]:
    """``(microbatch, chunk)`` in the order of forward passes.

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
    return tuple(
        (microbatch, chunk)
        for start in range(0, microbatches, size or 1)
        for chunk in range(vpp)
        for microbatch in range(start, min(start + size, microbatches))
    )


def operations(
    microbatches: int, *, pp: int = 1, rank: int = 0, vpp: int = 1, group: int | None = None
) -> tuple[Operation, ...]:
    """What pipeline ``rank`` does in one step: warm-up, one forward then one backward in turn,
    cool-down.

    Under virtual stages the number of microbatches must be a multiple of ``pp``. Raises
    ``LayoutError`` where it is not.
    """
    if vpp > 1 and microbatches % pp:
        raise LayoutError(
            f"{microbatches} microbatches are no multiple of pp={pp}, which interleaving needs."
        )
    size = group or pp
    forward = schedule_table(microbatches, vpp, size if vpp > 1 else None)
    backward = [(microbatch, vpp - 1 - chunk) for microbatch, chunk in forward]
    ahead = (pp - rank - 1) if vpp == 1 else (pp - rank - 1) * 2 + (vpp - 1) * size
    ahead = min(ahead, len(forward))
    out = [Operation(microbatch=m, chunk=c) for m, c in forward[:ahead]]
    for i, (m, c) in enumerate(backward):
        if ahead + i < len(forward):
            later = forward[ahead + i]
            out.append(Operation(microbatch=later[0], chunk=later[1]))
        out.append(Operation(microbatch=m, chunk=c, backward=True))
    return tuple(out)


def served_by_queues(
    order: Iterable[Operation], *, recompute: bool
) -> tuple[list[tuple[int, int]], dict[int, list[tuple[int, int]]]]:
    """The ``(microbatch, chunk)`` whose target each operation gets from one first-in-first-out
    queue per chunk, and what is left there.

    A forward pass uses its own target and queues it; a backward pass takes the oldest one where it
    recomputes (Megatron's and verl's ``replay_backward_list``). Without recompute nothing takes
    them, and whoever drives the step must empty the queues. Backward passes that recompute nothing
    are left out of the answer. Raises ``LayoutError`` where a queue is empty.
    """
    queues: dict[int, list[tuple[int, int]]] = {}
    used = []
    for operation in order:
        queue = queues.setdefault(operation.chunk, [])
        if not operation.backward:
            queue.append((operation.microbatch, operation.chunk))
            used.append(queue[-1])
        elif recompute:
            if not queue:
                raise LayoutError(
                    f"The backward pass of microbatch {operation.microbatch} finds no target: it"
                    " ran before its forward pass."
                )
            used.append(queue.pop(0))
    return used, queues


def wanted_targets(order: Sequence[Operation], *, recompute: bool) -> list[tuple[int, int]]:
    """The ``(microbatch, chunk)`` whose target each router call must use: its own."""
    return [
        (operation.microbatch, operation.chunk)
        for operation in order
        if recompute or not operation.backward
    ]
