"""The judged configurations of HF trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rollproof.errors import UsageError
from rollproof.replay.hf.inputs import Layout

__all__ = ["SETUPS", "Setup", "setup_named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The configuration of a trainer.

    Attributes:
        family: model family (``model_families``).
        layout: how samples become one input.
        reentrant: kind of gradient checkpointing.
        late: run the backward pass after the replay context has closed.
        dtype: name of a torch dtype.
        parallel: wrapper of the model (``ranked_trainer.WRAPS``).
        mixed: let FSDP2 compute in bfloat16.
        device: ``"cpu"`` or ``"cuda"``; each process takes the GPU of its rank.
        samples: samples in a microbatch.
        compiled: compile the attention modules, which have no router (``torch.compile``).
        varlen: use an attention kernel for packed samples, on a GPU in bfloat16 or float16.
    """

    family: str = "qwen3_moe"
    layout: Layout = Layout.LEFT
    reentrant: bool = False
    late: bool = False
    dtype: str = "float32"
    parallel: str = ""
    mixed: bool = False
    device: str = "cpu"
    samples: int = 2
    compiled: bool = False
    varlen: bool = False

    @property
    def name(self) -> str:
        """The configuration as text."""
        kinds = {
            "reentrant": self.reentrant,
            "late": self.late,
            self.dtype: self.dtype != "float32",
            self.parallel: bool(self.parallel),
            "mixed": self.mixed,
            self.device: self.device != "cpu",
            "compiled": self.compiled,
            "varlen": self.varlen,
        }
        return ", ".join(
            [self.family, self.layout, *(kind for kind, is_so in kinds.items() if is_so)]
        )


_PACKED, _RIGHT = Layout.PACKED, Layout.RIGHT

SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        setup.name: setup
        for setup in (
            Setup(family="qwen3_moe"),
            Setup(family="qwen3_moe", layout=_PACKED, dtype="bfloat16"),
            # late: a target that is cleared before the backward pass gives wrong gradients, and no
            # error under reentrant checkpointing
            Setup(family="qwen2_moe", layout=_RIGHT, late=True),
            Setup(family="olmoe", layout=_PACKED, reentrant=True),
            Setup(family="mixtral", layout=_RIGHT, reentrant=True),
            Setup(family="deepseek_v3", layout=_PACKED, reentrant=True, late=True),
            Setup(family="glm4_moe", late=True),
            # never packed: its eager attention does not see where packed samples begin
            Setup(family="gpt_oss", layout=_RIGHT, reentrant=True, late=True),
            Setup(family="qwen3_moe", parallel="ddp"),
            Setup(family="deepseek_v3", parallel="ddp", layout=_PACKED, reentrant=True, late=True),
            Setup(family="qwen3_moe", parallel="fsdp2", layout=_RIGHT, late=True),
            Setup(family="deepseek_v3", parallel="fsdp2", reentrant=True),
            Setup(family="qwen3_moe", parallel="fsdp2", mixed=True),
        )
    }
)
"""By name. They cover every family, layout, kind of checkpointing and wrapper, and early and late
backward passes.
"""


def setup_named(name: str) -> Setup:
    """Return the setup called ``name``. Raises ``UsageError`` for an unknown one."""
    try:
        return SETUPS[name]
    except KeyError:
        raise UsageError(
            f"No setup of HF trainers is named {name!r}; choose among {list(SETUPS)}."
        ) from None
