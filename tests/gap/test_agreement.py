from __future__ import annotations

import numpy as np
import pytest

from rollproof.gap.agreement import overlap, selections


@pytest.mark.parametrize("experts", [8, 64, 130, 1024, 5000])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("counting", ["by numpy", "by bytes"])
def test_common_experts_are_those_of_the_rows_as_sets(
    experts: int, top_k: int, counting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows of distinct, real experts; rows that hold a negative id, or one twice, are told
    apart, with and without numpy 2.
    """
    if counting == "by bytes":
        monkeypatch.delattr(np, "bitwise_count", raising=False)
    draw = np.random.default_rng([experts, top_k])
    left, right = draw.integers(-1, experts, (2, 40, 3, top_k))
    right[:20] = left[:20]
    common, complete = overlap(left, right)
    for place in np.ndindex(40, 3):
        a, b = left[place].tolist(), right[place].tolist()
        assert all(len({*row}) == top_k and min(row) >= 0 for row in (a, b)) == complete[place]
        if complete[place]:
            assert len({*a} & {*b}) == common[place]


def test_an_expert_of_one_side_is_not_another_one_of_the_other() -> None:
    """Where one side has low ids alone, 64 and 0 are still two experts."""
    common, complete = overlap(np.array([[[0, 1]]]), np.array([[[64, 1]]]))
    assert (1, True) == (int(common[0, 0]), bool(complete[0, 0]))


@pytest.mark.parametrize("experts", [8, 130, 5000])
def test_what_is_chosen_of_the_rows_is_compared_as_if_it_were_all(experts: int) -> None:
    """Rows, a slice of layers, and one layer held against every other."""
    draw = np.random.default_rng(experts)
    left, right = draw.integers(-1, experts, (2, 40, 5, 4))
    right[:20] = left[:20]
    ours, other = selections(left, right)
    rows = np.array([3, 3, 17, 30])
    for mine, theirs, chosen in (
        (left[rows], right[rows], (ours.at(rows), other.at(rows))),
        (
            left[:, 1:4],
            right[:, 2:],
            (ours.at(slice(None), slice(1, 4)), other.at(slice(None), slice(2, None))),
        ),
        (np.repeat(left[:, 2:3], 5, axis=1), right, (ours.at(slice(None), slice(2, 3)), other)),
    ):
        expected, got = overlap(mine, theirs), chosen[0].overlap(chosen[1])
        assert all(np.array_equal(a, b) for a, b in zip(expected, got, strict=True))
    assert (40, 5, 4) == (len(ours), ours.layers, ours.top_k)
