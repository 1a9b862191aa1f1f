"""The gap's panel on many tokens: seconds, CPU seconds and memory of each part.

python benchmarks/gap_panel.py [--tokens 10000000] [--sequences 20000] [--resamples 1000]
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from rollproof.gap.intervals import Resampler, metric_interval
from rollproof.gap.metrics import METRICS, sequence_sums
from rollproof.gap.panel import batch_median, quantile_intervals
from rollproof.gap.token_pairs import TokenPairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--sequences", type=int, default=20_000)
    parser.add_argument("--resamples", type=int, default=1000)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(0.3, options.tokens)
    trainer = np.minimum(
        rollout + 0.02 * rng.standard_normal(options.tokens) * (1 - np.exp(rollout)), 0
    )
    sequence = np.sort(rng.integers(options.sequences, size=options.tokens))
    begun = last = time.perf_counter(), time.process_time()

    def lap(what: str, since: tuple[float, float]) -> tuple[float, float]:
        now = time.perf_counter(), time.process_time()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"{what:12} {now[0] - since[0]:7.2f} s  {now[1] - since[1]:7.2f} CPU s  peak"
            f" {peak:.2f} GB"
        )
        return now

    pairs = TokenPairs.of(
        rollout_logprob=rollout,
        trainer_logprob=trainer,
        sequence_id=sequence,
        mask=np.ones(options.tokens, bool),
    )
    last = lap("laid out", last)
    sums = sequence_sums(pairs)
    last = lap("sums", last)
    resampler = Resampler(sums, resamples=options.resamples)
    for metric in METRICS.values():
        metric_interval(metric, resampler)
    batch_median(pairs, sums)
    last = lap("intervals", last)
    quantile_intervals(pairs)
    lap("quantiles", last)
    lap("all", begun)


if __name__ == "__main__":
    main()
