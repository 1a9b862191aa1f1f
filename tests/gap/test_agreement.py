from __future__ import annotations

import numpy as np
import pytest

from rollproof.gap.agreement import overlap


@pytest.mark.parametrize("experts", [8, 64, 130, 1024, 5000])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("counting", ["by numpy", "by bytes"])
def test_common_experts_are_those_of_the_rows_as_sets(experts: int, top_k: int, counting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of distinct, real experts; rows that hold a negative id, or one twice, are told apart, with and without numpy 2."""
    if counting == "by bytes":
        monkeypatch.delattr(np, "bitwise_count", raising=False)
    draw = np.random.default_rng([experts, top_k])
    left, right = draw.integers(-1, experts, (2, 40, 3, top_k))
    right[:20] = left[:20]
    common, whole = overlap(left, right)
    for place in np.ndindex(40, 3):
        a, b = left[place].tolist(), right[place].tolist()
        assert all(len({*row}) == top_k and min(row) >= 0 for row in (a, b)) == whole[place]
        if whole[place]:
            assert len({*a} & {*b}) == common[place]
