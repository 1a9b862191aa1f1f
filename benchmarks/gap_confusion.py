"""What the gap's diagnosis calls each planted fault, over many seeds.

python benchmarks/gap_confusion.py [--seeds 50]
"""

from __future__ import annotations

import argparse
from collections import Counter

from rollproof.fakes.gap_faults import GAP_FAULTS, gap_columns
from rollproof.gap import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=1000)
    options = parser.parse_args()
    print(f"{options.seeds} data sets a fault, 30,000 tokens in 60 sequences each")
    for fault in GAP_FAULTS:
        told: Counter[str] = Counter()
        for seed in range(options.first, options.first + options.seeds):
            report = measure(**gap_columns(fault, seed=seed), resamples=200)
            told[" + ".join(cause.name for cause in report.causes)] += 1
        print(f"{fault:28} {', '.join(f'{name}: {count}' for name, count in told.most_common())}", flush=True)


if __name__ == "__main__":
    main()
