"""What martingale and rollproof say of the same records, and how long each takes. Needs ``pip install martingale==0.2.0``.

    python benchmarks/gap_martingale.py [--sequences 20] [--length 100] [--only FAULT...]

Both get, for every token, the rollout's logprob and the trainer's, and the versions of the weights of either. martingale's decomposition
reads its own ledger, which is written first (its seconds are told apart); its words are cut to the first clause that tells a cause.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from martingale.diagnostics import decompose, diagnosis
from martingale.record import Recorder, SamplerConfig

from rollproof.fakes.gap_faults import GAP_FAULTS, GapWorld, gap_columns
from rollproof.gap import measure


def ledger(columns: dict[str, Any], folder: Path) -> Any:
    """The columns as a ledger of martingale's."""
    recorder = Recorder(folder)
    sampler = {"temperature": 1.0, "temperature_applied": True, "logprobs_mode": "processed_logprobs"}
    count = len(columns["rollout_logprob"])
    version = np.asarray(columns.get("version", np.zeros(count, int)))
    current = np.asarray(columns.get("current_version", version))
    revisions: dict[tuple[str, int], str] = {}
    for side, own in (("engine_sampling", version), ("trainer_scores", current)):
        for step in np.unique(own).tolist():
            made = recorder.publish_revision(f"{step:064x}", "0" * 64, SamplerConfig(**sampler, logprobs_source=side), step)
            revisions[side, step] = made.digest
    for sequence in np.unique(columns["sequence_id"]):
        rows = np.flatnonzero((columns["sequence_id"] == sequence) & np.isfinite(columns["trainer_logprob"]))
        with recorder.sequence(0, str(sequence), [1]) as builder:
            for row in rows:
                builder.token(revisions["engine_sampling", int(version[row])], 1, float(np.float32(columns["rollout_logprob"][row])))
        scores = [float(np.float32(columns["trainer_logprob"][row])) for row in rows]
        recorder.score(builder.record.digest, revisions["trainer_scores", int(current[rows[0]])], scores)
    return recorder.ledger


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
            told = diagnosis(decompose(written))
            spent["martingale, writing"] += middle - begun
            spent["martingale, decomposition"] += time.process_time() - middle
        begun = time.process_time()
        report = measure(**columns, resamples=1000)
        spent["rollproof"] += time.process_time() - begun
        print(f"{fault}\n    rollproof   {', '.join(cause.name for cause in report.causes)}")
        for line in told:
            print(f"    martingale  {line[:150]}")
    for name, seconds in spent.items():
        print(f"{name:28} {seconds / len(options.only) / tokens * 1e6:9.1f} us a token (CPU, {tokens} tokens a set)")


if __name__ == "__main__":
    main()
