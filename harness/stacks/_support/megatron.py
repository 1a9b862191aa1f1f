"""Runs functions as one rank of a Megatron mesh, in this process.

Layout functions of frameworks on Megatron read sizes and ranks from
``megatron.core.parallel_state`` and gather with ``torch.distributed``. Inside ``megatron_rank``
both use a ``Mesh`` and the pieces of the other ranks, which are its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Mesh, Rank

__all__ = ["GroupMember", "megatron_config", "megatron_rank"]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A process group, as far as slicing reads it: its size, and which member this is."""

    members: int
    member: int

    def size(self) -> int:
        """How many members there are."""
        return self.members

    def rank(self) -> int:
        """Which of them this is."""
        return self.member


@contextmanager
def megatron_rank(mesh: Mesh, rank: Rank, gathered: Sequence[Any] = ()) -> Iterator[None]:
    """Set Megatron's parallel state to that of ``rank``; gathering returns ``gathered``, in rank
    order.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    def all_gather(into: list[Any], *_: Any, **__: Any) -> None:
        for buffer, piece in zip(into, gathered, strict=True):
            buffer.copy_(piece)

    def all_gather_object(into: list[Any], *_: Any, **__: Any) -> None:
        into[:] = gathered

    values = {
        "get_tensor_model_parallel_world_size": mesh.tp,
        "get_tensor_model_parallel_rank": rank.tp,
        "get_tensor_model_parallel_group": GroupMember(mesh.tp, rank.tp),
        "get_context_parallel_world_size": mesh.cp,
        "get_context_parallel_rank": rank.cp,
        "get_context_parallel_group": GroupMember(mesh.cp, rank.cp),
        "get_pipeline_model_parallel_world_size": mesh.pp,
        "get_pipeline_model_parallel_rank": rank.pp,
        "get_pipeline_model_parallel_group": GroupMember(mesh.pp, rank.pp),
        "get_virtual_pipeline_model_parallel_world_size": mesh.vpp if mesh.vpp > 1 else None,
        "is_initialized": True,
    }
    tensor_group = values["get_tensor_model_parallel_group"]
    # By name in the modules that define them: callers look them up there at every call.
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(
                mappings, "get_tensor_model_parallel_group_if_none", _returning(tensor_group)
            )
        )
        for name, value in values.items():
            stack.enter_context(mock.patch.object(parallel_state, name, _returning(value)))
        stack.enter_context(mock.patch.object(torch.distributed, "all_gather", all_gather))
        stack.enter_context(
            mock.patch.object(torch.distributed, "all_gather_object", all_gather_object)
        )
        stack.enter_context(
            mock.patch.object(
                torch.distributed, "get_world_size", lambda group=None: group.size() if group else 1
            )
        )
        stack.enter_context(
            mock.patch.object(
                torch.distributed, "get_rank", lambda group=None: group.rank() if group else 0
            )
        )
        yield


def _returning(value: Any) -> Any:
    return lambda *_, **__: value


def megatron_config(layout: Layout) -> Any:
    """The fields of a ``TransformerConfig`` that layout functions read: layers, pattern of MoE
    layers, pipeline sizes and how stages are made.
    """
    from types import SimpleNamespace

    stages, mesh = layout.stages, layout.mesh
    return SimpleNamespace(
        num_layers=layout.num_layers,
        moe_layer_freq=[int(layer in layout.moe) for layer in range(layout.num_layers)],
        moe_router_topk=layout.top_k,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=mesh.vpp if mesh.vpp > 1 else None,
        sequence_parallel=mesh.sequence_parallel,
        pipeline_model_parallel_layout=None if stages.custom is None else _custom_layout(layout),
        num_layers_in_first_pipeline_stage=stages.first,
        num_layers_in_last_pipeline_stage=stages.last,
        account_for_embedding_in_pipeline_split=stages.embedding,
        account_for_loss_in_pipeline_split=stages.loss,
        fp8=None,
    )


def _custom_layout(layout: Layout) -> Any:
    """Megatron's own ``PipelineParallelLayerLayout`` of the custom stages."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    counts, mesh = layout.stages.custom or (), layout.mesh
    chunks = [["decoder"] * counts[pp][chunk] for chunk in range(mesh.vpp) for pp in range(mesh.pp)]
    # embedding and loss are layers of a custom layout
    chunks[0], chunks[-1] = ["embedding", *chunks[0]], [*chunks[-1], "loss"]
    return PipelineParallelLayerLayout(chunks, mesh.pp)
