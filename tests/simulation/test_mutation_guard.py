"""Lending: what a stack changes in its caller's objects is seen and told."""

from __future__ import annotations

import numpy as np

from rollproof.simulation.mutation_guard import WATCH, Watch, changed_rows, lend, same


def test_changes_are_reported_by_key() -> None:
    """Added, removed and changed keys are named with their values."""
    watch = Watch()
    params = watch.lend("sampling_params", {"max_tokens": 8, "top_p": 1.0})
    params["max_tokens"] = 5
    params["n"] = 1
    del params["top_p"]

    assert (
        "sampling_params: 'top_p' was removed, 'n' was added (1), 'max_tokens' went from 8 to 5",
    ) == watch.changed()


def test_unchanged_objects_are_not_reported() -> None:
    """A stack that works on a copy is not blamed."""
    watch = Watch()
    watch.lend("prompt_ids", [1, 2])
    watch.lend("routes", np.zeros(3))
    watch.lend("logprobs", np.array([np.nan]))

    assert () == watch.changed()


def test_growing_lists_and_written_arrays_are_reported() -> None:
    """A longer list and a changed array are named."""
    watch = Watch()
    watch.lend("prompt_ids", [1, 2]).append(3)
    watch.lend("routes", np.zeros(3))[1] = 4

    assert ("prompt_ids: went from 2 to 3 items", "routes: its contents changed") == watch.changed()


def test_outside_a_run_lending_is_a_no_op() -> None:
    """The adapter of a stack can call ``lend`` anywhere."""
    value = {"a": 1}

    assert WATCH.get() is None
    assert value is lend("x", value)


def test_sameness_knows_dtype_and_nested_arrays() -> None:
    """Equal numbers of another dtype are a change; NaN equals NaN, also inside containers."""
    assert same([{"a": np.array([1.0, np.nan])}], [{"a": np.array([1.0, np.nan])}])
    assert not same(np.zeros(2, np.uint8), np.zeros(2, np.int32))
    assert not same((1,), [1])


def test_overwritten_rows_are_counted() -> None:
    """What was sorted in place holds the same values; another shape is no change."""
    before = np.array([[[3, 1]], [[0, 2]], [[5, 4]]])

    assert "" == changed_rows(before, before.reshape(3, 2))
    assert "2 of 3 rows have the same values in another order" == changed_rows(
        before, np.sort(before, axis=-1)
    )
    assert "3 of 3 rows have other values" == changed_rows(before, before * 0 - 1)
    assert "" == changed_rows(before[:0], before[:0])
    assert "" == changed_rows(None, before)
