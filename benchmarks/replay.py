"""Measure the cost of the replay checks: reference trainers, their episodes and random plans.

``python benchmarks/replay.py [PLANS]`` prints processor seconds per reference, and for ``PLANS``
random plans of each (default 20).
"""

from __future__ import annotations

import sys
import time

from rollproof.core.trace import Header, Recorder
from rollproof.fakes.trainers.reference_trainers import REFERENCES
from rollproof.invariants import default_registry
from rollproof.judging.judge import Tally
from rollproof.replay.driver import drive_episode, record_replay
from rollproof.replay.plans import random_episode
from rollproof.verification.traces import judge, judge_events

CHECKS = default_registry().select(["replay"])


def main(plans: int = 20) -> None:
    """Print the figures."""
    began = time.process_time()
    for name, made in REFERENCES.items():
        start = time.process_time()
        trace = record_replay(made, name=name)
        ran = time.process_time() - start
        judge(trace, CHECKS)
        judged = time.process_time() - start - ran
        print(f"{name:24} {len(trace.events):6} events: run {ran:.2f} s, judge {judged:.2f} s")
    print(f"all references: {time.process_time() - began:.1f} s of processor time")
    start, tally = time.process_time(), Tally(CHECKS)
    for name, made in REFERENCES.items():
        for number in range(plans):
            recorder = Recorder(lambda: 0.0)
            drive_episode(made(), random_episode(made.contract, 0, number), recorder, name)
            judge_events(
                Header(subject=name, contract=made.contract, about="replay"), recorder.events, tally
            )
    spent = time.process_time() - start
    print(
        f"{tally.traces} random plans: {1000 * spent / max(1, tally.traces):.0f} ms each,"
        f" {len(tally.found())} checks fail"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
