"""Records: conversions from native values, which refuse what they cannot read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.core.records import (
    Request,
    Span,
    as_logprobs,
    as_mask,
    as_routes,
    as_tokens,
    spread,
)
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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "token_ids must be a sequence of integers, not None"),
        ("12", "token_ids must be a sequence of integers, not str '12'"),
        (3, "token_ids must be a sequence of integers, not int 3"),
        ([1, 1.0], r"token_ids\[1\] must be integers, not float 1.0"),
        ([1, 2, True], r"token_ids\[2\] must be integers, not bool True"),
        ([[1], [2, None]], r"token_ids\[1\]\[1\] must be integers, not None"),
        ([[1], 2], r"token_ids\[1\] must be an array like the other elements, not int 2"),
        ([2, 2**70, 2.5], r"token_ids\[2\] must be integers, not float 2.5"),
        (np.ones(2), r"token_ids must be integers, not an array of float64 \(2,\)"),
        (np.ones((1, 2), int), r"on one axis, not an array of int64 \(1, 2\): pass element 0"),
    ],
)
def test_tokens_refuse_other_values(value: object, message: str) -> None:
    """Anything else is refused, with the field, the place in it, and what it was."""
    with pytest.raises(SubjectError, match=f"^{message}" if message[0] == "t" else message):
        as_tokens(value)


class OtherArray:
    """An array of another library: all that it offers is DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def jagged(*parts: Any) -> Any:
    """An array of arrays, as a column of a Parquet file is read."""
    array = np.empty(len(parts), dtype=object)
    array[:] = parts
    return array


@pytest.mark.parametrize(
    "value",
    [
        [4, 5, 6],
        (np.int32(4), np.array(5), 6),
        np.array([4, 5, 6], np.uint16),
        OtherArray(np.array([4, 5, 6])),
        jagged(np.array([4, 5]), np.array([6])),
        [[4], [], [5, 6]],
        [np.array([4, 5]), (6,)],
    ],
)
def test_every_form_of_numbers_is_one_array(value: Any) -> None:
    """Lists, tuples, arrays, DLPack, and jagged lists with one part a call give the same tokens,
    logprobs and mask.
    """
    assert (4, 5, 6) == as_tokens(value)
    for convert in (as_logprobs, as_mask):
        got = convert(value)
        assert got is not None
        assert [4, 5, 6] == got.tolist()


@pytest.mark.parametrize("value", [[], (), np.empty(0), np.empty((0, 3)), [[], []], jagged()])
def test_empty_arrays_have_no_rows(value: Any) -> None:
    """An empty list or array of any type and rank is a sample without tokens."""
    assert () == as_tokens(value)
    for convert, rank in ((as_logprobs, 1), (as_mask, 1), (as_routes, 3)):
        got = convert(value)
        assert got is not None
        assert (0, rank) == (got.size, got.ndim)


def test_routes_in_parts_are_joined() -> None:
    """Nested lists, arrays of rows, and one array a call are the same routes; the type of arrays
    stays.
    """
    whole = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    lists = whole.tolist()
    for value in (
        whole,
        lists,
        list(whole),
        jagged(*whole),
        [whole[:1], whole[1:1], whole[1:]],
        [[np.array(row[0]), row[1]] for row in whole],
        [whole[:1].tolist(), whole[1:]],
        [[[np.array(row[0]), row[1]] for row in part] for part in (whole[:2], whole[2:])],
    ):
        got = as_routes(value)
        assert got is not None
        assert whole.tolist() == got.tolist()
        assert got.dtype in ((np.int64,) if value is lists else (np.uint8, np.int64))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[[1, 2]], [[3]]], r"routes\[1\] has the shape \(1, 1\), and routes\[0\] \(1, 2\)"),
        ([[[1, 2]], None], r"routes\[1\] must be an array like the other elements, not None"),
        ([[[1]], [[None]]], r"routes\[1\]\[0\]\[0\] must be integers, not None"),
        ([[[1]], []], r"routes\[1\] has the shape \(0,\), and routes\[0\] \(1, 1\)"),
        (
            np.zeros((2, 3), int),
            r"integers \(rows, layers, top_k\), not an array of int64 \(2, 3\)",
        ),
        (np.zeros((1, 2, 3, 4), int), "pass element 0, since a record holds one sample"),
    ],
)
def test_jagged_routes_are_refused_with_their_place(value: Any, message: str) -> None:
    """Rows that differ in layers or top-k, or are absent, fit no array: the error says which."""
    with pytest.raises(SubjectError, match=message):
        as_routes(value)


def test_tensors_of_torch_are_read() -> None:
    """Tensors that need a gradient, bfloat16, lists of tensors and nested tensors are read."""
    torch = pytest.importorskip("torch")
    logprobs = torch.tensor([-0.5, -1.0], dtype=torch.bfloat16, requires_grad=True)
    nested = torch.nested.nested_tensor(
        [torch.tensor([4, 5]), torch.tensor([6])], layout=torch.jagged
    )
    routes = torch.arange(8, dtype=torch.uint8).reshape(2, 2, 2)
    converted = as_logprobs(logprobs)
    parts = as_logprobs([logprobs[0], None, logprobs[1]])

    assert converted is not None and parts is not None
    assert [-0.5, -1.0] == converted.tolist()
    assert [-0.5, -1.0] == parts[[0, 2]].tolist()
    assert (
        (4, 5, 6) == as_tokens(nested) == as_tokens([torch.tensor(4), torch.tensor([5, 6])[0], 6])
    )
    for value in (routes, [routes[:1], routes[1:]], list(routes)):
        got = as_routes(value)
        assert got is not None
        assert (routes.tolist(), np.uint8) == (got.tolist(), got.dtype)
    with pytest.raises(SubjectError, match="token_ids cannot be read as an array: "):
        as_tokens(torch.ones(2, dtype=torch.int64, device="meta"))


def test_missing_logprobs_become_nan() -> None:
    """``None`` entries become NaN, and the whole ``None`` stays ``None``."""
    got = as_logprobs([-0.5, None])

    assert got is not None
    assert [-0.5, True] == [got[0], bool(np.isnan(got[1]))]
    assert as_logprobs(None) is None


@pytest.mark.parametrize("value", ["abc", [object()], 1.0, ["-0.5"], [[0.1, "x"]]])
def test_logprobs_refuse_other_values(value: object) -> None:
    """Anything but numbers and ``None`` is refused."""
    with pytest.raises(SubjectError, match=r"logprobs(\[\d\])* must"):
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
