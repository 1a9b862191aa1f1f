"""What the gap's diagnosis calls each planted fault: on the closed-form fake over many seeds, or on a tiny real model.

python benchmarks/gap_confusion.py [--seeds 50] [--real] [--only NAME...]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rollproof.fakes.gap_faults import GAP_FAULTS, gap_columns
from rollproof.gap import measure

EXPECTED = {
    "raw logprobs": "temperature or logprob mode",
    "trainer temperature": "temperature or logprob mode",
    "top-": "truncated support (top-p or top-k)",
    "off by one": "off by one",
    "version lag": "staleness",
    "wrong version": "wrong version scored",
    "stuck weights": "stale engine weights",
    "lost weights": "unrelated weights",
    "dense layer": "routes shifted by dense layers",
    "capture": "polluted capture",
}
"""The class of a fault of the closed-form fake, by how its name begins; others are called as their class."""


def fakes(first: int) -> Iterator[tuple[str, str, Callable[[int], Any]]]:
    for fault in GAP_FAULTS:
        expected = next((told for begin, told in EXPECTED.items() if fault.startswith(begin)), fault)
        yield fault, expected, lambda seed, fault=fault: gap_columns(fault, seed=first + seed)


def real(first: int) -> Iterator[tuple[str, str, Callable[[int], Any]]]:
    from gap_real import FAULTS, Contexts, Draw

    contexts = Contexts(first)

    def columns(plant: Any, seed: int) -> Any:
        draw = Draw(contexts, seed)
        plant(draw)
        return draw.columns()

    for fault, (expected, plant) in FAULTS.items():
        yield fault, expected, lambda seed, plant=plant: columns(plant, first + seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--real", action="store_true", help="a tiny Qwen3-MoE of HF transformers instead of the fake")
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    where = "a tiny real model" if options.real else "the closed-form fake"
    print(f"{options.seeds} data sets a fault on {where}, 30,000 tokens in 60 sequences each")
    begun, right, total, blamed, healthy, classes = time.perf_counter(), 0, 0, 0, 0, set()
    for fault, expected, make in (real if options.real else fakes)(options.first):
        if options.only and fault not in options.only:
            continue
        told: Counter[str] = Counter()
        for seed in range(options.seeds):
            report = measure(**make(seed), limits="tiny-bf16" if options.real else None, resamples=200)
            names = [cause.name for cause in report.causes]
            told[" + ".join(names)] += 1
            hit = names[:1] == [expected]
            right, total = right + hit, total + 1
            if expected == "numerics only":
                healthy, blamed = healthy + 1, blamed + (not all(cause.harmless for cause in report.causes))
        classes.add(expected)
        print(f"{fault:28} {', '.join(f'{name}: {count}' for name, count in told.most_common())}", flush=True)
    print(f"{right} of {total} right ({right / total:.1%}) over {len(classes)} classes; numerics blamed {blamed} of {healthy} times;"
          f" {time.perf_counter() - begun:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
