"""The gap between a real engine and a Hugging Face model: `python benchmarks/engine_gap.py vllm [SEQUENCES [TOKENS]]`.

Needs the engine, torch and transformers (`nox -s "engines(vllm)"` makes such an environment); says so and ends where they are absent.
Prints one row per dtype and routing: n, mean, 99th percentile and largest difference of logprobs in nats, k3, and how often the routers
disagree, per layer and per token; with 95 % intervals over sequences.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rollproof.engines.rollout_gap import measure_rollout_gap
from rollproof.engines.targets import engine_target
from rollproof.gap.intervals import Interval
from rollproof.gap.report import GapReport

COLUMNS = ("abs_diff_mean", "abs_diff_p99", "abs_diff_max", "kl_mu_pi_k3", "layer_mismatch", "any_layer_mismatch")


def shown(interval: Interval | None) -> str:
    """A value with its interval."""
    if interval is None:
        return "-"
    if math.isnan(interval.low):
        return f"{interval.value:.2e}"
    return f"{interval.value:.2e} [{interval.low:.1e}, {interval.high:.1e}]"


def row(engine: str, dtype: str, routing: str, report: GapReport) -> str:
    """One row of the table."""
    metrics: Mapping[str, Interval] = report.panel.metrics
    cells = [shown(metrics.get(name)) for name in COLUMNS]
    return f"| {engine} | {dtype} | {routing} | {report.panel.n_tokens} | " + " | ".join(cells) + " |"


def main() -> None:
    engine = sys.argv[1] if len(sys.argv) > 1 else "vllm"
    sequences, tokens = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((2, 16), (3, 32)))
    if importlib.util.find_spec(engine.partition("-")[0]) is None or importlib.util.find_spec("transformers") is None:
        print(f"{engine} or transformers is not installed: nothing to measure")
        return
    with tempfile.TemporaryDirectory() as folder:
        target = engine_target(engine, model=None, folder=Path(folder))
        print("| engine | dtype | routing | n | " + " | ".join(COLUMNS) + " |")
        print("|---|---|---|---|" + "---|" * len(COLUMNS))
        for dtype in ("float32", "bfloat16"):
            gap = measure_rollout_gap(target, dtype, sequences=sequences, tokens=tokens)
            print(row(engine, dtype, "native", gap.native), flush=True)
            print(row(engine, dtype, "replayed", gap.replayed), flush=True)


if __name__ == "__main__":
    main()
