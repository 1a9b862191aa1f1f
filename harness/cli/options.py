"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = ["JsonTarget", "Only", "ProfileName", "Seed", "Verbose", "WitnessDir"]

JsonTarget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        help="Write the JSON to this file, or to standard output (-) and nothing else there.",
    ),
]
Only: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="ID", help="Only this check or family; may be repeated."),
]
ProfileName: TypeAlias = Annotated[
    str, typer.Option("--profile", metavar="NAME", help="How much is run: pr, nightly or soak.")
]
Seed: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of everything that is drawn; default: what the profile says.",
    ),
]
Verbose: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="List every check, also those that passed and those that the contract rules out.",
    ),
]
WitnessDir: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--witness-dir",
        metavar="DIR",
        help="Where counterexamples are written, for `rollproof replay`.",
    ),
]
