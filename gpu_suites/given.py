"""Given: the user's own model and trainer, looked at before any engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rollproof.errors import UsageError

__all__ = ["Given", "check_given"]


class Given(Protocol):
    """Options of the GPU suites: a checkpoint's folder, and a trainer's name or ``module:factory``."""

    @property
    def model(self) -> str | None: ...
    @property
    def trainer(self) -> str | None: ...


def check_given(given: Given) -> None:
    """Raises ``UsageError`` for a model that is no folder or has no experts, and for a trainer that cannot be imported.

    ``EngineStartError`` for a folder that holds no checkpoint.
    """
    if given.model is not None:
        from rollproof.engines.declaring import model_of

        if not Path(given.model).is_dir():
            raise UsageError(f"--rollproof-model {given.model} is no folder: name the one that holds the checkpoint's config.json.")
        if model_of(Path(given.model)) is None:
            raise UsageError(f"--rollproof-model {given.model} has no experts: there is no routing to replay. Name a MoE checkpoint.")
    if given.trainer is not None and ":" in given.trainer:
        from rollproof.cli.targets import named_factory

        named_factory(given.trainer, "--rollproof-trainer")
