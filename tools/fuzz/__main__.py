"""Fuzz everything that reads what others wrote, and print a table.

    python -m tools.fuzz [--seconds 60 | --inputs N] [--seed S] [--only NAME ...]
    python -m tools.fuzz --inputs 100000 --processes 16 --within 450 --report fuzz.json

The inputs of a target are read in processes of their own, which may take 4 GiB each: a crash, a
hang of 20 s for one input and a lack of memory are found like an exception. An input that fails is
printed with as few changes as show it, and with the options that make it again; add it to the tests
of what read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from tools.fuzz.fuzzing import Amount, fuzz
from tools.fuzz.targets import TARGETS, unavailable


def main() -> int:
    """Fuzz the targets that the command line names; 1 if an input failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for each target (default: 60)")
    parser.add_argument("--inputs", type=int, help="for each target, in place of a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", nargs="*", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--skip", nargs="*", choices=list(TARGETS), default=[])
    parser.add_argument("--processes", type=int, default=1, help="at once (default: 1)")
    parser.add_argument(
        "--within", type=float, default=float("inf"), help="start none after so many seconds"
    )
    parser.add_argument("--report", type=Path, help="write the table there, as JSON")
    options = parser.parse_args()
    amount = Amount(
        seconds=options.seconds,
        inputs=options.inputs,
        seed=options.seed,
        start=options.start,
        processes=options.processes,
        within=options.within,
    )
    print(f"seed {options.seed}")
    print(f"{'target':<20}{'inputs':>9}{'seconds':>9}{'cpu s':>9}{'MiB':>7}  outcome")
    names = [name for name in options.only if name not in options.skip]
    for name in names:
        if unavailable(name):
            print(f"{name:<20} left out: {unavailable(name)}")
    outcomes = fuzz([name for name in names if not unavailable(name)], amount)
    if options.report is not None:
        table = [dataclasses.asdict(outcome) for outcome in outcomes]
        options.report.write_text(json.dumps({"seed": options.seed, "targets": table}, indent=1))
    failed = [outcome.name for outcome in outcomes if outcome.problems]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
