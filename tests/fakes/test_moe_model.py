"""The numpy model: its gradients are the slopes of its loss, and the order of rows and experts does
not matter.
"""

from __future__ import annotations

import numpy as np
import pytest

from rollproof.core.records import IntArray
from rollproof.fakes.trainers.moe_model import Gradients, MoeModel, TokenRows, chosen
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.fakes.trainers.trainer_parts import token_rows
from rollproof.replay.replay_samples import make_samples

SAMPLES = make_samples(ReplayTrainer.contract, 0)


def passed(
    model: MoeModel, rows: TokenRows, routes: dict[int, IntArray]
) -> tuple[float, Gradients]:
    """Return loss and gradients of a pass that executes ``routes``."""
    inputs = [model.embed(rows)]
    for layer in range(model.layers):
        x = inputs[-1]
        inputs.append(
            model.sparse(layer, rows, x, routes[layer])
            if layer in model.moe
            else model.dense(layer, rows, x)
        )
    gradients = model.zeros()
    dx = model.loss_backward(rows, inputs[-1], 0.25, gradients)
    for layer in reversed(range(model.layers)):
        if layer in model.moe:
            dx = model.sparse_backward(layer, rows, inputs[layer], routes[layer], dx, gradients)
        else:
            dx = model.dense_backward(layer, rows, inputs[layer], dx, gradients)
    model.embed_backward(rows, dx, gradients)
    return model.loss(rows, inputs[-1], 0.25)[0], gradients


@pytest.mark.parametrize("normalised", [False, True])
def test_every_gradient_is_a_slope(normalised: bool) -> None:
    """For each parameter, along a random direction, the gradient is the central difference of the
    loss.
    """
    model = MoeModel(layers=3, moe=(0, 2), experts=6, top_k=2, vocab=96, normalised=normalised)
    rows, _ = token_rows(SAMPLES)
    random = np.random.default_rng(1)
    routes = {
        layer: random.permuted(np.tile(np.arange(6), (len(rows.tokens), 1)), axis=1)[:, :2]
        for layer in (0, 2)
    }
    _, gradients = passed(model, rows, routes)

    for name, gradient in gradients.items():
        step = random.standard_normal(gradient.shape) * 1e-5
        original = model.weights[name]
        model.weights[name] = original + step
        high, _ = passed(model, rows, routes)
        model.weights[name] = original - step
        low, _ = passed(model, rows, routes)
        model.weights[name] = original
        assert (high - low) / 2 == pytest.approx(
            float((gradient * step).sum()), rel=1e-5, abs=1e-12
        ), name
        assert np.abs(gradient).max() > 0, name


def test_the_order_of_experts_within_a_row_makes_no_difference() -> None:
    """Loss and gradients are equal bit for bit when columns of the routes are exchanged."""
    model = MoeModel(layers=1, moe=(0,), experts=6, top_k=3, vocab=96)
    rows, _ = token_rows(SAMPLES)
    routes = chosen(np.random.default_rng(2).random((len(rows.tokens), 6)), 3)

    (loss, gradients), (other, others) = (
        passed(model, rows, {0: routes}),
        passed(model, rows, {0: routes[:, ::-1]}),
    )
    assert loss == other
    assert all(np.array_equal(gradients[name], others[name]) for name in gradients)


def test_samples_do_not_see_each_other() -> None:
    """The first row of a sample mixes with nothing, whichever sample precedes it."""
    rows, starts = token_rows(SAMPLES)

    assert [-1] * len(SAMPLES) == rows.before[starts[:-1]].tolist()
    assert (
        sum(len(sample.response_ids) for sample in SAMPLES)
        == len(rows.labels)
        == len(rows.predicted)
    )


def test_weights_are_numbered() -> None:
    """Number 0 is always the same, others differ from it and repeat, -1 has NaN in the first
    gate.
    """
    model = MoeModel(layers=2, moe=(1,), experts=6, top_k=2, vocab=96)
    first = {name: value.copy() for name, value in model.weights.items()}
    model.set_weights(3)
    third = model.weights["head"].copy()
    model.set_weights(0)

    assert all(np.array_equal(first[name], model.weights[name]) for name in first)
    model.set_weights(3)
    assert np.array_equal(third, model.weights["head"]) and not np.array_equal(third, first["head"])
    model.set_weights(-1)
    assert 1 == sum(int(np.isnan(value).sum()) for value in model.weights.values())


def test_ties_go_to_the_lower_id() -> None:
    """A router's own choice is the best scores first, and the same one each time."""
    assert [[2, 0], [0, 1]] == chosen(np.array([[0.2, 0.1, 0.7], [0.3, 0.3, 0.3]]), 2).tolist()
