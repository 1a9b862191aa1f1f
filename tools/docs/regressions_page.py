"""Writes docs/regressions.md: published faults that were put back into fixed releases, and whether
rollproof finds them. Results are read from ``regression_results/NAME.json``, which
``nox -s regressions -- NAME --write`` stores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rollproof.stacks import STACKS
from tools.regressions import FAULTS, RESULTS, Fault, Regressions, names_cause

__all__ = ["regressions_page"]


def regressions_page() -> Iterator[str]:
    """docs/regressions.md."""
    stacks = [name for name in STACKS if (FAULTS / f"{name}.toml").is_file()]
    regressions = {name: Regressions.read(name) for name in stacks}
    results = {name: _results(name) for name in stacks}
    yield (
        "# Faults put back\n\nPublished faults that a release has repaired, put back into it by an"
        " edit of a line or two and judged. `nox -s regressions -- verl` makes the edits of"
        " [docs/regressions](regressions/verl.toml) in a copy of the package and judges it again"
        " (`-- slime --checkout DIR`).\n"
    )
    yield (
        "*Found*: the check that the file names reports a kind of finding that the unchanged release"
        " does not have. *Cause*: the text of the first such finding names the cause (by a pattern"
        " in the file). *New*: every check with new kinds. Only parts that run the edited code are"
        " judged. Seconds are of a loaded machine, without imports. The tests of the frameworks were"
        " not run on the edits.\n"
    )
    yield "| stack | put back | found | cause named | not put back, in scope | out of scope |"
    yield "|---|---|---|---|---|---|"
    for name, known in regressions.items():
        run = results[name]
        found = [each for each in run.values() if each["found"] == "expected"]
        left = [each.in_scope for each in known.not_planted]
        yield (
            f"| {name} {known.version} | {len(run)} | {len(found)} |"
            f" {_named(known, run)} | {sum(left)} | {len(left) - sum(left)} |"
        )
    for name, known in regressions.items():
        yield from _stack(known, results[name])


def _results(stack: str) -> Mapping[str, Mapping[str, Any]]:
    path = RESULTS / f"{stack}.json"
    if not path.is_file():
        return {}
    results: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))[
        "faults"
    ]
    return results


def _named(known: Regressions, results: Mapping[str, Mapping[str, Any]]) -> int:
    """How many faults were found by a finding that names the cause."""
    return sum(
        results[fault.reference]["found"] == "expected"
        and names_cause(fault, results[fault.reference])
        for fault in known.faults
        if fault.reference in results
    )


def _stack(known: Regressions, results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield f"\n## {known.stack} {known.version}\n"
    if results:
        yield "| fault | published | parts | found | new | cause | seconds |"
        yield "|---|---|---|---|---|---|---|"
    for fault in known.faults:
        # Nothing is claimed of a fault without a stored run.
        if fault.reference in results:
            yield _row(fault, results[fault.reference])
    missed = [fault for fault in known.faults if fault.missed and fault.reference in results]
    for fault in missed:
        yield f"\n{fault.reference} is missed: {fault.missed}."
    waiting = [fault.reference for fault in known.faults if fault.reference not in results]
    if waiting:
        yield f"\nWithout a stored run: {', '.join(waiting)}."
    if known.not_planted:
        yield f"\nNot put back: {len(known.not_planted)} ([why](regressions/{known.stack}.toml))."


def _row(fault: Fault, result: Mapping[str, Any]) -> str:
    found = {"expected": "yes", "other": "by other checks", "nothing": "no"}[result["found"]]
    new = ", ".join(f"`{check}`" for check in result["checks"]) or "–"
    named = "yes" if names_cause(fault, result) else "no"
    parts = ", ".join(fault.parts) or f"`{fault.subject}`"
    return (
        f"| {fault.what} | {fault.reference} | {parts} | {found} | {new} | {named} |"
        f" {result['seconds']:.0f} |"
    )
