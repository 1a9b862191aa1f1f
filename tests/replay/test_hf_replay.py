"""hf_replay and hf_record on tiny models of every family: what is executed, and what the gradients
are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")
transformers = pytest.importorskip(
    "transformers",
    minversion="5.24",
    reason="tried with 5.24; routers of DeepSeek-V3 up to 5.12 select outside of their forward",
)

from rollproof.replay.hf import find_routers, hf_record, hf_replay  # noqa: E402
from rollproof.replay.hf.model_families import FAMILIES, tiny_model  # noqa: E402
from rollproof.replay.hf.router_formulas import fixed_selection  # noqa: E402
from tests.support.hf_models import (  # noqa: E402
    IDS,
    ROWS,
    assert_untouched,
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

COMMON = [name for name in FAMILIES if not name.startswith(("qwen3_next", "qwen3_5"))]


@pytest.mark.parametrize("family", COMMON)
def test_replay_of_the_models_own_choice_changes_no_bit(family: str) -> None:
    """Loss and every gradient equal those of the run that was recorded; the recording run itself
    equals a native one.
    """
    model = tiny_model(family).train()
    native = loss(model)
    native.backward()
    expected = gradients(model)
    with hf_record(model) as taken:
        assert float(native.detach()) == float(loss(model).detach())

    value, actual = trained(model, taken.routes)

    assert FAMILIES[family].moe_layers == taken.layers
    assert (ROWS, len(taken.layers), 2) == tuple(taken.routes.shape)
    assert float(native.detach()) == value
    assert same(expected, actual)
    assert_untouched(model)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(COMMON)))
def test_families_with_linear_attention_replay(family: str) -> None:
    """Forward only, for they are slow on a CPU: every router executes routes that it did not
    choose.
    """
    model = tiny_model(family).eval()
    routes = recorded(model).flip(0)

    with spied(model) as calls, hf_replay(model, routes), torch.no_grad():
        model(IDS, use_cache=False)

    assert [(n, routes[:, n].tolist()) for n in range(3)] == [
        (layer, ids.tolist()) for layer, ids in calls
    ]


@pytest.mark.parametrize("family", COMMON)
def test_under_other_weights_the_recorded_experts_run(family: str) -> None:
    """Every router executes its target where it would have chosen otherwise; results change, and
    every gate has a gradient.
    """
    model = tiny_model(family).train()
    routes = recorded(model)
    drift(model)
    native = float(loss(model).detach())
    rerouted = (recorded(model).sort(-1).values != routes.sort(-1).values).any(-1).float().mean()

    with spied(model) as calls:
        value, actual = trained(model, routes)

    assert rerouted > 0.3
    assert [
        (layer, routes[:, n].tolist()) for n, layer in enumerate(find_routers(model).layers)
    ] == [(n, i.tolist()) for n, i in calls]
    assert native != value
    gates = [actual[f"{router.path}.weight"] for router in find_routers(model).all]
    assert all(float(gate.norm()) > 0 for gate in gates)


@pytest.mark.parametrize("family", COMMON)
def test_gradients_are_those_of_the_formula_with_the_selection_fixed(family: str) -> None:
    """Under drifted weights, all gradients equal those of the family's formula written out without
    a top-k, bit for bit.
    """
    model = tiny_model(family).train()
    routes = recorded(model)
    drift(model)
    with fixed_selection(find_routers(model), family, routes):
        expected_loss = loss(model)
        expected_loss.backward()
    expected = gradients(model)

    value, actual = trained(model, routes)

    assert float(expected_loss.detach()) == value
    assert same(expected, actual)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_gate_gradients_are_the_slope_of_the_loss(family: str) -> None:
    """Central differences along a random direction of each gate agree with its gradient, to a
    hundredth.
    """
    model = tiny_model(family, dtype=torch.float64).train()
    routes = recorded(model)
    drift(model)

    def exact() -> Any:  # a model's own loss is computed in float32
        with hf_replay(model, routes):
            logits = model(IDS, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())

    exact().backward()
    actual, step = gradients(model), 3e-3  # norms and routers round to float32
    for router in find_routers(model).all:
        direction = torch.randn(
            router.module.weight.shape, generator=torch.Generator().manual_seed(3)
        ).double()
        values = []
        for sign in (1, -1):
            router.module.weight.data += sign * step * direction
            values.append(float(exact().detach()))
            router.module.weight.data -= sign * step * direction
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(
            float((actual[f"{router.path}.weight"] * direction).sum()), rel=1e-2
        )


def test_bfloat16_replays_as_exactly() -> None:
    """A bfloat16 model repeats its own recording bit for bit, although float32 of the same weights
    would choose otherwise.
    """
    half = tiny_model("qwen3_moe").bfloat16().train()
    native = loss(half)
    native.backward()
    expected = gradients(half)

    value, actual = trained(half, recorded(half))

    assert float(native.detach()) == value
    assert same(expected, actual)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_every_integer_type_and_both_layer_axes_are_taken(dtype: Any) -> None:
    """Arrays or tensors, all layers or those with a router, flat or batched: one result."""
    model = tiny_model("deepseek_v3").train()
    routes = recorded(model)
    drift(model)
    expected = trained(model, routes)
    all_layers = np.zeros((ROWS, 3, 2), dtype=dtype)
    all_layers[:, 1:] = routes.numpy()

    assert expected[0] == trained(model, all_layers)[0]
    assert expected[0] == trained(model, all_layers.reshape(2, 11, 3, 2))[0]
    assert expected[0] == trained(model, torch.from_numpy(all_layers[:, 1:].copy()))[0]
    assert (
        expected[0]
        == trained(model, all_layers[::-1].astype(np.dtype(dtype).newbyteorder())[::-1])[0]
    )


def test_rows_without_a_target_route_natively(model: Any) -> None:
    """Rows masked out, and rows of -1, execute the live choice; all others their target."""
    routes = recorded(model)
    drift(model)
    mask = torch.zeros(2, 11, dtype=torch.long)
    mask[0, :4] = mask[1, 6:] = 1
    sentinel = torch.where(mask.reshape(-1, 1, 1) == 1, routes, -1)
    with spied(model) as native:
        loss(model)

    with spied(model) as masked:
        first = trained(model, routes, mask=mask)
    with spied(model) as sentinels:
        second = trained(model, sentinel)

    assert first[0] == second[0]
    replayed = mask.flatten() == 1
    layer, ids = masked[0]
    assert ids.tolist() == sentinels[0][1].tolist()
    assert routes[replayed, layer].tolist() == ids[replayed].tolist()
    assert native[0][1][~replayed].tolist() == ids[~replayed].tolist()


def test_packed_samples_replay_as_each_alone(model: Any) -> None:
    """A packed row, split by position ids, replays what its samples replay alone."""
    samples = [torch.arange(3, 10), torch.arange(20, 31), torch.arange(50, 55)]
    alone = [recorded(model, sample[None]) for sample in samples]
    drift(model)
    expected = []
    for sample, routes in zip(samples, alone, strict=True):
        with hf_replay(model, routes), torch.no_grad():
            expected.append(model(sample[None], use_cache=False).logits[0])
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])[None]

    with spied(model) as calls, hf_replay(model, torch.cat(alone)), torch.no_grad():
        logits = model(torch.cat(samples)[None], position_ids=positions, use_cache=False).logits[0]

    assert torch.cat(alone)[:, 0].tolist() == calls[0][1].tolist()
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=2e-5)
