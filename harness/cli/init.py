"""The command ``init``: write a test file to start from."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.completions import complete_flavours, complete_presets
from rollproof.cli.output import Output
from rollproof.contracts.presets import PRESETS, preset_named
from rollproof.core.error_text import describe_error
from rollproof.errors import UsageError
from rollproof.judging.report import ExitCode
from rollproof.reporting.text import Style
from rollproof.starters.http_clients import HTTP_ENGINES, http_file
from rollproof.starters.plain_files import PLAIN_FILES
from rollproof.starters.rollouts import rollouts_file

__all__ = ["init"]


class What(StrEnum):
    """What is to be judged."""

    ROLLOUTS = "rollouts"
    HTTP = "http"
    TRAINER = "trainer"
    BATCHES = "batches"
    LAYOUTS = "layouts"
    CORRECTIONS = "corrections"
    GAP = "gap"


_ABOUT = {
    What.ROLLOUTS: "a client or loop that makes samples with an engine",
    What.HTTP: "a client that calls SGLang or vLLM over HTTP",
    What.TRAINER: "a trainer with routing replay",
    What.BATCHES: "the collation of samples into training batches",
    What.LAYOUTS: "functions that bring routed experts to the ranks of a trainer",
    What.CORRECTIONS: "importance weights and masks for off-policy rollouts",
    What.GAP: "logprobs of rollout and trainer, side by side",
}


def init(
    what: Annotated[
        What | None,
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
    asks = sys.stdin.isatty() and sys.stdout.isatty() and what is None
    what = _ask_what() if asks else what or What.ROLLOUTS
    _refuse_options(what, like=like, engine=engine, routes=routes)
    if asks and like is None and what is What.ROLLOUTS:
        like = _ask_like()
    file = to or _folder() / f"test_{what}.py"
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise UsageError(
            f"--to {str(file)!r} must name a Python file, such as tests/test_{what}.py."
        )
    preset = preset_named(like or "verl") if what is What.ROLLOUTS else None
    if preset is not None:
        text = rollouts_file(preset.name, path=_shown(file), engine=engine, routes=routes)
    elif what is What.HTTP:
        text = http_file(engine or HTTP_ENGINES[0], path=_shown(file))
    else:
        text = PLAIN_FILES[what].format(file=_shown(file))
    _write(file, text)
    output.lines([(Style.GOOD, f"wrote {file}: {_ABOUT[what]}")])
    if preset is not None:
        output.say(f"  contract   like {preset.name}: {preset.about}")
    output.say(
        f"  next       pytest {_shown(file)}, which passes: put your own code in at the marks"
    )
    return output.ended(ExitCode.PASS)


def _refuse_options(
    what: What, *, like: str | None, engine: str | None, routes: bool | None
) -> None:
    """Raise ``UsageError`` for an option that a file of this kind does not have."""
    given = {"--like": like, "--engine": engine, "--routes": routes}
    taken = {What.ROLLOUTS: tuple(given), What.HTTP: ("--engine",)}.get(what, ())
    refused = [name for name, value in given.items() if value is not None and name not in taken]
    if refused:
        raise UsageError(
            f"init {what} has no {' and no '.join(refused)}: --like, --engine and --routes are"
            " options of rollouts, and --engine is one of http."
        )
    if what is What.HTTP and engine is not None and engine not in HTTP_ENGINES:
        raise UsageError(f"--engine {engine}: init http has {' and '.join(HTTP_ENGINES)}.")


def _ask_what() -> What:
    for name, about in _ABOUT.items():
        typer.echo(f"  {name:<11} {about}")
    answer = typer.prompt("What is to be judged", default=str(What.ROLLOUTS))
    try:
        return What(answer)
    except ValueError:
        raise UsageError(f"{answer!r} is none of {', '.join(What)}.") from None


def _ask_like() -> str:
    for preset in PRESETS.values():
        typer.echo(f"  {preset.name:<9} {preset.about}")
    return str(typer.prompt("Whose promises are nearest to yours", default="verl"))


def _shown(file: Path) -> str:
    """Return the path of a file as a shell takes it."""
    return shlex.quote(file.as_posix())


def _folder() -> Path:
    """Return where test files are: ``tests`` if it is there."""
    return Path("tests") if Path("tests").is_dir() else Path()


def _write(file: Path, text: str) -> None:
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(
            f"{file} exists, and nothing was changed: name another file with --to FILE."
        ) from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {describe_error(error)}.") from None
