"""Flip single bits of files, and count what each flip did to what a command says of the file.

    python -m tools.fuzz.bit_flips [--flips 2000] [--seed 0]

A flip of a file with a checksum must be refused, noted or without effect: a changed result without
a word is a silent change, and exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from rollproof.cli.app import run
from tools.fuzz.file_targets import gap_parquet, report_bytes, sound_trace, trace_arrow
from tools.fuzz.target import CODES

_VARYING = frozenset({"seconds", "checksum"})
"""Keys of a report that two runs on the same file differ in."""
_GAP = ("gap", "FILE", "--json", "-", "--resamples", "100")
_CHECK = ("check", "FILE", "--json", "-")


def main() -> int:
    """Flip bits in a file of each format, and print a line for each; 1 after a silent change."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.bit_flips", description=__doc__)
    parser.add_argument("--flips", type=int, default=2000, help="for each format (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sound_trace(Path())
        report = report_bytes()
        Path("sound.json").write_bytes(report)
        files: dict[str, tuple[bytes, tuple[str, ...]]] = {
            "trace.json": (Path("trace.json").read_bytes(), _CHECK),
            "report.json": (report, ("diff", "FILE", "sound.json", "--json", "-")),
            "trace.arrow": (trace_arrow(), _CHECK),
            "gap.parquet": (gap_parquet(), _GAP),
        }
        for name, (sound, command) in files.items():
            counts = _flipped(name, sound, command, options.flips, Random(f"{name}:{options.seed}"))
            print(f"{name:<12}{len(sound):>8,} bytes  {_listed(counts)}", flush=True)
            bad += counts["silent change"] + counts["crash"]
    return 1 if bad else 0


def _listed(counts: Counter[str]) -> str:
    kinds = ("refused", "noted", "same result", "silent change", "crash")
    return ", ".join(f"{counts[kind]:,} {kind}" for kind in kinds)


def _flipped(
    name: str, sound: bytes, command: tuple[str, ...], flips: int, random: Random
) -> Counter[str]:
    """Count what flips of single bits did."""
    path = Path(name)
    path.write_bytes(sound)
    _, before, _ = _result(name, command)
    counts: Counter[str] = Counter()
    for _ in range(flips):
        data = bytearray(sound)
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.unlink()
        path.write_bytes(data)
        code, result, text = _result(name, command)
        if code not in CODES:
            counts["crash"] += 1
        elif code == 254:
            counts["refused"] += 1
        elif result == before:
            counts["same result"] += 1
        elif "damage" in text or "checksum" in text:
            counts["noted"] += 1
        else:
            counts["silent change"] += 1
    return counts


def _result(name: str, command: tuple[str, ...]) -> tuple[int, Any, str]:
    """Run a command on a file: its exit code, its JSON without what varies, and all of its text."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([part.replace("FILE", name) for part in command])
    text = out.getvalue()
    return code, _steady(json.loads(text)) if text.startswith("{") else text, text + err.getvalue()


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _steady(inner) for key, inner in value.items() if key not in _VARYING}
    return [_steady(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
