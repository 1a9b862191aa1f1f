"""Whether each estimator of the gap is unbiased: its mean over many data sets next to the exact
expectation over the vocabulary.

python benchmarks/gap_bias.py [--sets 1000] [--sequences 32] [--length 50]

Tokens have 64 candidates whose two laws are known (``tests.support.gap_profiles``), so that every
expectation is a sum. Printed are the exact value, the mean of the estimates, and by how many of its
standard errors over data sets that mean is off.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from rollproof.gap.metrics import METRICS, sequence_sums
from rollproof.gap.token_pairs import FloatArray, TokenPairs
from tests.support.gap_profiles import PROFILES, bank, noise_scale

WINSOR = 2.0
LOUDEST = 0.5
"""Largest noise of a logit, so that chi2 and mean exp |d| have an error that some hundred sets can
tell.
"""


def exact(mu: FloatArray, pi: FloatArray) -> dict[str, FloatArray]:
    """``(tokens,)`` by estimator: its expectation under mu, a sum over the candidates."""
    d = pi - mu
    size, cut = np.abs(d), np.clip(d, -WINSOR, WINSOR)
    terms = {
        "kl_mu_pi_k3": np.expm1(d) - d,
        "k1": -d,
        "k2": d * d / 2,
        "k3_winsorised": np.expm1(cut) - cut,
        "abs_diff_mean": size,
        "rho_mean_minus_1": np.expm1(d),
        "chi2_token": np.expm1(2 * d),
        "F2": size > math.log(2),
        "F5": size > math.log(5),
        "prob_diff_mean": np.abs(np.exp(mu) - np.exp(pi)),
        "token_mult_prob_error": np.exp(size),
        "different_token_fraction": size > 1e-6,
    }
    return {name: (np.exp(mu) * term).sum(axis=1) for name, term in terms.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=50)
    parser.add_argument("--profile", choices=list(PROFILES), default="moe-bf16")
    options = parser.parse_args()
    rng, tokens = np.random.default_rng(0), options.sequences * options.length
    estimates: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.sets):
        logits = bank(tokens, rng)
        scale = noise_scale(
            PROFILES[options.profile], options.sequences, options.length, rng
        ).reshape(-1, 1)
        scale = np.minimum(scale, LOUDEST)
        mu, pi = (
            x - np.logaddexp.reduce(x, axis=1, keepdims=True)
            for x in (logits, logits + scale * rng.standard_normal(logits.shape))
        )
        picked = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
        rows = np.arange(tokens)
        pairs = TokenPairs.of(
            rollout_logprob=np.minimum(mu[rows, picked], 0),
            trainer_logprob=np.minimum(pi[rows, picked], 0),
            sequence_id=rows // options.length,
            mask=np.ones(tokens, bool),
        )
        total = sequence_sums(pairs).sum(axis=0)
        for name, values in exact(mu, pi).items():
            estimates.setdefault(name, []).append(
                (float(values.mean()), float(METRICS[name].statistic(total)))
            )
    print(
        f"{options.sets} sets of {options.sequences} sequences of {options.length} tokens,"
        f" {options.profile}"
    )
    for name, pairs_of_values in estimates.items():
        true, own = np.array(pairs_of_values).T
        error = (own - true).std(ddof=1) / math.sqrt(len(own))
        off = (own - true).mean() / error if error else 0.0
        print(
            f"{name:28} exact {true.mean():11.4e}  mean of the estimates {own.mean():11.4e}  off by"
            f" {off:+.1f} standard errors"
        )


if __name__ == "__main__":
    main()
