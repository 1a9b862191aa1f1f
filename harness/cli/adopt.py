"""The command ``adopt``: write a test into the repository of a stack, with what belongs to it."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.completions import complete_repositories
from rollproof.cli.output import Output
from rollproof.cli.starter_files import shell_path, write_new_file
from rollproof.core.error_text import describe_error
from rollproof.core.files import check_target
from rollproof.errors import UsageError
from rollproof.judging.report import ExitCode
from rollproof.reporting.text import Line, Style
from rollproof.stacks import release_of
from rollproof.stacks.matrix import Matrix
from rollproof.stacks.releases import check_checkout
from rollproof.stacks.repositories import REPOSITORIES, Repository, repository_named
from rollproof.stacks.repository_files import (
    EXPECTED_FILE,
    WORKFLOW_FILE,
    expectations,
    repository_files,
    requirement,
)

__all__ = ["adopt"]


def adopt(
    repository: Annotated[
        str,
        typer.Argument(
            help=f"Whose repository it is: {', '.join(REPOSITORIES)}.",
            autocompletion=complete_repositories,
        ),
    ],
    checkout: Annotated[
        Path,
        typer.Option(
            "--checkout",
            metavar="DIR",
            help="The root of the checkout.",
            show_default="the current folder",
        ),
    ] = Path(),
) -> int:
    """Write a test of a framework's rollouts into a checkout of its repository.

    With it come a file of expected failures and a workflow for GitHub Actions. A file that exists
    is never changed. Exit code 1: one has other content, and the difference is shown.
    """
    output = Output()
    target = repository_named(repository)
    release = release_of(target.stack)
    check_checkout(checkout, release)
    texts = repository_files(target, release, checkout)
    present = {path: _present(checkout / path) for path in texts}
    # all or nothing: half of the files would be of no use
    for path, text in present.items():
        if text is None:
            check_target(checkout / path)
    differing = False
    for path, text in texts.items():
        existing = present[path]
        if existing is None:
            write_new_file(checkout / path, text, instead="run adopt again")
            output.lines([(Style.GOOD, f"wrote {path}: {_about(path, target)}")])
        elif existing == text:
            output.say(f"{path} is there already")
        else:
            differing = True
            output.lines(_difference(path, existing, text))
    # Not written anywhere: a changed list of dependencies needs a new lock, which only the
    # repository's own tools make.
    test = shell_path(Path(next(iter(texts))))
    locked = f", then renew {target.locked}" if target.locked else ""
    output.say(f"  collected   {target.collected}; without rollproof it is skipped there")
    output.say(f'  dependency  "{requirement(target)}" in {target.dependency}{locked}')
    output.say(f"  next        pytest {test}, after the installs of {WORKFLOW_FILE}")
    return output.ended(ExitCode.FAIL if differing else ExitCode.PASS)


def _present(file: Path) -> str | None:
    """Return the text of a file; ``None`` if there is none. Raises ``UsageError`` for one that
    cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {describe_error(error)}.") from None


def _about(path: str, repository: Repository) -> str:
    """Return what a file has, in words."""
    if path == WORKFLOW_FILE:
        return "a job that installs what it needs and runs it"
    if not path.endswith(EXPECTED_FILE):
        parts = (*repository.parts, *repository.batches, *repository.corrections)
        return f"{len(parts)} parts of {repository.stack}, one test per check"
    matrix = Matrix.read(repository.stack)
    counts = Counter(entry.undecided for _, entry in expectations(matrix))
    undecided = f", {counts[True]} undecided" if counts[True] else ""
    return (
        f"what {repository.stack} {matrix.pinned[-1]} shows as it was released:"
        f" {counts[False]} failures{undecided}"
    )


def _difference(path: str, existing: str, text: str) -> Iterator[Line]:
    """Yield the difference between a file and what would be written."""
    yield Style.DOUBT, f"{path} exists, and was not changed: it differs from what would be written"
    # From the file to what would be written, as a patch to apply.
    lines = difflib.unified_diff(
        existing.splitlines(), text.splitlines(), path, f"{path} (rollproof)", lineterm=""
    )
    yield from ((Style.PLAIN, f"  {line}") for line in lines)
