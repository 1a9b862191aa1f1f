"""Writes docs/stacks.md: the releases of stacks that were judged, and the verdict of each check.

Verdicts are read from ``stack_results/NAME.json``, those of the newest pinned release. ``python
tools/docs/stacks_page.py REPORT.json`` condenses what ``rollproof verify --stack NAME --json
REPORT.json`` wrote into such a file; ``nox -s upstream -- NAME --write`` does both.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
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

- TRL's `VLLMClient` makes one blocking call a batch and resumes nothing, so there is no schedule to
  run it through. It is run unmodified over real HTTP against the fake vLLM server, and its samples
  are judged (tests/fakes/http/test_released_clients.py); its weight transfer needs CUDA.
- AReno's rollouts run on an engine of its own, whose workers are made for accelerators: only its
  merging of chunks and ranks is judged.
- Of prime-rl, its sink (which drops what is too stale), curriculum, and concurrency controller are
  not run, nor its vLLM server.
- NeMo-RL's rollouts with NeMo-Gym use its servers, which are another repository; its TRT-LLM,
  Dynamo and Megatron generations start engines of their own. Read at 7ea279abf and not run: their
  results go through the same buffers and batches, which are judged.
- Of ROLL, its agentic pipelines, its replay buffer of prompts and its vLLM strategy were read at
  8eb27cc2 and not run: the first keep a loop of their own for each environment, the second counts
  prompts and not tokens, the third imports vLLM's classes to call them."""


def stacks_page() -> Iterator[str]:
    """docs/stacks.md."""
    results = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))
    ]
    results.sort(key=lambda result: (list(STACKS).index(result["stack"]), result["version"]))
    yield (
        "# Stacks\n\nReleased frameworks whose own, unmodified code is judged on fake engines:"
        " `rollproof verify --stack NAME`,"
    )
    yield (
        "where it is installed (elsewhere the error has the commands that install it: from a"
        " package index, without the engines and CUDA"
    )
    yield (
        "packages that its metadata asks for); `nox -s upstream -- NAME==VERSION` installs it and"
        " holds its verdicts to the matrix of"
    )
    yield (
        "`verdicts.toml` in its folder of harness/stacks. What fails is shown by hand in"
        " [track-record.md](track-record.md)."
    )
    yield (
        "An entry says of each check that fails what kind of finding it shows, and after which"
        " situations: another kind, or another"
    )
    yield (
        "situation, is an error, as a pass or an unknown verdict is. The seed draws the schedules;"
        " the matrix is that of the default one."
    )
    yield (
        "Every stack is judged from a checkout too, of a fork or of a branch, `--checkout DIR`,"
        " where its requirements are installed; slime,"
    )
    yield (
        "prime-rl, NeMo-RL and ROLL, which no package index has, are judged from that of the"
        " table's commit. An editable installation is"
    )
    yield (
        "judged as a checkout. A release or commit that the table does not have, or code that was"
        " changed (`<commit>+changed`), is driven as"
    )
    yield (
        "the newest that it has and that is not newer, and compared with its pinned verdicts by"
        " `--matrix`: the report says so, and what fails"
    )
    yield "then may be the adapter's fault.\n"
    yield from _parts(results)
    yield from _table(results)
    yield from _failing(results)
    yield from _left_out(results)
    yield UNDRIVEN


def _parts(results: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "## What was judged\n\n| stack | part | cases | pass | fail | unknown | not applicable |"
        " seconds |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for result in results:
        for part, outcome in result["parts"].items():
            count = Counter(_SIGNS[verdict] for verdict in outcome["verdicts"].values())
            counts = " | ".join(str(count[sign]) for sign in "✓✗?·")
            yield (
                f"| {_title(result)} | {part} | {outcome['cases']} | {counts} |"
                f" {outcome['seconds']:.0f} |"
            )
    yield "\nSeconds on two cores, without imports, while other work ran on the machine.\n"


def _table(results: list[dict[str, Any]]) -> Iterator[str]:
    judged = {
        check
        for result in results
        for part in result["parts"].values()
        for check in part["verdicts"]
    }
    yield "## Verdicts\n\nPass ✓, fail ✗, unknown ?, not applicable ·: the worst of all parts.\n"
    yield (
        f"| check | {' | '.join(_title(result) for result in results)}"
        f" |\n|---|{'---|' * len(results)}"
    )
    for check in default_registry():
        if check.id in judged:
            yield f"| {check.id} | {' | '.join(_worst(result, check.id) for result in results)} |"


def _worst(result: Mapping[str, Any], check: str) -> str:
    signs = {
        _SIGNS[part["verdicts"][check]]
        for part in result["parts"].values()
        if check in part["verdicts"]
    }
    # as in a report over several subjects: what passed somewhere and failed nowhere passes
    order = "✗✓?·" if "✗" not in signs and "✓" in signs else "✗?✓·"
    return next((sign for sign in order if sign in signs), " ")


def _failing(results: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "\n## What fails, and why\n\n| stack | what | kind | checks (parts) | upstream | by hand"
        " |\n|---|---|---|---|---|---|"
    )
    for stack in dict.fromkeys(result["stack"] for result in results):
        for entry in Matrix.read(stack).entries:
            concerned = {**entry.may_fail, **entry.fails, **entry.unknown}
            checks = "; ".join(
                f"`{check}` ({', '.join(parts)})" for check, parts in concerned.items()
            )
            source = ", ".join(
                filter(None, (f"`{entry.where}`" if entry.where else "", entry.upstream))
            )
            file = entry.script.partition(" ")[0]
            script = f"[{entry.script}](track_record/{file})" if file else ""
            yield (
                f"| {stack} {', '.join(entry.versions)} | {entry.name} | {entry.kind} | {checks} |"
                f" {source} | {script} |"
            )


def _left_out(results: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "\n## What is not applicable\n\nBy the declared contract of the newest release judged, all"
        " parts.\n"
    )
    newest = {result["stack"]: result for result in results}
    for result in newest.values():
        reasons: dict[str, list[str]] = {}
        for check in default_registry().ids:
            if _worst(result, check) == "·":
                texts = {
                    part["reasons"][check]
                    for part in result["parts"].values()
                    if check in part["reasons"]
                }
                reasons.setdefault("; ".join(sorted(texts)), []).append(check)
        yield f"\n**{_title(result)}**\n"
        for reason, checks in reasons.items():
            yield f"- {', '.join(f'`{check}`' for check in checks)}: {reason}"


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
