"""How often the 95 % intervals of the gap hold the true value, on clustered data of the closed-form fake.

python benchmarks/gap_coverage.py [--sets 1000] [--sequences 64] [--length 500] [--profile moe-bf16]
"""

from __future__ import annotations

import argparse

import numpy as np

from rollproof.fakes.gap import PROFILES, bank, closed_form, noise_scale
from rollproof.gap.intervals import Resampler, metric_interval
from rollproof.gap.metrics import METRICS
from rollproof.gap.pairs import FloatArray, TokenPairs
from rollproof.gap.sums import sequence_sums


def sampled_logprobs(rng: np.random.Generator, tokens: int) -> FloatArray:
    """Logprobs of tokens sampled from the bank's laws."""
    logits = bank(tokens, rng)
    picked = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    top = logits.max(axis=1)
    return np.asarray(logits[np.arange(tokens), picked] - top - np.log(np.exp(logits - top[:, None]).sum(axis=1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=500)
    parser.add_argument("--profile", choices=list(PROFILES), default="moe-bf16")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    pool = sampled_logprobs(rng, 200_000)

    def sums(sequences: int) -> FloatArray:
        rollout = rng.choice(pool, (sequences, options.length))
        scale = noise_scale(PROFILES[options.profile], sequences, options.length, rng)
        pairs = TokenPairs.of(
            rollout_logprob=rollout.ravel(),
            trainer_logprob=closed_form(rollout, scale, rng).ravel(),
            sequence_id=np.repeat(np.arange(sequences), options.length),
            mask=np.ones(rollout.size, bool),
        )
        return sequence_sums(pairs)

    total = np.sum([sums(2000).sum(axis=0) for _ in range(50)], axis=0)
    truth = {name: float(metric.statistic(total)) for name, metric in METRICS.items()} | {"rho_mean_minus_1": 0.0}
    held = dict.fromkeys(METRICS, 0)
    for number in range(options.sets):
        resampler = Resampler(sums(options.sequences), resamples=1000, seed=number)
        for name, metric in METRICS.items():
            interval = metric_interval(metric, resampler)
            held[name] += interval.low <= truth[name] <= interval.high
    print(f"{options.sets} sets of {options.sequences} sequences of {options.length} tokens, {options.profile}")
    for name, count in held.items():
        print(f"{name:28} true {truth[name]:11.4e}  held {count / options.sets:.3f}")


if __name__ == "__main__":
    main()
