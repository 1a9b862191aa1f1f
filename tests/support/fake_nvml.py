"""A stand-in for the module ``pynvml``: cards as a test describes them."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30


class NVMLError(Exception):
    """What every function of the module raises."""


@dataclass(eq=False)
class Card:
    """One card. ``pids`` are the compute processes on it; ``dumb`` says that it knows neither MIG
    nor clocks.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    total: int = 80 * GIB
    free: int = 79 * GIB
    capability: tuple[int, int] = (9, 0)
    mig: int = 0
    pids: Sequence[int] = ()
    dumb: bool = False


def fake_nvml(*cards: Card, broken: str = "") -> Any:
    """The module, with these cards; ``broken`` names a function that raises."""

    def made(name: str, answer: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if name == broken:
                raise NVMLError(f"{name} failed")
            return answer(*arguments)

        return call

    def knows(card: Card, value: Any) -> Any:
        if card.dumb:
            raise NVMLError("Not Supported")
        return value

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: cards[index],
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlSystemGetCudaDriverVersion": lambda: 13020,
        "nvmlDeviceGetName": lambda card: card.name,
        "nvmlDeviceGetMemoryInfo": lambda card: types.SimpleNamespace(
            total=card.total, free=card.free
        ),
        "nvmlDeviceGetCudaComputeCapability": lambda card: card.capability,
        "nvmlDeviceGetMigMode": lambda card: knows(card, (card.mig, card.mig)),
        "nvmlDeviceGetComputeRunningProcesses": lambda card: [
            types.SimpleNamespace(pid=pid) for pid in card.pids
        ],
        "nvmlDeviceGetClockInfo": lambda card, kind: knows(card, 1980 if kind == "sm" else 2619),
        "nvmlDeviceGetMaxClockInfo": lambda card, kind: knows(card, 1980 if kind == "sm" else 2619),
        "nvmlDeviceGetUUID": lambda card: f"GPU-{cards.index(card)}abc",
    }
    module = types.SimpleNamespace(NVMLError=NVMLError, NVML_CLOCK_SM="sm", NVML_CLOCK_MEM="memory")
    for name, answer in answers.items():
        setattr(module, name, made(name, answer))
    return module
