"""How often the 95 % intervals of the gap hold the true value, on clustered data of the closed-form
fake: every interval that is printed.

python benchmarks/gap_coverage.py [--sets 1000] [--sequences 64] [--length 500] [--profile moe-bf16]
[--jobs 1] [--means]

A second score of the same tokens, with noise of 0.6 times the size that shares half of the first's,
is for the ratio of a comparison; routes of four layers differ by near-ties whose rate is a
sequence's own.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
from collections import Counter
from typing import Any

import numpy as np

from rollproof.gap.buckets import bucket_pairs
from rollproof.gap.intervals import Interval, Resampler, metric_interval
from rollproof.gap.metrics import METRICS, PLACE, Scale, sequence_sums
from rollproof.gap.panel import MEDIAN, QUANTILES, batch_median, quantile_intervals
from rollproof.gap.token_pairs import FloatArray, TokenPairs
from rollproof.gap.trainer_comparison import COMPARED, compare
from tests.support.gap_profiles import PROFILES, bank, closed_form, noise_scale

RESUMED = 0.02
"""Share of the tokens that stand at a resume, for the buckets: 10 of 500."""
MEANS = ("kl_mu_pi_k3", "k3_winsorised", "abs_diff_mean", "rho_mean_minus_1")
SLOTS = 0.013
"""Mean share of expert slots that differ, over four layers of top-4."""


@functools.lru_cache
def pool() -> FloatArray:
    """Logprobs of tokens sampled from the bank's laws."""
    rng = np.random.default_rng(0)
    logits = bank(200_000, rng)
    picked = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    top = logits.max(axis=1)
    return np.asarray(
        logits[np.arange(len(logits)), picked]
        - top
        - np.log(np.exp(logits - top[:, None]).sum(axis=1))
    )


def draw(
    options: argparse.Namespace, sequences: int, rng: np.random.Generator
) -> tuple[TokenPairs, TokenPairs]:
    rollout = rng.choice(pool(), (sequences, options.length))
    scale = noise_scale(PROFILES[options.profile], sequences, options.length, rng)
    seed = int(rng.integers(1 << 31))
    first, second = (
        closed_form(rollout, scale * size, np.random.default_rng(seed + 1)) for size in (1.0, 0.6)
    )
    other = closed_form(rollout, scale * 0.6, rng)
    second = np.where(rng.random(rollout.shape) < 0.5, second, other)
    columns = {
        "sequence_id": np.repeat(np.arange(sequences), options.length),
        "mask": np.ones(rollout.size, bool),
    }
    since = np.where(np.arange(options.length) % round(1 / RESUMED) == 0, 0, 8)
    sides = {"since_resume": np.tile(since, sequences)}
    return (
        TokenPairs.of(
            rollout_logprob=rollout.ravel(), trainer_logprob=first.ravel(), **columns, **sides
        ),
        TokenPairs.of(rollout_logprob=rollout.ravel(), trainer_logprob=second.ravel(), **columns),
    )


def slot_mismatch(
    options: argparse.Namespace, sequences: int, rng: np.random.Generator
) -> Interval:
    """Interval of the mismatch where a sequence's rate is a lognormal factor times that of all."""
    from rollproof.gap.intervals import share_interval

    rate = np.minimum(
        SLOTS * 4 * rng.lognormal(-0.125, 0.5, sequences), 0.5
    )  # a changed set mostly changes one slot of its four
    changed = rng.binomial(options.length * 4, rate).astype(np.float64)
    return share_interval(changed / 4, np.full(sequences, options.length * 4.0))


def truths(options: argparse.Namespace) -> dict[str, float]:
    """Of ``--truth`` sequences."""
    rng = np.random.default_rng(1)
    total, other, means, sizes = np.zeros(len(PLACE)), np.zeros(len(PLACE)), [], []
    for _ in range(max(1, options.truth // 2000)):
        first, second = draw(options, 2000, rng)
        sums = sequence_sums(first)
        total, other = total + sums.sum(axis=0), other + sequence_sums(second).sum(axis=0)
        means.append(sums[:, PLACE["mult"]] / sums[:, PLACE["finite"]])
        sizes.append(np.abs(first.trainer - first.rollout)[:200_000])
    out = {
        name: float(metric.statistic(total))
        for name, metric in METRICS.items()
        if metric.scale is not Scale.BARE
    }
    if options.means:
        return {name: out[name] for name in MEANS} | {"rho_mean_minus_1": 0.0}
    out |= {
        "rho_mean_minus_1": 0.0,
        MEDIAN: float(np.median(np.concatenate(means))),
        "slot_mismatch": SLOTS,
    }
    out |= {
        name: float(np.quantile(np.concatenate(sizes), order)) for name, order in QUANTILES.items()
    }
    out |= {
        f"ratio of {name}": float(other[PLACE[column]] / total[PLACE[column]])
        for name, column in COMPARED.items()
    }
    return out | {
        f"{name}, resume bucket": out[name]
        for name in ("kl_mu_pi_k3", "abs_diff_mean", "rho_mean_minus_1")
    }


def coverage_of(interval: Interval, value: float) -> str:
    if np.isnan(interval.low):
        return "none"
    return "below" if interval.high < value else "above" if interval.low > value else "held"


def held(options: argparse.Namespace, truth: dict[str, float], number: int) -> dict[str, str]:
    """What each interval of one data set does: holds the true value, lies below it, lies above it,
    or is not given.
    """
    rng = np.random.default_rng([7, number])
    first, second = draw(options, options.sequences, rng)
    sums = sequence_sums(first)
    resampler = Resampler(sums, resamples=1000, seed=number)
    intervals: dict[str, Interval] = {
        name: metric_interval(METRICS[name], resampler) for name in truth if name in METRICS
    }
    if options.means:
        return {name: coverage_of(intervals[name], value) for name, value in truth.items()}
    intervals |= quantile_intervals(first)
    intervals |= {
        MEDIAN: batch_median(first, sums),
        "slot_mismatch": slot_mismatch(options, options.sequences, rng),
    }
    intervals |= {
        f"ratio of {effect.metric}": effect.ratio
        for effect in compare(second, first, seed=number).effects
    }
    bucket = next(
        bucket for bucket in bucket_pairs(first, seed=number)["since_resume"] if bucket.label == "0"
    )
    numbers = {
        "kl_mu_pi_k3": bucket.k3,
        "abs_diff_mean": bucket.abs_diff,
        "rho_mean_minus_1": bucket.rho,
    }
    intervals |= {f"{name}, resume bucket": interval for name, interval in numbers.items()}
    return {name: coverage_of(intervals[name], value) for name, value in truth.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=500)
    parser.add_argument("--profile", choices=list(PROFILES), default="moe-bf16")
    parser.add_argument(
        "--truth", type=int, default=100_000, help="sequences that the true values are taken of"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--means",
        action="store_true",
        help="k3, mean |d| and E[rho] - 1 alone: a tenth of the time",
    )
    options = parser.parse_args()
    truth = truths(options)
    work = functools.partial(held, options, truth)
    if options.jobs > 1:
        with multiprocessing.Pool(options.jobs) as processes:
            results: list[dict[str, Any]] = list(
                processes.imap_unordered(work, range(options.sets), chunksize=5)
            )
    else:
        results = [work(number) for number in range(options.sets)]
    print(
        f"{options.sets} sets of {options.sequences} sequences of {options.length} tokens,"
        f" {options.profile}"
    )
    for name, value in truth.items():
        counts = Counter(result[name] for result in results)
        measured = options.sets - counts["none"]
        share = f"{counts['held'] / measured:.3f}" if measured else "  -  "
        rest = "  ".join(f"{what} {counts[what]:4}" for what in ("below", "above", "none"))
        print(f"{name:32} true {value:11.4e}  held {share}  {rest}")


if __name__ == "__main__":
    main()
