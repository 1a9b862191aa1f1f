"""Correct replaying trainers with different conventions and meshes; no check may fail on them."""

from __future__ import annotations

from typing import ClassVar

from rollproof.core.contract import LayerAxis, Rows
from rollproof.core.replay_contract import FreeRows, ReplayMode
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.layouts import Alignment, Context, Fill, Layout, Mesh, Order, Side, Stages

__all__ = [
    "REFERENCES",
    "CapturedPrefix",
    "Contiguous",
    "DenseFirst",
    "Interleaved",
    "ManyExperts",
    "OneExpert",
    "Pipelined",
    "RecordingTrainer",
    "Zigzag",
]

_BOTH = Alignment(by=("tp", "2cp"))


class DenseFirst(ReplayTrainer):
    """Has a dense first layer, and a payload column for it; sequence parallel.

    Batches are padded on the left, rows are sequence-major.
    """

    layout: ClassVar[Layout] = Layout(
        num_layers=4,
        num_experts=8,
        top_k=2,
        moe_layers=(1, 2, 3),
        packed=False,
        side=Side.LEFT,
        order=Order.SEQUENCE_MAJOR,
        mesh=Mesh(tp=2, sequence_parallel=True),
        alignment=Alignment(by=("tp",)),
    )
    others: ClassVar[tuple[str, ...]] = ("critic", "reference")
    parallel = "tp2 with sequence parallelism"


class RecordingTrainer(ReplayTrainer):
    """Records its own routes (R2), with columns of MoE layers only, over uneven pipeline stages.

    The first stage has no router.
    """

    layout: ClassVar[Layout] = Layout(
        num_layers=5,
        num_experts=8,
        top_k=2,
        moe_layers=(2, 4),
        layer_axis=LayerAxis.MOE,
        held=Rows.CAPTURED_PREFIX,
        mesh=Mesh(pp=3),
        stages=Stages(custom=((2,), (1,), (2,))),
    )
    mode = ReplayMode.R2
    microbatches = 3
    parallel = "pp3, the first stage without routers"


class Zigzag(ReplayTrainer):
    """Packs sequences; zigzag context parallel and sequence parallel, of different sizes."""

    layout: ClassVar[Layout] = Layout(
        num_layers=3,
        num_experts=8,
        top_k=2,
        mesh=Mesh(tp=2, cp=3, sequence_parallel=True),
        alignment=_BOTH,
    )
    parallel = "tp2 with sequence parallelism, cp3 (zigzag)"


class Contiguous(ReplayTrainer):
    """Contiguous context parallel over all packed rows.

    Rows without a target execute distinct dummy experts.
    """

    layout: ClassVar[Layout] = Layout(
        num_layers=2,
        num_experts=8,
        top_k=3,
        mesh=Mesh(cp=3),
        context=Context.CONTIGUOUS,
        alignment=Alignment(total=6),
        fill=Fill.SPREAD,
    )
    free_rows = FreeRows.DUMMY
    others: ClassVar[tuple[str, ...]] = ()
    parallel = "cp3 (contiguous)"


class Interleaved(ReplayTrainer):
    """Two pipeline ranks with two chunks each: rank 0 has layers 0 and 2."""

    layout: ClassVar[Layout] = Layout(num_layers=4, num_experts=8, top_k=2, mesh=Mesh(pp=2, vpp=2))
    microbatches = 4
    others: ClassVar[tuple[str, ...]] = ()
    parallel = "pp2 with 2 chunks"


class Pipelined(ReplayTrainer):
    """Records over pipeline stages, chunks, context and tensor ranks (R2)."""

    layout: ClassVar[Layout] = Layout(
        num_layers=8,
        num_experts=8,
        top_k=2,
        moe_layers=(1, 2, 3, 5, 7),
        held=Rows.CAPTURED_PREFIX,
        mesh=Mesh(pp=2, vpp=2, cp=2, tp=3, sequence_parallel=True),
        alignment=_BOTH,
    )
    mode = ReplayMode.R2
    microbatches = 2
    others: ClassVar[tuple[str, ...]] = ("critic",)
    parallel = "pp2 with 2 chunks, cp2 (zigzag), tp3 with sequence parallelism"


class ManyExperts(ReplayTrainer):
    """More experts than a byte can number, normalised weights, and an MTP layer."""

    layout: ClassVar[Layout] = Layout(num_layers=2, num_experts=300, top_k=2)
    normalised = True
    mtp = True
    width = 3


class CapturedPrefix(ReplayTrainer):
    """Payloads may end early; the router chooses for rows that were not captured."""

    layout: ClassVar[Layout] = Layout(
        num_layers=3, num_experts=8, top_k=2, held=Rows.CAPTURED_PREFIX, packed=False
    )
    others: ClassVar[tuple[str, ...]] = ("teacher",)


class OneExpert(ReplayTrainer):
    """A single expert per token."""

    layout: ClassVar[Layout] = Layout(num_layers=2, num_experts=4, top_k=1, mesh=Mesh(tp=2))
    parallel = "tp2 without sequence parallelism"


REFERENCES: dict[str, type[ReplayTrainer]] = {
    "replay-plain": ReplayTrainer,
    "replay-dense-first": DenseFirst,
    "replay-recording": RecordingTrainer,
    "replay-zigzag": Zigzag,
    "replay-contiguous": Contiguous,
    "replay-interleaved": Interleaved,
    "replay-pipelined": Pipelined,
    "replay-many-experts": ManyExperts,
    "replay-captured-prefix": CapturedPrefix,
    "replay-one-expert": OneExpert,
}
"""Correct trainers by name."""
