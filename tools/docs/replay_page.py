"""Writes docs/replay.md: what a trainer with routing replay declares and reports, which steps it
runs, and the verdicts on real trainers.

The reference trainers are judged each time; verdicts on real trainers are read from
``replay_results/*.json``, which ``python -m tools.judge_table KIND FILE`` and similar
programs write on machines that have the packages.
"""

from __future__ import annotations

import inspect
import json
import re
import runpy
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
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
from rollproof.reporting.text import check_lines, text_of
from rollproof.verification.replay import judge_replay
from tools.covering_array import coverage
from tools.docs.enum_texts import enum_texts

__all__ = ["replay_page"]

RESULTS = Path(__file__).parents[2] / "docs" / "replay_results"
_SIGNS = {"pass": "✓", "fail": "✗", "unknown": "?", "not applicable": "·"}
_INTRO = """
Routing replay makes a trainer's routers execute recorded experts: experts that were recorded in its own old-logprob pass (R2), or in the
rollout engine (R3). It fails silently: a target that reaches the wrong row, layer, rank or microbatch, or none at all, still gives a finite
loss. So no check trusts that a target was installed. A spy observes the *output* of every router, and the expected experts of each row are
derived from the samples' payload alone. The results of a step must depend on nothing that ran before: loss and gradients are a function of
weights, samples, routes and action.

`rollproof verify --replay my_module:MyTrainer` judges a trainer. In pytest, use `rollproof.ReplayConformance`, or the fixture
`rollproof_replay(MyTrainer)` within a test of your own. In a program, use `rollproof.judge_replay(MyTrainer)`.
`rollproof.ReplayLayoutConformance` judges the functions between payload and router rows separately, without a trainer
([entry-points.md](entry-points.md)).

All layers must have the same `top_k`: a model with several values cannot be declared yet.

Two pages show a complete trainer: [one of HF transformers](replay-hf.md), with replay code that you can use, and
[one on Megatron](replay-megatron.md); both run on a CPU.
"""
_TRY = """
## Try it without torch

rollproof's own trainers use numpy. The first command judges a correct one, the second a trainer with the most frequent fault
([example/shifted_trainer.py](example/shifted_trainer.py)): routes are one row behind their tokens.

```
rollproof verify --replay rollproof.fakes.trainers.replay_trainer:ReplayTrainer
cd docs/example
rollproof verify --replay shifted_trainer:ShiftedTrainer --only replay.forward
```

The second command ends with exit code 1, and prints:
"""
_EXAMPLES = """
Worked examples: [a trainer of HF transformers](example/hf_trainer.py), [a Megatron trainer](example/megatron_trainer.py).
"""
_COVERING = """
## Which configurations

The package has a covering array of {rows} rows (`rollproof.replay.megatron.covered_setups`): every pair of settings that can be combined is in at
least one row. The settings are the engine's rows, mode, DP, TP, EP, PP, VPP, CP, SP, recompute, packing, a dense first layer, and the dispatcher.
For each row, two implementations lay routes out over the ranks and merge them again; {run} rows also run on megatron-core with at most {ranks} processes
([replay-megatron.md](replay-megatron.md)). `python -m tools.covering_array` counts:

| settings at once | feasible combinations | in the rows | in the rows that run |
|---|---|---|---|"""


def replay_page() -> Iterator[str]:
    """docs/replay.md."""
    yield f"# Routing replay in a trainer\n{_INTRO}"
    yield from _tried()
    yield "\n## What you write\n"
    yield _plain(rollproof.ReplaySubject.__doc__)
    yield (
        "\n`contract` is made by `rollproof.replay.contract.trainer_contract`: the sizes of the model,"
        " the convention of the payload"
    )
    yield "([contract.md](contract.md)), and these terms.\n\n| term | default |\n|---|---|"
    for field in fields(ReplayTerms):
        yield (
            f"| `{field.name}` |"
            f" {'required' if field.default is MISSING else f'`{_shown(field.default)}`'} |"
        )
    yield f"\n{_plain(ReplayTerms.__doc__)}"
    for name, (text, members) in enum_texts(replay_contract).items():
        yield f"\n### {name}\n\n{_plain(text)}\n"
        yield from _values(members)
    yield (
        "\n## What it gets and returns\n\nFrom `rollproof.replay.events` and `rollproof.replay.spy`.\n"
    )
    for record in (replay.Step, replay.Outcome):
        yield f"\n### {record.__name__}\n\n{_plain(record.__doc__)}"
    for name, (text, members) in enum_texts(replay).items():
        yield f"\n### {name}\n\n{_plain(text)}\n"
        yield from _values(members)
    yield f"\n### Spy\n\n{_plain(Spy.__doc__)}"
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
        yield f"\n`{function.__name__}`: {_plain(function.__doc__)}"
    if all(
        (RESULTS.parent / name).exists() for name in re.findall(r"\((example/[^)]+)\)", _EXAMPLES)
    ):
        yield _EXAMPLES
    yield from _episodes()
    yield from _covering()
    yield from _table()


def _tried() -> Iterator[str]:
    """The finding on the example with a fault."""
    yield _TRY
    example = runpy.run_path(str(RESULTS.parent / "example" / "shifted_trainer.py"))
    check = judge_replay(example["ShiftedTrainer"], only=["replay.forward"]).to_dict()["checks"][0]
    yield f"```console\n{text_of(check_lines(check, findings=1))}\n```"


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
        "\n## Episodes\n\nAn episode begins with a fresh adapter. These are the episodes of a trainer"
        " that supports everything (R2,"
    )
    yield (
        "one other model); `--profile nightly` and `soak` add random ones, which repeat a few steps"
        " among failures, recomputes and"
    )
    yield "other modes.\n"
    yield "| episode | steps |\n|---|---|"
    for episode in episodes_for(Pipelined.contract):
        yield f"| {episode.name} | {'; '.join(step.name for step in episode.steps)} |"


def _table() -> Iterator[str]:
    checks = [check for check in default_registry() if check.about == "replay"]
    short = [check.id.partition(".")[2] for check in checks]
    yield (
        "\n## Verdicts\n\nPass ✓, fail ✗, unknown ?, not applicable ·. Reference trainers are"
        " rollproof's own, in numpy, on"
    )
    yield (
        "simulated ranks; the rows below them are real trainers on CPU (gloo), judged on a machine"
        " that has their packages.\n"
    )
    yield (
        f"{len(checks)} checks, by number:"
        f" {', '.join(f'{i + 1} {name}' for i, name in enumerate(short))}.\n"
    )
    yield f"| trainer | split | mode | {' | '.join(str(i + 1) for i in range(len(checks)))} |"
    yield f"|---|---|---|{'---|' * len(checks)}"
    findings: list[str] = []
    for name, row in {**_references(), **_results()}.items():
        verdicts: Mapping[str, str] = row["verdicts"]
        signs = [_SIGNS.get(verdicts.get(check.id, ""), " ") for check in checks]
        yield (
            f"| {name} | {row['parallel'] or 'one process'} | {row['mode']} | {' | '.join(signs)} |"
        )
        findings += [f"- **{name}**, `{check}`: {text}" for check, text in row["findings"].items()]
    versions = {
        f"{package} {version}"
        for row in _results().values()
        for package, version in row["versions"].items()
    }
    if versions:
        yield f"\nVersions: {', '.join(sorted(versions))}."
    if findings:
        yield (
            "\n### What fails\n\nThe first finding of each check;"
            " [track-record.md](track-record.md) reproduces them by hand.\n"
        )
        yield from findings


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


def _values(members: list[tuple[str, str]]) -> Iterator[str]:
    for value, meaning in members:
        yield f"- `{value}`{': ' + _plain(meaning) if meaning else ''}"


def _shown(value: Any) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, tuple) else repr(value)


def _plain(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("``", "`")
