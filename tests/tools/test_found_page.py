"""docs/found.md counts every fault once, as docs/track-record.md and docs/regressions say it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tools.docs import found_page
from tools.docs.found_page import Found, recorded_faults

RECORD = (Path(__file__).parents[2] / "docs" / "track-record.md").read_text(encoding="utf-8")
SEED_1 = {"check": "routes.rows", "seed": 1}
NIGHTLY = {"check": "routes.rows", "profile": "nightly"}
PLAIN = {"check": "routes.rows"}


def test_every_row_of_the_track_record_is_counted_once() -> None:
    """As many as its first line says."""
    (count,) = re.findall(r"^(\d+) faults of released", RECORD, re.MULTILINE)
    assert int(count) == len(recorded_faults())


@pytest.mark.parametrize(
    ("cell", "finds", "expected"),
    [
        ("`routes.rows`", [PLAIN], Found.PR),
        ("`routes.rows`, `routes.position`", [SEED_1, PLAIN], Found.PR),
        ("`routes.rows` (in a random schedule)", [SEED_1], Found.SEED),
        ("`routes.rows`", [NIGHTLY], Found.NIGHTLY),
        ("`engine.answers` in `streams`", [], Found.SUITE),
        ("none: not declared", [], Found.HAND),
        ("by hand, from the code", [], Found.HAND),
        ("declared: `abort_by_prefix`", [], Found.HAND),
        ("with 3", [], Found.SEED),
    ],
)
def test_a_cell_says_how_a_fault_is_found(
    cell: str, finds: list[dict[str, Any]], expected: Found
) -> None:
    """By a check and the runs in which it finds it, by those of another row, or by nobody's run."""
    assert expected is found_page._level(cell, finds, {"3": Found.SEED})


@pytest.mark.parametrize(
    ("text", "script", "framework"),
    [
        ("SkyRL 0.3.0: padded", "megatron_faults.py skyrl_batch_order", "SkyRL"),
        ("0.8.0: recordings", "verl_faults.py budget", "verl"),
        ("An aborted call", "nemo_rl_faults.py abort", "NeMo-RL"),
    ],
)
def test_a_row_belongs_to_the_framework_that_it_names(
    text: str, script: str, framework: str
) -> None:
    """Otherwise to that of its script."""
    assert framework == found_page._framework(text, script, "")


def test_the_last_row_of_the_table_is_the_sum_of_the_others() -> None:
    """Nothing is counted twice or lost, and the share is that of the sums."""
    lines = [line for line in found_page.found_page() if line.startswith("| ")]
    end = next(number for number, line in enumerate(lines) if line.startswith("| all "))
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines[1 : end + 1]]
    *parts, total = ([int(cell) for cell in (*row[:7], row[8])] for row in rows)
    assert [sum(column) for column in zip(*parts, strict=True)] == total
    found, other = sum(total[:4]) + total[5], total[4] + total[6]
    assert f"{found / (found + other):.0%}" == rows[-1][7]
