"""The modules of prime-rl, and of the verifiers below it, that the adapters drive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollproof.stacks import installed_version
from rollproof.stacks._support.stand_ins import stub_packages
from rollproof.stacks._support.upstream import upstream
from rollproof.stacks.prime_rl.release import RELEASE
from rollproof.stacks.verifiers.upstream import Verifiers, import_verifiers

__all__ = ["PrimeRl", "import_prime_rl"]

_STUBBED = ("vllm", "modelexpress", "grpc", "wandb", "datasets", "torchtitan", "torchdata")
"""Packages that prime-rl's modules import at their head: engines, trainers, and loggers, which are
not run here.
"""
_TRANSFERS = ("prime_rl.transports.weights",)
"""The transfer of weights between trainer and engines asks for CUDA, and imports the trainer's
models.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrimeRl:
    """The modules of a checkout, and of the verifiers below it. ``wire`` and ``encoding``: how an
    environment server sends an episode.
    """

    version: str
    verifiers: Verifiers
    v1: Any
    wire: Any
    encoding: Any
    dispatcher: Any
    watcher: Any
    envs: Any
    types: Any
    client: Any
    shared: Any
    trajectories: Any
    transport: Any
    batch: Any
    data: Any
    loss: Any
    config: Any


def import_prime_rl(version: str) -> PrimeRl:
    """Import what the adapters drive (15 to 50 s). Raises ``StackError`` for a missing package."""
    verifiers = import_verifiers(installed_version("verifiers") or "")
    with stub_packages(_STUBBED), stub_packages(_TRANSFERS, even_if_installed=True):
        modules = upstream(
            RELEASE,
            version,
            {
                "v1": "verifiers.v1",
                "wire": "verifiers.v1.serve.types",
                "encoding": "verifiers.v1.serve.encoding",
                "dispatcher": "prime_rl.orchestrator.dispatcher",
                "envs": "prime_rl.orchestrator.envs",
                "types": "prime_rl.orchestrator.types",
                "client": "prime_rl.utils.client",
                "shared": "prime_rl.configs.shared",
                "trajectories": "prime_rl.orchestrator.trajectories",
                "transport": "prime_rl.transports.rollouts.types",
                "batch": "prime_rl.trainer.batch",
                "data": "prime_rl.trainer.rl.data",
                "loss": "prime_rl.trainer.rl.loss",
                "config": "prime_rl.configs.trainer",
                "watcher": "prime_rl.orchestrator.watcher",
                "setup_logger": "prime_rl.utils.logger:setup_logger",
            },
        )
        modules.pop("setup_logger")("critical")
    return PrimeRl(version=version, verifiers=verifiers, **modules)
