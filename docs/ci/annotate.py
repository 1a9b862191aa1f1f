"""Prints the failures of JUnit files as GitHub annotations; exits with 1 if there are any.

Usage: `python annotate.py junit.xml ...`
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path


def failures(path: Path) -> Iterator[tuple[str, str]]:
    """The name and the first line of each failure or error in one file."""
    for case in ET.parse(path).getroot().iter("testcase"):  # noqa: S314 - written by pytest in the job before
        for kind in ("failure", "error"):
            for found in case.findall(kind):
                yield (
                    f"{case.get('classname')}.{case.get('name')}",
                    (found.get("message") or "").strip().split("\n")[0],
                )


def main(paths: list[str]) -> int:
    """Print; returns the exit code."""
    told = [(name, text) for path in paths for name, text in failures(Path(path))]
    for name, text in told:
        clean = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        print(f"::error title={name}::{clean[:500]}")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
