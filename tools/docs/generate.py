"""Writes the pages of docs/ that are generated from the code: checks, contract, options and so on.

``python -m tools.docs.generate --write`` writes them; ``--check`` (the default) exits with 1 if a
page differs from what it would write.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

import rollproof.core.batch_columns
import rollproof.core.conventions
import rollproof.core.limits
import rollproof.verification.expected_failures
from rollproof.cli.app import app
from rollproof.core.batch_columns import Column
from rollproof.core.contract import Contract
from rollproof.core.limits import RolloutLimits
from rollproof.core.own_stops import OwnStops
from rollproof.fakes.known_bugs import KNOWN_BUGS
from rollproof.invariants import default_registry
from rollproof.plugin import OPTIONS
from tools.docs.api_page import api_page
from tools.docs.corrections_page import corrections_page
from tools.docs.docstrings import described_fields, markdown
from tools.docs.engines_page import engines_page
from tools.docs.enum_texts import term_lines
from tools.docs.found_page import found_page
from tools.docs.gpu_page import gpu_page
from tools.docs.http_page import http_page
from tools.docs.regressions_page import regressions_page
from tools.docs.replay_page import replay_page
from tools.docs.situations_page import situations_page
from tools.docs.stacks_page import stacks_page

HERE = Path(__file__).parents[2] / "docs"
HEAD = (
    "<!-- Written by tools/docs/generate.py from the code; edit the code, then run `nox -s docs --"
    " --write`. -->"
)


def checks_page() -> Iterator[str]:
    """docs/checks.md."""
    registry = default_registry()
    families = dict.fromkeys(check.family for check in registry)
    yield (
        f"# Checks and known bugs\n\n{len(registry)} checks in {len(families)} families, tested"
        f" by {len(KNOWN_BUGS)} published faults (*known bugs*). [Concepts](concepts.md) says what"
        " the verdicts mean.\n"
    )
    yield (
        "`rollproof checks ID` shows which data a check needs, which situations exercise it, and"
        " which known bugs it detects; `rollproof known-bugs ID` says where a bug was published.\n"
    )
    for family in families:
        yield f"\n## {family}\n"
        for check in registry:
            if check.family != family:
                continue
            yield f"- **{check.id}**: {check.promise}"


def contract_page() -> Iterator[str]:
    """docs/contract.md."""
    yield "# Contract\n"
    yield (
        "What a subject declares about the samples that it returns. To write one, see"
        " [how](how-to/contract.md); [concepts](concepts.md#contract) says why.\n"
    )
    yield (
        "Every field takes the enum member or its plain text; in brackets: the default. Fields"
        " about routes are required unless `rows` is `none`. A contract that is incomplete or"
        " contradicts itself raises `ContractError`, which lists every problem at once."
    )
    yield ""
    yield from term_lines(Contract, rollproof.core.conventions)
    text, _ = described_fields(RolloutLimits.__doc__)
    yield f"\n## RolloutLimits\n\n{markdown(text)}\n"
    yield from term_lines(RolloutLimits, rollproof.core.limits)
    text, _ = described_fields(OwnStops.__doc__)
    yield f"\n## OwnStops\n\n{markdown(text)}\n"
    yield from term_lines(OwnStops, rollproof.core.limits)
    text, _ = described_fields(Column.__doc__)
    yield f"\n## Column\n\n{markdown(text)}\n"
    yield from term_lines(Column, rollproof.core.batch_columns)


def options_page() -> Iterator[str]:
    """docs/options.md."""
    yield "# Options\n\n## pytest\n"
    yield (
        "The command line wins over the ini file, the ini file over the default. Paths of the ini"
        " file start from pytest's root folder.\n"
    )
    yield (
        "The key of `--rollproof-x-y` in the ini file is `rollproof_x_y`; `--rollproof-accept` has"
        " none.\n"
    )
    yield "| option | meaning |\n|---|---|"
    for option in OPTIONS:
        value = f"={option.metavar}".replace("|", "\\|") if option.metavar else ""
        default = "" if option.default in (None, (), False) else f"; default: {option.default}"
        yield f"| `{option.flag}{value}` | {option.help}{default} |"
    yield (
        "\nFixtures: `rollproof_record`, `rollproof_sglang`, `rollproof_vllm`, `rollproof_replay`,"
        " `rollproof_gap`, `rollproof_profile`, `rollproof_seed`. Marker: every"
    )
    yield (
        "conformance item has `rollproof(profile=None, seed=None)`, so `-m rollproof` selects them;"
        " on a test of yours its arguments"
    )
    yield "override the options."
    yield "\n## Command line\n"
    yield (
        "Exit codes: 0 all pass, 1 some fail, 2 unknown only, 254 bad arguments, 255 internal"
        " error, 130 interrupted. `rollproof COMMAND --help` has the same texts, and those of"
        " arguments that are only named here."
    )
    root = get_command(app)
    commands = list(_commands(root, "rollproof"))
    times = Counter(_described(option) for _, command in commands for option in command.params)
    shared = {row: row[0] for row, count in times.items() if count >= _SHARED}
    yield "\n### Of several commands\n\n| argument | meaning |\n|---|---|"
    for spelling, meaning in shared:
        yield f"| {spelling} | {meaning} |"
    for name, command in commands:
        yield f"\n### {name}\n\n{inspect.cleandoc(command.help)}"
        rows = [_described(option) for option in command.params]
        own = [row for row in rows if row not in shared]
        if name in _BRIEF:
            yield f"\nArguments: {', '.join(spelling for spelling, _ in rows)}."
            continue
        if own:
            yield "\n| argument | meaning |\n|---|---|"
        for spelling, meaning in own:
            yield f"| {spelling} | {meaning} |"
        if also := [shared[row] for row in rows if row in shared]:
            yield f"\nAlso {', '.join(also)}."
    yield "\n## File of expected failures\n"
    before, _, rest = inspect.cleandoc(
        rollproof.verification.expected_failures.__doc__ or ""
    ).partition("::\n\n")
    example, _, after = rest.partition("\n\n")
    yield f"{before}:\n\n```toml\n{inspect.cleandoc(example)}\n```\n\n{after}"


_SHARED = 2
"""Options of so many commands, with the same text, are described once."""
_BRIEF = {
    *("rollproof adopt", "rollproof diff", "rollproof seal", "rollproof merge"),
    *("rollproof known-bugs", "rollproof checks", "rollproof doctor"),
    *("rollproof contract show", "rollproof contract explain"),
    *("rollproof matrix add", "rollproof matrix build"),
}
"""Commands with few arguments, of which the page has only the names."""


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group and of the groups below it, each with what a user types."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def _described(parameter: Any) -> tuple[str, str]:
    return _spelling(parameter), getattr(parameter, "help", "") or ""


def _spelling(parameter: Any) -> str:
    metavar = (parameter.metavar or "").replace("|", "\\|")
    if parameter.param_type_name == "argument":
        return f"`{metavar or parameter.name.upper()}`"
    flags = ", ".join(parameter.opts)
    return f"`{flags}{' ' + metavar if metavar and not parameter.is_flag else ''}`"


_BETWEEN_CELLS = re.compile(r" *(?<!\\)\| *")
PAGES = {
    "api.md": api_page,
    "checks.md": checks_page,
    "contract.md": contract_page,
    "corrections.md": corrections_page,
    "http.md": http_page,
    "engines.md": engines_page,
    "found.md": found_page,
    "gpu.md": gpu_page,
    "options.md": options_page,
    "replay.md": replay_page,
    "situations.md": situations_page,
    "stacks.md": stacks_page,
    "regressions.md": regressions_page,
}


def _text(lines: Iterable[str]) -> str:
    text = "\n".join(lines).rstrip()
    return f"{HEAD}\n" + "\n".join(map(_compact, text.split("\n"))) + "\n"


def _compact(line: str) -> str:
    """Return the row of a table without the blanks around its cells, any other line as it is."""
    return _BETWEEN_CELLS.sub("|", line) if line.startswith("| ") else line


def main(
    write: bool = typer.Option(False, "--write/--check", help="Write the pages, or compare them."),
) -> None:
    """Write the generated pages, or compare them with the code."""
    stale = []
    for name, page in PAGES.items():
        path, text = HERE / name, _text(page())
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == text:
            continue
        if write:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
            continue
        stale.append(name)
        sys.stdout.writelines(
            difflib.unified_diff(
                old.splitlines(True),
                text.splitlines(True),
                f"docs/{name}",
                "what the code says",
                n=1,
            )
        )
    if stale:
        print(f"{', '.join(stale)} differ from the code: run `nox -s docs -- --write` and commit.")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
