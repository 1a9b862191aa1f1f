"""A fault planted in one module of a tiny model is found at its place; rounding, other kernels and
other batches name nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from rollproof.errors import GapError
from rollproof.gap import Localisation, localise
from rollproof.gap.localise.localisation import localisation_lines
from rollproof.reporting.text import text_of

torch = pytest.importorskip("torch", reason="localisation runs models of torch")
pytest.importorskip("transformers", reason="the tiny models are of transformers")

from rollproof.gap.localise.forwards import Forward, hf_forward  # noqa: E402 - it needs torch
from rollproof.replay.hf.model_families import tiny_model  # noqa: E402 - as above
from tests.support.megatron_named import MegatronNamed, megatron_forward  # noqa: E402 - as above
from tests.support.vllm_named import VllmNamed, vllm_forward  # noqa: E402 - as above

IDS = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(0))


@lru_cache
def model(family: str) -> Any:
    return tiny_model(family).eval()


def broken(family: str, plant: Callable[[Any], None], dtype: Any = None) -> Any:
    """A copy with a fault, in ``dtype`` where one is given."""
    out = copy.deepcopy(model(family))
    with torch.no_grad():
        plant(out)
    return out if dtype is None else out.to(dtype)


def scaled(path: str, factor: float = 1.1, expert: int | None = None) -> Callable[[Any], None]:
    """A parameter times ``factor``, of one expert where there are several."""

    def plant(own: Any) -> None:
        parameter = own.get_parameter(path)
        (parameter if expert is None else parameter[expert]).mul_(factor)

    return plant


def noisy(path: str, part: float = 0.1) -> Callable[[Any], None]:
    """A parameter with noise of ``part`` of its own spread."""

    def plant(own: Any) -> None:
        parameter = own.get_parameter(path)
        parameter.add_(
            part
            * parameter.std()
            * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
        )

    return plant


PLACES = [
    ("qwen3_moe", scaled("model.layers.1.input_layernorm.weight"), "layer 1 attn_norm", ()),
    ("qwen3_moe", noisy("model.layers.2.self_attn.q_proj.weight"), "layer 2 q", ()),
    ("qwen3_moe", noisy("model.layers.0.self_attn.v_proj.weight"), "layer 0 v", ()),
    ("qwen3_moe", scaled("model.layers.1.self_attn.k_norm.weight"), "layer 1 k_norm", ()),
    ("qwen3_moe", noisy("model.layers.1.self_attn.o_proj.weight"), "layer 1 o", ()),
    ("qwen3_moe", scaled("model.layers.0.post_attention_layernorm.weight"), "layer 0 mlp_norm", ()),
    ("qwen3_moe", noisy("model.layers.2.mlp.gate.weight"), "layer 2 router", ()),
    (
        "qwen3_moe",
        scaled("model.layers.1.mlp.experts.down_proj", expert=3),
        "layer 1 experts",
        (3,),
    ),
    (
        "qwen3_moe",
        scaled("model.layers.2.mlp.experts.gate_up_proj", expert=0),
        "layer 2 experts",
        (0,),
    ),
    ("qwen3_moe", scaled("model.norm.weight"), "final_norm", ()),
    ("qwen3_moe", noisy("lm_head.weight"), "head", ()),
    ("qwen3_moe", noisy("model.embed_tokens.weight"), "embed", ()),
    ("qwen3", noisy("model.layers.1.mlp.down_proj.weight"), "layer 1 down", ()),
    ("qwen3", noisy("model.layers.2.mlp.up_proj.weight"), "layer 2 up", ()),
    ("qwen3", noisy("model.layers.0.self_attn.k_proj.weight"), "layer 0 k", ()),
    ("qwen3", scaled("model.layers.2.post_attention_layernorm.weight"), "layer 2 mlp_norm", ()),
    (
        "deepseek_v3",
        noisy("model.layers.1.self_attn.kv_b_proj.weight"),
        "layer 1 self_attn.kv_b_proj",
        (),
    ),
    (
        "deepseek_v3",
        noisy("model.layers.2.mlp.shared_experts.down_proj.weight"),
        "layer 2 mlp.shared_experts.down_proj",
        (),
    ),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "plant", "place", "experts"), PLACES, ids=[f"{row[0]}-{row[2]}" for row in PLACES]
)
def test_a_fault_is_found_at_its_place(
    family: str, plant: Any, place: str, experts: tuple[int, ...], dtype: str
) -> None:
    """One parameter that is off by a tenth is named, with its expert, and nothing else is; beside
    the rounding of bf16 as well.
    """
    found = localise(model(family), broken(family, plant, getattr(torch, dtype)), IDS)
    # a block holds its leaves' difference as well, and is told behind them
    sites = [str(gap.site) for gap in found.sites if gap.parts]
    assert place == sites[0]
    assert found.found is not None
    assert experts == found.found.experts
    outer = {
        "layer 2 shared",
        f"{place.partition(' r')[0]} gates",
        f"{place.partition(' r')[0]} selection",
    }
    assert set(sites[1:]) <= outer


def rope(own: Any) -> None:
    own.model.rotary_emb.inv_freq.mul_(1.3)


def window(own: Any) -> None:
    own.model.layers[1].self_attn.scaling *= 1.2


def unnormalised(own: Any) -> None:
    own.model.layers[1].mlp.gate.norm_topk_prob = False


def no_bias(own: Any) -> None:
    own.model.layers[1].mlp.gate.e_score_correction_bias.mul_(-3)


def residual(own: Any) -> None:
    layer = own.model.layers[1]
    layer.register_forward_hook(lambda module, args, output: output * 1.05)


@pytest.mark.parametrize(
    ("family", "plant", "place", "module"),
    [
        ("qwen3_moe", rope, "layer 0 attention", "before model.layers.0.self_attn.o_proj"),
        ("qwen3_moe", window, "layer 1 attention", "before model.layers.1.self_attn.o_proj"),
        ("qwen3_moe", unnormalised, "layer 1 gates", "model.layers.1.mlp.gate"),
        ("deepseek_v3", no_bias, "layer 1 selection", "model.layers.1.mlp.gate"),
        ("qwen3", residual, "layer 2 residual", "before model.layers.2.input_layernorm"),
    ],
)
def test_what_stands_between_modules_is_found_too(
    family: str, plant: Any, place: str, module: str
) -> None:
    """Rotation, attention, the weights and the choice of a router, and the residual are no modules
    of their own: their place is named.
    """
    found = localise(model(family), broken(family, plant), IDS)
    assert (place, module) == (
        str(next(gap.site for gap in found.sites if gap.parts)),
        found.partings[0].module,
    )


def test_two_faults_are_both_found() -> None:
    """A second fault after the first is reported too, since the effect of the first is removed."""

    def plant(own: Any) -> None:
        noisy("model.layers.0.self_attn.o_proj.weight")(own)
        scaled("model.layers.2.mlp.experts.down_proj", expert=5)(own)
        scaled("model.layers.2.mlp.experts.down_proj", expert=1)(own)

    found = localise(model("qwen3_moe"), broken("qwen3_moe", plant), IDS)
    assert [("o", ()), ("experts", (1, 5))] == [
        (parting.role, parting.experts) for parting in found.partings
    ]
    assert (
        "layer 2 experts, experts 1, 5: given the other side's values" in found.partings[1].because
    )


def _sdpa(own: Any) -> Any:
    out = copy.deepcopy(own)
    out.set_attn_implementation("sdpa")
    out.set_experts_implementation("eager")
    return out


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3", "deepseek_v3", "gpt_oss", "mixtral"])
def test_rounding_names_nothing(family: str) -> None:
    """Equal weights in float32, bf16 and fp16 on either side part nowhere."""
    own = model(family)
    for left, right in (
        (None, None),
        (None, torch.bfloat16),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16),
        (None, torch.float16),
    ):
        first, second = (
            own if kind is None else copy.deepcopy(own).to(kind) for kind in (left, right)
        )
        assert localise(first, second, IDS).found is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_kernels_and_other_batches_name_nothing(dtype: str) -> None:
    """Another attention kernel, other products of the experts, another order of the batch, and
    padding part nowhere.
    """
    own = copy.deepcopy(model("qwen3_moe")).to(getattr(torch, dtype))
    other = _sdpa(own)
    turned = torch.tensor([2, 0, 3, 1])
    order = np.concatenate(
        [np.arange(24) + 24 * int((turned == line).nonzero()) for line in range(4)]
    )
    padded, mask = torch.zeros(4, 30, dtype=torch.int64), torch.zeros(4, 30, dtype=torch.int64)
    padded[:, 6:], mask[:, 6:] = IDS, 1
    for second in (
        hf_forward(other, IDS),
        hf_forward(other, IDS[turned], order=order),
        hf_forward(other, padded, mask),
    ):
        found = localise(hf_forward(own, IDS), second)
        assert found.found is None
        assert 96 == found.n_tokens


def test_a_wrong_order_of_the_tokens_is_seen_at_once() -> None:
    """Other tokens in the rows part at the embedding: nothing is matched by chance."""
    found = localise(hf_forward(model("qwen3"), IDS), hf_forward(model("qwen3"), IDS.flip(0)))
    assert found.found is not None
    assert "embed" == found.found.role


def test_names_and_layouts_of_megatron_are_matched() -> None:
    """Fused projections, sequence-first activations and a dense map of routes are compared with
    HF's, site by site, and agree.
    """
    own = MegatronNamed(model("qwen3_moe"))
    found = localise(hf_forward(model("qwen3_moe"), IDS), megatron_forward(own, IDS))
    assert found.found is None
    assert ("router", "experts") == tuple(name.split()[-1] for name in found.unmatched[:2])
    matched = {str(gap.site): gap.other_module for gap in found.sites}
    assert (
        "decoder.layers.1.self_attention.linear_qkv"
        == matched["layer 1 q"]
        == matched["layer 1 k"]
        == matched["layer 1 v"]
    )
    assert {
        "layer 1 gates",
        "layer 1 selection",
        "layer 1 attention",
        "layer 2 mlp",
        "final_norm",
        "head",
        "embed",
    } <= set(matched)


@pytest.mark.parametrize(
    ("path", "place", "experts"),
    [
        ("decoder.layers.1.self_attention.linear_proj.weight", "layer 1 o", ()),
        ("decoder.layers.2.pre_mlp_layernorm.weight", "layer 2 mlp_norm", ()),
        ("decoder.layers.0.mlp.experts.6.down", "layer 0 mlp", (6,)),
        ("decoder.layers.1.self_attention.q_layernorm.weight", "layer 1 q_norm", ()),
        ("decoder.final_layernorm.weight", "final_norm", ()),
    ],
)
def test_a_fault_of_the_megatron_side_is_found(
    path: str, place: str, experts: tuple[int, ...]
) -> None:
    """A fault in a model of other names and layouts is found at its place, with the names of both
    sides.
    """
    own = MegatronNamed(model("qwen3_moe"))
    with torch.no_grad():
        own.get_parameter(path).mul_(1.1)
    found = localise(hf_forward(model("qwen3_moe"), IDS), megatron_forward(own, IDS))
    assert [place] == [str(gap.site) for gap in found.sites if gap.parts]
    assert found.found is not None
    assert experts == found.found.experts
    assert path.startswith((found.found.other_module, "decoder.layers.0.mlp"))


def test_a_fused_projections_part_is_told() -> None:
    """Of a fused projection the part is named that is wrong: the keys of one group."""
    own = MegatronNamed(model("qwen3_moe"))
    with torch.no_grad():
        own.decoder["layers"][1].self_attention.linear_qkv.weight.reshape(2, 4, 8, -1)[1, 2].mul_(
            1.2
        )
    found = localise(hf_forward(model("qwen3_moe"), IDS), megatron_forward(own, IDS))
    assert ["layer 1 k"] == [str(gap.site) for gap in found.sites if gap.parts]


@pytest.mark.parametrize(
    ("path", "part", "place"),
    [
        ("", slice(0), ""),
        ("model.layers.1.self_attn.qkv_proj.weight", slice(40, 48), "layer 1 k"),
        ("model.layers.2.mlp.gate_up_proj.weight", slice(48, None), "layer 2 up"),
        ("model.layers.1.input_layernorm.weight", slice(None), "layer 1 attn_norm"),
        ("model.layers.2.post_attention_layernorm.weight", slice(None), "layer 2 mlp_norm"),
        ("model.norm.weight", slice(None), "final_norm"),
    ],
)
def test_names_and_layouts_of_vllm_are_matched(path: str, part: slice, place: str) -> None:
    """Flat tokens, fused projections and norms that add the residual in place agree with HF's; a
    fault in one part of them is found.
    """
    own = VllmNamed(model("qwen3"))
    with torch.no_grad():
        if path:
            own.get_parameter(path)[part].mul_(1.2)
    found = localise(hf_forward(model("qwen3"), IDS), vllm_forward(own, IDS))
    assert [place] * bool(place) == [str(gap.site) for gap in found.sites if gap.parts]
    assert () == found.unmatched
    assert (
        "model.layers.1.self_attn.qkv_proj"
        == {str(gap.site): gap.other_module for gap in found.sites}["layer 1 v"]
    )


def test_growth_is_shown_with_replay_and_without() -> None:
    """In bf16 experts flip, and the difference of the residual grows; with the first side's experts
    replayed it grows less.
    """
    second = copy.deepcopy(model("qwen3_moe")).to(torch.bfloat16)
    found = localise(
        model("qwen3_moe"),
        second,
        torch.randint(3, 128, (8, 64), generator=torch.Generator().manual_seed(1)),
    )
    carried = [gap.carried for gap in found.growth]
    assert carried == sorted(carried)
    assert found.growth[-1].replayed < 0.9 * found.growth[-1].carried
    assert all(0.1 < gap.carried / gap.carried_rounding < 2 for gap in found.growth)


def test_a_side_that_must_not_be_led() -> None:
    """With its own values, a second side shows the first place alone; later ones inherit it."""
    found = localise(
        model("qwen3"),
        broken("qwen3", noisy("model.layers.1.mlp.up_proj.weight", 0.3)),
        IDS,
        led=False,
    )
    assert ["up"] == [parting.role for parting in found.partings]
    assert not found.led
    assert sum(gap.parts for gap in found.sites) > 5


def test_reruns_of_ones_own_count_as_rounding() -> None:
    """Differences that a rerun of the first side shows are rounding: noise of that size is not
    blamed, more of it is.
    """

    def shaken(size: float, seed: int) -> Any:
        return broken("qwen3", noisy("model.layers.1.self_attn.o_proj.weight", size))

    rerun = hf_forward(shaken(0.02, 1), IDS)
    assert localise(model("qwen3"), shaken(0.02, 2), IDS, reruns=[rerun]).found is None
    found = localise(model("qwen3"), shaken(0.1, 2), IDS, reruns=[rerun]).found
    assert found is not None
    assert "o" == found.role


def test_nothing_is_left_on_the_models() -> None:
    """No hook and no change stays behind, also where the run fails."""
    first, second = copy.deepcopy(model("qwen3_moe")), broken("qwen3_moe", noisy("lm_head.weight"))
    before = [parameter.clone() for parameter in second.parameters()]
    logits = second(IDS).logits
    localise(first, second, IDS)
    failing = Forward(
        model=second, run=lambda own: own(IDS.float()), size=96, rows=np.arange(96), name="broken"
    )
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        localise(first, failing, IDS)
    assert all(torch.equal(a, b) for a, b in zip(before, second.parameters(), strict=True))
    assert torch.equal(logits, second(IDS).logits)
    assert 0 == sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for side in (first, second)
        for module in side.modules()
    )


def test_nan_is_beyond_rounding() -> None:
    """A module that returns NaN is named."""
    found = localise(
        model("qwen3"),
        broken("qwen3", scaled("model.layers.1.mlp.gate_proj.weight", float("nan"))),
        IDS,
    )
    assert found.found is not None
    assert (1, "gate") == (found.found.layer, found.found.role)
    assert (
        json.loads(json.dumps(found.to_dict(), allow_nan=False))["found"]["module"]
        == "model.layers.1.mlp.gate_proj"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3, 4, IDS), "must be a Forward or a model of torch, not int"),
        ((torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), "Two models need input_ids"),
        (
            (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), IDS[0]),
            r"input_ids must be \(batch, width\)",
        ),
        ((torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), IDS, IDS[:2]), "must have one shape"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    """Sides of a wrong kind or shape are errors of ours."""
    with pytest.raises(GapError, match=words):
        localise(*arguments)


def test_sides_of_other_sizes_are_refused() -> None:
    """Another number of tokens, none at all, or nothing in common cannot be compared."""
    full = hf_forward(model("qwen3"), IDS)
    with pytest.raises(GapError, match="compares 96 tokens and HF 48"):
        localise(full, hf_forward(model("qwen3"), IDS[:2]))
    with pytest.raises(GapError, match="There are no tokens"):
        localise(hf_forward(model("qwen3"), IDS, IDS * 0), hf_forward(model("qwen3"), IDS, IDS * 0))
    other = torch.nn.Linear(24, 4)
    alien = Forward(
        model=other, run=lambda own: own(IDS.float()), size=96, rows=np.arange(96), name="alien"
    )
    with pytest.raises(GapError, match="no module in common"):
        localise(full, alien)


def test_lines_fit_a_terminal_and_tell_the_place() -> None:
    """The lines name the place and both modules, show the growth, and are no longer than 120
    columns.
    """
    own = MegatronNamed(model("qwen3_moe"))
    with torch.no_grad():
        own.get_parameter("decoder.layers.1.self_attention.linear_proj.weight").mul_(1.1)
    text = text_of(
        localisation_lines(
            localise(hf_forward(model("qwen3_moe"), IDS), megatron_forward(own, IDS))
        )
    )
    assert "parts at layer 1 o: given the other side's values, 96 of 96 tokens" in text
    assert "model.layers.1.self_attn.o_proj and decoder.layers.1.self_attention.linear_proj" in text
    assert "not compared: layer 0 router" in text
    assert max(map(len, text.splitlines())) <= 120
    clean: Localisation = localise(model("qwen3"), model("qwen3"), IDS)
    assert "nowhere do they part" in text_of(localisation_lines(clean))
