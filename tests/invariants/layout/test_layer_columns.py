"""Checks on layers: rows or numbers, each answer is told as what it is."""

from __future__ import annotations

import numpy as np
import pytest

from rollproof.layouts import Layout
from tests.support.layout_script import call, counted, laid, place, told, with_array

FOUR = Layout(num_layers=4, num_experts=64, top_k=2, moe_layers=(1, 2, 3))
CALL = call(3, layout=FOUR)
NAME = "a router reads another layer's column"


def test_the_rows_of_each_router_are_those_of_its_column() -> None:
    """Three routers of four layers."""
    assert {"routers compared": 3} == {
        name: count
        for name, count in counted("layout.layer-map", laid("select", CALL)).items()
        if count
    }


def test_a_router_may_name_its_column() -> None:
    """A number in place of rows: the layer's own column passes, another one is named."""
    out = laid("select", CALL).out
    layers = out[0].ravel().tolist()
    for number, layer in enumerate(layers):
        event = laid("select", CALL, with_array(number + 1, np.array(layer)))
        counted("layout.layer-map", event)
    event = laid("select", CALL, with_array(1, np.array(layers[1])))
    assert (
        NAME,
        f"layer {layers[0]} reads column {layers[0]} of 4 (layer axis: all)",
        f"column {layers[1]}, that of layer {layers[1]}; so for 1 of 3 routers",
    ) == told("layout.layer-map", event)
    assert layers[0] == place("layout.layer-map", event)["layer"]


def test_rows_of_a_dense_layer_are_of_no_moe_layer() -> None:
    """Column 0 belongs to a layer without a router."""
    event = laid("select", CALL, with_array(2, np.array(0)))
    assert told("layout.layer-map", event)[2] == (
        "column 0, of no MoE layer; so for 1 of 3 routers"
    )


@pytest.mark.parametrize("change", ["turned", "short", "long", "none", "wide", "mixed"])
def test_rows_of_no_one_column_are_told_so(change: str) -> None:
    """Rows in another order, too few, too many or none, of another width, or of two layers."""
    rows, others = laid("select", CALL).out[1:3]
    wrong = {
        "turned": rows[::-1],
        "short": rows[:-1],
        "long": np.concatenate([rows, rows[-1:]]),
        "none": rows[:0],
        "wide": np.concatenate([rows, rows], axis=1),
        "mixed": np.concatenate([rows[:2], others[2:]]),
    }[change]
    event = laid("select", CALL, with_array(1, wrong))
    assert told("layout.layer-map", event)[2] == (
        "column None, or rows of several layers, or in another order; so for 1 of 3 routers"
    )


def test_a_chunk_may_be_told_by_the_number_of_its_layers() -> None:
    """The right number passes, and another one is found; so it is with the layers themselves."""
    for function, right in (("stage_layers", [0, 1, 2, 3]), ("routers", [1, 2, 3])):
        for value in (np.array(len(right)), np.array(right)):
            event = laid(function, CALL, with_array(0, value))
            assert 1 == counted("layout.stages", event)["chunks compared"]
        few = laid(function, CALL, with_array(0, np.array(2)))
        assert "2 layers" == told("layout.stages", few)[2]
        other = laid(function, CALL, with_array(0, np.array([1, 3])))
        assert "[1, 3]" == told("layout.stages", other)[2]
