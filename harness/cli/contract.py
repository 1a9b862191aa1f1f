"""The commands ``contract ...``: show a preset, list the fields, compare a contract with a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from rich.table import Table

from rollproof.cli.completions import complete_flavours, complete_presets
from rollproof.cli.named_targets import subject_target
from rollproof.cli.output import JsonTarget, Meter, Output
from rollproof.contracts.presets import PRESETS, preset_named
from rollproof.core.contract import Contract
from rollproof.errors import UsageError
from rollproof.judging.report import REPORT_SCHEMA, ExitCode
from rollproof.reporting.text import Style
from rollproof.starters.rollouts import contract_source
from rollproof.verification.observed_contract import FieldReading, observe_contract
from rollproof.verification.options import ROLLOUTS

__all__ = ["contract_commands"]

contract_commands: typer.Typer = typer.Typer(
    name="contract",
    help="Contracts: those of public stacks, all fields, and what a run shows of yours.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contract_commands.command()
def show(
    like: Annotated[
        str,
        typer.Argument(
            metavar="STACK",
            help=f"{', '.join(PRESETS)}.",
            show_default=False,
            autocompletion=complete_presets,
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="FLAVOUR",
            help="The engine.",
            show_default=False,
            autocompletion=complete_flavours,
        ),
    ] = None,
    routes: Annotated[
        bool | None,
        typer.Option("--routes/--no-routes", help="Whether samples carry routed experts."),
    ] = None,
) -> int:
    """Print the contract of a public stack, with the reason for each field."""
    output = Output()
    preset = preset_named(like)
    chosen = preset.engines[0] if engine is None else engine
    promises = preset.promises(chosen, routes=preset.routes if routes is None else routes)
    output.say(f"# {preset.about}")
    output.say(contract_source(promises))
    return output.ended(ExitCode.PASS)


@contract_commands.command("fields")
def fields_command() -> int:
    """List all fields of a contract with their values; docs/contract.md explains them."""
    output = Output()
    table = Table(title="Fields of a contract", title_justify="left")
    table.add_column("field", no_wrap=True)
    table.add_column("values", overflow="fold")
    table.add_column("default")
    hints = get_type_hints(Contract)
    for field in fields(Contract):
        default = "required" if field.default is MISSING else _text(field.default)
        table.add_row(field.name, _values(hints[field.name]), default)
    output.table(table)
    return output.ended(ExitCode.PASS)


@contract_commands.command()
def explain(
    subject: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="A subject.", show_default=False)
    ],
    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="Which schedules are run.")
    ] = "pr",
    json_target: JsonTarget = None,
) -> int:
    """Run a subject, and say field by field what it declares and what its samples show.

    Exit code 1 if a field looks wrong, 2 if no sample shows anything.
    """
    output = Output(json_target)
    target = subject_target(subject, option="the subject")
    if target.about != ROLLOUTS:
        raise UsageError(f"{subject} is no rollout subject: only their contracts are compared.")
    with Meter() as meter:
        readings, report = observe_contract(target.factory, profile=profile, progress=meter)
    table = Table(title=f"{target.name}, {report.cases:,} cases", title_justify="left")
    for column in ("field", "declared"):
        table.add_column(column, no_wrap=True)
    table.add_column("seen in samples and calls", overflow="fold")
    for reading in (reading for reading in readings if reading.fits is not None):
        style = None if reading.fits else Style.BAD.rich
        table.add_row(reading.field, reading.declared, reading.observed, style=style)
    output.table(table)
    unseen = [reading.field for reading in readings if reading.fits is None]
    output.say(f"not to be seen in a run, or not met in this one: {', '.join(unseen)}")
    wrong = [reading for reading in readings if reading.fits is False]
    seen = any(reading.field in _OF_SAMPLES and reading.observed for reading in readings)
    output.lines(
        [
            (
                Style.BAD,
                (
                    f"{reading.field} looks wrong: declared {reading.declared}, but most samples or"
                    f" calls show otherwise: {reading.observed}"
                ),
            )
            for reading in wrong
        ]
        or [
            (Style.GOOD, "no field looks wrong; `rollproof verify --subject` judges the values")
            if seen
            else (
                Style.DOUBT,
                (
                    "no sample was delivered, so nothing is known of its fields; `rollproof verify"
                    f" --subject {subject}` says why"
                ),
            )
        ]
    )
    output.json({"schema": REPORT_SCHEMA, "fields": [_dict(reading) for reading in readings]})
    if wrong:
        return output.ended(ExitCode.FAIL)
    return output.ended(ExitCode.PASS if seen else ExitCode.UNKNOWN)


_OF_SAMPLES = ("finish_reason", "rows", "loss_mask")
"""Fields that every delivered sample shows."""


def _dict(reading: FieldReading) -> dict[str, Any]:
    return {
        "field": reading.field,
        "declared": reading.declared,
        "observed": reading.observed,
        "fits": reading.fits,
    }


def _values(hint: Any) -> str:
    """Return the values that a type allows, in words."""
    # the arguments of a tuple are no alternatives
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return ", ".join(_value_text(kind) for kind in kinds if kind is not type(None))


def _value_text(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a tuple of: {_value_text(get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return ", ".join(kind)
    words: Mapping[Any, str] = {bool: "True, False", int: "number", str: "text"}
    return words.get(kind, str(kind.__name__))


def _text(value: Any) -> str:
    return str(value) if isinstance(value, StrEnum) else repr(value)
