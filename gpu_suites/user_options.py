"""The options for the user's own model, trainer and report, checked before any engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rollproof.core.files import check_folder
from rollproof.errors import UsageError

__all__ = ["UserOptions", "check_options"]


class UserOptions(Protocol):
    """Options of the GPU suites.

    They are the folder of a checkpoint, the name or ``module:factory`` of a trainer, and the folder
    of the report.
    """

    @property
    def model(self) -> str | None: ...
    @property
    def trainer(self) -> str | None: ...
    @property
    def gpu_report(self) -> str | None: ...


def check_options(options: UserOptions) -> None:
    """Check that the options can be used.

    Raises:
        UsageError: the model is no folder or has no experts, the trainer has no known name and
            cannot be imported, or the folder of the report cannot be written to.
        EngineStartError: the folder of the model holds no checkpoint.
    """
    if options.model is not None:
        from rollproof.core.model_config import model_of

        if not Path(options.model).is_dir():
            raise UsageError(
                f"--rollproof-model {options.model} is not a folder: name the one that holds the"
                " checkpoint's config.json."
            )
        if model_of(Path(options.model)) is None:
            raise UsageError(
                f"--rollproof-model {options.model} has no experts: there is no routing to replay."
                " Name a MoE checkpoint."
            )
    if options.gpu_report is not None:
        check_folder(Path(options.gpu_report))
    if options.trainer is None:
        return
    # imported late: it loads the setups of all trainers
    from rollproof.gpu_suites.trainer_setups import GAP_TRAINERS

    if ":" in options.trainer:
        from rollproof.cli.named_targets import named_factory

        named_factory(options.trainer, "--rollproof-trainer")
    elif options.trainer not in GAP_TRAINERS:
        raise UsageError(
            f"--rollproof-trainer={options.trainer!r} is neither module:factory nor one of:"
            f" {', '.join(GAP_TRAINERS)}."
        )
