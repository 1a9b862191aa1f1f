"""The typer app of all commands, and the exit codes and messages of their errors."""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from rollproof.cli.adopt import adopt
from rollproof.cli.check import check
from rollproof.cli.checks import checks
from rollproof.cli.contract import contract_commands
from rollproof.cli.diff import diff
from rollproof.cli.doctor import doctor
from rollproof.cli.gap import gap
from rollproof.cli.init import init
from rollproof.cli.known_bugs import known_bugs
from rollproof.cli.matrix import matrix_commands
from rollproof.cli.merge import merge
from rollproof.cli.proxy import proxy
from rollproof.cli.replay import replay
from rollproof.cli.safe_stdio import stdout_failure
from rollproof.cli.seal import seal
from rollproof.cli.serve import serve
from rollproof.cli.show import show
from rollproof.cli.verify import verify
from rollproof.core.error_text import describe_error, one_line
from rollproof.errors import ConformanceError, RollproofError
from rollproof.judging.report import ExitCode

__all__ = ["app", "run"]

INTERRUPTED = 130
"""The code with which a shell reports a program that SIGINT ended."""
_BAD_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR)
"""Errors of a path that no command could use, whatever it wants there."""
_BROKEN_MACHINE = frozenset(
    (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE)
)
"""Errors of a disk, a network file system or a limit, which any read or write may raise."""
_LONGEST_PATH = 80
_COMPLETION = "_ROLLPROOF_COMPLETE"
"""The variable with which a shell's completion calls the command line."""
_PLAIN: Mapping[str, str] = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "it must be a whole"
    " number",
    "Input should be a valid number, unable to parse string as a number": "it must be a number",
    "Input should be greater than or equal to ": "it must be at least ",
    "Input should be less than or equal to ": "it must be at most ",
}
"""Words of pydantic, which newer typers put into their messages, and what is said instead."""
BROKEN_PIPE = 141
"""The code with which a shell reports SIGPIPE. 1 would say that a check failed."""

# By its place, because newer typers bring a click of their own.
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]
"""click's exception for a wrong command line."""

app: typer.Typer = typer.Typer(
    name="rollproof",
    help=(
        "Tests the rollouts of LLM reinforcement-learning stacks: stitching, routes, weight"
        " versions, logprobs."
    ),
    epilog=(
        "Exit codes: 0 all pass, 1 some fail, 2 unknown only, 254 bad arguments, 255 internal"
        " error, 130 interrupted."
    ),
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS = (
    init,
    adopt,
    verify,
    check,
    diff,
    show,
    replay,
    seal,
    gap,
    serve,
    proxy,
    merge,
    known_bugs,
    checks,
    doctor,
)
for _command in _COMMANDS:
    app.command(_command.__name__.replace("_", "-"))(_command)
app.add_typer(contract_commands)
app.add_typer(matrix_commands)


def _version(requested: bool) -> None:
    if requested:
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
        typer.Option("--debug", help="Show the traceback of an error (also after the command)."),
    ] = False,
) -> None:
    """Declare the options of all commands."""


@functools.cache
def _parser() -> Any:
    """Return the commands of ``app``, which take typer a twentieth of a second to make."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return the exit code.

    An error is one line on standard error; ``--debug`` adds its traceback.
    """
    # Taken out here, so that it works before and after the command.
    debug = "--debug" in arguments
    try:
        code = _parser()(
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
                f"rollproof: standard output could not be written ({failure}); the exit code is"
                " still the verdict\n"
            )
    except (KeyboardInterrupt, typer.Abort):  # click raises Abort at a prompt
        code = INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as stop:
        # typer ends so what a shell asks for its completion
        if _COMPLETION in os.environ or {"--install-completion", "--show-completion"} & {
            *arguments
        }:
            return stop.code if isinstance(stop.code, int) else ExitCode.PASS
        if isinstance(stop.__context__, BrokenPipeError):  # rich exits on a broken pipe
            return _reader_left()
        return _fail(
            f"internal error: a command ended the process ({describe_error(stop)})",
            ExitCode.INTERNAL,
            debug=debug,
        )
    # Of the errors below, a broken promise is a verdict, a wrong argument is the user's to correct,
    # and everything else is a fault of ours: three exit codes that CI can tell apart.
    except ConformanceError as error:
        return _fail(str(error), ExitCode.FAIL, debug=debug)
    except RollproofError as error:
        return _fail(f"error: {error}", ExitCode.USAGE, debug=debug)
    except _ClickError as error:
        return _fail(f"error: {_clicked_text(error)}", ExitCode.USAGE, debug=debug)
    except OSError as error:
        text = _trouble_of_the_machine(error)
        return (
            _internal(error, debug=debug)
            if text is None
            else _fail(f"error: {text}", ExitCode.USAGE, debug=debug)
        )
    except Exception as error:  # noqa: BLE001 - the last resort
        return _internal(error, debug=debug)
    # Newer versions of typer return this code, older ones raise KeyboardInterrupt.
    if code == INTERRUPTED:
        return _fail("interrupted", INTERRUPTED, debug=debug)
    return code if isinstance(code, int) else ExitCode.PASS


def _internal(error: Exception, *, debug: bool) -> int:
    """Report an error of ours: whatever it is, the user gets one line and the right exit code."""
    return _fail(
        f"internal error: {describe_error(error)}.\nThis is a fault of rollproof, not of the"
        " code under test. Please report it with the command, the output of `rollproof"
        " doctor`, and the traceback that `--debug` shows.",
        ExitCode.INTERNAL,
        debug=debug,
    )


def _trouble_of_the_machine(error: OSError) -> str | None:
    """Return what is wrong with a path or with the machine; ``None`` if that is not it."""
    name = None if error.filename is None else _shown(error.filename)
    # even asking whether such a path exists fails, in each command and in pathlib
    if error.errno in _BAD_PATH and name is not None:
        return f"{name}: {error.strerror}. Name another path."
    if error.errno in _BROKEN_MACHINE:
        return (
            f"{'' if name is None else f'{name}: '}{error.strerror}. This comes from the machine:"
            " its disk, its network file system or a limit of open files. Repair that, and run"
            " the command again."
        )
    try:
        Path.cwd()
    except OSError:
        return "The current folder was deleted. Change to one that exists."
    return None


def _shown(path: object) -> str:
    """Return a path in an error, which may be too long for a line."""
    text = one_line(os.fsdecode(path) if isinstance(path, bytes | str | os.PathLike) else str(path))
    return text if len(text) <= _LONGEST_PATH else f"{text[:_LONGEST_PATH]}..."


def _fail(text: str, code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"rollproof: {text}\n")
    return code


def _clicked_text(error: Any) -> str:
    """Return what is wrong with a command line, as sentences."""
    # Newer clicks end their messages without a period, and have none for a missing command.
    text = (
        one_line(error.format_message() if hasattr(error, "format_message") else str(error))
        or "Name a command"
    )
    for theirs, plain in _PLAIN.items():
        text = text.replace(theirs, plain)
    context = getattr(error, "ctx", None)
    text = text if text.endswith((".", "?", "!")) else f"{text}."
    return f"{text} See `{context.command_path} --help`." if context is not None else text


def _reader_left() -> int:
    """Return the exit code if the reader of standard output, such as ``head``, has ended."""
    # Otherwise the interpreter flushes into the closed pipe at its end, and complains.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
