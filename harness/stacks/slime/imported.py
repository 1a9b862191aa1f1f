"""What the adapters import of slime, and stand-ins for the packages that it imports without their being needed here."""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

from rollproof.stacks import missing_dependency

__all__ = ["Slime", "import_slime"]

_ABSENT = ("sglang", "sglang_router", "megatron", "wandb")
"""Packages that slime's modules import at their head: engines and trainers, which are not run here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slime:
    """The modules of one checkout."""

    version: str
    rollout: Any
    types: Any
    http: Any
    misc: Any
    manager: Any
    data: Any


def import_slime(version: str) -> Slime:
    """Import what the adapters drive (5 to 10 s). Raises ``StackError`` for a missing dependency."""
    from rollproof.stacks.slime import RELEASE

    finder = _Absent()
    sys.meta_path.append(finder)  # the last: what is installed is found before
    try:
        modules = {
            "rollout": "slime.rollout.sglang_rollout",
            "types": "slime.utils.types",
            "http": "slime.utils.http_utils",
            "misc": "slime.utils.misc",
            "manager": "slime.ray.rollout",
            "data": "slime.utils.data",
        }
        found = {name: importlib.import_module(module) for name, module in modules.items()}
    except ImportError as error:
        raise missing_dependency("slime", version, error, RELEASE) from error
    finally:
        sys.meta_path.remove(finder)
    logging.getLogger("slime").setLevel(logging.CRITICAL)
    return Slime(version=version, **found)


class _Absent:
    """Finds an empty stand-in for every module of the packages that are absent."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """A spec for modules of ``_ABSENT`` only."""
        if name.partition(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # as much of a loader as is asked for

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module that has whatever is asked for."""
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _Anything(ModuleType):
    """A module every name of which is a stand-in."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # as a package has it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")
