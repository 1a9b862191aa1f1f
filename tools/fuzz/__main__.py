"""Fuzz everything that reads what others wrote, and print a table.

    python -m tools.fuzz [--seconds 60 | --inputs N] [--seed S] [--only NAME ...]

Each target runs in a process of its own, which may take 4 GiB: a crash, a hang of 20 s for one
input and a lack of memory are found like an exception. An input that fails is shrunk, and printed
with the seed; add it to the tests of what read it.
"""

from __future__ import annotations

import argparse
import sys

from tools.fuzz.fuzzing import fuzz
from tools.fuzz.targets import TARGETS


def main() -> int:
    """Fuzz the targets that the command line names; 1 if an input failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for each target (default: 60)")
    parser.add_argument("--inputs", type=int, help="for each target, in place of a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=list(TARGETS), default=list(TARGETS))
    options = parser.parse_args()
    print(f"seed {options.seed}\n{'target':<20}{'inputs':>9}{'seconds':>9}{'MiB':>7}  outcome")
    failed = [
        name
        for name in options.only
        if not fuzz(name, seconds=options.seconds, inputs=options.inputs, first=options.seed)
    ]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
