"""Contracts to start from: what public stacks promise their trainers.

``rollproof.contracts.verl()`` is the contract of a client like verl's on vLLM, with a small model;
``rollproof.contracts.verl(engine="sglang", routes=False, partial_off="dropped")`` that of one which
differs. ``rollproof contract show verl`` prints every field with the reason for its value.
"""

from __future__ import annotations

from typing import Any

from rollproof.contracts.presets import PRESETS, Preset, Promise, contract_of, preset_named
from rollproof.core.contract import Contract

__all__ = [
    "PRESETS",
    "Preset",
    "Promise",
    "areal",
    "contract_of",
    "miles",
    "nemo_rl",
    "openrlhf",
    "preset_named",
    "prime_rl",
    "rlinf",
    "roll",
    "skyrl",
    "slime",
    "trl",
    "verifiers",
    "verl",
]


def areal(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of AReaL's inference engine clients; arguments as in ``contract_of``."""
    return contract_of("areal", engine=engine, routes=routes, **differs)


def miles(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of miles' rollout loop; arguments as in ``contract_of``."""
    return contract_of("miles", engine=engine, routes=routes, **differs)


def nemo_rl(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of NeMo-RL's rollout manager; arguments as in ``contract_of``."""
    return contract_of("nemo_rl", engine=engine, routes=routes, **differs)


def openrlhf(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of OpenRLHF's agent executors; arguments as in ``contract_of``."""
    return contract_of("openrlhf", engine=engine, routes=routes, **differs)


def prime_rl(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of prime-rl's orchestrator; arguments as in ``contract_of``."""
    return contract_of("prime_rl", engine=engine, routes=routes, **differs)


def rlinf(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of RLinf's SGLang worker; arguments as in ``contract_of``."""
    return contract_of("rlinf", engine=engine, routes=routes, **differs)


def roll(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of ROLL's rollout loop; arguments as in ``contract_of``."""
    return contract_of("roll", engine=engine, routes=routes, **differs)


def skyrl(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of SkyRL's generator; arguments as in ``contract_of``."""
    return contract_of("skyrl", engine=engine, routes=routes, **differs)


def slime(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of slime's rollout loop; arguments as in ``contract_of``."""
    return contract_of("slime", engine=engine, routes=routes, **differs)


def trl(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of TRL's asynchronous GRPO; arguments as in ``contract_of``."""
    return contract_of("trl", engine=engine, routes=routes, **differs)


def verifiers(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of verifiers' environments; arguments as in ``contract_of``."""
    return contract_of("verifiers", engine=engine, routes=routes, **differs)


def verl(*, engine: str | None = None, routes: bool | None = None, **differs: Any) -> Contract:
    """Return the contract of verl's LLM server client; arguments as in ``contract_of``."""
    return contract_of("verl", engine=engine, routes=routes, **differs)
