"""Writes docs/stacks.md: the releases of stacks that were judged, and the verdict of each check.

Verdicts are read from the stored results in ``stack_results``, those of the newest pinned release.
``nox -s upstream -- NAME --write`` judges the releases of a stack and stores what came out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollproof.invariants import default_registry
from rollproof.reporting.results.release_changes import releases_by_name
from rollproof.reporting.results.stored_runs import StoredRun, read_runs
from rollproof.stacks import STACKS
from rollproof.stacks.matrix import Matrix

__all__ = ["stacks_page"]

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
    results = list(_newest_pinned())
    yield (
        "# Stacks\n\nReleased frameworks whose own, unmodified code is judged on fake engines, and"
        " what came out ([what fails](track-record.md)). `rollproof verify --stack NAME` judges one"
        " that is installed (elsewhere its error says how to install it);"
        " `nox -s upstream -- NAME==VERSION` installs it and compares its verdicts with those of"
        " `verdicts.toml` in its folder of harness/stacks.\n"
    )
    yield (
        "- An entry of `verdicts.toml` names the kinds of findings: another kind, or a pass, is an"
        " error.\n"
        "- `--checkout DIR` judges a checkout: of a fork, a branch, or of slime, prime-rl, NeMo-RL"
        " and ROLL, which no package index has. An editable installation counts as a checkout.\n"
        "- A release that is not in the table, a fork, or changed code (`0.9.1+changed`: files that"
        " differ from the commit, or from what was installed) is driven as the newest that is in"
        " the table and is not newer; what fails then may be the adapter's fault. With `--matrix`"
        " the failures of that release are expected, and others are errors.\n"
        "- `rollproof matrix add REPORT.json --to DIR` stores a report of `verify --json`, and"
        " `rollproof matrix build DIR --out SITE` makes a site of what is stored, as this"
        " documentation has one of the results below.\n"
        "- `-v` lists the checks that do not apply, with the reason.\n"
    )
    yield from _parts(results)
    yield from _table(results)
    yield UNDRIVEN


def _newest_pinned() -> Iterator[StoredRun]:
    """Yield the stored run of the newest pinned release of each stack."""
    releases = releases_by_name(read_runs([RESULTS]))
    for stack in STACKS:
        newest = Matrix.read(stack).pinned[-1]
        yield from (run for run in releases.get(("stack", stack), ()) if run.version == newest)


def _parts(results: list[StoredRun]) -> Iterator[str]:
    yield (
        "## What was judged\n\nCases, and seconds on two cores without imports, while other work"
        " ran on the machine; `✗`: checks that fail.\n\n"
        "| stack | parts | cases | seconds | ✗ |\n|---|---|---|---|---|"
    )
    for result in results:
        parts = result.parts.values()
        failing = {
            check
            for part in parts
            for check, stored in part.checks.items()
            if _SIGNS[stored.verdict] == "✗"
        }
        yield (
            f"| {result.title} | {', '.join(result.parts)} |"
            f" {sum(part.cases for part in parts)} |"
            f" {sum(part.seconds for part in parts):.0f} | {len(failing)} |"
        )
    yield ""


def _table(results: list[StoredRun]) -> Iterator[str]:
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
        f"| check | {' | '.join(result.title for result in results)}"
        f" |\n|---|{'---|' * len(results)}"
    )
    for check, signs in shown.items():
        yield f"| {check} | {' | '.join(signs)} |"


def _worst(result: StoredRun, check: str) -> str:
    signs = {
        _SIGNS[part.checks[check].verdict] for part in result.parts.values() if check in part.checks
    }
    # as in a report over several subjects: what passed somewhere and failed nowhere passes
    order = "✗✓?·" if "✗" not in signs and "✓" in signs else "✗?✓·"
    return next((sign for sign in order if sign in signs), " ")
