"""Writes docs/found.md: every fault of docs/track-record.md and of docs/regressions, by framework,
and whether rollproof finds it by itself.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rollproof.fakes.known_bugs import KNOWN_BUGS
from tools.regressions import FAULTS, RESULTS, Regressions

__all__ = ["Found", "RecordedFault", "found_page", "recorded_faults"]

DOCS = Path(__file__).parents[2] / "docs"
_LINK = re.compile(r" ?\(?\[(\w+)\]\(track_record/(\w+)_faults\.py\)\)?")
_CHECK = re.compile(r"`[a-z]+\.[a-z0-9-]+`")
_NAMES = {
    "areal": "AReaL",
    "areno": "AReno",
    "megatron": "megatron-core",
    "miles": "miles",
    "nemo_automodel": "NeMo Automodel",
    "nemo_rl": "NeMo-RL",
    "openrlhf": "OpenRLHF",
    "prime_rl": "prime-rl",
    "rlinf": "RLinf",
    "roll": "ROLL",
    "sglang": "SGLang",
    "skyrl": "SkyRL",
    "slime": "slime",
    "trl": "TRL",
    "verifiers": "verifiers",
    "verl": "verl",
    "vllm": "vLLM",
}


class Found(StrEnum):
    """How a fault is found."""

    PR = "pr"
    """By `rollproof verify --stack` as it is."""
    SEED = "another seed"
    """By the same with another seed."""
    NIGHTLY = "nightly"
    """By the same with `--profile nightly`."""
    SUITE = "own suite"
    """By a check in a run of layouts, trainers, engines or GPUs, which no `--stack` has."""
    HAND = "by hand"
    """By somebody who looked."""
    NO = "no"
    """Not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedFault:
    """A row of docs/track-record.md.

    Fields:
        framework: The framework that has it.
        title: What is wrong, without the link to its script.
        found: How it is found.
        cell: The text of the column "found by".
    """

    framework: str
    title: str
    found: Found
    cell: str


def recorded_faults() -> list[RecordedFault]:
    """Return the rows of docs/track-record.md, in their order."""
    runs = tomllib.loads((DOCS / "track_record" / "found_by.toml").read_text(encoding="utf-8"))
    faults: list[RecordedFault] = []
    levels: dict[str, Found] = {}
    script, section = "", ""
    for line in (DOCS / "track-record.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section, levels = line, {}
        columns = line.split(" | ")
        if not re.match(r"\| \d+ \| ", line) or len(columns) != 4:
            continue
        number, text, cell, _ = columns
        link = _LINK.search(text)
        # a row without a link is shown by the function of the row before
        script = f"{link[2]}_faults.py {link[1]}" if link else script
        finds = runs.get(script, {}).get("finds", [])
        number = number.removeprefix("| ")
        levels[number] = _level(cell, finds, levels)
        faults.append(
            RecordedFault(
                framework=_framework(text, script, section),
                title=_LINK.sub("", text),
                found=levels[number],
                cell=cell,
            )
        )
    return faults


def _level(cell: str, finds: list[dict[str, object]], levels: dict[str, Found]) -> Found:
    """Return how a row is found; ``levels`` are those of the rows above it in its section."""
    if row := re.match(r"with (\d+)", cell):
        return levels[row[1]]
    # "declared: ..." and the like name no check that fails
    if not _CHECK.match(cell):
        return Found.HAND
    if not finds:
        return Found.SUITE
    if all(find.get("profile", "pr") != "pr" for find in finds):
        return Found.NIGHTLY
    return Found.PR if any(not find.get("seed", 0) for find in finds) else Found.SEED


def _framework(text: str, script: str, section: str) -> str:
    """Return the framework that a row begins with, or that its script is about."""
    first = text.split(" ", 1)[0]
    if first in _NAMES.values():
        return first
    return _NAMES[script.partition("_faults.py")[0]] if script else section


def found_page() -> Iterator[str]:
    """docs/found.md."""
    recorded = recorded_faults()
    observed: dict[str, Counter[Found]] = {}
    for fault in recorded:
        observed.setdefault(fault.framework, Counter())[fault.found] += 1
    put_back = {each.stack: each for each in _regressions()}
    results = {_NAMES[stack.replace("-", "_")]: _put_back(each) for stack, each in put_back.items()}
    yield (
        "# Found by itself\n\nThe faults of the [track record](track-record.md), which are live in a"
        " release, and [those put back](regressions.md), which a release has repaired: how many a"
        " run of rollproof finds by itself.\n"
    )
    yield (
        "- *pr*: `rollproof verify --stack` as it is; *another seed*, *nightly*: with `--seed`, or"
        " `--profile nightly`.\n"
        "- *own suite*: by a check in a run of layouts, trainers, engines or GPUs.\n"
        "- *by hand*: seen by somebody who looked; the reasons are below.\n"
        "- *put back*: faults that are in scope; *no*: missed, not put back yet, or without a"
        " stored run.\n"
        "- *share*: of both kinds, those not by hand and not *no*.\n"
        "- *imitated*: further published faults of the framework that a [known bug](checks.md)"
        " plants in a reference, all of them detected; not in the share.\n"
    )
    levels = (Found.PR, Found.SEED, Found.NIGHTLY, Found.SUITE, Found.HAND)
    yield f"| framework | {' | '.join(levels)} | put back: pr | no | share | imitated |"
    yield f"|---|{'---|' * (len(levels) + 4)}"
    total: Counter[Found] = Counter()
    put: Counter[Found] = Counter()
    named = _imitated()
    for framework in sorted({*observed, *results}, key=str.lower):
        seen, again = observed.get(framework, Counter()), results.get(framework, Counter())
        total, put = total + seen, put + again
        yield _line(framework, levels, seen, again, named[framework])
    yield _line("all", levels, total, put, sum(named.values()))
    yield "\n## By hand only\n\n| framework | fault | why no run finds it |\n|---|---|---|"
    for fault in recorded:
        if fault.found is Found.HAND:
            yield f"| {fault.framework} | {fault.title} | {fault.cell.removeprefix('none: ')} |"
    yield "\n## Put back in vain, or not put back\n\n| published | fault | why |\n|---|---|---|"
    for regressions in put_back.values():
        yield from _not_found(regressions)


def _line(
    name: str,
    levels: tuple[Found, ...],
    seen: Counter[Found],
    again: Counter[Found],
    imitated: int,
) -> str:
    found = seen.total() - seen[Found.HAND] + again[Found.PR]
    share = f"{found / (seen.total() + again.total()):.0%}"
    cells = [*(seen[level] for level in levels), again[Found.PR], again[Found.NO], share, imitated]
    return f"| {name} | {' | '.join(str(cell) for cell in cells)} |"


def _regressions() -> list[Regressions]:
    return [Regressions.read(path.stem) for path in sorted(FAULTS.glob("*.toml"))]


def _stored(stack: str) -> dict[str, dict[str, object]]:
    path = RESULTS / f"{stack}.json"
    if not path.is_file():
        return {}
    faults: dict[str, dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))["faults"]
    return faults


def _put_back(regressions: Regressions) -> Counter[Found]:
    """Return how many faults in scope are found: one for each reference."""
    results, counts = _stored(regressions.stack), Counter[Found]()
    for fault in regressions.faults:
        found = results.get(fault.reference, {}).get("found") == "expected"
        counts[Found.PR if found else Found.NO] += fault.reference.count("#")
    for left in regressions.not_planted:
        counts[Found.NO] += left.reference.count("#") * left.in_scope
    return counts


def _not_found(regressions: Regressions) -> Iterator[str]:
    results = _stored(regressions.stack)
    for fault in regressions.faults:
        if results.get(fault.reference, {}).get("found") != "expected":
            why = fault.missed or "no stored run"
            yield f"| {fault.reference} | {fault.what} | {why} |"
    for left in regressions.not_planted:
        scope = "" if left.in_scope else "out of scope: "
        yield f"| {left.reference} | {left.what} | {scope}{left.why} |"


def _imitated() -> Counter[str]:
    """Return how many published faults are planted as known bugs, by framework, but for those of
    docs/regressions.
    """
    listed = {
        reference
        for regressions in _regressions()
        for each in (*regressions.faults, *regressions.not_planted)
        for reference in each.reference.split(", ")
    }
    names = {name.lower(): name for name in _NAMES.values()}
    references = {
        reference
        for bug in KNOWN_BUGS
        for reference in bug.refs
        # cf.: the same code, but another fault
        if "#" in reference and not reference.startswith("cf.") and reference not in listed
    }
    projects = (reference.partition("#")[0].lower() for reference in references)
    return Counter(names[project] for project in projects if project in names)
