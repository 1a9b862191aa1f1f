"""Writes docs/engines.md: the verdicts on real engines, read from ``engine_results/*.json``.

``python -m tools.judge_table ENGINE FILE`` writes the verdicts and ``benchmarks/engine_gap.py
ENGINE --json FILE`` the gap, on a machine that has the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollproof.invariants import default_registry
from tools.engine_results import GAP_METRICS

__all__ = ["engines_page"]

RESULTS = Path(__file__).parents[2] / "docs" / "engine_results"
_SIGNS = {"pass": "✓", "fail": "✗", "unknown": "?", "not applicable": "·"}
_INTRO = """
Released engines on a plain CPU, each driven call by call through the same experiments: cached prefixes, chunked prefill, preemption,
several samples, rows from a position on, every way of streaming, aborts (in the middle, before the first token, in the queue), every pause
with and without clearing the cache and a weight update in between, resumes, temperatures, identity updates, and calls that cannot be
served.
Every value is compared with a Hugging Face forward, in float32, of the weights that sampled it. A CPU build shares the engine's scheduler,
cache, capture and interfaces with the one for GPUs, and not its kernels.

`nox -s "engines(vllm)"` and `nox -s "engines(sglang)"` run them as tests; `rollproof verify --engine NAME [--model FOLDER]` judges one.
"""


def engines_page() -> Iterator[str]:
    """docs/engines.md."""
    yield f"# Real engines\n{_INTRO}"
    results = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RESULTS.glob("*.json"))
    }
    yield from _verdicts(results)
    yield from _gaps(results)


def _verdicts(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = {name: row for result in results.values() for name, row in result["runs"].items()}
    judged = {name: row for name, row in rows.items() if "verdicts" in row}
    checks = [
        check
        for check in default_registry()
        if any(check.id in row["verdicts"] for row in judged.values())
    ]
    yield (
        "\n## Verdicts\n\nPass ✓, fail ✗, unknown ?, not applicable ·. A row is a run: the target,"
        " and the family of its tiny random"
    )
    yield "model where it is not the target's own.\n"
    yield (
        f"{len(checks)} checks, by number:"
        f" {', '.join(f'{i + 1} {check.id}' for i, check in enumerate(checks))}.\n"
    )
    yield (
        f"| run | {' | '.join(str(i + 1) for i in range(len(checks)))}"
        f" |\n|---|{'---|' * len(checks)}"
    )
    for name, row in judged.items():
        yield (
            f"| {name} |"
            f" {' | '.join(_SIGNS.get(row['verdicts'].get(check.id, ''), ' ') for check in checks)} |"
        )
    for engine, result in results.items():
        versions = ", ".join(
            f"{package} {version}" for package, version in result["versions"].items()
        )
        yield f"\n{engine}: {versions}."
    yield "\n| run | what | experiments |\n|---|---|---|"
    for name, row in judged.items():
        yield f"| {name} | {row['about']} | {', '.join(row['experiments'])} |"
    findings = [
        f"- **{name}**, `{check}`: {text}"
        for name, row in judged.items()
        for check, text in row["findings"].items()
    ]
    if findings:
        yield (
            "\n### What fails\n\nThe first finding of each check;"
            " [track-record.md](track-record.md) reproduces them by hand.\n"
        )
        yield from findings
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, row in judged.items():
        for check, reason in row["reasons"].items():
            if row["verdicts"][check] == "unknown":
                reasons.setdefault((check, reason), []).append(name)
    if reasons:
        yield "\n### What is unknown\n"
        for (check, reason), names in reasons.items():
            yield f"- `{check}` ({', '.join(names)}): {reason}"
    stopped = {name: row["not_started"] for name, row in rows.items() if "not_started" in row}
    if stopped:
        yield "\n### What does not start on a CPU\n"
        for name, text in stopped.items():
            yield f"- **{name}**: {text}"


def _gaps(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = [row for result in results.values() for row in result["gap"]]
    if not rows:
        return
    yield (
        "\n## The rollout gap\n\nSequences that the engine sampled at temperature 1, beside a"
        " Hugging Face forward of the same"
    )
    yield (
        "weights in the same dtype: with its own routing (native) and with the engine's routes"
        " replayed. In nats; 95 % intervals over"
    )
    yield (
        "sequences. In float32 the difference is rounding; in bfloat16 a part of it is experts that"
        " rounding chose otherwise, which"
    )
    yield "replay takes away.\n"
    yield f"| engine | model | dtype | routing | tokens | sequences | {' | '.join(GAP_METRICS)} |"
    yield f"|---|---|---|---|---|---|{'---|' * len(GAP_METRICS)}"
    for row in rows:
        cells = [_interval(row["metrics"].get(name)) for name in GAP_METRICS]
        yield (
            f"| {row['engine']} | {row['model']} | {row['dtype']} | {row['routing']} |"
            f" {row['n_tokens']} | {row['n_sequences']} | {' | '.join(cells)} |"
        )


def _interval(held: list[float | None] | None) -> str:
    if held is None or held[0] is None:
        return "-"
    value, low, high = held
    return f"{value:.2e}" if low is None or high is None else f"{value:.2e} [{low:.1e}, {high:.1e}]"
