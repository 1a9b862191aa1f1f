"""verl's layout functions for routing replay on Megatron, released and unmodified, as layout
subjects.

Judged are ``preprocess_thd_engine`` and ``postprocess_thd_engine`` (verl.models.mcore.util),
``align_r3_router_replay_data``, ``build_r3_replay_mask``, ``set_router_replay_data``,
``get_current_rank_layer_info``, ``get_moe_num_layers_to_build``, ``reorder_and_merge_vpp_layers``,
``merge_nested_router_maps`` and ``pp_gather`` (verl.utils.megatron.router_replay_utils),
``rearrange_micro_batches``, ``restore_dynamic_batch``, ``get_seqlen_balanced_partitions``,
``index_select_tensor_dict``, ``left_right_2_no_padding`` and ``slice_input_tensor``
(verl.utils.ulysses). Needs verl and megatron-core (``pip install --no-deps megatron-core``); no
device and no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import numpy as np

from rollproof.core.records import IntArray
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Mesh, Rank
from rollproof.layouts.padding import Alignment, Fill, Side
from rollproof.layouts.row_slices import Context
from rollproof.stacks._support.megatron import GroupMember, megatron_config, megatron_rank

__all__ = ["VerlPadded", "VerlR2", "VerlR3", "VerlR3Contiguous", "VerlSamples"]

_FULL = Layout(
    num_layers=4,
    num_experts=64,
    top_k=2,
    mesh=Mesh(tp=2, sequence_parallel=True),
    alignment=Alignment(by=("tp", "2cp")),
    side=Side.BOTH,
    fill=Fill.ZEROS,
    final=Fill.ZEROS,
)


class VerlR3:
    """Replay of routes that the rollout engine recorded: payloads have a column for every layer,
    and replay is masked.
    """

    layout: ClassVar[Layout] = _FULL

    def supports(self, function: str, layout: Layout) -> str | None:
        """Say why verl does not support a layout: with context parallelism it never has the packed
        rows of all ranks.
        """
        if function in ("pack", "unpack") and layout.mesh.cp > 1:
            return "verl packs and divides in one function"
        if layout.stages.custom is not None and layout.mesh.pp == 1:
            return "Megatron has custom stages for pipelines only"
        return None

    def complete(self, layout: Layout, routes: IntArray, tokens: int) -> tuple[Any, Any]:
        """``align_r3_router_replay_data`` with ``build_r3_replay_mask``; all tokens but the first
        are the response.
        """
        import torch
        from verl.utils.megatron.router_replay_utils import (
            align_r3_router_replay_data,
            build_r3_replay_mask,
        )

        ids = _nested([np.arange(tokens)])
        rows = align_r3_router_replay_data(_nested([routes]), ids)
        mask = build_r3_replay_mask(ids, torch.ones(1, max(0, tokens - 1), dtype=torch.long))
        return rows.unbind()[0], mask.unbind()[0]

    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> tuple[Any, Any]:
        """``preprocess_thd_engine`` without context parallelism."""
        return self._thd(layout, samples, Rank())

    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> Any:
        """``preprocess_thd_engine`` on a context-parallel rank."""
        return self._thd(layout, samples, rank)[0]

    def unpack(self, layout: Layout, rows: IntArray, lengths: Sequence[int]) -> Any:
        """``postprocess_thd_engine`` without context parallelism."""
        return self.context_merge(layout, [rows], lengths)

    def context_merge(
        self, layout: Layout, pieces: Sequence[IntArray], lengths: Sequence[int]
    ) -> Any:
        """``postprocess_thd_engine`` on rank 0, which gathers the pieces of the others."""
        import torch
        from verl.models.mcore.util import postprocess_thd_engine, preprocess_thd_engine

        tensors = [torch.as_tensor(piece)[None] for piece in pieces]
        ids = _nested([np.arange(length) for length in lengths])
        with megatron_rank(layout.mesh, Rank(), tensors):
            params = preprocess_thd_engine(ids, pre_process=True, cp_layout=_division(layout))[1]
            out = postprocess_thd_engine(
                tensors[0], params, ids, len(lengths), cp_layout=_division(layout)
            )
        return list(out.unbind())

    def tensor_slice(self, layout: Layout, rows: IntArray, rank: Rank) -> Any:
        """Megatron's ``scatter_to_sequence_parallel_region``, which verl calls."""
        import torch
        from verl.utils.megatron.router_replay_utils import scatter_to_sequence_parallel_region

        with megatron_rank(layout.mesh, rank):
            return scatter_to_sequence_parallel_region(torch.as_tensor(rows))

    def select(self, layout: Layout, rows: IntArray, rank: Rank, chunk: int) -> dict[int, Any]:
        """``set_router_replay_data`` on one sequence, which stays as it is."""
        return _installed(layout, _nested([rows]), rank, chunk)

    def targets(
        self,
        layout: Layout,
        payloads: Sequence[IntArray],
        lengths: Sequence[int],
        rank: Rank,
        chunk: int,
    ) -> dict[int, Any]:
        """``align_r3_router_replay_data``, then ``set_router_replay_data``."""
        from verl.utils.megatron.router_replay_utils import align_r3_router_replay_data

        routes = align_r3_router_replay_data(
            _nested(payloads), _nested([np.arange(length) for length in lengths])
        )
        return _installed(layout, routes, rank, chunk)

    def stage_layers(self, layout: Layout, rank: Rank, chunk: int) -> list[int]:
        """``get_current_rank_layer_info``."""
        from verl.utils.megatron.router_replay_utils import get_current_rank_layer_info

        with megatron_rank(layout.mesh, rank):
            info = get_current_rank_layer_info(megatron_config(layout), chunk)
        return list(range(info["start"], info["end"]))

    def routers(self, layout: Layout, rank: Rank, chunk: int) -> int:
        """``get_moe_num_layers_to_build`` for another pipeline rank, as ``pp_gather`` calls it on
        rank 0.
        """
        from verl.utils.megatron.router_replay_utils import get_moe_num_layers_to_build

        with megatron_rank(layout.mesh, Rank()):
            count: int = get_moe_num_layers_to_build(megatron_config(layout), chunk, rank.pp)
        return count

    def _thd(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> tuple[Any, Any]:
        from verl.models.mcore.util import preprocess_thd_engine

        with megatron_rank(layout.mesh, rank):
            rows, params, _ = preprocess_thd_engine(
                _nested(samples), pre_process=True, cp_layout=_division(layout)
            )
        return rows[0], params.cu_seqlens_q_padded


class VerlPadded(VerlR3):
    """As ``VerlR3`` with ``use_remove_padding=False``: the engine feeds what
    ``preprocess_bshd_engine`` makes, a padded batch.
    """

    layout: ClassVar[Layout] = replace(_FULL, packed=False, side=Side.RIGHT)
    complete: ClassVar[Any] = None
    unpack: ClassVar[Any] = None
    pack: ClassVar[Any] = None
    context: ClassVar[Any] = None
    context_merge: ClassVar[Any] = None
    select: ClassVar[Any] = None
    stage_layers: ClassVar[Any] = None
    routers: ClassVar[Any] = None
    tensor_slice: ClassVar[Any] = None


class VerlR3Contiguous(VerlR3):
    """As ``VerlR3``, with the contiguous division of DeepSeek-V4's attention."""

    layout: ClassVar[Layout] = replace(
        _FULL, context=Context.CONTIGUOUS, alignment=Alignment(by=("tp", "cp"))
    )
    complete: ClassVar[Any] = None
    unpack: ClassVar[Any] = None
    pack: ClassVar[Any] = None
    select: ClassVar[Any] = None
    targets: ClassVar[Any] = None
    stage_layers: ClassVar[Any] = None
    routers: ClassVar[Any] = None
    tensor_slice: ClassVar[Any] = None

    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> Any:
        """``preprocess_thd_engine``, with a megatron-core that has ``cp_partition_mode``."""
        with _partition_mode():
            return super().context(layout, samples, rank)

    def context_merge(
        self, layout: Layout, pieces: Sequence[IntArray], lengths: Sequence[int]
    ) -> Any:
        """As ``VerlR3.context_merge``."""
        with _partition_mode():
            return super().context_merge(layout, pieces, lengths)


class VerlR2(VerlR3):
    """Routes that the trainer recorded: payloads have columns for MoE layers only, and ranks and
    chunks are merged.
    """

    layout: ClassVar[Layout] = replace(_FULL, layer_axis="moe")  # type: ignore[arg-type]  # a plain string is accepted
    complete: ClassVar[Any] = None
    unpack: ClassVar[Any] = None
    pack: ClassVar[Any] = None
    context: ClassVar[Any] = None
    context_merge: ClassVar[Any] = None
    targets: ClassVar[Any] = None
    stage_layers: ClassVar[Any] = None
    tensor_slice: ClassVar[Any] = None

    def supports(self, function: str, layout: Layout) -> str | None:
        """Say why verl does not support a layout: a single rank gathers no stages."""
        if function == "gather_stages" and layout.mesh.pp == 1:
            return "pp_gather returns its argument without a pipeline"
        return super().supports(function, layout)

    def reorder(
        self, layout: Layout, recorded: Sequence[IntArray], microbatches: int, rank: Rank
    ) -> Any:
        """``reorder_and_merge_vpp_layers``."""
        from verl.utils.megatron.router_replay_utils import (
            merge_nested_router_maps,
            reorder_and_merge_vpp_layers,
        )

        # verl records routes as int16
        tensors = [_nested([rows.astype(np.int16)]) for rows in recorded]
        if layout.mesh.vpp == 1:
            return list(merge_nested_router_maps(tensors).unbind())
        merged = reorder_and_merge_vpp_layers(
            tensors, microbatches, layout.mesh.vpp, layout.group or layout.mesh.pp
        )
        return list(merged.unbind())

    def gather_stages(self, layout: Layout, stages: Sequence[IntArray]) -> Any:
        """``pp_gather`` on rank 0."""
        from verl.utils.megatron.router_replay_utils import pp_gather

        tensors = [_nested([rows.astype(np.int16)]) for rows in stages]
        with megatron_rank(layout.mesh, Rank(), tensors):
            gathered = pp_gather(tensors[0], megatron_config(layout))
        return gathered.unbind()[0]

    def compact(self, layout: Layout, ids: IntArray) -> Any:
        """``merge_nested_router_maps`` keeps ids in 16 bits."""
        from verl.utils.megatron.router_replay_utils import merge_nested_router_maps

        return merge_nested_router_maps([_nested([ids])]).unbind()[0]


class VerlSamples:
    """How samples are divided, put back, indexed and unpadded, and how the VeOmni engine divides
    rows over Ulysses ranks.
    """

    layout: ClassVar[Layout] = _FULL

    def microbatches(self, layout: Layout, lengths: Sequence[int], most: int) -> Any:
        """``rearrange_micro_batches``. Samples are recognised by their tokens, and compared with
        the indexes that verl returns.
        """
        from verl.utils.seqlen_balancing import rearrange_micro_batches
        from verl.utils.tensordict_utils import get_tensordict

        numbered = [np.full(length, i) for i, length in enumerate(lengths)]
        batches, indexes = rearrange_micro_batches(
            get_tensordict({"input_ids": _nested(numbered)}), max_token_len=most
        )
        samples = [[int(tokens[0]) for tokens in batch["input_ids"].unbind()] for batch in batches]
        if samples != [list(part) for part in indexes]:
            raise ValueError(
                f"the microbatches hold samples {samples}, and their indexes say {indexes}"
            )
        return samples

    def ulysses(self, layout: Layout, rows: IntArray, rank: Rank) -> Any:
        """``slice_input_tensor``, which the VeOmni engine calls on targets and on input ids."""
        import torch
        from verl.utils import ulysses

        group = GroupMember(layout.mesh.ulysses, rank.ulysses)
        with (
            megatron_rank(Mesh(), Rank()),
            mock.patch.object(ulysses, "_ULYSSES_SEQUENCE_PARALLEL_GROUP", group),
        ):
            return ulysses.slice_input_tensor(torch.as_tensor(rows), dim=0, padding=True)

    def restore(
        self, layout: Layout, values: Sequence[Sequence[IntArray]], indexes: Sequence[Sequence[int]]
    ) -> Any:
        """``restore_dynamic_batch``."""
        from verl.utils.seqlen_balancing import restore_dynamic_batch

        return list(
            restore_dynamic_batch(
                _nested([value for part in values for value in part]), indexes
            ).unbind()
        )

    def divide(
        self, layout: Layout, samples: Sequence[tuple[IntArray, IntArray]], parts: int
    ) -> Any:
        """``get_seqlen_balanced_partitions`` and ``index_select_tensor_dict``."""
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

        partitions = get_seqlen_balanced_partitions(
            [len(tokens) for tokens, _ in samples], parts, equal_size=len(samples) % parts == 0
        )
        return [_selected(samples, partition) for partition in partitions]

    def keep(
        self, layout: Layout, samples: Sequence[tuple[IntArray, IntArray]], kept: Sequence[int]
    ) -> Any:
        """``index_select_tensor_dict``."""
        return _selected(samples, kept)

    def unpad(self, layout: Layout, batch: IntArray, attention: IntArray) -> Any:
        """``left_right_2_no_padding``."""
        import torch
        from tensordict import TensorDict
        from verl.workers.utils.padding import left_right_2_no_padding

        mask = torch.as_tensor(attention)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        data = TensorDict(
            {
                "input_ids": mask,
                "attention_mask": mask,
                "response_mask": mask[:, 1:],
                "position_ids": positions,
                "routed_experts": torch.as_tensor(batch),
            },
            batch_size=len(batch),
        )
        return list(left_right_2_no_padding(data)["routed_experts"].unbind())


def _installed(layout: Layout, routes: Any, rank: Rank, chunk: int) -> dict[int, Any]:
    """The targets that ``set_router_replay_data`` installs in the routers of a chunk, by layer."""
    # Megatron builds a rank's routers chunk by chunk.
    from verl.utils.megatron import router_replay_utils as utils

    owned = [layer for v in range(layout.mesh.vpp) for layer in layout.routers(rank.pp, v)]
    routers = [_router(utils) for _ in owned]
    registry = mock.patch.object(utils.RouterReplay, "router_instances", routers)
    # `device_name` is read when verl is imported: it would name a GPU of this machine
    with registry, megatron_rank(layout.mesh, rank), mock.patch.object(utils, "device_name", "cpu"):
        if layout.routers(rank.pp, chunk):
            utils.set_router_replay_data(routes, None, megatron_config(layout), vp_rank=chunk)
    return {
        layer: router.target_topk_idx
        for layer, router in zip(owned, routers, strict=True)
        if router.target_topk_idx is not None
    }


def _selected(
    samples: Sequence[tuple[IntArray, IntArray]], indexes: Sequence[int]
) -> list[tuple[Any, Any]]:
    from verl.utils.tensordict_utils import get_tensordict, index_select_tensor_dict

    data = get_tensordict(
        {
            "input_ids": _nested([tokens for tokens, _ in samples]),
            "routed_experts": _nested([r for _, r in samples]),
        }
    )
    chosen = index_select_tensor_dict(data, list(indexes))
    return list(zip(chosen["input_ids"].unbind(), chosen["routed_experts"].unbind(), strict=True))


def _nested(parts: Sequence[IntArray]) -> Any:
    import torch

    return torch.nested.as_nested_tensor(
        [torch.as_tensor(part) for part in parts], layout=torch.jagged
    )


def _division(layout: Layout) -> str:
    return "contiguous" if layout.context is Context.CONTIGUOUS else "zigzag"


def _router(utils: Any) -> Any:
    """A ``RouterReplay`` that is not yet in the registry."""
    router = object.__new__(utils.RouterReplay)
    router.clear_indices()
    router.router_replay_action = None
    return router


def _partition_mode() -> Any:
    """megatron-core 0.16.1 has no ``PackedSeqParams.cp_partition_mode``; a newer one does."""
    from verl.models.mcore import util

    # A newer megatron-core needs no help.
    if util._PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE:
        return mock.patch.object(util, "_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE", True)
    original = util.PackedSeqParams

    def params(**fields: Any) -> Any:
        return original(
            **{name: value for name, value in fields.items() if name != "cp_partition_mode"}
        )

    return mock.patch.multiple(
        util, PackedSeqParams=params, _PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE=True
    )
