"""RLinf's classes, and stubs for what its SGLang worker imports of SGLang.

RLinf refuses SGLang beyond 0.5.4, which in turn needs a GPU to be imported. So ``sglang`` and the
package of the worker, whose ``__init__`` looks for that release, are replaced by modules with the
names that the worker imports; the worker itself is RLinf's own file. The engine is the fleet's, and
nothing else of SGLang is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rollproof.stacks._support.stand_ins import stub_modules
from rollproof.stacks._support.upstream import upstream
from rollproof.stacks.rlinf.release import RELEASE

__all__ = ["RLinf", "import_rlinf"]

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
    """Import what the adapter drives (5 to 15 s). Raises ``StackError`` for a missing package."""
    classes = upstream(
        RELEASE,
        version,
        {
            "group": "rlinf.data.io_struct:SeqGroupInfo",
            "result": "rlinf.data.io_struct:RolloutResult",
            "rollout": "rlinf.workers.rollout",
        },
    )
    with stub_modules(_stubs(classes.pop("rollout"))):
        worker = upstream(RELEASE, version, {"worker": f"{_PACKAGE}.sglang_worker:SGLangWorker"})
    return RLinf(**classes, **worker)


def _stubs(rollout: Any) -> dict[str, ModuleType]:
    """Modules with the names of ``_NAMES``; ``rollout`` is the package around the worker's."""
    modules: dict[str, ModuleType] = {}
    for name, members in _NAMES.items():
        modules[name] = module = ModuleType(name)
        # RLinf's own files are found in the package that its __init__ is kept from running
        module.__path__ = (
            [str(Path(folder) / "sglang") for folder in rollout.__path__]
            if name == _PACKAGE
            else []
        )
        for member in members:
            setattr(module, member, type(member, (), {}))
    return modules
