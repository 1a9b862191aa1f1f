"""Given: the user's own model, trainer and place of the report, looked at before any engine is
started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rollproof.core.files import check_folder
from rollproof.errors import UsageError

__all__ = ["Given", "check_given"]


class Given(Protocol):
    """Options of the GPU suites: a checkpoint's folder, a trainer's name or ``module:factory``, the
    folder of the report.
    """

    @property
    def model(self) -> str | None: ...
    @property
    def trainer(self) -> str | None: ...
    @property
    def gpu_report(self) -> str | None: ...


def check_given(given: Given) -> None:
    """Raises ``UsageError`` for a model that is no folder or has no experts, for a trainer that is
    none of ours and cannot be imported, and for a report's folder that cannot be written into.

    ``EngineStartError`` for a folder that holds no checkpoint.
    """
    if given.model is not None:
        from rollproof.core.model_config import model_of

        if not Path(given.model).is_dir():
            raise UsageError(
                f"--rollproof-model {given.model} is no folder: name the one that holds the"
                " checkpoint's config.json."
            )
        if model_of(Path(given.model)) is None:
            raise UsageError(
                f"--rollproof-model {given.model} has no experts: there is no routing to replay."
                " Name a MoE checkpoint."
            )
    if given.gpu_report is not None:
        check_folder(Path(given.gpu_report))
    if given.trainer is None:
        return
    from rollproof.gpu_suites.trainer_setups import GAP_TRAINERS

    if ":" in given.trainer:
        from rollproof.cli.named_targets import named_factory

        named_factory(given.trainer, "--rollproof-trainer")
    elif given.trainer not in GAP_TRAINERS:
        raise UsageError(
            f"--rollproof-trainer={given.trainer!r} is neither module:factory nor one of:"
            f" {', '.join(GAP_TRAINERS)}."
        )
