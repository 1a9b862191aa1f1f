"""Routes of finished samples at the rows of padded and packed inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")

from rollproof.errors import RoutesError
from rollproof.replay.hf import batch_routes, packed_routes

LAYERS, TOP_K = 2, 2


def coded(sample: int, rows: int) -> Any:
    """Routes that say which sample, position, layer and column they are of."""
    position, layer, column = np.ogrid[:rows, :LAYERS, :TOP_K]
    return (((sample * 50 + position) * LAYERS + layer) * TOP_K + column).astype(np.int32)


samples = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=5)
"""Tokens of each sample, and whether its last token has a row."""


@given(samples, st.sampled_from(["left", "right"]), st.integers(0, 3))
def test_padded_rows_stand_where_their_tokens_stand(
    drawn: list[tuple[int, bool]], side: str, extra: int
) -> None:
    """Row p of a sample is at the place of its token p, on whichever side the padding is; all else
    is -1.
    """
    width = max(tokens for tokens, _ in drawn) + extra
    mask = np.zeros((len(drawn), width), dtype=np.int64)
    for line, (tokens, _) in zip(mask, drawn, strict=True):
        line[slice(width - tokens, width) if side == "left" else slice(0, tokens)] = 1

    placed = batch_routes(
        [coded(i, tokens - (not last)) for i, (tokens, last) in enumerate(drawn)], mask
    )

    assert (len(drawn), width, LAYERS, TOP_K) == placed.shape
    for i, (tokens, last) in enumerate(drawn):
        own = placed[i][mask[i] == 1]
        assert coded(i, tokens - (not last)).tolist() == own[: tokens - (not last)].tolist()
        assert (own[tokens - (not last) :] == -1).all()
        assert (placed[i][mask[i] == 0] == -1).all()


@given(samples, st.integers(1, 4))
def test_packed_rows_follow_the_cumulative_lengths(
    drawn: list[tuple[int, bool]], multiple: int
) -> None:
    """Row p of sample i is at cu_seqlens[i] + p; rows that align a sample are -1."""
    lengths = [tokens for tokens, _ in drawn]
    cumulative = np.cumsum([0, *(-(-tokens // multiple) * multiple for tokens in lengths)])

    placed = packed_routes(
        [coded(i, tokens - (not last)) for i, (tokens, last) in enumerate(drawn)],
        cumulative,
        lengths,
    )

    for i, (tokens, last) in enumerate(drawn):
        rows = tokens - (not last)
        own = placed[cumulative[i] : cumulative[i + 1]]
        assert coded(i, rows).tolist() == own[:rows].tolist()
        assert (own[rows:] == -1).all()


@pytest.mark.parametrize(
    ("routes", "mask", "message"),
    [
        (
            [coded(0, 3)],
            [[1, 1, 1, 1, 1]],
            r"Sample 0 has 5 tokens and 3 rows of routes; it must have 4, as engines return, or 5",
        ),
        ([coded(0, 6)], [[1, 1, 1, 1, 1]], "Sample 0 has 5 tokens and 6 rows"),
        ([coded(0, 4)], [1, 1, 1, 1, 1], r"The attention mask is \(5,\)"),
        ([coded(0, 4).astype(np.float32)], [[1, 1, 1, 1, 1]], "The routes of sample 0 are float32"),
        ([coded(0, 4)[0]], [[1, 1]], r"not integers \(rows, layers, top_k\)"),
        (
            [coded(0, 2), coded(1, 2)[:, :1]],
            [[1, 1], [1, 1]],
            r"Samples have routes of \(layers, top_k\) \[\(2, 2\), \(1, 2\)\]",
        ),
    ],
)
def test_rows_that_do_not_fit_their_tokens_are_refused(
    routes: Any, mask: Any, message: str
) -> None:
    """A sample cut without its routes, or the other way round, is refused with both numbers."""
    with pytest.raises(RoutesError, match=message):
        batch_routes(routes, mask)


@pytest.mark.parametrize(
    ("routes", "cumulative", "lengths", "message"),
    [
        (
            None,
            [0, 2],
            None,
            "Routes are a sequence with one array .* for each sample, not NoneType",
        ),
        ([coded(0, 2)], [[0, 2]], None, r"Cumulative lengths are \(1, 2\), not \(2,\)"),
        (
            [coded(0, 2)],
            [1, 3],
            None,
            r"Cumulative lengths are integers that begin with 0 and never fall, not \[1, 3\]",
        ),
        ([coded(0, 4), coded(1, 2)], [0, 4, 2], None, "never fall"),
        (
            [coded(0, 2)],
            [0.0, 2.5],
            None,
            r"are integers that begin with 0 and never fall, not \[0.0, 2.5\]",
        ),
        ([coded(0, 0)], [0, 2], [-1], r"Samples have lengths \[-1\]: none can be negative"),
    ],
)
def test_cumulative_lengths_that_are_none_are_refused(
    routes: Any, cumulative: Any, lengths: Any, message: str
) -> None:
    """What is no list of boundaries places nothing."""
    with pytest.raises(RoutesError, match=message):
        packed_routes(routes, cumulative, lengths)


def test_an_additive_mask_is_refused() -> None:
    """A mask of 0 and minus infinity would be taken the wrong way round; one of floats that are 0
    and 1 is a mask.
    """
    assert coded(0, 2).tolist() == batch_routes([coded(0, 2)], [[0.0, 1.0, 1.0]])[0, 1:].tolist()
    with pytest.raises(
        RoutesError, match="The attention mask is float64 and has other values than 0 and 1"
    ):
        batch_routes([coded(0, 2)], [[0.0, -1e9, -1e9]])


def test_a_captured_prefix_has_to_be_declared() -> None:
    """Fewer rows than tokens are taken for a fault, unless the caller says that they may be."""
    placed = batch_routes([coded(0, 2)], [[1, 1, 1, 1, 1]], prefix=True)

    assert coded(0, 2).tolist() == placed[0, :2].tolist()
    assert (placed[0, 2:] == -1).all()


def test_unsigned_ids_and_tensors_are_widened() -> None:
    """uint8 and uint64 arrays and tensors come out as int64 with -1 where free."""
    import torch

    for routes in (
        coded(0, 2).astype(np.uint8),
        coded(0, 2).astype(np.uint64),
        torch.from_numpy(coded(0, 2)),
    ):
        placed = batch_routes([routes], torch.tensor([[0, 1, 1, 1]]))
        assert placed.dtype == np.int64
        assert coded(0, 2).tolist() == placed[0, 1:3].tolist()
        assert (placed[0, [0, 3]] == -1).all()
