"""hf_replay where a router or its experts are of another build: adapted or copied as by PEFT,
around a linear layer, called with more.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")
transformers = pytest.importorskip(
    "transformers",
    minversion="5.24",
    reason="tried with 5.24; routers of DeepSeek-V3 up to 5.12 select outside of their forward",
)

from rollproof.errors import RouterError  # noqa: E402
from rollproof.replay.hf import find_routers, hf_replay  # noqa: E402
from rollproof.replay.hf.model_families import tiny_model  # noqa: E402
from tests.support.hf_models import (  # noqa: E402
    GOOD,
    assert_untouched,
    checkpointing,
    gradients,
    loss,
    of_family,
    recorded,
    same,
    trained,
)

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
    pytest.mark.usefixtures("quiet_transformers"),
]


class Plus(torch.nn.Module):  # type: ignore[misc]
    """A parametrization: the parameter plus a trained difference."""

    def __init__(self, delta: Any) -> None:
        super().__init__()
        self.delta = [delta]  # held by the module around

    def forward(self, weight: Any) -> Any:
        return weight + self.delta[0]


class Adapted(torch.nn.Module):  # type: ignore[misc]
    """As PEFT's ParamWrapper: while what it is around is called, a parameter of that is computed,
    and retained from its first use on.
    """

    def __init__(self, base_layer: Any, name: str) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.name = name
        inner = base_layer.base_layer if isinstance(base_layer, Adapted) else base_layer
        self.inner = [inner]
        self.delta = torch.nn.Parameter(
            0.05
            * torch.randn(getattr(inner, name).shape, generator=torch.Generator().manual_seed(3))
        )

    def forward(self, *args: Any) -> Any:
        parametrize = torch.nn.utils.parametrize
        parametrize.register_parametrization(self.inner[0], self.name, Plus(self.delta))
        try:
            with parametrize.cached():
                return self.base_layer(*args)
        finally:
            parametrize.remove_parametrizations(self.inner[0], self.name, leave_parametrized=False)


def adapt(model: Any, what: str) -> Any:
    for layer in model.model.layers:
        block = layer.mlp
        if what == "experts":
            block.experts = Adapted(Adapted(block.experts, "gate_up_proj"), "down_proj")
        else:
            block.gate = Adapted(block.gate, "weight")
    return model


def merged(model: Any, what: str) -> Any:
    """The same model with the differences added to its parameters, for good."""
    plain = tiny_model("qwen3_moe").train()
    with torch.no_grad():
        for mine, adapted in zip(plain.model.layers, model.model.layers, strict=True):
            if what == "gate":
                mine.mlp.gate.weight += adapted.mlp.gate.delta
            else:
                mine.mlp.experts.down_proj += adapted.mlp.experts.delta
                mine.mlp.experts.gate_up_proj += adapted.mlp.experts.base_layer.delta
    return plain


@pytest.mark.parametrize("what", ["experts", "gate"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_an_adapted_model_replays_as_the_merged_one(
    model: Any, what: str, reentrant: bool | None
) -> None:
    """Loss and gradients are those of the model with the same weights and no adapter, with and
    without checkpointing.
    """
    adapt(model, what)
    plain = merged(model, what)
    routes = recorded(plain).flip(0)
    value, expected = trained(plain, routes)
    if reentrant is not None:
        checkpointing(model, reentrant)

    actual, all_gradients = trained(model, routes)

    assert value == actual
    if what == "gate":
        gates = {
            name.replace(".delta", ".weight"): one
            for name, one in all_gradients.items()
            if name.endswith("gate.delta")
        }
        assert 3 == len(gates)
        assert same({name: expected[name] for name in gates}, gates)
    assert_untouched(model)


def test_the_trial_does_not_cost_the_first_step_its_gradient(model: Any) -> None:
    """A weight that is computed once per call is computed with its graph, whatever a router is
    also tried on.
    """
    adapt(model, "gate")
    routers = find_routers(model)
    assert all(router.path.endswith("mlp.gate.base_layer") for router in routers.all)
    first, second = (_gradients(model, routers) for _ in range(2))

    assert same(first, second)
    assert all(float(first[f"model.layers.{n}.mlp.gate.delta"].norm()) > 0 for n in range(3))


def _gradients(model: Any, routers: Any) -> dict[str, Any]:
    with hf_replay(routers, GOOD):
        loss(model).backward()
    return gradients(model)


def test_a_copy_of_a_block_is_refused(model: Any) -> None:
    """Where a layer holds a block and a trained copy of it, both are named: which one runs is not
    looked up.
    """
    layer = model.model.layers[1]
    layer.mlp = torch.nn.ModuleDict(
        {"original_module": layer.mlp, "copy": tiny_model("qwen3_moe").model.layers[1].mlp}
    )
    with pytest.raises(
        RouterError,
        match=(
            r"Layer 1 of .* has two routers, model.layers.1.mlp.original_module.gate and"
            r" .*copy.gate"
        ),
    ):
        find_routers(model)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}),
        (
            "afmoe",
            {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "head_dim": 8,
                "num_dense_layers": 1,
            },
        ),
        (
            "gemma4_text",
            {
                "num_experts": 8,
                "top_k_experts": 2,
                "enable_moe_block": True,
                "moe_intermediate_size": 24,
                "head_dim": 8,
            },
        ),
    ],
)
def test_routers_of_another_build_replay(family: str, config: dict[str, Any]) -> None:
    """One that is called with a bias, one around a linear layer, one whose sizes have other names:
    self-replay changes no bit.
    """
    relative = of_family(family, **config)
    native = loss(relative)
    native.backward()
    expected = gradients(relative)

    value, actual = trained(relative, recorded(relative))

    assert float(native.detach()) == value
    assert same(expected, actual)
    assert value != trained(relative, recorded(relative).flip(0))[0]
    assert_untouched(relative)


class Copied(torch.nn.Module):  # type: ignore[misc]
    """As PEFT's ModulesToSaveWrapper: a trained copy runs in place of the original."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(original)})

    def forward(self, *args: Any) -> Any:
        return self.modules_to_save["default"](*args)


def test_a_copied_router_replays_as_the_original(model: Any) -> None:
    """The copy that runs has the gradient, and the original none."""
    routes = recorded(model).flip(0)
    value, expected = trained(model, routes)
    for layer in model.model.layers:
        layer.mlp.gate = Copied(layer.mlp.gate)

    actual, all_gradients = trained(model, routes)

    assert value == actual
    for n in range(3):
        gate = f"model.layers.{n}.mlp.gate"
        assert torch.equal(
            expected[f"{gate}.weight"], all_gradients[f"{gate}.modules_to_save.default.weight"]
        )
        assert f"{gate}.original_module.weight" not in all_gradients
    assert_untouched(model)
