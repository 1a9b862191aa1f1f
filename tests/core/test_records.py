"""Records: conversions from native values, which refuse what they cannot read."""

from __future__ import annotations

import numpy as np
import pytest

from rollproof.core.records import Request, Span, as_logprobs, as_routes, as_tokens, spread
from rollproof.errors import SubjectError


def test_versions_are_unknown_outside_of_spans() -> None:
    """Tokens outside all spans are unknown, and spans may reach beyond the tokens."""
    assert [None, 1, 1, None, 2] == spread(
        [Span(start=1, end=3, version=1), Span(start=4, end=9, version=2)], 5
    )


@pytest.mark.parametrize(
    ("max_tokens", "limit", "budget"),
    [(None, None, None), (4, None, 4), (None, 6, 6), (9, 6, 6), (4, 6, 4)],
)
def test_the_tighter_bound_is_the_budget(
    max_tokens: int | None, limit: int | None, budget: int | None
) -> None:
    """The stated budget and the configured limit both hold."""
    assert (
        budget
        == Request(request_id="r", prompt_ids=(1,), max_tokens=max_tokens, limit=limit).budget
    )


def test_tokens_from_lists_arrays_and_tuples() -> None:
    """Token ids may come as any integer sequence, and become plain ints."""
    assert (1, 2) == as_tokens([1, 2]) == as_tokens(np.array([1, 2])) == as_tokens((np.int64(1), 2))


@pytest.mark.parametrize("value", [None, "12", [1.0], [True], [[1]], 3])
def test_tokens_refuse_other_values(value: object) -> None:
    """Anything else is refused, with what it was."""
    with pytest.raises(SubjectError, match="token_ids must be a sequence of integers"):
        as_tokens(value)


def test_missing_logprobs_become_nan() -> None:
    """``None`` entries become NaN, and the whole ``None`` stays ``None``."""
    got = as_logprobs([-0.5, None])

    assert got is not None
    assert [-0.5, True] == [got[0], bool(np.isnan(got[1]))]
    assert as_logprobs(None) is None


@pytest.mark.parametrize("value", ["abc", [object()], 1.0])
def test_logprobs_refuse_other_values(value: object) -> None:
    """Anything but numbers and ``None`` is refused."""
    with pytest.raises(SubjectError, match="logprobs must"):
        as_logprobs(value)


def test_routes_are_copied() -> None:
    """A record keeps its own copy: what an engine does to its buffer later does not reach it."""
    buffer = np.zeros((2, 3, 2), np.uint8)
    got = as_routes(buffer)
    buffer[:] = 7

    assert got is not None
    assert 0 == int(got.sum())


@pytest.mark.parametrize("value", [np.zeros((2, 3)), np.zeros((2, 3, 2)), [[[1], [2, 3]]], "x"])
def test_routes_refuse_other_ranks_and_types(value: object) -> None:
    """Routes are integers of rank 3, or refused with their shape and dtype."""
    with pytest.raises(SubjectError, match="routes"):
        as_routes(value)
