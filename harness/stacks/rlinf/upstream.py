"""RLinf's classes, and stand-ins for what its SGLang worker imports of SGLang: the engine is the
fleet's, and the rest is never called.

RLinf refuses SGLang beyond 0.5.4, which in turn needs a GPU to be imported. So ``sglang`` and the
package of the worker, whose ``__init__`` looks for that release, are replaced by modules with the
names that the worker imports; the worker itself is RLinf's own file.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rollproof.stacks import Release, attributes, missing_dependency
from rollproof.stacks._support.importing import standing_in

__all__ = ["RELEASE", "RLinf", "import_rlinf"]

RELEASE = Release(distribution="rlinf", versions=("0.3.0",), stack="rlinf")

_PACKAGE = "rlinf.workers.rollout.sglang"
_NAMES = {
    "sglang": (),
    "sglang.srt": (),
    "sglang.srt.managers": (),
    "sglang.srt.managers.io_struct": (
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
    ),
    "sglang.srt.server_args": ("ServerArgs",),
    _PACKAGE: ("Engine", "io_struct"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RLinf:
    """The imported classes."""

    worker: Any
    group: Any
    result: Any


def import_rlinf(version: str) -> RLinf:
    """Import what the adapter drives (5 to 15 s). Raises ``StackError`` where something that it
    imports is missing.
    """
    try:
        group, result = attributes("rlinf.data.io_struct", "SeqGroupInfo", "RolloutResult")
        with standing_in(_stand_ins()):
            (worker,) = attributes(_PACKAGE + ".sglang_worker", "SGLangWorker")
    except ImportError as error:
        raise missing_dependency("rlinf", version, error, RELEASE) from error
    return RLinf(worker=worker, group=group, result=result)


def _stand_ins() -> dict[str, ModuleType]:
    """Modules with the names of ``_NAMES``."""
    rollout: Any = importlib.import_module("rlinf.workers.rollout")
    modules: dict[str, ModuleType] = {}
    for name, members in _NAMES.items():
        modules[name] = module = ModuleType(name)
        module.__path__ = (
            [str(Path(folder) / "sglang") for folder in rollout.__path__]
            if name == _PACKAGE
            else []
        )
        for member in members:
            setattr(module, member, type(member, (), {}))
    return modules
