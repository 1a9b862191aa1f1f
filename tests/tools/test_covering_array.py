"""The covering array: frozen, sound, complete for pairs, laid out alike by two implementations."""

from __future__ import annotations

import numpy as np
import pytest

from rollproof.fakes.trainers.reference_layouts import MegatronLike
from rollproof.layouts import Coding
from rollproof.replay.megatron.covered_setups import CPU_RANKS, FACTORS, frozen_rows, world_size
from tools.covering_array import coverage, generated, layout_of, violated

ROWS = frozen_rows()


def test_rows_are_sound_and_most_fit_a_cpu() -> None:
    """No row breaks a rule, each has every factor, and what fits a CPU takes 1, 2 or 4 ranks."""
    assert {(): len(ROWS)} == {
        found: sum(violated(row) == found for row in ROWS)
        for found in {violated(row) for row in ROWS}
    }
    assert all(set(FACTORS) == set(row) for row in ROWS)
    assert {1, 2, 4} >= {world_size(row) for row in ROWS if world_size(row) <= CPU_RANKS}
    assert sum(world_size(row) <= CPU_RANKS for row in ROWS) >= 20


def test_every_feasible_pair_is_covered() -> None:
    """2-way coverage is complete, and 3-way coverage is what the page says or more."""
    covered, total = coverage(ROWS, 2)
    assert (492, 492) == (covered, total)
    triples, all_triples = coverage(ROWS, 3)
    assert triples / all_triples > 0.85


def test_a_row_less_does_not_cover() -> None:
    """The count is not vacuous: without its last row a pair is missing, and a rule that is broken
    is named.
    """
    assert coverage(ROWS[:-1], 2)[0] < coverage(ROWS, 2)[0]
    assert ("chunks alternate between pipeline ranks (vpp > 1 needs pp > 1)",) == violated(
        {**ROWS[0], "vpp": 2}
    )


def test_the_frozen_rows_are_those_that_are_generated() -> None:
    """The command writes what is frozen: nobody edits the file by hand."""
    assert list(ROWS) == generated()


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_row_is_laid_out_and_merged_back(number: int) -> None:
    """Every rank and chunk gets what an independent implementation gives it, and together they hold
    each sample's rows once.
    """
    layout = layout_of(ROWS[number])
    lengths = (9, 4)
    coding = Coding(samples=2, positions=9, columns=layout.columns, experts=64)
    payloads = [coding.payload(i, length) for i, length in enumerate(lengths)]
    recorded = {}
    for pp in range(layout.mesh.pp):
        for rank in layout.mesh.row_ranks(pp=pp):
            for chunk in range(layout.mesh.vpp):
                targets = layout.targets(payloads, rank, chunk)
                recorded[rank, chunk] = targets
                if layout.packed:
                    other = MegatronLike().targets(layout, payloads, lengths, rank, chunk)
                    assert list(targets) == list(other)
                    assert all(np.array_equal(targets[layer], other[layer]) for layer in targets)
    merged = layout.merge(recorded, lengths)
    columns = list(layout.column.values())
    for payload, back in zip(payloads, merged, strict=True):
        assert np.array_equal(payload[:, columns], back[:, columns])
