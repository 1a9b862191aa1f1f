"""What the adapters import of NeMo-RL."""

from __future__ import annotations

import importlib
import logging
import typing
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rollproof.fakes.engine.exceptions import EngineFailure
from rollproof.stacks import missing_dependency
from rollproof.stacks._support.stand_ins import stood_in

__all__ = ["NemoRl", "Ref", "import_nemo_rl"]

_ABSENT = (
    "absl", "hydra", "matplotlib", "mlflow", "nemo_automodel", "prometheus_client", "pynvml", "soundfile", "swanlab", "tensorboard",
    "wandb", "zmq",
)  # fmt: skip
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
    """The modules of one checkout."""

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
    """Import what the adapters drive (20 to 40 s). Raises ``StackError`` for a missing dependency."""
    from rollproof.stacks.nemo_rl import RELEASE

    try:
        with _of_python_312(), stood_in(_ABSENT, values={"tensorboard": {"__version__": "2.20.0"}}):
            found: dict[str, Any] = {
                name: importlib.import_module(module) for name, module in _MODULES.items()
            }
    except ImportError as error:
        raise missing_dependency("nemo-rl", version, error, RELEASE) from error
    for name in ("nemo_rl", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for module in found.values():
        module.print = _silent  # it says much on every rollout
    for name in _WITH_RAY:
        found[name].ray = RayCalls(found[name].ray)
    # it collects garbage at every update, which takes longer than a case
    found["vllm_worker"].gc = SimpleNamespace(collect=lambda: 0)
    return NemoRl(version=version, **found)


@dataclass(frozen=True, eq=False, slots=True)
class Ref:
    """A reference to a value that is at hand; it can be awaited."""

    value: Any

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()  # what makes it a generator, and waits for nothing
        return self.value


class RayCalls:
    """Ray, where what a remote call returned is at hand: a value, a reference to one, or a
    coroutine that waits for nothing.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ray, name)

    def get(self, refs: Any) -> Any:
        """The value, or the values of a list. Raises what the remote call raised, as Ray wraps it."""
        return [self._value(ref) for ref in refs] if isinstance(refs, list) else self._value(refs)

    def cancel(self, _call: Any) -> None:
        """Nothing: a remote call here runs in the task that waits for it, and is cancelled with it."""

    def wrapped(self, name: str, error: EngineFailure) -> BaseException:
        """How a caller sees what a method of an actor raised."""
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
def _of_python_312() -> Iterator[None]:
    """NeMo-RL asks for Python 3.13; of what is new since 3.11 it uses this one, for pydantic."""
    import typing_extensions

    before = typing.TypedDict
    setattr(typing, "TypedDict", typing_extensions.TypedDict)  # noqa: B010 - pydantic refuses that of 3.11
    try:
        yield
    finally:
        setattr(typing, "TypedDict", before)  # noqa: B010


def _silent(*_said: Any, **_how: Any) -> None:
    """In place of ``print``."""
