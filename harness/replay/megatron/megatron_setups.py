"""The judged Megatron configurations: model, parallel sizes and replay code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rollproof.core.contract import Contract, Filler, LayerAxis, Rows
from rollproof.core.replay_contract import ReplayMode
from rollproof.core.trainer_contract import trainer_contract
from rollproof.errors import UsageError
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Mesh
from rollproof.layouts.padding import Alignment, Side
from rollproof.layouts.pipeline import Stages

__all__ = [
    "OTHERS",
    "SETUPS",
    "UNSUPPORTED",
    "Dispatcher",
    "MegatronSetup",
    "ReplayCodeName",
    "RouterKind",
    "setup_named",
]


class Dispatcher(StrEnum):
    """How tokens reach the experts of other ranks (``moe_token_dispatcher_type``)."""

    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"


class RouterKind(StrEnum):
    """Scores and selection of the routers."""

    SOFTMAX = "softmax"
    """Softmax over the chosen experts (Mixtral, Qwen-MoE without normalisation differ in the order
    only).
    """
    SIGMOID = "sigmoid"
    """Sigmoid scores with an expert bias, groups of experts, a scaling factor and a shared expert
    (DeepSeek-V3).
    """


class ReplayCodeName(StrEnum):
    """The replay code that drives the routers."""

    CORE = "megatron-core"
    VERL = "verl"
    SKYRL = "SkyRL"


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronSetup:
    """A tiny GPT with routers in ``moe_layers``, divided over ``dp * cp * tp * pp`` processes.

    Tensor parallelism implies sequence parallelism, which Megatron requires for MoE; ``ep`` may
    span data, context and tensor ranks.

    - ``vpp`` is the number of model chunks on a pipeline rank.
    - ``first`` is the number of layers of the first pipeline rank, for uneven stages.
    - ``own_widths`` pads each microbatch to a width of its own.
    - ``dense`` makes a model without routers; ``unsupported`` names one of ``UNSUPPORTED``.
    - ``mode`` says where routes come from, ``code`` which code replays them.
    - With ``checkpoints`` the model is theirs (``checkpoint.checkpoint_setup``); the weights number
      n are those of the n-th, in ``dtype``.
    """

    name: str
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    first: int | None = None
    dispatcher: Dispatcher = Dispatcher.ALLGATHER
    router: RouterKind = RouterKind.SOFTMAX
    num_layers: int = 4
    moe_layers: tuple[int, ...] = (0, 1, 2, 3)
    layer_axis: LayerAxis = LayerAxis.ALL
    rows: Rows = Rows.FORWARDED
    microbatches: int = 2
    microbatch_size: int = 2
    num_experts: int = 8
    top_k: int = 2
    vocab: int = 384
    own_widths: bool = False
    code: ReplayCodeName = ReplayCodeName.CORE
    mode: ReplayMode = ReplayMode.R3
    dense: bool = False
    unsupported: str = ""
    checkpoints: tuple[str, ...] = ()
    dtype: str = "float32"

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def mesh(self) -> Mesh:
        """The parallel sizes."""
        return Mesh(
            dp=self.dp,
            cp=self.cp,
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            sequence_parallel=self.tp > 1,
        )

    def layout(self, width: int = 1) -> Layout:
        """Return the layout: batches padded on the right to a multiple of ``width``, in
        sequence-major order, zigzag over context ranks.
        """
        return Layout(
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            top_k=self.top_k,
            moe_layers=self.moe_layers,
            layer_axis=self.layer_axis,
            mesh=self.mesh,
            stages=Stages(first=self.first),
            packed=False,
            side=Side.RIGHT,
            alignment=Alignment(by=("tp", "2cp"), constant=width),
        )

    def width(self, lengths: Iterable[int]) -> int:
        """Return what samples of these lengths are padded to, so that all ranks divide it."""
        multiple = self.layout().alignment.multiple(self.mesh)
        return -(-max(lengths, default=1) // multiple) * multiple

    @property
    def words(self) -> str:
        """The parallel sizes as text."""
        sizes = [
            f"{name.upper()}={getattr(self, name)}"
            for name in ("dp", "cp", "tp", "ep", "pp", "vpp")
            if getattr(self, name) > 1
        ]
        if self.tp > 1:
            sizes.append("SP")
        if self.first is not None:
            sizes.append(f"{self.first} layers on the first stage")
        return " ".join(sizes) or "one process"

    def contract(self) -> Contract:
        """What a trainer of this setup declares."""
        return trainer_contract(
            num_layers=self.num_layers,
            moe_layers=self.moe_layers,
            num_experts=self.num_experts,
            top_k=self.top_k,
            layer_axis=self.layer_axis,
            mode=self.mode,
            vocab=self.vocab,
            recompute=("none", "selective", "full"),
            unsupported=tuple(UNSUPPORTED),
            microbatches=self.microbatches,
            microbatch_size=self.microbatch_size,
            parallel=f"{self.code}, {self.words}",
            rows=self.rows,
            final_row=Filler.ARANGE if self.rows is Rows.ALL else None,
            **_TERMS[self.code, self.mode],
        )


# If padding and final tokens execute a filler, experts multiply other numbers of rows than
# natively, and the last bits differ: hence the tolerances.
_TERMS: Mapping[tuple[ReplayCodeName, ReplayMode], Mapping[str, Any]] = {
    (ReplayCodeName.CORE, ReplayMode.R3): {
        "free_rows": "dummy",
        "records": True,
        "installs": "per-call",
        "tolerance": 1e-4,
    },
    (ReplayCodeName.CORE, ReplayMode.R2): {
        "free_rows": "dummy",
        "records": True,
        "installs": "per-call",
        "tolerance": 1e-4,
    },
    (ReplayCodeName.VERL, ReplayMode.R3): {"free_rows": "native"},
    (ReplayCodeName.VERL, ReplayMode.R2): {
        "free_rows": "dummy",
        "records": True,
        "tolerance": 1e-4,
    },
    (ReplayCodeName.SKYRL, ReplayMode.R3): {"free_rows": "dummy", "tolerance": 1e-4},
}
"""What the replay codes promise."""

UNSUPPORTED: Mapping[str, Mapping[str, Any]] = {
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    "capacity": {"moe_expert_capacity_factor": 1.0},
}
"""Configurations of routers that do not choose, or not only, by ``RouterReplay``.

Megatron accepts targets for them silently, and executes others.
"""

_DENSE_FIRST = (1, 2, 3)

_ALL = (
    MegatronSetup(name="single"),
    MegatronSetup(name="dense-first", moe_layers=_DENSE_FIRST),
    MegatronSetup(
        name="dense-first-moe-axis",
        moe_layers=_DENSE_FIRST,
        layer_axis=LayerAxis.MOE,
        dispatcher=Dispatcher.ALLTOALL,
    ),
    MegatronSetup(
        name="sigmoid",
        router=RouterKind.SIGMOID,
        moe_layers=_DENSE_FIRST,
        dispatcher=Dispatcher.ALLTOALL,
    ),
    MegatronSetup(name="tp2", tp=2),
    MegatronSetup(name="tp2-alltoall", tp=2, dispatcher=Dispatcher.ALLTOALL),
    MegatronSetup(name="ep2-allgather", dp=2, ep=2, microbatch_size=4),
    MegatronSetup(
        name="ep2-alltoall", dp=2, ep=2, dispatcher=Dispatcher.ALLTOALL, microbatch_size=4
    ),
    MegatronSetup(name="cp2", cp=2),
    MegatronSetup(name="pp2", pp=2, microbatches=4),
    MegatronSetup(name="pp2-uneven", pp=2, first=1, moe_layers=_DENSE_FIRST, microbatches=3),
    MegatronSetup(
        name="pp2-vpp3", pp=2, vpp=3, num_layers=6, moe_layers=(1, 2, 3, 5), microbatches=4
    ),
    MegatronSetup(
        name="tp2-ep4", tp=2, dp=2, ep=4, dispatcher=Dispatcher.ALLTOALL, microbatch_size=4
    ),
    MegatronSetup(
        name="tp2-cp2-sigmoid",
        tp=2,
        cp=2,
        router=RouterKind.SIGMOID,
        moe_layers=_DENSE_FIRST,
        dispatcher=Dispatcher.ALLTOALL,
    ),
    MegatronSetup(name="tp2-pp2", tp=2, pp=2, microbatches=4),
    MegatronSetup(
        name="cp2-pp2-vpp2",
        cp=2,
        pp=2,
        vpp=2,
        microbatches=4,
        moe_layers=_DENSE_FIRST,
        layer_axis=LayerAxis.MOE,
    ),
    MegatronSetup(
        name="ep2-pp2",
        dp=2,
        ep=2,
        pp=2,
        dispatcher=Dispatcher.ALLTOALL,
        microbatches=4,
        microbatch_size=4,
    ),
    MegatronSetup(name="cp4", cp=4),
    MegatronSetup(name="tp2-cp3", tp=2, cp=3),
)

_PACKED = MegatronSetup(
    name="packed",
    own_widths=True,
    microbatch_size=1,
    microbatches=4,
    dispatcher=Dispatcher.ALLTOALL,
    moe_layers=_DENSE_FIRST,
)
_VERL = replace(_PACKED, code=ReplayCodeName.VERL)
_SKYRL = replace(_PACKED, code=ReplayCodeName.SKYRL)

_OTHERS = (
    replace(_VERL, name="verl-single"),
    replace(_VERL, name="verl-sigmoid", router=RouterKind.SIGMOID),
    replace(_VERL, name="verl-tp2-cp2", tp=2, cp=2),
    replace(_VERL, name="verl-ep2", dp=2, ep=2, microbatch_size=2),
    replace(_VERL, name="verl-pp2-vpp3", pp=2, vpp=3, num_layers=6, moe_layers=(1, 2, 3, 5)),
    replace(_VERL, name="verl-r2", mode=ReplayMode.R2, rows=Rows.ALL, layer_axis=LayerAxis.MOE),
    replace(
        _VERL, name="verl-r2-tp2", mode=ReplayMode.R2, rows=Rows.ALL, layer_axis=LayerAxis.MOE, tp=2
    ),
    replace(
        _VERL,
        name="verl-r2-cp2-pp2",
        mode=ReplayMode.R2,
        rows=Rows.ALL,
        layer_axis=LayerAxis.MOE,
        cp=2,
        pp=2,
    ),
    replace(
        _VERL,
        name="verl-r2-pp2-vpp3",
        mode=ReplayMode.R2,
        rows=Rows.ALL,
        layer_axis=LayerAxis.MOE,
        pp=2,
        vpp=3,
        num_layers=6,
        moe_layers=(1, 2, 3, 5),
    ),
    replace(_SKYRL, name="skyrl-single"),
    replace(_SKYRL, name="skyrl-tp2-cp2", tp=2, cp=2),
    replace(_SKYRL, name="skyrl-pp2", pp=2, first=1),
    replace(_SKYRL, name="skyrl-padded", microbatch_size=2, microbatches=2),
)
"""Setups with the replay code of verl and SkyRL; a microbatch of a rank is one packed sequence,
unless the name says that it is padded.
"""

SETUPS: Mapping[str, MegatronSetup] = {setup.name: setup for setup in _ALL}
"""The judged configurations of megatron-core by name."""

OTHERS: Mapping[str, MegatronSetup] = {setup.name: setup for setup in _OTHERS}
"""The judged configurations with other replay code by name."""


def setup_named(name: str) -> MegatronSetup:
    """Return the setup called ``name``. Raises ``UsageError`` for an unknown one."""
    try:
        return {**SETUPS, **OTHERS}[name]
    except KeyError:
        raise UsageError(
            f"No Megatron setup is named {name!r}; choose one of {', '.join([*SETUPS, *OTHERS])}."
        ) from None
