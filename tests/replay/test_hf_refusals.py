"""What hf_replay refuses: routes, masks and models that it could only replay wrongly."""

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

from rollproof.errors import ReplayError, RouterError, RoutesError  # noqa: E402
from rollproof.replay.hf import find_routers, hf_replay  # noqa: E402
from rollproof.replay.hf.model_families import tiny_model  # noqa: E402
from tests.support.hf_models import GOOD, IDS, ROWS, assert_untouched, loss, trained  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
    pytest.mark.usefixtures("quiet_transformers"),
]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (GOOD[:, :, :1], "Routes have 1 columns, but the model runs top_k=2"),
        (GOOD.repeat(2, axis=2), "Routes have 4 columns"),
        (
            GOOD[:, :2],
            r"Routes have 2 layers; the model has 3, 3 of them with a router, \[0, 1, 2\]",
        ),
        (GOOD.astype(float), "Routes are of torch.float64, but expert ids are integers"),
        (GOOD > 0, "Routes are of torch.bool"),
        (GOOD - 1, r"66 of 66 rows name experts outside of 0 to 7 \(row 0 of layer 0: \[-1, 0\]"),
        (GOOD + 7, "66 of 66 rows name experts outside of 0 to 7"),
        (GOOD * 0, r"66 of 66 rows are all zero \(expert 0, top_k times\).*They are padding"),
        (GOOD * 0 + 3, "66 of 66 rows name one expert twice"),
        (GOOD[:0], "Routes have no rows"),
        (GOOD * 0 - 1, "Every row is free"),
        (np.where(np.arange(3)[:, None] == 1, -1, GOOD), r"All rows of layers \[1\] are -1"),
        (
            GOOD[0],
            r"Routes are \(rows, layers, top_k\) or \(batch, width, layers, top_k\), not \(3, 2\)",
        ),
        (None, "Routes must be an array or a tensor of integers, not NoneType"),
        ([[["a"]]], "Routes must be an array or a tensor of integers, not list"),
        (
            np.ma.masked_array(GOOD, mask=GOOD == 1),
            "Routes are a masked array, and its masked values would be replayed",
        ),
        (torch.from_numpy(GOOD).to_sparse(), "Routes are a torch.sparse_coo tensor"),
        (torch.from_numpy(GOOD).to("meta"), "Routes are a meta tensor"),
    ],
)
def test_bad_routes_are_refused_before_anything_runs(model: Any, routes: Any, message: str) -> None:
    """Each defect is reported with the place and the likely cause; the model is not touched."""
    with pytest.raises(RoutesError, match=message):
        hf_replay(model, routes)
    assert_untouched(model)


def test_a_bad_row_that_is_masked_out_is_accepted(model: Any) -> None:
    """Zeros in padding are accepted if the mask excludes them, and reported otherwise."""
    routes = GOOD.copy()
    routes[5:] = 0

    assert trained(model, routes, mask=np.arange(ROWS) < 5)[0] > 0
    with pytest.raises(
        RoutesError, match=r"3 of 66 rows are all zero .*row 5 of layer 0: \[0, 0\]"
    ):
        hf_replay(model, routes, np.arange(ROWS) < 6)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones(3, dtype=bool), r"The shape of the mask is \(3,\), that of the routes \(22,\)"),
        (np.ones(ROWS), "The mask is of torch.float64"),
        ("all", "The mask must be an array or a tensor, one value for each row, not str"),
        ([[1], [1, 1]], "The mask must be an array or a tensor, one value for each row, not list"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(model: Any, mask: Any, message: str) -> None:
    """A mask of other places, or one that is additive, is not taken for a mask of rows."""
    with pytest.raises(RoutesError, match=message):
        hf_replay(model, GOOD, mask)


def test_a_mask_of_another_batch_is_refused(model: Any) -> None:
    """As many places in another shape, such as sequence-major ones, are other rows; a flat mask is
    one of the flattened batch.
    """
    batch = GOOD.reshape(*IDS.shape, *GOOD.shape[1:])

    hf_replay(model, batch, torch.ones(IDS.numel(), dtype=torch.bool))
    with pytest.raises(
        RoutesError, match=r"The shape of the mask is \(11, 2\), that of the routes \(2, 11\)"
    ):
        hf_replay(model, batch, torch.ones(IDS.T.shape, dtype=torch.bool))


@pytest.mark.parametrize("rows", [5, ROWS + 1])
def test_rows_that_are_not_the_models_are_reported(model: Any, rows: int) -> None:
    """Too few and too many rows stop in the first router, with both numbers; nothing is left."""
    with (
        pytest.raises(ReplayError, match=rf"is given 22 rows, and the routes have {rows}"),
        hf_replay(model, GOOD[np.arange(rows) % ROWS]),
    ):
        loss(model)
    assert_untouched(model)


def test_routes_that_no_router_used_are_reported(model: Any) -> None:
    """A context without a forward, and one in which a layer did not run, end with an error: nothing
    falls back in silence.
    """
    with pytest.raises(ReplayError, match="no router was called"), hf_replay(model, GOOD):
        pass

    def skipped() -> None:
        with hf_replay(model, GOOD):
            model.model.layers[1].forward = lambda hidden_states, **_: hidden_states
            loss(model)

    with pytest.raises(
        ReplayError, match=r"not called equally often \(layer: calls \{0: 1, 1: 0, 2: 1\}\)"
    ):
        skipped()
    del model.model.layers[1].forward
    assert_untouched(model)


def with_two_configurations() -> Any:
    model = torch.nn.Linear(2, 2)
    model.config = transformers.AutoConfig.for_model("musicgen")
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_model("qwen3"), "has no MoE layers"),
        (
            lambda: tiny_model("qwen3_moe", mlp_only_layers=[0, 1, 2]),
            "looks like an MoE block with 8 experts",
        ),
        (lambda: torch.nn.Linear(2, 2), "Linear has no configuration of HF transformers"),
        (lambda: None, "to replay, not a NoneType"),
        (
            lambda: torch.nn.ModuleList([tiny_model("qwen3_moe"), tiny_model("qwen3_moe")]),
            "several stacks of layers with routers",
        ),
        (lambda: torch.compile(tiny_model("qwen3_moe"), backend="eager"), "is compiled"),
        (lambda: with_two_configurations(), "has no configuration of HF transformers"),
    ],
    ids=[
        "dense",
        "all layers dense",
        "no model",
        "nothing",
        "two decoders",
        "compiled",
        "encoder and decoder",
    ],
)
def test_models_without_routers_to_replay_are_refused(make: Any, message: str) -> None:
    """A model in which nothing could be replayed, or more than one thing, is refused as such."""
    with pytest.raises(RouterError, match=message):
        find_routers(make())


def test_parts_without_routers_may_be_compiled(model: Any) -> None:
    """Compiled attention is none of replay's business; a compiled MoE block is refused."""
    model.model.layers[0].self_attn.compile(backend="eager")
    assert 3 == len(find_routers(model).all)
    model.model.layers[0].mlp.compile(backend="eager")
    with pytest.raises(
        RouterError,
        match=r"model.layers.0.mlp is compiled \(torch.compile\) with the routers in it",
    ):
        find_routers(model)


def test_a_router_with_a_hidden_weight_is_refused(model: Any) -> None:
    """A gate whose weight is packed into another shape is not recognised with certainty, and
    neither is one of two.
    """
    gate = model.model.layers[1].mlp.gate
    gate.weight = torch.nn.Parameter(gate.weight.detach().reshape(-1, 1))
    with pytest.raises(
        RouterError,
        match=r"The MoE block model.layers.1.mlp .* has 0 children with a weight \(8, hidden\)",
    ):
        find_routers(model)
    other = tiny_model("qwen3_moe")
    other.model.layers[1].mlp.second = torch.nn.Linear(32, 8)
    with pytest.raises(RouterError, match="has 2 children with a weight"):
        find_routers(other)


def test_sizes_that_differ_from_layer_to_layer_are_refused(model: Any) -> None:
    """Transformers raises for a heterogeneous configuration; so does rollproof."""

    class Heterogeneous:
        def get_text_config(self) -> Any:
            return self

        @property
        def num_experts(self) -> int:
            raise RuntimeError("per-layer attribute")

    model.config = Heterogeneous()
    with pytest.raises(
        RouterError, match=r"Heterogeneous has no one value of \['num_experts', .* for all layers"
    ):
        find_routers(model)


def test_a_block_that_does_not_call_its_router_is_reported(model: Any) -> None:
    """A fused block that never calls its router ends in an error, not in native routing."""
    block = model.model.layers[2].mlp
    block.forward = lambda hidden: hidden
    with (
        pytest.raises(ReplayError, match=r"layer: calls \{0: 1, 1: 1, 2: 0\}"),
        hf_replay(model, GOOD),
    ):
        loss(model)
    del block.forward


def test_a_model_compiled_as_one_graph_is_refused_with_a_remedy(model: Any) -> None:
    """Routers that were found before `torch.compile(fullgraph=True)`: the compiler's error says
    that rollproof replays there.
    """
    routers = find_routers(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with (
        pytest.raises(
            Exception, match=r"(?s)rollproof replays routes here.*without fullgraph=True"
        ),
        hf_replay(routers, GOOD),
    ):
        loss(compiled)
    assert_untouched(model)
