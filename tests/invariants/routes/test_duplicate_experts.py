"""The fast search for repeated experts agrees with sorting, for every type, top-k and alignment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollproof.invariants.routes import duplicate_experts
from rollproof.invariants.routes.duplicate_experts import has_repeats, repeats


@given(
    dtype=st.sampled_from(["uint8", "int8", "uint16", "int16", "int32", "int64"]),
    k=st.integers(1, 10),
    layers=st.integers(1, 5),
    rows=st.integers(0, 12),
    experts=st.integers(10, 300),
    planted=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_repetition_is_never_missed_nor_invented(
    dtype: str, k: int, layers: int, rows: int, experts: int, planted: bool, seed: int
) -> None:
    """For ids in range the fast answer is the exact one, at every place of the repetition."""
    experts = min(experts, np.iinfo(dtype).max + 1)
    rng = np.random.default_rng(seed)
    array = rng.random((rows, layers, experts)).argsort(axis=2)[:, :, :k].astype(dtype)
    if planted and rows and k > 1:
        row, layer = rng.integers(rows), rng.integers(layers)
        first, second = rng.permutation(k)[:2]
        array[row, layer, first] = array[row, layer, second]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicate_experts, "_SMALL", 0)
        patch.setattr(duplicate_experts, "_CELLS", 4)
        assert bool(repeats(array).any()) == has_repeats(array, experts)


@pytest.mark.parametrize("place", [0, 7, 8, 4095, 4096, 40_000, 95_999])
def test_blocks_leave_no_gap(place: int) -> None:
    """A repetition in the first, the last or a border cell of a block is found in an array of many
    blocks.
    """
    array = np.broadcast_to(np.arange(8, dtype=np.uint8), (2000, 48, 8)).copy()
    assert not has_repeats(array, 128)
    array.reshape(-1, 8)[place, 7] = 3
    assert has_repeats(array, 128)
    assert has_repeats(array, 256)


def test_a_selection_of_layers_is_searched_too() -> None:
    """MoE columns picked out of an array with dense ones are not contiguous."""
    array = np.zeros((500, 4, 6), dtype=np.uint16)
    array[:, 1:] = np.arange(6)
    assert has_repeats(array, 64)
    assert not has_repeats(array[:, 1:], 64)


def test_equal_ids_but_for_their_top_bit_are_not_repeated() -> None:
    """Ids of all 256 experts leave no bit to mark every other cell with."""
    array = np.broadcast_to(np.array([[0, 129], [128, 1]], dtype=np.uint8), (600, 2, 2)).copy()
    assert array.size > duplicate_experts._SMALL
    assert not has_repeats(array, 256)
    array[599, 1] = 7
    assert has_repeats(array, 256)


@pytest.mark.parametrize("experts", [128, 256])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_equal_ids_of_neighbouring_cells_are_not_repeated(experts: int, step: int) -> None:
    """Each cell begins with ids of the one before it, at every distance below top-k."""
    cells = np.arange(24)[:, None] * step + np.arange(4)
    array = np.broadcast_to(cells.astype(np.uint8), (60, 24, 4)).copy()
    assert array.size > duplicate_experts._SMALL
    assert not has_repeats(array, experts)
    array[30, 7, 3] = array[30, 7, 0]
    assert has_repeats(array, experts)
