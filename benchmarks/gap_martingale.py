"""What martingale and rollproof say of the same records, and how long each takes. Needs ``pip
install martingale==0.2.0``.

    python benchmarks/gap_martingale.py [--sequences 20] [--length 100] [--only FAULT...]

Both get, for every token, the rollout's logprob and the trainer's, and the versions of the weights
of either. martingale's decomposition reads its own ledger, which is written first (its seconds are
distinguished); its words are cut to the first clause that names a cause.

Then records with the trainer's logprobs under the sampling version and under the current one, of
which the engine's share of the stale tokens' difference is known: with an engine that is the same
for all ages, and with one that was worse when the old tokens were sampled.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from martingale.diagnostics import attribute, decompose, diagnosis
from martingale.record import Recorder, SamplerConfig

from rollproof.gap import measure
from tests.support.gap_faults import GAP_FAULTS, GapWorld, gap_columns
from tests.support.gap_profiles import PROFILES, closed_form, noise_scale


def ledger(columns: dict[str, Any], folder: Path) -> Any:
    """The columns as a ledger of martingale's."""
    recorder = Recorder(folder)
    sampler = {
        "temperature": 1.0,
        "temperature_applied": True,
        "logprobs_mode": "processed_logprobs",
    }
    count = len(columns["rollout_logprob"])
    version = np.asarray(columns.get("version", np.zeros(count, int)))
    current = np.asarray(columns.get("current_version", version))
    revisions: dict[tuple[str, int], str] = {}
    both = "current_logprob" in columns
    for side, own in (
        ("engine_sampling", version),
        ("trainer_scores", np.concatenate([version, current]) if both else current),
    ):
        for step in np.unique(own).tolist():
            made = recorder.publish_revision(
                f"{step:064x}", "0" * 64, SamplerConfig(**sampler, logprobs_source=side), step
            )
            revisions[side, step] = made.digest
    for sequence in np.unique(columns["sequence_id"]):
        rows = np.flatnonzero(
            (columns["sequence_id"] == sequence) & np.isfinite(columns["trainer_logprob"])
        )
        with recorder.sequence(0, str(sequence), [1]) as builder:
            for row in rows:
                builder.token(
                    revisions["engine_sampling", int(version[row])],
                    1,
                    float(np.float32(columns["rollout_logprob"][row])),
                )
        scored = (
            [("trainer_logprob", version), ("current_logprob", current)]
            if both
            else [("trainer_logprob", current)]
        )
        for name, own in scored:
            scores = [float(np.float32(columns[name][row])) for row in rows]
            recorder.score(
                builder.record.digest, revisions["trainer_scores", int(own[rows[0]])], scores
            )
    return recorder.ledger


def two_scores(worse: float, sequences: int, length: int) -> dict[str, Any]:
    """Tokens of ages 0 to 2 with both scores; the engine's noise is ``worse`` times as large for
    those that are old.
    """
    rng = np.random.default_rng(11)
    plain = gap_columns(
        "numerics only", seed=11, world=GapWorld(sequences=sequences, length=length)
    )
    rollout = plain["rollout_logprob"].reshape(sequences, length)
    age = np.arange(sequences)[:, None] % 3
    scale = noise_scale(PROFILES["moe-bf16"], sequences, length, rng)
    trainer = closed_form(rollout, scale * np.where(age > 0, worse, 1.0), rng)
    current = np.where(
        age > 0, closed_form(trainer, 0.15 * age * np.ones_like(scale), rng), trainer
    )
    return {name: plain[name] for name in ("sequence_id", "mask")} | {
        "rollout_logprob": rollout.ravel(),
        "trainer_logprob": trainer.ravel(),
        "current_logprob": current.ravel(),
        "version": np.repeat(5 - age.ravel(), length),
        "current_version": np.full(rollout.size, 5),
    }


def shares(sequences: int, length: int) -> None:
    """The engine's share of what stale tokens differ by: as planted, and as either reports it."""
    for worse in (1.0, 3.0):
        columns = two_scores(worse, sequences, length)
        old = columns["version"] < 5
        engine, policy = (
            np.abs(columns[one] - columns[other])[old].mean()
            for one, other in (
                ("trainer_logprob", "rollout_logprob"),
                ("current_logprob", "trainer_logprob"),
            )
        )
        with tempfile.TemporaryDirectory() as folder:
            theirs = attribute(decompose(ledger(columns, Path(folder))))["float_informational"][
                "engine_share"
            ]
        stale = {name: column[old] for name, column in columns.items()}
        decomposition = measure(**stale, resamples=1000).decomposition
        assert decomposition is not None
        ours = decomposition.rows[0].share
        print(
            f"engine's share of stale tokens, engine {worse:g} times as noisy when old: planted"
            f" {engine / (engine + policy):.1%},",
            end=" ",
        )
        print(
            f"rollproof {ours.value:.1%} [{ours.low:.1%}, {ours.high:.1%}], martingale {theirs:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=20)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=list(GAP_FAULTS))
    options = parser.parse_args()
    world = GapWorld(sequences=options.sequences, length=options.length)
    tokens = options.sequences * options.length
    spent = {"martingale, writing": 0.0, "martingale, decomposition": 0.0, "rollproof": 0.0}
    for fault in options.only:
        columns = gap_columns(fault, seed=7, world=world)
        with tempfile.TemporaryDirectory() as folder:
            begun = time.process_time()
            written = ledger(columns, Path(folder))
            middle = time.process_time()
            diagnoses = diagnosis(decompose(written))
            spent["martingale, writing"] += middle - begun
            spent["martingale, decomposition"] += time.process_time() - middle
        begun = time.process_time()
        report = measure(**columns, resamples=1000)
        spent["rollproof"] += time.process_time() - begun
        print(f"{fault}\n    rollproof   {', '.join(cause.name for cause in report.causes)}")
        for line in diagnoses:
            print(f"    martingale  {line[:150]}")
    shares(options.sequences, options.length)
    for name, seconds in spent.items():
        print(
            f"{name:28} {seconds / len(options.only) / tokens * 1e6:9.1f} us a token (CPU, {tokens}"
            " tokens a set)"
        )


if __name__ == "__main__":
    main()
