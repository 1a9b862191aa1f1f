"""The command ``init``: write a test file to start from."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.completions import complete_flavours, complete_presets
from rollproof.cli.output import Output
from rollproof.cli.starter_files import shell_path, write_new_file
from rollproof.contracts.presets import PRESETS, preset_named
from rollproof.errors import UsageError
from rollproof.judging.report import ExitCode
from rollproof.reporting.text import Style
from rollproof.starters.http_clients import HTTP_ENGINES, http_file
from rollproof.starters.plain_files import plain_file
from rollproof.starters.rollouts import rollouts_file

__all__ = ["init"]


class Subject(StrEnum):
    """What is to be judged."""

    ROLLOUTS = "rollouts"
    HTTP = "http"
    TRAINER = "trainer"
    BATCHES = "batches"
    LAYOUTS = "layouts"
    CORRECTIONS = "corrections"
    GAP = "gap"


_ABOUT = {
    Subject.ROLLOUTS: "a client or loop that makes samples with an engine",
    Subject.HTTP: "a client that calls SGLang or vLLM over HTTP",
    Subject.TRAINER: "a trainer with routing replay",
    Subject.BATCHES: "the collation of samples into training batches",
    Subject.LAYOUTS: "functions that bring routed experts to the ranks of a trainer",
    Subject.CORRECTIONS: "importance weights and masks for off-policy rollouts",
    Subject.GAP: "logprobs of rollout and trainer, side by side",
}


def init(
    subject: Annotated[
        Subject | None,
        typer.Argument(help="What is to be judged.", show_default="rollouts, or asked"),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="STACK",
            help=f"The stack whose promises the contract starts from: {', '.join(PRESETS)}.",
            show_default="verl, or asked",
            autocompletion=complete_presets,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="FLAVOUR",
            help="The engine that the rollouts use: vllm, sglang, ...",
            show_default="the stack's",
            autocompletion=complete_flavours,
        ),
    ] = None,
    routes: Annotated[
        bool | None,
        typer.Option(
            "--routes/--no-routes",
            help="Whether samples carry routed experts.",
            show_default="as in the stack",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FILE",
            help="The file to write.",
            show_default="test_WHAT.py in tests/ if there is such a folder, else here",
        ),
    ] = None,
) -> int:
    """Write a test file with a contract and a subject, which passes as it is.

    On a terminal it asks for what the options leave open. A file that exists is never changed.
    """
    output = Output()
    asks = sys.stdin.isatty() and sys.stdout.isatty() and subject is None
    subject = _ask_subject() if asks else subject or Subject.ROLLOUTS
    _refuse_options(subject, like=like, engine=engine, routes=routes)
    if asks and like is None and subject is Subject.ROLLOUTS:
        like = _ask_like()
    file = to or _folder() / f"test_{subject}.py"
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise UsageError(
            f"--to {str(file)!r} must name a Python file, such as tests/test_{subject}.py."
        )
    preset = preset_named(like or "verl") if subject is Subject.ROLLOUTS else None
    if preset is not None:
        text = rollouts_file(preset.name, path=shell_path(file), engine=engine, routes=routes)
    elif subject is Subject.HTTP:
        text = http_file(engine or HTTP_ENGINES[0], path=shell_path(file))
    else:
        text = plain_file(subject, path=shell_path(file))
    if not file.parent.is_dir():
        raise UsageError(f"{file} cannot be written: there is no folder {file.parent}.")
    write_new_file(file, text, instead="name another file with --to FILE")
    output.lines([(Style.GOOD, f"wrote {file}: {_ABOUT[subject]}")])
    if preset is not None:
        output.say(f"  contract   like {preset.name}: {preset.about}")
    output.say(
        f"  next       pytest {shell_path(file)}, which passes: put your own code in at the marks"
    )
    return output.ended(ExitCode.PASS)


def _refuse_options(
    subject: Subject, *, like: str | None, engine: str | None, routes: bool | None
) -> None:
    """Raise ``UsageError`` for an option that a file of this kind does not have."""
    given = {"--like": like, "--engine": engine, "--routes": routes}
    taken = {Subject.ROLLOUTS: tuple(given), Subject.HTTP: ("--engine",)}.get(subject, ())
    refused = [name for name, value in given.items() if value is not None and name not in taken]
    if refused:
        raise UsageError(
            f"init {subject} has no {' and no '.join(refused)}: --like, --engine and --routes are"
            " options of rollouts, and --engine is one of http."
        )
    if subject is Subject.HTTP and engine is not None and engine not in HTTP_ENGINES:
        raise UsageError(f"--engine {engine}: init http has {' and '.join(HTTP_ENGINES)}.")


def _ask_subject() -> Subject:
    for name, about in _ABOUT.items():
        typer.echo(f"  {name:<11} {about}")
    answer = typer.prompt("What is to be judged", default=str(Subject.ROLLOUTS))
    try:
        return Subject(answer)
    except ValueError:
        raise UsageError(f"{answer!r} is none of {', '.join(Subject)}.") from None


def _ask_like() -> str:
    for preset in PRESETS.values():
        typer.echo(f"  {preset.name:<9} {preset.about}")
    return str(typer.prompt("Whose promises are nearest to yours", default="verl"))


def _folder() -> Path:
    """Return where test files are: ``tests`` if it is there."""
    return Path("tests") if Path("tests").is_dir() else Path()
