"""SkyRL's layout functions for routing replay on Megatron, released and unmodified, as layout
subjects.

Judged is ``setup_per_microbatch_replay_forward`` (skyrl.backends.skyrl_train.utils.replay_utils),
with what it packs by: ``_pack_replay_indices`` and ``_remove_left_padding_from_indices`` of SkyRL
0.3.0; ``build_token_metadata_layout`` and ``align_packed_token_metadata`` since 0.4.0. Needs skyrl
and megatron-core, both ``--no-deps``, and torch; no device and no process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np

from rollproof.core.contract import Rows
from rollproof.core.records import IntArray
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Mesh, Rank
from rollproof.layouts.padding import Alignment, Fill, Side
from rollproof.layouts.row_slices import Order
from rollproof.stacks._support.megatron import megatron_config, megatron_rank
from rollproof.stacks.skyrl.upstream import hybrid_model, replay_facts, replay_utils, token_metadata

__all__ = ["SkyRLPacked", "SkyRLPadded"]

_PACKED = Layout(
    num_layers=4,
    num_experts=64,
    top_k=2,
    held=Rows.ALL,
    mesh=Mesh(tp=2, sequence_parallel=True),
    alignment=Alignment(by=("tp", "2cp")),
    side=Side.LEFT,
    final=Fill.ZEROS,
)
"""Without the contents of padding rows, which differ between releases."""


class SkyRLPacked:
    """Microbatches without padding: sequences are packed and divided in zigzag."""

    layout: Layout = _PACKED
    packs: ClassVar[bool] = True

    def __init__(self) -> None:
        self._facts = replay_facts()
        self.layout = replace(type(self).layout, fill=Fill(self._facts.route_padding))

    def supports(self, function: str, layout: Layout) -> str | None:
        """Say why SkyRL does not support a layout. 0.3.0 has no virtual stages, and does not refuse
        them; 0.4.0 refuses them.
        """
        if layout.mesh.vpp > 1:
            return "SkyRL has no virtual stages"
        if layout.stages.custom is not None and layout.mesh.pp == 1:
            return "Megatron has custom stages for pipelines only"
        return None

    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> Any:
        """``_pack_replay_indices``, or ``align_packed_token_metadata`` with the row by which replay
        pads.
        """
        skyrl = replay_utils()
        batch, mask = _left_padded(samples)
        with megatron_rank(layout.mesh, rank):
            if not self._facts.packs_routes:
                return skyrl._pack_replay_indices(batch, mask)[0]
            padding = skyrl.replay_padding_row(batch.shape[-1], dtype=batch.dtype)
            return token_metadata().align_packed_token_metadata(
                _packed(batch, mask), self._token_layout(mask), padding
            )[0]

    def select(self, layout: Layout, rows: IntArray, rank: Rank, chunk: int) -> dict[int, Any]:
        """``setup_per_microbatch_replay_forward`` on one sequence, whose order packing keeps."""
        return self.targets(layout, [rows], [len(rows)], rank, chunk)

    def targets(
        self,
        layout: Layout,
        payloads: Sequence[IntArray],
        lengths: Sequence[int],
        rank: Rank,
        chunk: int,
    ) -> dict[int, Any]:
        """``setup_per_microbatch_replay_forward``, as ``forward_step`` calls it."""
        skyrl = replay_utils()
        batch, mask = _left_padded(payloads)
        layers, config = layout.routers(rank.pp, chunk), megatron_config(layout)
        with _routers(layers) as routers, megatron_rank(layout.mesh, rank):
            if self._facts.packs_routes:
                with hybrid_model():
                    skyrl.setup_per_microbatch_replay_forward(
                        _packed(batch, mask),
                        mask == 0,
                        mask,
                        model=SimpleNamespace(pre_process=rank.pp == 0),
                        model_config=config,
                        metadata_layout=self._token_layout(mask),
                        remove_microbatch_padding=self.packs,
                    )
            else:
                skyrl.setup_per_microbatch_replay_forward(
                    batch, mask, config, remove_microbatch_padding=self.packs
                )
            found = {
                layer: router.target_topk_idx for layer, router in zip(layers, routers, strict=True)
            }
            skyrl.clear_router_replay()
        return found

    def _token_layout(self, mask: Any) -> Any:
        """SkyRL's ``TokenMetadataLayout`` of a microbatch on this rank."""
        return token_metadata().build_token_metadata_layout(
            mask, mask.device, packed=self.packs, fp8_enabled=False
        )


class SkyRLPadded(SkyRLPacked):
    """Microbatches that are padded on the right instead of the left: Megatron flattens such a batch
    position by position.
    """

    layout: Layout = replace(
        _PACKED,
        packed=False,
        side=Side.RIGHT,
        order=Order.SEQUENCE_MAJOR,
        alignment=Alignment(by=("tp",)),
    )
    packs: ClassVar[bool] = False
    context: ClassVar[Any] = None
    select: ClassVar[Any] = None

    def supports(self, function: str, layout: Layout) -> str | None:
        """Context parallelism needs packing."""
        return (
            "SkyRL packs under context parallelism"
            if layout.mesh.cp > 1
            else super().supports(function, layout)
        )


def _left_padded(samples: Sequence[IntArray]) -> tuple[Any, Any]:
    """A batch ``(samples, width, columns, k)``, padded on the left by at least two positions, and
    its attention mask, as tensors.
    """
    import torch

    width = max(len(sample) for sample in samples) + 2
    batch = np.zeros((len(samples), width, *samples[0].shape[1:]), dtype=np.int64)
    mask = np.zeros((len(samples), width), dtype=np.int64)
    for line, attended, sample in zip(batch, mask, samples, strict=True):
        line[width - len(sample) :] = sample
        attended[width - len(sample) :] = 1
    return torch.as_tensor(batch), torch.as_tensor(mask)


def _packed(batch: Any, mask: Any) -> Any:
    """SkyRL's ``PackedTensor`` of the attended rows of a batch."""
    return token_metadata().PackedTensor.from_segments(
        [rows[attended != 0] for rows, attended in zip(batch, mask, strict=True)]
    )


@contextmanager
def _routers(layers: Sequence[int]) -> Iterator[list[Any]]:
    """Megatron's registry with a ``RouterReplay`` for each of these layers, numbered as SkyRL's
    patch of ``TopKRouter`` does.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay

    with mock.patch.object(RouterReplay, "global_router_replay_instances", []):
        routers = [RouterReplay() for _ in layers]
        for router, layer in zip(routers, layers, strict=True):
            router.layer_number = layer + 1
        yield routers
