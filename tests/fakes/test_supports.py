"""The sampling masks of fake engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.core.sampling_masks import SamplingMask
from rollproof.fakes.coded.policy import CodedPolicy

_POLICY = CodedPolicy(
    seed=3, vocab=1000, num_layers=1, moe_layers=(0,), num_experts=4, top_k=1, eos_every=None
)
_IDS = tuple(range(100, 500))
_START = 5


def _mask(version: int = 1, ids: tuple[int, ...] = _IDS, **sampling: Any) -> SamplingMask:
    mask = _POLICY.sampling_mask([(0, len(ids), version)], ids, _START, len(ids), sampling)
    assert mask is not None
    return mask


@pytest.mark.parametrize(
    ("sampling", "counts"),
    [
        ({"top_k": 20}, {20, 21}),
        ({"top_k": 20, "top_p": 0.9}, set(range(1, 21))),
        ({"top_p": 0.9}, set(range(1, 13))),
        ({"min_p": 0.1}, set(range(1, 13))),
        ({"temperature": 0.0}, {1}),
        ({"top_k": 1}, {1}),
    ],
)
def test_counts_are_those_that_the_parameters_leave(
    sampling: dict[str, Any], counts: set[int]
) -> None:
    """A tie at the cutoff leaves one more than top_k; a greedy call leaves the token alone."""
    assert counts == set(_mask(**sampling).counts.tolist())


@pytest.mark.parametrize("sampling", [{"top_k": 20}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_the_sampled_token_is_in_its_mask(sampling: dict[str, Any]) -> None:
    """No id occurs twice in one mask."""
    mask = _mask(**sampling)
    assert mask.holds(_IDS[_START:]).all()
    assert mask.fits
    assert all(len(set(mask.ids_of(i))) == mask.counts[i] for i in range(len(mask)))


def test_calls_that_leave_nothing_out_have_no_mask() -> None:
    """All tokens of the vocabulary are not listed."""
    assert _POLICY.sampling_mask([(0, 400, 1)], _IDS, _START, 400, {"top_p": 1.0}) is None


def test_masks_of_other_versions_and_sequences_differ() -> None:
    """A mask of the wrong place, version or sequence cannot be taken for a token's own."""
    mask = _mask(top_k=20)
    assert mask.equal(_mask(2, top_k=20)).mean() < 0.05
    assert mask.equal(_mask(1, (1, *_IDS[1:]), top_k=20)).mean() < 0.05
    assert mask.cut(1, 395).equal(mask.cut(0, 394)).mean() < 0.05


def test_a_small_vocabulary_holds_no_more_than_its_ids() -> None:
    """With two ids in all, a support has two at most."""
    policy = CodedPolicy(
        seed=0, vocab=2, num_layers=1, moe_layers=(0,), num_experts=2, top_k=1, eos_every=None
    )
    mask = policy.sampling_mask([(0, 9, 1)], (0, 1) * 4, 1, 8, {"top_k": 50})
    assert mask is not None
    assert 2 == mask.counts.max()
    np.testing.assert_array_equal(np.tile([0, 1], 7), mask.token_ids)
