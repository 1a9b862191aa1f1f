"""Contexts of hf_replay: what is left when they end, and what else may run meanwhile."""

from __future__ import annotations

import copy
import threading
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
from rollproof.replay.hf.model_families import tiny_model  # noqa: E402
from tests.support.hf_models import (  # noqa: E402
    GOOD,
    IDS,
    ROWS,
    assert_untouched,
    checkpointing,
    drift,
    loss,
    recorded,
    spied,
    trained,
)

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
    pytest.mark.usefixtures("quiet_transformers"),
]


@pytest.mark.parametrize("place", ["forward", "recompute within", "recompute later"])
def test_an_exception_leaves_nothing(model: Any, place: str) -> None:
    """Whatever raises in the middle, in the context or in a later backward pass: the model is as
    before, and the next run is right.
    """
    routes = recorded(model)
    expected = trained(model, routes)
    if place != "forward":
        checkpointing(model, reentrant=True)
    calls = []

    def failing(*_: Any) -> None:
        calls.append(1)
        if len(calls) == (2 if place == "forward" else 5):
            raise KeyError("in the middle")

    hooks = [router.module.register_forward_hook(failing) for router in find_routers(model).all]

    def run() -> None:
        with hf_replay(model, routes):
            value = loss(model)
            if place == "recompute within":
                value.backward()
        value.backward()

    with pytest.raises(KeyError, match="in the middle"):
        run()
    for hook in hooks:
        hook.remove()
    model.gradient_checkpointing_disable()
    model.zero_grad()
    assert_untouched(model)
    assert expected[0] == trained(model, routes)[0]


def test_an_evaluation_in_between_is_native(model: Any) -> None:
    """Without the context a model in eval mode routes by itself, and a context in eval mode
    replays.
    """
    routes = recorded(model).flip(0)
    before = recorded(model.eval())
    with spied(model) as calls, hf_replay(model, routes), torch.no_grad():
        model(IDS, use_cache=False)

    assert routes[:, 0].tolist() == calls[0][1].tolist()
    assert before.tolist() == recorded(model).tolist()


def test_contexts_nest(model: Any) -> None:
    """The inner one counts while it is open, then the outer one again."""
    outer, inner = recorded(model), recorded(model).flip(0)
    with spied(model) as calls, torch.no_grad(), hf_replay(model, outer):
        with hf_replay(model, inner):
            model(IDS, use_cache=False)
        model(IDS, use_cache=False)

    assert [inner[:, 0].tolist(), outer[:, 0].tolist()] == [
        ids.tolist() for layer, ids in calls if layer == 0
    ]
    assert_untouched(model)


def test_other_models_are_untouched(model: Any) -> None:
    """A critic or a reference of the same class, in the same process, routes by itself while the
    policy replays.
    """
    other = tiny_model("qwen3_moe", seed=7)
    expected = recorded(other)
    routes = recorded(model).flip(0)

    with hf_replay(model, routes), torch.no_grad(), spied(other) as calls:
        model(IDS, use_cache=False)
        other(IDS, use_cache=False)

    assert [expected[:, n].tolist() for n in range(3)] == [ids.tolist() for _, ids in calls]


def test_two_threads_replay_two_models_and_not_one(model: Any) -> None:
    """Models are independent of each other; a second thread on the same model is refused."""
    other = tiny_model("qwen3_moe", seed=7).train()
    pairs = [(one, recorded(one).flip(0)) for one in (model, other)]
    expected = [trained(*pair)[0] for pair in pairs]
    losses: dict[int, float] = {}
    errors: list[Exception] = []

    def work(number: int) -> None:
        for _ in range(3):
            losses[number] = trained(*pairs[number])[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert expected == [losses[0], losses[1]]

    def intrude() -> None:
        try:
            trained(*pairs[0])
        except ReplayError as error:
            errors.append(error)

    with hf_replay(*pairs[0]):
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        loss(model)
    assert "replays in another thread" in str(errors[0])


@pytest.mark.parametrize("then", ["replay", "native"])
def test_a_failed_backward_pass_that_autograd_lets_go_of_late(
    model: Any, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """On a GPU a backward pass runs in autograd's thread, which may hold a failed one for a while:
    the next run is right all the same.
    """
    routes = recorded(model).flip(0)
    expected = trained(model, routes)[0], float(loss(model))
    model.zero_grad()
    checkpointing(model, reentrant=False)
    calls = []

    def failing(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise KeyError("in the middle")

    hooks = [router.module.register_forward_hook(failing) for router in find_routers(model).all]
    with hf_replay(model, routes):
        value = loss(model)
    with monkeypatch.context() as patch:
        patch.setattr(
            "rollproof.replay.hf.passes.weakref.finalize", lambda *_: None
        )  # nobody ever lets go of it
        raised: list[BaseException] = []

        def backward() -> None:
            try:
                value.backward()
            except KeyError as error:
                raised.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert len(raised) == 1
    for hook in hooks:
        hook.remove()
    model.gradient_checkpointing_disable()
    model.zero_grad()
    assert (expected[0] if then == "replay" else expected[1]) == (
        trained(model, routes)[0] if then == "replay" else float(loss(model))
    )
    assert_untouched(model)


def test_a_model_is_not_copied_while_it_replays(model: Any) -> None:
    """A copy (a new reference model) would replay, too: it is refused inside the context only."""
    with hf_replay(model, GOOD):
        with pytest.raises(ReplayError, match="copied while it replays"):
            copy.deepcopy(model)
        loss(model)
    assert_untouched(copy.deepcopy(model))


def test_a_pass_is_entered_once(model: Any) -> None:
    """A second microbatch needs routes of its own."""
    once = hf_replay(model, GOOD)
    with once:
        loss(model)
    with pytest.raises(ReplayError, match="entered once"), once:
        pass
    with pytest.raises(ReplayError, match="left that was not entered"):
        hf_replay(model, GOOD).__exit__(None, None, None)


def test_a_second_forward_is_refused(model: Any) -> None:
    """Two microbatches of as many rows in one context: the second would execute the routes of the
    first, without an error.
    """

    def twice() -> None:
        with hf_replay(model, GOOD):
            loss(model)
            loss(model, IDS.flip(0))

    with pytest.raises(
        ReplayError,
        match="called a second time in one context, which has the routes of one forward",
    ):
        twice()
    assert_untouched(model)


def test_a_replay_in_a_recording_records_nothing_and_says_so(model: Any) -> None:
    """The inner context counts, and the outer one gets nothing: both orders are reported."""
    with (
        pytest.raises(ReplayError, match="Nothing was recorded, because no router was called"),
        hf_record(model),
        hf_replay(model, GOOD),
    ):
        loss(model)
    with (
        pytest.raises(ReplayError, match="ran in a context within it"),
        hf_replay(model, GOOD),
        hf_record(model),
    ):
        loss(model)
    assert_untouched(model)


def test_a_forward_that_others_put_around_is_left_to_them(model: Any) -> None:
    """A profiler that wraps a router's forward within the context and goes on: routes end with the
    context all the same.
    """
    gate = model.model.layers[0].mlp.gate
    expected = float(loss(model).detach())
    calls = []
    with hf_replay(model, GOOD):
        inner = gate.forward
        gate.forward = lambda hidden: (calls.append(1), inner(hidden))[1]
        loss(model)

    assert expected == float(loss(model).detach())
    assert [1, 1] == calls
    del gate.forward
    assert_untouched(model)


def test_a_recording_requires_one_forward(model: Any) -> None:
    """Before a forward there are no routes, and a second forward in one recording is refused."""
    with hf_record(model) as taken:
        with pytest.raises(ReplayError, match=r"Nothing was recorded in layers \[0, 1, 2\]"):
            _ = taken.routes
        loss(model)
        with pytest.raises(ReplayError, match="called a second time while it records"):
            loss(model)


def test_router_logits_stay_raw_and_other_hooks_work(model: Any) -> None:
    """`output_router_logits` under replay gives the live logits, and the auxiliary loss has a
    gradient in recompute, too.
    """
    routes = recorded(model)
    drift(model)
    checkpointing(model, reentrant=False)
    with hf_replay(model, routes):
        output = model(IDS, labels=IDS, use_cache=False, output_router_logits=True)
    hidden = model.model.layers[0].mlp.gate.weight

    assert (ROWS, 8) == tuple(output.router_logits[0].shape)
    assert not torch.allclose(output.router_logits[0].sum(-1), torch.ones(ROWS))
    (output.loss + output.aux_loss).backward()
    assert float(hidden.grad.norm()) > 0
    assert_untouched(model)
