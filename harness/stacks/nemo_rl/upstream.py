"""The modules of NeMo-RL that the adapters drive."""

from __future__ import annotations

import logging
import typing
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rollproof.fakes.engine.exceptions import EngineFailure
from rollproof.stacks._support.stand_ins import stub_packages
from rollproof.stacks._support.upstream import upstream
from rollproof.stacks.nemo_rl.release import RELEASE

__all__ = ["NemoRl", "Ref", "import_nemo_rl"]

_STUBBED = (
    "absl",
    "hydra",
    "matplotlib",
    "mlflow",
    "nemo_automodel",
    "prometheus_client",
    "pynvml",
    "soundfile",
    "swanlab",
    "tensorboard",
    "wandb",
    "zmq",
)
"""Packages that NeMo-RL's modules import at their head: loggers, a trainer, audio. Nothing of them
is used here.
"""
_MODULES = {
    "batched": "nemo_rl.distributed.batched_data_dict",
    "interfaces": "nemo_rl.models.generation.interfaces",
    "messages": "nemo_rl.data.llm_message_utils",
    "rollouts": "nemo_rl.experience.rollouts",
    "manager": "nemo_rl.experience.rollout_manager",
    "records": "nemo_rl.experience.interfaces",
    "payload": "nemo_rl.experience.payload",
    "buffers": "nemo_rl.algorithms.async_utils.replay_buffer",
    "collector": "nemo_rl.algorithms.async_utils.trajectory_collector",
    "samplers": "nemo_rl.algorithms.async_utils.staleness_sampler",
    "controller": "nemo_rl.algorithms.single_controller",
    "controller_config": "nemo_rl.algorithms.single_controller_utils.config",
    "grpo": "nemo_rl.algorithms.grpo",
    "environments": "nemo_rl.environments.interfaces",
    "vllm": "nemo_rl.models.generation.vllm.vllm_generation",
    "vllm_worker": "nemo_rl.models.generation.vllm.vllm_worker_async",
    "vllm_utils": "nemo_rl.models.generation.vllm.utils",
    "sglang": "nemo_rl.models.generation.sglang.sglang_generation",
    "collective": "nemo_rl.weight_sync.collective_weight_synchronizer",
    "plane": "nemo_rl.data_plane.adapters.noop",
    "columns": "nemo_rl.data_plane.column_io",
    "preshard": "nemo_rl.data_plane.preshard",
}
_WITH_RAY = ("rollouts", "collector", "grpo", "vllm", "collective")


@dataclass(frozen=True, kw_only=True, slots=True)
class NemoRl:
    """The modules of a checkout."""

    version: str
    batched: Any
    interfaces: Any
    messages: Any
    rollouts: Any
    manager: Any
    records: Any
    payload: Any
    buffers: Any
    collector: Any
    samplers: Any
    controller: Any
    controller_config: Any
    grpo: Any
    environments: Any
    vllm: Any
    vllm_worker: Any
    vllm_utils: Any
    sglang: Any
    collective: Any
    plane: Any
    columns: Any
    preshard: Any


def import_nemo_rl(version: str) -> NemoRl:
    """Import what the adapters drive (20 to 40 s). Raises ``StackError`` for a missing package."""
    values = {"tensorboard": {"__version__": "2.20.0"}}
    with _typed_dict_of_python_312(), stub_packages(_STUBBED, values=values):
        modules = upstream(RELEASE, version, _MODULES)
    for name in ("nemo_rl", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for module in modules.values():
        # it prints much on every rollout
        module.print = _silent
    for name in _WITH_RAY:
        modules[name].ray = RayCalls(modules[name].ray)
    # it collects garbage at every update, which takes longer than a case
    modules["vllm_worker"].gc = SimpleNamespace(collect=lambda: 0)
    return NemoRl(version=version, **modules)


@dataclass(frozen=True, eq=False, slots=True)
class Ref:
    """A reference to a value that is there already; it can be awaited."""

    value: Any

    def __await__(self) -> Generator[None, None, Any]:
        # makes it a generator, and waits for nothing
        yield from ()
        return self.value


class RayCalls:
    """Ray for remote calls that return at once: a value, a reference to one, or a coroutine that
    waits for nothing.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ray, name)

    def get(self, refs: Any) -> Any:
        """The value, or the values of a list. Raises what the call raised, as Ray wraps it."""
        return [self._value(ref) for ref in refs] if isinstance(refs, list) else self._value(refs)

    def cancel(self, _call: Any) -> None:
        """Do nothing: a remote call runs in the task that waits for it, and is cancelled with
        it.
        """

    def wrapped(self, name: str, error: EngineFailure) -> BaseException:
        """The error of an actor's method as its caller sees it."""
        raised: BaseException = self._ray.exceptions.RayTaskError(
            name, str(error), error, "rollproof", 0, "127.0.0.1"
        )
        return raised

    def _value(self, ref: Any) -> Any:
        if not hasattr(ref, "send"):
            return ref.value if isinstance(ref, Ref) else ref
        try:
            ref.send(None)
        except StopIteration as done:
            return done.value
        except EngineFailure as error:
            raise self.wrapped("call", error) from error
        ref.close()
        raise RuntimeError("a remote call had to wait where NeMo-RL blocks its thread")


@contextmanager
def _typed_dict_of_python_312() -> Iterator[None]:
    """Replace ``typing.TypedDict``: NeMo-RL asks for Python 3.13, and pydantic refuses the one of
    3.11. It uses nothing else that is newer.
    """
    import typing_extensions

    before = typing.TypedDict
    setattr(typing, "TypedDict", typing_extensions.TypedDict)  # noqa: B010 - mypy refuses the assignment
    try:
        yield
    finally:
        setattr(typing, "TypedDict", before)  # noqa: B010 - as above


def _silent(*_objects: Any, **_options: Any) -> None:
    """Print nothing."""
