"""How often single sequences are reported as outliers: of healthy sets (never, it should be), and
where a few in a hundred have a fault.

python benchmarks/gap_outliers.py [--sets 200] [--profile moe-bf16 ...] [--real FAMILY]

Healthy sets of the closed form: 64 sequences of 500 tokens, 256 of 200, 16 of 4,000, 64 of 500
whose noise is spread twice as far. Faults are of the mechanistic fake, with full distributions:
every set draws its sequences again out of 1,024 healthy ones and 64 of each fault.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from gap_coverage import pool

from rollproof.gap.diagnosis.outliers import find_mismatched, find_mistagged, find_tilted
from rollproof.gap.diagnosis.usual_diff import diff_and_usual
from rollproof.gap.token_pairs import TokenPairs
from tests.support.gap_faults import GapWorld, gap_columns
from tests.support.gap_profiles import PROFILES, closed_form, noise_scale

LENGTH = 500
SHAPES = ((64, 500, 0.5), (256, 200, 0.5), (16, 4000, 0.5), (64, 500, 1.0))
"""Sequences, tokens of each, and the log-spread of the noise between them."""
HEALTHY = "numerics only, every version"
FAULTS = (
    "raw logprobs, T=0.6",
    "raw logprobs, T=0.8",
    "raw logprobs, T=1.2",
    "trainer temperature, T=0.7",
    "lost weights",
    "top-p 0.90",
)
VERSIONED = ("wrong version", "stuck weights")


def reported(columns: dict[str, Any]) -> set[int]:
    """Indexes of the sequences that stand apart."""
    pairs = TokenPairs.of(**columns)
    outliers = (
        *find_tilted(pairs),
        *find_mismatched(pairs),
        *(find_mistagged(pairs, diff_and_usual(pairs)[1]) if pairs.by_version else ()),
    )
    return {outlier.sequence for outlier in outliers}


def false_alarms(profile: str, sets: int) -> None:
    for sequences, length, cluster in SHAPES:
        rng, wrong = np.random.default_rng(11), 0
        for _ in range(sets):
            rollout = rng.choice(pool(), (sequences, length))
            trainer = closed_form(
                rollout,
                noise_scale(PROFILES[profile], sequences, length, rng, cluster=cluster),
                rng,
            )
            wrong += bool(
                reported(laid_out({"rollout_logprob": rollout, "trainer_logprob": trainer}))
            )
        print(
            f"{profile:18} {sequences:4} sequences of {length:5}, spread {cluster}:"
            f" reported in {wrong}"
            f" of {sets} healthy sets",
            flush=True,
        )


def laid_out(arrays: dict[str, Any]) -> dict[str, Any]:
    """Columns, of arrays ``(sequences, tokens)``."""
    shape = arrays["rollout_logprob"].shape
    scores = {
        int(name.removeprefix("@")): array.ravel()
        for name, array in arrays.items()
        if name.startswith("@")
    }
    rest = {name: array.ravel() for name, array in arrays.items() if not name.startswith("@")}
    return (
        {
            "sequence_id": np.repeat(np.arange(shape[0]), shape[1]),
            "mask": np.ones(shape[0] * shape[1], bool),
        }
        | rest
        | ({"by_version": scores} if scores else {})
    )


def stock(fault: str, profile: str, worlds: int) -> dict[str, Any]:
    """Arrays ``(64 * worlds, tokens)`` of the fault: the logprobs, and where there are versions
    ``version`` and ``@VERSION``.
    """
    parts = []
    for seed in range(worlds):
        world = GapWorld(
            sequences=64, length=LENGTH, profile=PROFILES[profile], layers=1, experts=8, top_k=2
        )
        own = gap_columns(fault, seed=seed, world=world)
        own |= {f"@{version}": scores for version, scores in own.pop("by_version", {}).items()}
        parts.append(
            {
                name: own[name].reshape(64, -1)
                for name in own
                if name in ("rollout_logprob", "trainer_logprob", "version") or "@" in name
            }
        )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def detection(profile: str, sets: int) -> None:
    healthy = stock(HEALTHY, profile, 16)
    for fault in (*FAULTS, *VERSIONED):
        faulty, rng, rates, wrong = stock(fault, profile, 1), np.random.default_rng(3), [], 0
        names = list(healthy) if fault in VERSIONED else ["rollout_logprob", "trainer_logprob"]
        for sequences in (64, 256, 1000):
            for share in (0.01, 0.02, 0.05):
                planted, seen = max(1, round(share * sequences)), 0
                for _ in range(max(3, sets // sequences)):
                    good, bad = (
                        rng.permutation(1024)[: sequences - planted],
                        rng.permutation(64)[:planted],
                    )
                    outliers = reported(
                        laid_out(
                            {
                                name: np.concatenate([faulty[name][bad], healthy[name][good]])
                                for name in names
                            }
                        )
                    )
                    seen += len({at for at in outliers if at < planted}) / planted
                    wrong += len({at for at in outliers if at >= planted})
                rates.append(f"{seen / max(3, sets // sequences):4.0%}")
        print(
            f"{profile:18} {fault:28} found of 1, 2, 5 % of 64: {' '.join(rates[:3])}  of 256:"
            f" {' '.join(rates[3:6])}",
            end="  ",
        )
        print(f"of 1,000: {' '.join(rates[6:])}  healthy ones accused: {wrong}", flush=True)


def on_a_model(family: str) -> None:
    """Healthy sets of the model, and sets of 60 sequences with 1 or 3 of a fault in the place of
    healthy ones.
    """
    import torch
    from gap_real import FAULTS as CASES
    from gap_real import NUMERICS, OWNER, Contexts

    torch.set_num_threads(1)
    contexts = Contexts(4000, family)

    def columns(name: str, seed: int) -> dict[str, Any]:
        return {
            column: values
            for column, values in CASES[name][1](contexts).draw(seed).items()
            if "routes" not in column
        }

    for name in (name for name, (expected, _) in CASES.items() if expected == NUMERICS):
        print(
            f"{name:32} reported: {[sorted(reported(columns(name, seed))) for seed in (0, 1)]}",
            flush=True,
        )
    for fault in (*FAULTS, *VERSIONED):
        healthy = columns("numerics, every version" if fault in VERSIONED else "numerics, bf16", 0)
        faulty, out = columns(fault, 1), []
        for planted in (1, 3):
            hit = np.isin(OWNER, np.arange(planted))
            mixed = healthy | {
                name: np.where(hit, faulty[name], healthy[name])
                for name in ("rollout_logprob", "trainer_logprob")
            }
            if "by_version" in healthy:
                scores = healthy["by_version"].items()
                mixed["by_version"] = {
                    v: np.where(hit, faulty["by_version"][v], own) for v, own in scores
                }
            out.append(sorted(reported(mixed)))
        print(
            f"{fault:32} planted in 0 and in 0 to 2 of 60, reported: {out[0]} and {out[1]}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument(
        "--real",
        metavar="FAMILY",
        help="a tiny model of HF transformers instead, such as qwen3_moe (gap_real.py)",
    )
    parser.add_argument("--profile", nargs="*", choices=list(PROFILES), default=list(PROFILES))
    options = parser.parse_args()
    if options.real:
        on_a_model(options.real)
    for profile in options.profile if not options.real else ():
        false_alarms(profile, options.sets)
        detection(profile, 10 * options.sets)


if __name__ == "__main__":
    main()
