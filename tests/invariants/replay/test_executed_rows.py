"""Which executed rows hold top_k distinct experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollproof.invariants.replay.executed_rows import Executed
from tests.support.trace_builder import contract


@pytest.mark.parametrize(
    ("ids", "distinct"),
    [
        ((0, 1, 2, 7), True),
        ((7, 2, 1, 0), True),
        ((0, 0, 2, 7), False),
        ((0, 1, 7, 7), False),
        ((1, 2, 1, 0), False),
        ((0, 1, 2, 8), False),
        ((0, 1, 2, -1), False),
    ],
)
def test_distinct_rows_repeat_no_id_and_stay_in_range(ids: tuple[int, ...], distinct: bool) -> None:
    """Wherever the repetition is, and on both sides of the first and the last id."""
    view: Any = SimpleNamespace(contract=contract(top_k=4))
    none = np.zeros(1, dtype=np.int64)
    rows = Executed(view=view, place=none, column=none, rank=none, experts=np.array([ids]))
    assert [distinct] == rows.distinct.tolist()
