"""Writes docs/stacks.md: the releases of stacks that were judged, and the verdict of each check.

Verdicts are read from ``stack_results/NAME.json``, those of the newest pinned release. ``python
tools/docs/stacks_page.py REPORT.json`` condenses what ``rollproof verify --stack NAME --json
REPORT.json`` wrote into such a file; ``nox -s upstream -- NAME --write`` does both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollproof.invariants import default_registry
from rollproof.stacks import STACKS
from rollproof.stacks.matrix import Matrix

__all__ = ["condense", "stacks_page"]

RESULTS = Path(__file__).parents[2] / "docs" / "stack_results"
_SIGNS = {"fail": "✗", "expected fail": "✗", "unknown": "?", "pass": "✓", "not applicable": "·"}
"""The worst first: a release shows the worst verdict of its parts; one that passed somewhere and
failed nowhere passes.
"""


UNDRIVEN = """
## What is not driven

- TRL's `VLLMClient` resumes nothing; it is run over real HTTP against the fake vLLM server
  (tests/fakes/http/test_released_clients.py). Its weight transfer needs CUDA.
- AReno: its rollouts, which run on an engine of its own.
- prime-rl: its sink, curriculum and concurrency controller, and its vLLM server.
- NeMo-RL: rollouts with NeMo-Gym (another repository), TRT-LLM, Dynamo and Megatron generation. By
  reading, their results go through the same buffers and batches, which are judged.
- ROLL: agentic pipelines, replay buffer of prompts, vLLM strategy."""


def stacks_page() -> Iterator[str]:
    """docs/stacks.md."""
    results = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))
    ]
    results.sort(key=lambda result: (list(STACKS).index(result["stack"]), result["version"]))
    yield (
        "# Stacks\n\nReleased frameworks whose own, unmodified code is judged on fake engines, and"
        " what came out. `rollproof verify --stack NAME` judges one that is installed (elsewhere its"
        " error has the commands that install it, without engines and CUDA packages);"
        " `nox -s upstream -- NAME==VERSION` installs it and compares its verdicts with those of"
        " `verdicts.toml` in its folder of harness/stacks. [track-record.md](track-record.md)"
        " describes what fails, with a script for each.\n"
    )
    yield (
        "- An entry of `verdicts.toml` names the kinds of findings, and the situations before them:"
        " another kind, or a pass, is an error. The matrix is that of the default seed.\n"
        "- `--checkout DIR` judges a checkout: of a fork, a branch, or of slime, prime-rl, NeMo-RL"
        " and ROLL, which no package index has. An editable installation counts as a checkout.\n"
        "- A release that is not in the table, or changed code (`<commit>+changed`), is driven as"
        " the newest that is and is not newer, and `--matrix` compares with its verdicts. The report"
        " says so; what fails then may be the adapter's fault.\n"
        "- `-v` lists the checks that do not apply, with the reason: what the stack's contract rules"
        " out.\n"
    )
    yield from _parts(results)
    yield from _table(results)
    yield UNDRIVEN


def _parts(results: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "## What was judged\n\nCases, and seconds on two cores without imports, while other work"
        " ran on the machine; `✗`: checks that fail.\n\n"
        "| stack | parts | cases | seconds | ✗ |\n|---|---|---|---|---|"
    )
    for result in results:
        parts = result["parts"].values()
        failing = {
            check
            for part in parts
            for check, verdict in part["verdicts"].items()
            if _SIGNS[verdict] == "✗"
        }
        yield (
            f"| {_title(result)} | {', '.join(result['parts'])} |"
            f" {sum(part['cases'] for part in parts)} |"
            f" {sum(part['seconds'] for part in parts):.0f} | {len(failing)} |"
        )
    yield ""


def _table(results: list[dict[str, Any]]) -> Iterator[str]:
    rows = {
        check.id: [_worst(result, check.id) for result in results] for check in default_registry()
    }
    judged = {check: signs for check, signs in rows.items() if set(signs) != {" "}}
    shown = {check: signs for check, signs in judged.items() if {"✗", "?"} & set(signs)}
    yield (
        f"## Verdicts\n\nFail ✗, unknown ?, pass ✓, not applicable ·: the worst of all parts. The"
        f" other {len(judged) - len(shown)} checks pass in every stack, or do not apply.\n"
    )
    yield (
        f"| check | {' | '.join(_title(result) for result in results)}"
        f" |\n|---|{'---|' * len(results)}"
    )
    for check, signs in shown.items():
        yield f"| {check} | {' | '.join(signs)} |"


def _worst(result: Mapping[str, Any], check: str) -> str:
    signs = {
        _SIGNS[part["verdicts"][check]]
        for part in result["parts"].values()
        if check in part["verdicts"]
    }
    # as in a report over several subjects: what passed somewhere and failed nowhere passes
    order = "✗✓?·" if "✗" not in signs and "✓" in signs else "✗?✓·"
    return next((sign for sign in order if sign in signs), " ")


def _title(result: Mapping[str, Any]) -> str:
    return f"{result['stack']} {result['version']}"


def condense(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is stored of a JSON report: verdicts by part and check, and the reasons of those that
    are not applicable or unknown.
    """
    parts = {}
    for part in report.get("reports", [report]):
        recipe = part["recipe"]
        checks = part["checks"]
        parts[recipe["part"]] = {
            "cases": part["cases"],
            "seconds": round(part["seconds"], 1),
            "verdicts": {check["id"]: check["verdict"] for check in checks},
            "reasons": {
                check["id"]: check["reason"]
                for check in checks
                if check["verdict"] in ("not applicable", "unknown")
            },
        }
    return {
        "stack": recipe["stack"],
        "version": recipe["version"],
        "profile": report["profile"],
        "seed": report["seed"],
        "parts": parts,
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        result = condense(json.loads(Path(name).read_text(encoding="utf-8")))
        stack, version = result["stack"], result["version"]
        newest = Matrix.read(stack).pinned[-1]
        if version != newest:
            sys.stdout.write(f"{stack} {version} is not stored: the page shows {newest}\n")
            continue
        target = RESULTS / f"{stack}.json"
        target.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        sys.stdout.write(f"wrote {target.name}\n")
