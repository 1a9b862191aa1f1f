"""App: the commands, and what every error of them becomes: one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer

from rollproof.cli.check import check
from rollproof.cli.checks import checks
from rollproof.cli.doctor import doctor
from rollproof.cli.gap import gap
from rollproof.cli.known_bugs import known_bugs
from rollproof.cli.replay import replay
from rollproof.cli.safe_stdio import stdout_failure
from rollproof.cli.serve import serve
from rollproof.cli.verify import verify
from rollproof.core.error_text import describe_error, one_line
from rollproof.errors import ConformanceError, RollproofError
from rollproof.judging.report import ExitCode

__all__ = ["app", "run"]

INTERRUPTED = 130
"""As a shell reports a program that SIGINT ended."""
BROKEN_PIPE = 141
"""As a shell reports a program whose reader went away; 1 would say that a check failed."""

_Clicked: type[Exception] = typer.BadParameter.__mro__[2]
"""click's exception for everything that is wrong with a command line; newer typers carry a click of
their own.
"""

app: typer.Typer = typer.Typer(
    name="rollproof",
    help=(
        "Proves that the rollouts of an LLM reinforcement-learning stack are what its trainer"
        " thinks they are."
    ),
    epilog=(
        "Exit codes: 0 all pass, 1 some fail, 2 unknown only, 254 bad arguments, 255 internal"
        " error, 130 interrupted."
    ),
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (verify, check, replay, gap, serve, known_bugs, checks, doctor):
    app.command(_command.__name__.replace("_", "-"))(_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollproof {metadata.version('rollproof')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show the traceback of an error (works behind a command too)."
        ),
    ] = False,
) -> None:
    """Options of all commands; ``--debug`` is taken out by ``run`` before typer sees the arguments."""


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code. An error is told in one line, with its traceback
    where ``--debug`` is given.
    """
    debug = "--debug" in arguments
    try:
        code = app(
            args=[argument for argument in arguments if argument != "--debug"],
            prog_name="rollproof",
            standalone_mode=False,
        )
        sys.stdout.flush()
        if (
            code != ExitCode.USAGE
            and sys.__stdout__ is not None
            and (failure := stdout_failure()) is not None
        ):
            sys.stderr.write(
                f"rollproof: standard output took no more ({failure}); the exit code is the"
                " verdict\n"
            )
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        return _unread()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich's way to tell it
            return _unread()
        return _tell(
            f"internal error: a command ended the process ({describe_error(stop)})",
            ExitCode.INTERNAL,
            debug=debug,
        )
    except ConformanceError as error:
        return _tell(str(error), ExitCode.FAIL, debug=debug)
    except RollproofError as error:
        return _tell(f"error: {error}", ExitCode.USAGE, debug=debug)
    except _Clicked as error:
        return _tell(f"error: {_clicked_text(error)}", ExitCode.USAGE, debug=debug)
    except Exception as error:  # noqa: BLE001 - the last resort: whatever it is, the user gets a line and the right exit code
        return _tell(
            f"internal error: {describe_error(error)}.\nThis is a fault of rollproof, not of what it judged."
            " Please report it with the command, the output of `rollproof doctor`, and the"
            " traceback that `--debug` shows.",
            ExitCode.INTERNAL,
            debug=debug,
        )
    if code == INTERRUPTED:  # newer typers return it, older ones raise
        return _tell("interrupted", INTERRUPTED, debug=debug)
    return code if isinstance(code, int) else ExitCode.PASS


def _tell(text: str, code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"rollproof: {text}\n")
    return code


def _clicked_text(error: Any) -> str:
    """What is wrong with a command line, as sentences; newer clicks end theirs without a period,
    and say nothing of a missing command.
    """
    text = (
        one_line(error.format_message() if hasattr(error, "format_message") else str(error))
        or "Name a command"
    )
    context = getattr(error, "ctx", None)
    text = text if text.endswith((".", "?", "!")) else f"{text}."
    return f"{text} See `{context.command_path} --help`." if context is not None else text


def _unread() -> int:
    """The reader of our output went away: stop without a word, and keep the interpreter from
    flushing into the closed pipe.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
