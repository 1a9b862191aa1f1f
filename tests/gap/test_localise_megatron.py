"""A fault planted in a real megatron-core model is found at its place, against HF transformers,
with routing replay and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollproof.errors import GapError
from rollproof.gap import localise

torch = pytest.importorskip("torch", reason="localisation runs models of torch")
pytest.importorskip("transformers", reason="the tiny models are of transformers")
pytest.importorskip(
    "megatron.core", reason="`pip install --no-deps megatron-core==0.16.1` (Python 3.11)"
)

from rollproof.gap.localise.forwards import hf_forward, megatron_forward  # noqa: E402 - it needs torch
from tests.support.tiny_rollouts import checkpoint, load  # noqa: E402 - as above

pytestmark = pytest.mark.filterwarnings("ignore")  # what megatron-core warns of is not ours
IDS = torch.randint(3, 64, (6, 40), generator=torch.Generator().manual_seed(0))
LAYERS = "decoder.layers."


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A Qwen3-MoE of transformers, and its weights in megatron-core's GPT: one rank on gloo, with
    RouterReplay.
    """
    from rollproof.core.replay_contract import Recompute
    from rollproof.replay.megatron.checkpoint import checkpoint_setup
    from rollproof.replay.megatron.cuda_stand_in import cpu_megatron
    from rollproof.replay.megatron.megatron_model import build, configuration, parallel

    path = checkpoint(tmp_path_factory.mktemp("gap") / "model")
    setup = checkpoint_setup((Path(path),), dtype="float32")
    # before megatron-core's devices are replaced, since those of a loading checkpoint would be too
    first = load(path)
    with ExitStack() as life:
        life.enter_context(cpu_megatron())
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        life.callback(torch.distributed.destroy_process_group)
        rank = life.enter_context(parallel(setup))
        chunks = build(
            setup, configuration(setup, Recompute.NONE, {"moe_enable_routing_replay": True})
        )
        chunks.load(setup, rank, 0)
        yield first, chunks.models[0].eval()


@pytest.fixture
def planted(sides: tuple[Any, Any]) -> Iterator[Any]:
    """Changes a parameter of the Megatron side, and puts it back."""
    originals: list[tuple[Any, Any]] = []

    def plant(path: str, change: Any) -> None:
        parameter = sides[1].get_parameter(path)
        originals.append((parameter, parameter.detach().clone()))
        with torch.no_grad():
            change(parameter)

    yield plant
    for parameter, before in originals:
        with torch.no_grad():
            parameter.copy_(before)


def noisy(parameter: Any) -> None:
    parameter.add_(
        0.1
        * parameter.std()
        * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    )


def scaled(parameter: Any) -> None:
    parameter.mul_(1.1)


def test_equal_weights_part_nowhere(sides: tuple[Any, Any]) -> None:
    """The two frameworks agree within rounding at every place that they share, also with padding;
    few places are not shared.
    """
    found = localise(hf_forward(sides[0], IDS), megatron_forward(sides[1], IDS))
    assert found.found is None
    assert {
        f"layer 1 {role}"
        for role in (
            "attn_norm",
            "q",
            "k",
            "v",
            "q_norm",
            "o",
            "mlp_norm",
            "selection",
            "gates",
            "mlp",
        )
    } <= {str(gap.site) for gap in found.sites}
    mask = torch.ones_like(IDS)
    mask[::2, 31:] = 0
    padded = localise(hf_forward(sides[0], IDS, mask), megatron_forward(sides[1], IDS, mask))
    assert (None, 6 * 40 - 3 * 9) == (padded.found, padded.n_tokens)


@pytest.mark.parametrize("replay", [False, True], ids=["native", "replayed"])
@pytest.mark.parametrize(
    ("path", "change", "places", "experts"),
    [
        (f"{LAYERS}1.input_layernorm.weight", scaled, {"layer 1 attn_norm"}, ()),
        (f"{LAYERS}0.pre_mlp_layernorm.weight", scaled, {"layer 0 mlp_norm"}, ()),
        ("decoder.final_layernorm.weight", scaled, {"final_norm"}, ()),
        (f"{LAYERS}1.self_attention.linear_proj.weight", noisy, {"layer 1 o"}, ()),
        (
            f"{LAYERS}0.self_attention.linear_qkv.weight",
            noisy,
            {"layer 0 q", "layer 0 k", "layer 0 v"},
            (),
        ),
        (f"{LAYERS}1.mlp.experts.local_experts.5.linear_fc2.weight", scaled, {"layer 1 mlp"}, (5,)),
        (f"{LAYERS}0.mlp.experts.local_experts.2.linear_fc1.weight", noisy, {"layer 0 mlp"}, (2,)),
        (f"{LAYERS}1.mlp.router.weight", noisy, {"layer 1 selection", "layer 1 gates"}, ()),
    ],
)
def test_a_fault_of_megatron_is_found(
    sides: tuple[Any, Any],
    planted: Any,
    path: str,
    change: Any,
    places: set[str],
    experts: tuple[int, ...],
    replay: bool,
) -> None:
    """A norm, a projection, an expert or a router that is off by a tenth is named by both sides'
    modules, and nothing else is.
    """
    planted(path, change)
    found = localise(hf_forward(sides[0], IDS), megatron_forward(sides[1], IDS), replay=replay)
    assert {str(gap.site) for gap in found.sites if gap.parts} <= places
    assert found.found is not None
    assert experts == found.found.experts
    assert path.startswith(
        (found.found.other_module, found.found.other_module.replace(".mlp", ".mlp.experts"))
    )
    assert replay == found.replayed
    if replay:
        assert found.growth[-1].replayed > 0


def test_replay_leaves_nothing_behind(sides: tuple[Any, Any]) -> None:
    """After a localisation with replay the routers choose by themselves; nothing is installed."""
    from rollproof.replay.megatron.replay_code import CoreReplay

    before = sides[1](IDS, torch.arange(40)[None].expand(6, 40), None)
    localise(hf_forward(sides[0], IDS), megatron_forward(sides[1], IDS))
    assert {0} == set(CoreReplay().left().values())
    assert torch.equal(before, sides[1](IDS, torch.arange(40)[None].expand(6, 40), None))


def test_padding_on_the_left_is_refused(sides: tuple[Any, Any]) -> None:
    """Tokens behind left padding would see it: that is said."""
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    with pytest.raises(GapError, match="Padding must be on the right"):
        megatron_forward(sides[1], IDS, mask)
