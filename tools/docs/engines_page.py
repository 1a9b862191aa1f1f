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
Released engines on a plain CPU, driven call by call through the same experiments ([how](how-to/engines.md)), and what came out. A CPU build
shares the engine's scheduler, cache, capture and interfaces with the one for GPUs, and not its kernels.
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
    shown = [
        check
        for check in checks
        if any(row["verdicts"].get(check.id) in ("fail", "unknown") for row in judged.values())
    ]
    yield (
        f"\n## Verdicts\n\nFail ✗, unknown ?, pass ✓, not applicable ·. The other"
        f" {len(checks) - len(shown)} of {len(checks)} checks pass in every run, or do not apply. A"
        " column is a run: the target, and the family of its tiny random model where it is not the"
        " target's own.\n"
    )
    yield f"| check | {' | '.join(judged)} |\n|---|{'---|' * len(judged)}"
    for check in shown:
        signs = [_SIGNS.get(row["verdicts"].get(check.id, ""), " ") for row in judged.values()]
        yield f"| {check.id} | {' | '.join(signs)} |"
    for engine, result in results.items():
        versions = ", ".join(
            f"{package} {version}" for package, version in result["versions"].items()
        )
        yield f"\n{engine}: {versions}."
    everything = sorted({name for row in judged.values() for name in row["experiments"]})
    yield f"\n{len(everything)} experiments, of which some targets cannot run all:\n"
    yield "| run | what | without |\n|---|---|---|"
    alike: dict[tuple[str, str], list[str]] = {}
    for name, row in judged.items():
        missing = [one for one in everything if one not in row["experiments"]]
        alike.setdefault((row["about"], ", ".join(missing)), []).append(name)
    for (about, missing_ones), names in alike.items():
        yield f"| {', '.join(names)} | {about} | {missing_ones} |"
    first: dict[str, tuple[list[str], str]] = {}
    for name, row in judged.items():
        for check, text in row["findings"].items():
            first.setdefault(check, ([], text))[0].append(name)
    findings = [
        f"- `{check}` ({', '.join(names)}): {text}" for check, (names, text) in first.items()
    ]
    if findings:
        yield (
            "\n### What fails\n\nThe first finding of each check, in the first run that has one;"
            " the [track record](track-record.md) reproduces them by hand.\n"
        )
        yield from findings
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
        "\n## The rollout gap\n\nSequences sampled at temperature 1, next to a Hugging Face forward in"
        " the same dtype, with its own routing (native) and with the engine's routes replayed. In nats,"
        " with 95 % intervals over sequences.\n"
    )
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
