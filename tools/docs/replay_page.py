"""Writes docs/replay.md: what a trainer with routing replay declares and reports, which steps it
runs, and the verdicts on real trainers.

The reference trainers are judged each time; verdicts on real trainers are read from
``replay_results/*.json``, which ``python -m tools.judge_table KIND FILE`` and similar
programs write on machines that have the packages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import rollproof
from rollproof.core import replay_contract
from rollproof.core.events import replay
from rollproof.core.replay_contract import ReplayTerms
from rollproof.core.router_spy import Spy, direction, identify, ids_of_map, sketch
from rollproof.core.trainer_contract import terms_of
from rollproof.fakes.trainers.reference_trainers import REFERENCES, Pipelined
from rollproof.invariants import default_registry
from rollproof.replay.megatron.covered_setups import CPU_RANKS, covering_setups, frozen_rows
from rollproof.replay.plans import episodes_for
from rollproof.verification.replay import judge_replay
from tools.covering_array import coverage
from tools.docs.docstrings import described_fields, markdown, one_line
from tools.docs.enum_texts import enum_texts, term_lines

__all__ = ["replay_page"]

RESULTS = Path(__file__).parents[2] / "docs" / "replay_results"
_SIGNS = {"pass": "✓", "fail": "✗", "unknown": "?", "not applicable": "·"}
_SECTION = "replay-on-megatron-run-verl-091-skyrl-030-megatron-core-0161"
_INTRO = """
Reference: what the adapter of a trainer declares and reports, which steps are run, and the verdicts. To begin, take the
[tutorial](tutorials/replay-trainer.md), then [transformers](replay-hf.md) or [Megatron](replay-megatron.md).

A spy observes the *output* of every router; the expected experts are derived from the samples' payload. All layers must have the same `top_k`.

| entry point | |
|---|---|
| command line | `rollproof verify --replay my_module:MyTrainer` |
| pytest | `class TestMine(rollproof.ReplayConformance): subject = MyTrainer`, or the fixture `rollproof_replay(MyTrainer)` |
| program | `rollproof.judge_replay(MyTrainer)` |
| functions between payload and rows, without a trainer | `rollproof.ReplayLayoutConformance` ([how](how-to/adapter.md#layout-functions)) |
"""
_COVERING = """
## Which configurations

A covering array of {rows} rows (`rollproof.replay.megatron.covered_setups`) has every pair of settings that can be combined: engine's rows, mode,
DP, TP, EP, PP, VPP, CP, SP, recompute, packing, a dense first layer, dispatcher. For each row two implementations lay routes out over the
ranks and merge them again; {run} rows also run on megatron-core with at most {ranks} processes ([how](replay-megatron.md)).

| settings at once | feasible combinations | in the rows | in the rows that run |
|---|---|---|---|"""


def replay_page() -> Iterator[str]:
    """docs/replay.md."""
    yield f"# Routing replay in a trainer\n{_INTRO}"
    yield "\n## What you write\n"
    yield markdown(rollproof.ReplaySubject.__doc__)
    yield (
        "\n`contract` is made by `rollproof.replay.contract.trainer_contract`: the sizes of the"
        " model, the convention of the payload ([contract.md](contract.md)), and these terms"
        " (in brackets: the default). Invalid ones raise `ContractError`, which lists every"
        " problem.\n"
    )
    yield from term_lines(ReplayTerms, replay_contract)
    yield "\n## What it gets and returns\n\nFrom `rollproof.replay.events` and `rollproof.replay.spy`.\n"
    for record in (replay.Step, replay.Outcome):
        text, meanings = described_fields(record.__doc__)
        yield f"\n### {record.__name__}\n\n{markdown(text)}\n"
        yield from (f"- `{name}`: {meaning}" for name, meaning in meanings.items())
    yield from _enums(replay)
    yield f"\n### Spy\n\n{markdown(Spy.__doc__)}"
    for function in (
        Spy.routed,
        Spy.installed,
        Spy.recomputing,
        Spy.extend,
        identify,
        ids_of_map,
        sketch,
        direction,
    ):
        yield f"\n`{function.__name__}`: {markdown(function.__doc__)}"
    yield from _episodes()
    yield from _covering()
    yield from _table()


def _enums(module: ModuleType) -> Iterator[str]:
    for name, (text, members) in enum_texts(module).items():
        values = (
            f"`{value}`{f': {one_line(meaning)}' if meaning else '.'}" for value, meaning in members
        )
        yield f"\n**{name}**: {one_line(text)} {' '.join(values)}"


def _covering() -> Iterator[str]:
    """How many combinations of settings the covering array has."""
    rows = frozen_rows()
    run = [rows[number] for number, *_ in covering_setups()]
    yield _COVERING.format(rows=len(rows), run=len(run), ranks=CPU_RANKS)
    for strength, words in ((2, "two"), (3, "three")):
        (covered, total), (ran, _) = coverage(rows, strength), coverage(run, strength)
        yield (
            f"| {words} | {total:,} | {covered:,} ({covered / total:.1%}) | {ran:,} ({ran / total:.1%}) |"
        )


def _episodes() -> Iterator[str]:
    """The steps of a trainer that supports everything."""
    yield (
        "\n## Episodes\n\nAn episode begins with a fresh adapter; `--profile nightly` and `soak` add"
        " random ones.\n"
    )
    episodes = (f"{each.name} ({len(each.steps)})" for each in episodes_for(Pipelined.contract))
    yield f"With the number of their steps, for a trainer that supports everything: {', '.join(episodes)}."


def _table() -> Iterator[str]:
    checks = [check for check in default_registry() if check.about == "replay"]
    rows = {**_references(), **_results()}
    clean = [name for name, row in rows.items() if not _undecided(row)]
    assert set(REFERENCES) <= set(clean)
    columns = [
        check for check in checks if any(check.id in _undecided(row) for row in rows.values())
    ]
    yield (
        f"\n## Verdicts\n\nReal trainers on CPU (gloo), judged on a machine that has their packages"
        f" ({', '.join(_versions())}), and rollproof's own, in numpy on simulated ranks. Every one"
        f" of the {len(checks)} checks passes, or does not apply, in all {len(REFERENCES)} of rollproof's"
        f" own and in {len(clean) - len(REFERENCES)} of {len(rows) - len(REFERENCES)} others.\n"
    )
    yield (
        f"In the rest, fail ✗ and unknown ? ([what fails](track-record.md#{_SECTION})); all other"
        " checks pass.\n"
    )
    yield f"| trainer | split | {' | '.join(check.id for check in columns)} |"
    yield f"|---|---|{'---|' * len(columns)}"
    for name, row in rows.items():
        if name not in clean:
            signs = [_SIGNS.get(row["verdicts"].get(check.id, ""), " ") for check in columns]
            yield f"| {name} | {row['parallel'] or 'one process'} | {' | '.join(signs)} |"


def _undecided(row: Mapping[str, Any]) -> set[str]:
    """Return the checks that fail or are unknown."""
    return {check for check, verdict in row["verdicts"].items() if verdict in ("fail", "unknown")}


def _versions() -> list[str]:
    return sorted(
        {
            f"{package} {version}"
            for row in _results().values()
            for package, version in row["versions"].items()
        }
    )


def _references() -> dict[str, dict[str, Any]]:
    """The row of each reference trainer."""
    rows = {}
    for name, made in REFERENCES.items():
        report = judge_replay(made, name=name)
        rows[name] = {
            "parallel": made.parallel,
            "mode": str(terms_of(made.contract).mode),
            "verdicts": {result.id: str(result.verdict) for result in report.results},
            "findings": {
                result.id: result.findings[0].observed
                for result in report.results
                if result.findings
            },
        }
    return rows


def _results() -> dict[str, dict[str, Any]]:
    """The rows of real trainers, file by file."""
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        rows |= json.loads(path.read_text(encoding="utf-8"))
    return rows
