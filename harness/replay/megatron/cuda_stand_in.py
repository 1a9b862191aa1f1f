"""A stand-in for the CUDA calls of megatron-core, so that its real routers, dispatchers and
schedules run on a CPU.

``with cpu_megatron():`` replaces what ``STAND_INS`` lists, item by item with the reason, and puts
everything back. Only the device changes: routing, token dispatch, recompute and pipeline schedules
stay megatron-core's own code. Collectives go through whatever backend ``torch.distributed`` was
started with (gloo on a CPU).

What it cannot stand in for: Transformer Engine (fused router, packed attention, FP8), grouped GEMM,
DeepEP, CUDA graphs. Dropout must be 0: random states are not kept apart by parallel rank.
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
    """megatron-core is absent, of a release that the stand-in was not tried with, or lacks a name
    that it replaces.
    """


RELEASES: dict[str, tuple[int, int]] = {"0.16.1": (3, 11), "0.19.2": (3, 12)}
"""The releases of megatron-core that the stand-in was tried with, and the oldest Python that each
installs on.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIn:
    """One replaced name: ``owner`` (a module, or ``module:Class``), ``name`` in it, ``why``, and
    what takes its place.

    ``make`` gets the original (``None`` where there is none) and returns the replacement.
    ``releases`` are those that need it (empty: all). ``missing`` says that the name is absent in
    those releases, which is why it is put there.
    """

    owner: str
    name: str
    why: str
    make: Callable[[Any], Any]
    releases: tuple[str, ...] = ()
    missing: bool = False

    @property
    def target(self) -> str:
        """The replaced name in full."""
        return f"{self.owner.replace(':', '.')}.{self.name}"

    @contextmanager
    def applied(self, release: str) -> Iterator[None]:
        """Replace the name, and put the original back. Raises ``MegatronVersionError`` where it is
        not as expected.
        """
        owner = _resolve(self.owner, release)
        original = getattr(owner, self.name, None)
        own = vars(owner).get(
            self.name, self
        )  # not getattr's: a static method must be put back as one
        if hasattr(owner, self.name) is self.missing:
            found = "is there" if self.missing else "is absent"
            raise MegatronVersionError(
                f"megatron-core {release}: {self.target} {found}, against what the stand-in knows"
                " of this release. Replacing other names than the ones that were tried would make"
                " a run on the CPU differ from one on GPUs in silence. Install a release as"
                f" published: {_known()}."
            )
        setattr(owner, self.name, self.make(original))
        try:
            yield
        finally:
            if own is self:
                delattr(owner, self.name)  # inherited, or never there
            else:
                setattr(owner, self.name, own)


def megatron_version() -> str:
    """The installed release of megatron-core. Raises ``MegatronVersionError`` where the stand-in
    does not know it.
    """
    try:
        release = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise MegatronVersionError(
            "megatron-core is not installed. Its trainers are judged on the CPU with PyTorch and"
            f" one of {_known()}: `pip install torch` and `pip install --no-deps"
            f" megatron-core=={_advised()}`."
        ) from None
    if release not in RELEASES:
        raise MegatronVersionError(
            f"megatron-core {release} is installed; the stand-in for its CUDA calls was tried with"
            f" {_known()}. On another release it could leave a call out and change what is"
            f" computed. Install one of them: `pip install --no-deps megatron-core=={_advised()}`."
        )
    return release


@contextmanager
def cpu_megatron() -> Iterator[str]:
    """Run megatron-core on the CPU inside the block; yields its release. Everything replaced is put
    back at the end.

    May be nested. Raises ``MegatronVersionError`` before anything is replaced when the release is
    not one of ``RELEASES``.
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
    """Run megatron-core on GPUs without Transformer Engine inside the block; yields its release.

    Of ``STAND_INS`` only those apply that let the plain layers take sequence and context
    parallelism; all that computes is CUDA's.
    """
    release = megatron_version()
    with ExitStack() as stack:
        for item in STAND_INS:
            if item.owner in (_NORM, _ATTENTION):
                stack.enter_context(item.applied(release))
        yield release


def _known() -> str:
    return ", ".join(
        f"{release} (Python {major}.{minor} or newer)"
        for release, (major, minor) in RELEASES.items()
    )


def _advised() -> str:
    """The newest known release that installs on this Python."""
    return [release for release, oldest in RELEASES.items() if sys.version_info >= oldest][-1]


def _resolve(owner: str, release: str) -> Any:
    module, _, attribute = owner.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError) as error:
        raise MegatronVersionError(
            f"megatron-core {release}: {owner.replace(':', '.')} cannot be imported ({error}). The"
            " stand-in replaces names in it. Install a release as published, with the packages"
            f" that it imports: {_known()}."
        ) from error


class _Stream:
    """A CUDA stream of a machine where everything has already happened; also its own event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self


class _SharedRandomState:
    """A tracker of CUDA random states that keeps none apart: there is one generator, the CPU's."""

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
    """A factory of tensors that makes on the CPU what is asked for on a GPU, and pins no memory."""

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
            *("cpu" if isinstance(one, str) and one.startswith("cuda") else one for one in args),
            **kwargs,
        )

    return to


def _cpu_device(_: Any) -> Any:
    import torch

    cpu = torch.device("cpu")
    return lambda: cpu


def _one_stream(_: Any) -> Any:
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
    """Call the original while ``config.flag`` reads ``off``."""

    def make(original: Any) -> Any:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            config = kwargs["config"] if "config" in kwargs else args[0]
            kept = getattr(config, flag)
            setattr(config, flag, off)
            try:
                return original(first, *args, **kwargs)
            finally:
                setattr(config, flag, kept)

        return call

    return make


def _over_all_context_ranks(original: Any) -> Any:
    """The original attention over whole sequences, of which each context-parallel rank keeps its
    own rows.
    """

    def forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state

        if self.config.context_parallel_size == 1:
            return original(self, query, key, value, *args, **kwargs)
        group = parallel_state.get_context_parallel_group()
        whole = [_join_chunks(tensor, group) for tensor in (query, key, value)]
        return _own_chunks(original(self, *whole, *args, **kwargs), group)

    return forward


def _join_chunks(tensor: Any, group: Any) -> Any:
    """The whole sequence, in order, of which each rank of ``group`` holds chunks r and 2 * size - 1
    - r of dimension 0.
    """
    import torch
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    chunks = gather_from_sequence_parallel_region(tensor.contiguous(), group=group).chunk(
        2 * group.size()
    )
    return torch.cat([*chunks[0::2], *chunks[1::2][::-1]])


def _own_chunks(tensor: Any, group: Any) -> Any:
    """This rank's two chunks of a whole sequence: the inverse of ``_join_chunks``."""
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
            why='masks, counters and pinned buffers are asked for with device="cuda"',
            make=_on_cpu,
        )
        for name in ("arange", "empty", "full", "ones", "tensor", "zeros")
    ),
    StandIn(
        owner="torch:Tensor",
        name="cuda",
        why="rotary positions and shared weights move themselves",
        make=lambda _: lambda tensor, *_, **__: tensor,
    ),
    StandIn(
        owner="torch.cuda",
        name="current_device",
        why=(
            "buffers of collectives, router weights, rotary frequencies and pipeline messages are"
            " put on the current device"
        ),
        make=_cpu_device,
    ),
    StandIn(
        owner="torch:Tensor",
        name="to",
        why='replay code above megatron-core moves routes with .to("cuda")',
        make=_to_cpu,
    ),
    StandIn(
        owner="torch.cuda",
        name="Stream",
        why="the all-to-all dispatcher and shared experts own a side stream",
        make=_always(_Stream),
    ),
    StandIn(
        owner="torch.cuda",
        name="current_stream",
        why="as above: the stream to wait for",
        make=_one_stream,
    ),
    StandIn(
        owner="torch.cuda",
        name="stream",
        why="as above: a block on the side stream",
        make=lambda _: lambda *_: nullcontext(),
    ),
    StandIn(
        owner="torch.cuda",
        name="synchronize",
        why="pipeline messages wait for the device; on a CPU nothing is pending",
        make=_nothing,
    ),
    StandIn(
        owner=_MOE_UTILS,
        name="te_general_gemm",
        why=(
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
        why=(
            "makes numpy split sizes of CUDA tensors only; all_to_all_single refuses tensors as"
            " sizes"
        ),
        make=_as_host_tensor,
    ),
    StandIn(
        owner=_RANDOM,
        name="_get_cuda_rng_state",
        why="recompute saves the CUDA generator; the CPU's is saved beside it",
        make=_cpu_state,
    ),
    StandIn(
        owner=_RANDOM, name="_set_cuda_rng_state", why="as above: nothing to restore", make=_nothing
    ),
    StandIn(
        owner=_RANDOM,
        name="CudaRNGStatesTracker",
        why="keeps CUDA generators per parallel rank",
        make=_always(_SharedRandomState),
    ),
    StandIn(
        owner=_RANDOM,
        name="_CUDA_RNG_STATE_TRACKER",
        why="as above: the one in use",
        make=lambda _: _SharedRandomState(),
    ),
    StandIn(
        owner=_RANDOM,
        name="_CUDA_RNG_STATE_TRACKER_INITIALIZED",
        why="as above: it is ready",
        make=_always(True),
    ),
    StandIn(
        owner=_NORM,
        name="__new__",
        why=(
            "refuses sequence parallelism, whose norms need only the reduction of their gradients,"
            " outside this class"
        ),
        make=_without_flag("sequence_parallel", False),
    ),
    StandIn(
        owner=_ATTENTION,
        name="__init__",
        why=(
            "refuses context parallelism: without Transformer Engine there is no attention for it"
            " (see forward)"
        ),
        make=_without_flag("context_parallel_size", 1),
    ),
    StandIn(
        owner=_ATTENTION,
        name="forward",
        why=(
            "gathers queries, keys and values of all context ranks in order, attends as without,"
            " and keeps the rank's own rows"
        ),
        make=_over_all_context_ranks,
    ),
)
"""Everything that ``cpu_megatron`` replaces. Beside it, functions under ``torch.compile`` run
eagerly.
"""
