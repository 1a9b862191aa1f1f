"""Measure the gap between a real engine and a Hugging Face model.

``python benchmarks/engine_gap.py ENGINE [SEQUENCES [TOKENS]] [--json FILE]`` needs the engine,
torch and transformers (`nox -s "engines(vllm)"` makes such an environment). It prints one row per
dtype and routing: n, mean, 99th percentile and largest difference of logprobs in nats, k3, and how
often the routers disagree, per layer and per token; with 95 % intervals over sequences. With
``--json`` the rows go into a file in docs/engine_results, from which docs/engines.md is made.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from rollproof.engines.engine_targets import REAL, engine_target
from rollproof.verification.engine_gap import measure_rollout_gap
from tools.engine_results import GAP_METRICS, gap_rows, save_results

MODEL = "qwen3_moe"


def shown(interval: list[float | None] | None) -> str:
    """Format a value with its interval."""
    if interval is None or interval[0] is None:
        return "-"
    value, low, high = interval
    return f"{value:.2e}" if low is None or high is None else f"{value:.2e} [{low:.1e}, {high:.1e}]"


def line(row: dict[str, Any]) -> str:
    """Format one row of the table."""
    cells = [shown(row["metrics"].get(name)) for name in GAP_METRICS]
    return (
        f"| {row['engine']} | {row['dtype']} | {row['routing']} | {row['n_tokens']} | "
        + " | ".join(cells)
        + " |"
    )


def main() -> None:
    arguments = sys.argv[1:]
    file = None
    if "--json" in arguments:
        at = arguments.index("--json")
        file = Path(arguments[at + 1])
        del arguments[at : at + 2]
    engine, sequences, tokens = [*arguments, *("vllm", "24", "32")[len(arguments) :]]
    if (
        importlib.util.find_spec(engine.partition("-")[0]) is None
        or importlib.util.find_spec("transformers") is None
    ):
        print(f"{engine} or transformers is not installed: nothing to measure")
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        target = engine_target(engine, model=None, folder=Path(folder), family=MODEL)
        print("| engine | dtype | routing | n | " + " | ".join(GAP_METRICS) + " |")
        print("|---|---|---|---|" + "---|" * len(GAP_METRICS))
        for dtype in ("float32", "bfloat16"):
            gap = gap_rows(
                measure_rollout_gap(target, dtype, sequences=int(sequences), tokens=int(tokens)),
                MODEL,
            )
            rows += gap
            print("\n".join(line(row) for row in gap), flush=True)
    if file is not None:
        save_results(file, REAL[engine].packages, gap=rows)


if __name__ == "__main__":
    main()
