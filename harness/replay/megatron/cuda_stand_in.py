"""Run megatron-core's real routers, dispatchers and schedules on a CPU, without its CUDA calls.

``with cpu_megatron():`` replaces the names in ``STAND_INS``, each for a stated reason, and restores
them. Only the device changes: routing, token dispatch, recompute and pipeline schedules
stay megatron-core's own code. Collectives go through whatever backend ``torch.distributed`` was
started with (gloo on a CPU).

What it cannot replace: Transformer Engine (fused router, packed attention, FP8), grouped GEMM,
DeepEP, CUDA graphs. Dropout must be 0: parallel ranks share one random state.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from rollproof.errors import StackError

__all__ = [
    "RELEASES",
    "STAND_INS",
    "MegatronVersionError",
    "StandIn",
    "cpu_megatron",
    "gpu_megatron",
    "megatron_version",
]


class MegatronVersionError(StackError):
    """megatron-core is missing, of an untested release, or without a name that is replaced."""


RELEASES: dict[str, tuple[int, int]] = {"0.16.1": (3, 11), "0.19.2": (3, 12)}
"""The tested releases of megatron-core, and the oldest Python that each installs on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIn:
    """One replaced name.

    Attributes:
        owner: a module, or ``module:Class``.
        name: the name in it.
        reason: why it is replaced.
        make: gets the original (``None`` if there is none) and returns the replacement.
        releases: the releases that need it (empty: all).
        missing: the name does not exist in those releases, and is added.
    """

    owner: str
    name: str
    reason: str
    make: Callable[[Any], Any]
    releases: tuple[str, ...] = ()
    missing: bool = False

    @property
    def target(self) -> str:
        """The full replaced name."""
        return f"{self.owner.replace(':', '.')}.{self.name}"

    @contextmanager
    def applied(self, release: str) -> Iterator[None]:
        """Replace the name inside the block.

        Raises ``MegatronVersionError`` if the name is unexpectedly missing or present.
        """
        owner = _resolve(self.owner, release)
        original = getattr(owner, self.name, None)
        # not getattr: a static method must be restored as one
        own = vars(owner).get(self.name, self)
        if hasattr(owner, self.name) is self.missing:
            state = "exists" if self.missing else "is missing"
            raise MegatronVersionError(
                f"megatron-core {release}: {self.target} {state}, unlike in the release that was"
                " tested. Replacing other names could silently make a run on the CPU differ from"
                f" one on GPUs. Install a release as published: {_supported()}."
            )
        setattr(owner, self.name, self.make(original))
        try:
            yield
        finally:
            if own is self:
                delattr(owner, self.name)  # inherited, or it did not exist
            else:
                setattr(owner, self.name, own)


def megatron_version() -> str:
    """Return the installed release of megatron-core.

    Raises ``MegatronVersionError`` for an untested one.
    """
    try:
        release = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise MegatronVersionError(
            "megatron-core is not installed. Its trainers are judged on the CPU with PyTorch and"
            f" one of {_supported()}: `pip install torch` and `pip install --no-deps"
            f" megatron-core=={_newest_fitting()}`."
        ) from None
    if release not in RELEASES:
        raise MegatronVersionError(
            f"megatron-core {release} is installed; the stand-ins for its CUDA calls were tested"
            f" with {_supported()}. On another release they could miss a call and change what is"
            " computed. Install one of them: `pip install --no-deps"
            f" megatron-core=={_newest_fitting()}`."
        )
    return release


@contextmanager
def cpu_megatron() -> Iterator[str]:
    """Run megatron-core on the CPU inside the block; yield its release.

    Blocks may be nested. Raises ``MegatronVersionError``, before anything is replaced, for a
    release that is not in ``RELEASES``.
    """
    release = megatron_version()
    import torch

    if torch.cuda.current_device.__module__ == __name__:  # within another block
        yield release
        return
    with ExitStack() as stack:
        for item in STAND_INS:
            if not item.releases or release in item.releases:
                stack.enter_context(item.applied(release))
        # Functions under torch.compile would be compiled for the CPU: minutes, for numbers that no
        # GPU run has.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield release


@contextmanager
def gpu_megatron() -> Iterator[str]:
    """Run megatron-core on GPUs without Transformer Engine inside the block; yield its release.

    Only those of ``STAND_INS`` apply that let the plain layers accept sequence and context
    parallelism; CUDA computes everything.
    """
    release = megatron_version()
    with ExitStack() as stack:
        for item in STAND_INS:
            if item.owner in (_NORM, _ATTENTION):
                stack.enter_context(item.applied(release))
        yield release


def _supported() -> str:
    return ", ".join(
        f"{release} (Python {major}.{minor} or newer)"
        for release, (major, minor) in RELEASES.items()
    )


def _newest_fitting() -> str:
    """Return the newest tested release that installs on this Python."""
    return [release for release, oldest in RELEASES.items() if sys.version_info >= oldest][-1]


def _resolve(owner: str, release: str) -> Any:
    module, _, attribute = owner.partition(":")
    try:
        imported = importlib.import_module(module)
        return getattr(imported, attribute) if attribute else imported
    except (ImportError, AttributeError) as error:
        raise MegatronVersionError(
            f"megatron-core {release}: {owner.replace(':', '.')} cannot be imported ({error}). The"
            " stand-ins replace names in it. Install a release as published, with the packages"
            f" that it imports: {_supported()}."
        ) from error


class _Stream:
    """A CUDA stream on which everything is already done; also its own event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self


class _SharedRandomState:
    """A tracker of CUDA random states with only one state: that of the CPU's generator."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def reset(self) -> None: ...
    def add(self, name: str, seed: int) -> None: ...
    def set_states(self, states: dict[str, Any]) -> None: ...

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}

    def fork(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()


def _on_cpu(original: Any) -> Any:
    """Return a factory of tensors that ignores a CUDA device, and pins no memory."""

    def create(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return original(*args, **kwargs)

    return create


def _to_cpu(original: Any) -> Any:
    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return original(
            tensor,
            *(
                "cpu" if isinstance(value, str) and value.startswith("cuda") else value
                for value in args
            ),
            **kwargs,
        )

    return to


def _cpu_device(_: Any) -> Any:
    import torch

    cpu = torch.device("cpu")
    return lambda: cpu


def _shared_stream(_: Any) -> Any:
    stream = _Stream()
    return lambda *_, **__: stream


def _cpu_state(_: Any) -> Any:
    import torch

    return lambda *_, **__: torch.get_rng_state()


def _nothing(_: Any) -> Any:
    return lambda *_, **__: None


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _as_host_tensor(original: Any) -> Any:
    def move(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        import torch

        return (
            tensor.detach().numpy()
            if as_numpy and torch.is_tensor(tensor)
            else original(tensor, as_numpy)
        )

    return move


def _without_flag(flag: str, off: Any) -> Callable[[Any], Any]:
    """Call the original while ``config.flag`` is ``off``."""

    def make(original: Any) -> Any:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            config = kwargs["config"] if "config" in kwargs else args[0]
            value = getattr(config, flag)
            setattr(config, flag, off)
            try:
                return original(first, *args, **kwargs)
            finally:
                setattr(config, flag, value)

        return call

    return make


def _over_all_context_ranks(original: Any) -> Any:
    """Run the original attention over complete sequences; each context rank takes its own rows."""

    def forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state

        if self.config.context_parallel_size == 1:
            return original(self, query, key, value, *args, **kwargs)
        group = parallel_state.get_context_parallel_group()
        complete = [_join_chunks(tensor, group) for tensor in (query, key, value)]
        return _own_chunks(original(self, *complete, *args, **kwargs), group)

    return forward


def _join_chunks(tensor: Any, group: Any) -> Any:
    """Gather the complete sequence, in order, along dimension 0."""
    # rank r of the group has chunks r and 2 * size - 1 - r (zigzag)
    import torch
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    chunks = gather_from_sequence_parallel_region(tensor.contiguous(), group=group).chunk(
        2 * group.size()
    )
    return torch.cat([*chunks[0::2], *chunks[1::2][::-1]])


def _own_chunks(tensor: Any, group: Any) -> Any:
    """Return this rank's two chunks of a sequence: the inverse of ``_join_chunks``."""
    import torch

    chunks = tensor.chunk(2 * group.size())
    return torch.cat([chunks[group.rank()], chunks[-1 - group.rank()]])


_MOE_UTILS = "megatron.core.transformer.moe.moe_utils"
_RANDOM = "megatron.core.tensor_parallel.random"
_ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_NORM = "megatron.core.transformer.torch_norm:WrappedTorchNorm"

STAND_INS: tuple[StandIn, ...] = (
    *(
        StandIn(
            owner="torch",
            name=name,
            reason='masks, counters and pinned buffers are made with device="cuda"',
            make=_on_cpu,
        )
        for name in ("arange", "empty", "full", "ones", "tensor", "zeros")
    ),
    StandIn(
        owner="torch:Tensor",
        name="cuda",
        reason="rotary positions and shared weights move themselves",
        make=lambda _: lambda tensor, *_, **__: tensor,
    ),
    StandIn(
        owner="torch.cuda",
        name="current_device",
        reason=(
            "buffers of collectives, router weights, rotary frequencies and pipeline messages are"
            " put on the current device"
        ),
        make=_cpu_device,
    ),
    StandIn(
        owner="torch:Tensor",
        name="to",
        reason='replay code above megatron-core moves routes with .to("cuda")',
        make=_to_cpu,
    ),
    StandIn(
        owner="torch.cuda",
        name="Stream",
        reason="the all-to-all dispatcher and shared experts own a side stream",
        make=_always(_Stream),
    ),
    StandIn(
        owner="torch.cuda",
        name="current_stream",
        reason="as above: the stream to wait for",
        make=_shared_stream,
    ),
    StandIn(
        owner="torch.cuda",
        name="stream",
        reason="as above: a block on the side stream",
        make=lambda _: lambda *_: nullcontext(),
    ),
    StandIn(
        owner="torch.cuda",
        name="synchronize",
        reason="pipeline messages wait for the device; on a CPU nothing is pending",
        make=_nothing,
    ),
    StandIn(
        owner=_MOE_UTILS,
        name="te_general_gemm",
        reason=(
            "0.16.1 reads the name without Transformer Engine too, where it was never bound:"
            " NameError in the router's gate"
        ),
        make=_always(None),
        releases=("0.16.1",),
        missing=True,
    ),
    StandIn(
        owner="megatron.core.transformer.moe.token_dispatcher",
        name="maybe_move_tensor_to_cpu",
        reason=(
            "makes numpy split sizes of CUDA tensors only; all_to_all_single refuses tensors as"
            " sizes"
        ),
        make=_as_host_tensor,
    ),
    StandIn(
        owner=_RANDOM,
        name="_get_cuda_rng_state",
        reason="recompute saves the CUDA generator in addition to the CPU's",
        make=_cpu_state,
    ),
    StandIn(
        owner=_RANDOM,
        name="_set_cuda_rng_state",
        reason="as above: nothing to restore",
        make=_nothing,
    ),
    StandIn(
        owner=_RANDOM,
        name="CudaRNGStatesTracker",
        reason="keeps CUDA generators per parallel rank",
        make=_always(_SharedRandomState),
    ),
    StandIn(
        owner=_RANDOM,
        name="_CUDA_RNG_STATE_TRACKER",
        reason="as above: the one in use",
        make=lambda _: _SharedRandomState(),
    ),
    StandIn(
        owner=_RANDOM,
        name="_CUDA_RNG_STATE_TRACKER_INITIALIZED",
        reason="as above: it is ready",
        make=_always(True),
    ),
    StandIn(
        owner=_NORM,
        name="__new__",
        reason=(
            "refuses sequence parallelism, whose norms need only the reduction of their gradients,"
            " outside this class"
        ),
        make=_without_flag("sequence_parallel", False),
    ),
    StandIn(
        owner=_ATTENTION,
        name="__init__",
        reason=(
            "refuses context parallelism: without Transformer Engine there is no attention for it"
            " (see forward)"
        ),
        make=_without_flag("context_parallel_size", 1),
    ),
    StandIn(
        owner=_ATTENTION,
        name="forward",
        reason=(
            "gathers queries, keys and values of all context ranks in order, attends as usual, and"
            " takes the rank's own rows"
        ),
        make=_over_all_context_ranks,
    ),
)
"""Everything that ``cpu_megatron`` replaces. Functions under ``torch.compile`` run eagerly, too."""
