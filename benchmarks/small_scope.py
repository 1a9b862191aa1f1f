"""The exhaustive small scope on one core: every case of one flavour run against a reference and
judged by all checks.

``python benchmarks/small_scope.py [reference] [flavour]`` prints one JSON line. ``seconds`` is
processor time, so that other programs on the machine do not count; the target is 20 s.
"""

from __future__ import annotations

import json
import os
import sys
import time

from rollproof.fakes.clients.reference_clients import REFERENCES
from rollproof.invariants import default_registry
from rollproof.judging.judge import Tally
from rollproof.verification.contract_probe import probe
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import small_scope
from rollproof.verification.traces import judge_events


def main(reference: str = "as-sampled", flavour: str = "vllm") -> None:
    """Print the figures."""
    factory = REFERENCES[reference]
    _, contract, model = probe(factory, [flavour])[0]
    tally = Tally(default_registry())
    run = judge = 0.0
    wall = time.perf_counter()
    for case in small_scope(flavour, contract, model=model):
        start = time.process_time()
        trace = run_case(factory, case)
        ran = time.process_time()
        judge_events(trace.header, trace.events, tally)
        run, judge = run + ran - start, judge + time.process_time() - ran
    figures = {
        "reference": reference,
        "flavour": flavour,
        "cases": tally.traces,
        "failed": list(tally.found()),
        "seconds": round(run + judge, 2),
        "run_ms": round(run / tally.traces * 1e3, 3),
        "judge_ms": round(judge / tally.traces * 1e3, 3),
        "wall_seconds": round(time.perf_counter() - wall, 2),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:3])
