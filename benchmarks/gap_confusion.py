"""What the gap's diagnosis calls each planted fault: on the closed-form fake over many seeds, or on
a tiny real model.

python benchmarks/gap_confusion.py [--seeds 50] [--real [--contexts 4] [--family qwen3_moe]]
[--first 1000] [--jobs 1] [--only NAME...]

On the real model each of ``--contexts`` is a model and texts of its own, with ``--seeds`` data sets
a fault drawn from their forwards.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from rollproof.gap import measure
from tests.support.gap_faults import GAP_FAULTS, gap_columns

NUMERICS = "numerics only"
EXPECTED = {
    "update arrived": "partly arrived weights",
    "update did not arrive": "stale engine weights",
    "end token forced": "end token without a logprob",
    "packed without": "packed sequences see each other",
    "samples swapped": "a part is unrelated",
    "numerics only": NUMERICS,
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
"""The class of a fault of the closed-form fake, by how its name begins; others are called as their
class.
"""
Sets = Iterator[tuple[str, str, Callable[[int], Any]]]


def fakes(first: int) -> Sets:
    for fault in GAP_FAULTS:
        expected = next(
            (diagnosed for begin, diagnosed in EXPECTED.items() if fault.startswith(begin)), fault
        )
        yield fault, expected, lambda seed, fault=fault: gap_columns(fault, seed=first + seed)


def real(first: int, family: str) -> Sets:
    import torch
    from gap_real import FAULTS, Contexts

    torch.set_num_threads(1)
    contexts = Contexts(first, family)
    for fault, (expected, plant) in FAULTS.items():
        yield fault, expected, plant(contexts).draw


def diagnose_sets(work: tuple[argparse.Namespace, int]) -> list[tuple[str, str, str, bool]]:
    """For each data set of one first seed: its fault, the class that is right, what was diagnosed,
    whether all that was diagnosed is harmless.
    """
    options, first = work
    out = []
    for fault, expected, make in real(first, options.family) if options.real else fakes(first):
        if options.only and fault not in options.only:
            continue
        for seed in range(options.seeds):
            report = measure(**make(seed), resamples=200)
            names = " + ".join(cause.name for cause in report.causes)
            out.append((fault, expected, names, all(cause.harmless for cause in report.causes)))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument(
        "--real", action="store_true", help="tiny models of HF transformers instead of the fake"
    )
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--family", default="qwen3_moe")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    where = (
        f"{options.contexts} tiny models ({options.family})"
        if options.real
        else "the closed-form fake"
    )
    print(
        f"{options.seeds} data sets a fault on {where}, 30,000 tokens in 60 sequences each",
        flush=True,
    )
    begun, rows = time.perf_counter(), []
    work = [
        (options, options.first + number)
        for number in range(options.contexts if options.real else 1)
    ]
    if options.jobs > 1:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            for results in pool.imap_unordered(diagnose_sets, work):
                rows += results
    else:
        for part in work:
            rows += diagnose_sets(part)
    table(rows)
    print(f"{time.perf_counter() - begun:.0f} s")


def table(rows: list[tuple[str, str, str, bool]]) -> None:
    diagnosed: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for fault, expected, names, _ in rows:
        diagnosed[fault, expected][names] += 1
    for (fault, expected), counts in diagnosed.items():
        sure = counts[expected] / counts.total()
        print(
            f"{fault:32} {sure:6.1%} "
            f" {', '.join(f'{name}: {count}' for name, count in counts.most_common())}"
        )
    right = sum(names == expected for _, expected, names, _ in rows)
    first = sum(names.split(" + ")[0] == expected for _, expected, names, _ in rows)
    healthy = [harmless for _, expected, _, harmless in rows if expected == NUMERICS]
    print(f"{len({expected for _, expected in diagnosed})} classes, {len(rows)} data sets")
    print(
        f"right, and nothing else diagnosed: {right} ({right / len(rows):.1%}); right in the first"
        f" place: {first} ({first / len(rows):.1%})"
    )
    print(f"numerics called anything else: {healthy.count(False)} of {len(healthy)} times")


if __name__ == "__main__":
    main()
