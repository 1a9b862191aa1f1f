"""hf_replay where activations are recomputed, and where the backward pass comes late."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")
transformers = pytest.importorskip(
    "transformers",
    minversion="5.24",
    reason="tried with 5.24; routers of DeepSeek-V3 up to 5.12 select outside of their forward",
)

from rollproof.errors import ReplayError  # noqa: E402
from rollproof.replay.hf import find_routers, hf_record, hf_replay  # noqa: E402
from tests.support.hf_models import (  # noqa: E402
    GOOD,
    IDS,
    assert_untouched,
    checkpointing,
    drift,
    gradients,
    loss,
    recorded,
    same,
    spied,
    trained,
)

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
    pytest.mark.usefixtures("quiet_transformers"),
]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize(
    "when", ["within", "later", "after another microbatch", "together with another microbatch"]
)
def test_recompute_repeats_its_own_forward(model: Any, reentrant: bool, when: str) -> None:
    """Wherever the backward pass runs, recomputed routers execute the routes of the forward that
    they belong to.
    """
    routes, others = recorded(model), recorded(model, IDS.flip(1))
    drift(model)
    expected = trained(model, routes)[1]
    checkpointing(model, reentrant)

    with spied(model) as calls:
        with hf_replay(model, routes):
            value = loss(model)
            if when == "within":
                value.backward()
        if when.endswith("another microbatch"):
            with hf_replay(model, others):
                other = loss(model)
            if when.startswith("together"):
                (value + 0 * other).backward()
        if value.grad_fn is not None and when in ("later", "after another microbatch"):
            value.backward()

    assert same(expected, gradients(model))
    last = [ids.tolist() for _, ids in calls[-3:]]
    assert [routes[:, layer].tolist() for layer in (2, 1, 0)] == last
    assert_untouched(model)


def test_a_recording_is_repeated_in_recompute(model: Any) -> None:
    """A recompute under hf_record executes what the forward chose, although the weights changed in
    between (NeMo Automodel#3156).
    """
    checkpointing(model, reentrant=True)
    with spied(model) as calls, hf_record(model) as taken:
        value = loss(model)
        find_routers(model).all[0].module.weight.data.neg_()
        value.backward()

    assert [(n, taken.routes[:, n].tolist()) for n in (0, 1, 2, 2, 1, 0)] == [
        (layer, ids.tolist()) for layer, ids in calls
    ]


def test_free_rows_repeat_their_forward_in_recompute(model: Any) -> None:
    """A row without a target executes in recompute what it chose in the forward, although the
    weights changed in between.
    """
    routes = recorded(model)
    routes[4:9] = -1
    checkpointing(model, reentrant=True)
    with spied(model) as calls, hf_replay(model, routes):
        value = loss(model)
        find_routers(model).all[0].module.weight.data.neg_()
        value.backward()

    forward = {layer: ids.tolist() for layer, ids in calls[:3]}
    assert forward == {layer: ids.tolist() for layer, ids in calls[3:]}


@pytest.mark.parametrize("array", [False, True], ids=["tensor", "array"])
def test_a_buffer_that_is_filled_anew_changes_no_pass(model: Any, array: bool) -> None:
    """A loop may keep one buffer for the routes of all microbatches: a recompute that comes later
    executes what its forward did.
    """
    routes, others = recorded(model), recorded(model, IDS.flip(1))
    drift(model)
    expected = trained(model, routes)[1]
    checkpointing(model, False)
    buffer = routes.clone()

    with hf_replay(model, buffer.numpy() if array else buffer):
        value = loss(model)
    buffer.copy_(others)
    value.backward()

    assert same(expected, gradients(model))


def test_routes_live_as_long_as_the_graph(model: Any) -> None:
    """What a later backward pass needs is held by the graph, and let go with it."""
    one = hf_replay(model, GOOD)
    with one:
        value = loss(model)
    alive = weakref.ref(one)
    del one
    gc.collect()
    assert alive() is not None
    del value
    gc.collect()
    assert alive() is None


def test_backward_passes_that_interleave_are_refused(model: Any) -> None:
    """Where one backward pass enters two microbatches by turns, it is unknown whose routes a
    recompute needs.
    """
    checkpointing(model, reentrant=False)
    outputs = []
    for routes in (recorded(model), recorded(model).flip(0)):
        with hf_replay(model, routes):
            outputs.append(model(IDS, use_cache=False, output_router_logits=True).router_logits)

    # Autograd runs what was created last first, and counts by thread: this head comes after all of
    # the first microbatch.
    late: list[Any] = []
    thread = threading.Thread(target=lambda: late.append(outputs[1][0].sum()))
    thread.start()
    thread.join()
    with pytest.raises(ReplayError, match="interleave"):
        torch.autograd.backward([outputs[0][2].sum(), outputs[1][2].sum(), late[0]])
    model.zero_grad()
    assert_untouched(model)
