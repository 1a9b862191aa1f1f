"""The classes of SkyRL that the adapters drive, and its module of router replay."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rollproof.errors import StackError
from rollproof.stacks import Found, installed_version
from rollproof.stacks._support.stand_ins import stub_modules
from rollproof.stacks._support.upstream import upstream
from rollproof.stacks.skyrl.release import RELEASE, VERSIONS, SkyRLVersion

__all__ = [
    "SkyRL",
    "hybrid_model",
    "import_skyrl",
    "replay_facts",
    "replay_utils",
    "token_metadata",
]

_REPLAY = "skyrl.backends.skyrl_train.utils.replay_utils"
_HYBRID = "megatron.core.models.hybrid"


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyRL:
    """The imported classes of the installed release, and its line of the table."""

    version: str
    facts: SkyRLVersion
    client: Any
    dispatch: Any
    generator: Any
    config: Any
    convert: Any
    gym: Any


def import_skyrl(found: Found) -> SkyRL:
    """Import what the adapters drive (5 to 15 s). Raises ``StackError`` for a missing package."""
    _quiet()
    inference_servers = "skyrl.backends.skyrl_train.inference_servers."
    names = upstream(
        RELEASE,
        found.version,
        {
            "client": inference_servers + "remote_inference_client:RemoteInferenceClient",
            "dispatch": "skyrl.backends.skyrl_train.workers.worker_dispatch:WorkerDispatch",
            "generator": "skyrl.train.generators.skyrl_gym_generator:SkyRLGymGenerator",
            "convert": "skyrl.train.dataset.preprocess:convert_prompts_responses_to_batch_tensors",
            "config": "skyrl.train.config",
            "gym": "skyrl_gym",
        },
    )
    # some of its modules configure logging when they are imported
    _quiet()
    return SkyRL(version=found.version, facts=VERSIONS[found.line], **names)


def _quiet() -> None:
    """Silence SkyRL, which logs much on every rollout, and let it be imported on Python 3.11."""
    import typing_extensions

    # SkyRL asks for Python 3.12 for one class (skyrl/tinker/types.py): pydantic refuses the
    # TypedDict of 3.11.
    setattr(typing, "TypedDict", typing_extensions.TypedDict)  # noqa: B010 - mypy refuses the assignment
    loggers = [name for name in logging.root.manager.loggerDict if name.startswith("skyrl.")]
    for name in ("skyrl", *loggers):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        from loguru import logger
    except ImportError:
        return
    logger.disable("skyrl")


def replay_utils() -> ModuleType:
    """SkyRL's functions of router replay, without the packages around them: those import the whole
    trainer.

    Raises:
        StackError: SkyRL is not installed, or this release has no such module.
    """
    if _REPLAY in sys.modules:
        return sys.modules[_REPLAY]
    spec = importlib.util.find_spec("skyrl")
    if spec is None or not spec.submodule_search_locations:
        raise StackError(
            "SkyRL is not installed. Run:\n"
            "  python -m pip install --no-deps skyrl==0.3.0 megatron-core"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / "backends" / "skyrl_train" / "utils" / "replay_utils.py").is_file():
        raise StackError(
            "The installed SkyRL has no backends/skyrl_train/utils/replay_utils.py; 0.3.0 has it."
        )
    # Empty packages that only know their folder: what their __init__ imports is left out.
    packages: dict[str, ModuleType] = {}
    for name in (
        "skyrl",
        "skyrl.backends",
        "skyrl.backends.skyrl_train",
        "skyrl.backends.skyrl_train.utils",
        "skyrl.backends.skyrl_train.distributed",
        "skyrl.backends.skyrl_train.distributed.megatron",
    ):
        packages[name] = package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
    with stub_modules(packages):
        return importlib.import_module(_REPLAY)


def replay_facts() -> SkyRLVersion:
    """The line of the table for the installed release; the newest for one that it does not have."""
    version = installed_version(RELEASE.distribution) or ""
    return VERSIONS.get(version, VERSIONS[RELEASE.versions[-1]])


def token_metadata() -> ModuleType:
    """SkyRL's module of token layouts, which its replay functions use since 0.4.0."""
    return sys.modules[replay_utils().TokenMetadataLayout.__module__]


@contextmanager
def hybrid_model() -> Iterator[None]:
    """Stand in for Megatron's ``HybridModel`` where megatron-core has none.

    SkyRL 0.4.0 asks of a model whether it is one; the newest megatron-core for Python 3.11, 0.16.1,
    is too old for it.
    """
    if importlib.util.find_spec(_HYBRID) is not None:
        yield
        return
    package, module = ModuleType(_HYBRID), ModuleType(f"{_HYBRID}.hybrid_model")
    setattr(module, "HybridModel", type("HybridModel", (), {}))  # noqa: B010 - mypy knows no such attribute
    with stub_modules({package.__name__: package, module.__name__: module}):
        yield
