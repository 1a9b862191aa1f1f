"""What differs between the releases of SkyRL, as data, and what the adapters import of one."""

from __future__ import annotations

import importlib
import logging
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollproof.errors import StackError
from rollproof.stacks import Release, attributes, missing_dependency

__all__ = ["RELEASE", "VERSIONS", "RouteForm", "SkyRL", "SkyRLVersion", "import_skyrl"]


class RouteForm(StrEnum):
    """What routes are between SkyRL's client and its batch."""

    LISTS = "lists"
    """Nested lists, as its server's JSON has them."""
    ARRAYS = "arrays"
    """Numpy arrays of the smallest of uint8, int16 and int32 that fits, from bytes with shape and
    dtype.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyRLVersion:
    """One release.

    ``routes`` is their form. ``keeps_rows``: on a later turn the generator asks for new rows only,
    and keeps those that it has (before, the last turn's rows replace all). ``takes_pad_id``: the
    batch conversion takes the pad id, not a tokenizer. ``batch_filler`` is what a batch holds where
    nothing was captured, ``batch_dtype`` the numpy types of its routes.
    """

    routes: RouteForm
    keeps_rows: bool
    takes_pad_id: bool
    batch_dtype: str


VERSIONS: Mapping[str, SkyRLVersion] = {
    "0.3.0": SkyRLVersion(
        routes=RouteForm.LISTS, keeps_rows=False, takes_pad_id=False, batch_dtype="uint8|int16"
    ),
    "0.4.0": SkyRLVersion(
        routes=RouteForm.ARRAYS, keeps_rows=True, takes_pad_id=True, batch_dtype="uint8|int16|int32"
    ),
}
RELEASE = Release(distribution="skyrl", versions=tuple(VERSIONS), stack="skyrl")


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyRL:
    """The imported classes of one installed release, and its line of the table."""

    version: str
    facts: SkyRLVersion
    client: Any
    dispatch: Any
    generator: Any
    config: Any
    convert: Any
    gym: Any


def import_skyrl(version: str, line: str | None = None) -> SkyRL:
    """Import what the adapters drive (5 to 15 s), by ``line`` of the table (default: its own).

    Raises ``StackError`` for an unknown version or a missing dependency.
    """
    facts = VERSIONS.get(line or version)
    if facts is None:
        raise StackError(
            f"skyrl {version} is not in the table of known releases ({', '.join(VERSIONS)}). Run:\n"
            f"  {RELEASE.install()}"
        )
    _quiet()
    try:
        (client,) = attributes(
            "skyrl.backends.skyrl_train.inference_servers.remote_inference_client",
            "RemoteInferenceClient",
        )
        (dispatch,) = attributes(
            "skyrl.backends.skyrl_train.workers.worker_dispatch", "WorkerDispatch"
        )
        (generator,) = attributes("skyrl.train.generators.skyrl_gym_generator", "SkyRLGymGenerator")
        (convert,) = attributes(
            "skyrl.train.dataset.preprocess", "convert_prompts_responses_to_batch_tensors"
        )
        _quiet()  # some of its modules configure logging when they are imported
        return SkyRL(
            version=version,
            facts=facts,
            client=client,
            dispatch=dispatch,
            generator=generator,
            config=importlib.import_module("skyrl.train.config"),
            convert=convert,
            gym=importlib.import_module("skyrl_gym"),
        )
    except ImportError as error:
        raise missing_dependency("skyrl", version, error, RELEASE) from error


def _quiet() -> None:
    """Before the first import: SkyRL asks for Python 3.12 for one class (skyrl/tinker/types.py),
    and says much on every rollout.
    """
    import typing_extensions

    setattr(typing, "TypedDict", typing_extensions.TypedDict)  # noqa: B010 - pydantic refuses that of 3.11
    for name in (
        "skyrl",
        *(name for name in logging.root.manager.loggerDict if name.startswith("skyrl.")),
    ):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        from loguru import logger
    except ImportError:
        return
    logger.disable("skyrl")
