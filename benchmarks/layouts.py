"""Measure the cost of the layout checks on the reference functions.

``python benchmarks/layouts.py [PROFILE]`` prints processor seconds for recording and judging, and
milliseconds per call of each function.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from rollproof.core.events.layouts import Laid
from rollproof.fakes.trainers.reference_layouts import MegatronLike
from rollproof.invariants import default_registry
from rollproof.layouts.layout_cases import layout_calls
from rollproof.verification.layouts import judge_layouts, record_layouts
from rollproof.verification.traces import judge


def main(profile: str = "pr") -> None:
    """Print the table."""
    start = time.process_time()
    trace = record_layouts(MegatronLike, profile=profile)
    recorded = time.process_time()
    judgement = judge(trace, default_registry().select(["layout"]))
    judged = time.process_time()
    counts = Counter(event.function for event in trace.events if isinstance(event, Laid))
    print(
        f"{len(trace.events):,} calls of {len(counts)} functions: recorded in"
        f" {recorded - start:.1f} s of processor time,"
    )
    print(
        f"judged by {len(judgement.results)} checks in {judged - recorded:.1f} s,"
        f" {len(judgement.failed)} of which failed"
    )
    for name, count in counts.items():
        calls = [(name, call) for call in layout_calls(name, MegatronLike.layout, draws=0)]
        before = time.process_time()
        judge_layouts(MegatronLike, calls=calls)
        print(
            f"{name:16s} {count:6,} calls {(time.process_time() - before) / len(calls) * 1000:8.2f}"
            " ms a call"
        )


if __name__ == "__main__":
    main(*sys.argv[1:2])
