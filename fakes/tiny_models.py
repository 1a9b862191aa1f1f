"""Random checkpoints of released MoE families, small enough that real engines and trainers run them
on a CPU in seconds.

Random weights as a library initialises them make useless tests: the next token is uniform over the
vocabulary, and every token goes to almost the same experts. Here the head is sharpened until the
entropy of the next token is that of a real model, the routers' logits have a spread of their own,
and near-ties between experts can be planted. A checkpoint is a folder with ``config.json`` and
safetensors, no tokenizer; one seed gives one checkpoint, bit for bit. Needs torch and transformers,
and downloads nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollproof.errors import UsageError

__all__ = [
    "FAMILIES",
    "TinyFamily",
    "family_named",
    "make_checkpoint",
    "make_pair",
    "second_version",
]

_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        # one token in 16, so that random weights end a call by themselves
        "eos_token_id": list(range(2, 512, 16)),
        "pad_token_id": 0,
    }
)
_ENTROPY = 1.1
"""Mean entropy of the next token in nats, within the 0.3 to 2 that policies in RL training show."""
_ROUTER_SPREAD = 1.5
"""Standard deviation of a router's logits."""
_GAIN = 1.3
"""Matrices are drawn from N(0, (gain / sqrt(inputs))^2): large enough that the experts of a token
depend on the tokens before it.
"""
_PROBES = 8
_PROBE_LENGTH = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyFamily:
    """An architecture of transformers at a tiny size.

    ``moe_layers`` are global layer indexes; empty for a dense model.
    """

    name: str
    about: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    moe_layers: tuple[int, ...] = (0, 1, 2, 3)
    hybrid: bool = False


_QWEN_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "routed_scaling_factor": 2.5,
    "num_key_value_heads": 4,
}
_QWEN_NEXT = {
    **_QWEN_MOE,
    "shared_expert_intermediate_size": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
_AFMOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "num_shared_experts": 1,
    "num_dense_layers": 1,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "mup_enabled": False,
    # vLLM reads these from the released checkpoints; transformers, whose router is fixed, has no
    # such fields
    "score_func": "sigmoid",
    "route_norm": True,
}

_MELLUM = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in (("sliding_attention", 1e4), ("full_attention", 5e5))
    },
}

FAMILIES: Mapping[str, TinyFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            TinyFamily(
                name="qwen3_moe",
                about="Qwen3-MoE: every layer is MoE, softmax router",
                sizes=_QWEN_MOE,
            ),
            TinyFamily(
                name="olmoe",
                about="OLMoE: every layer is MoE, weights not renormalised",
                sizes={"num_experts": 8, "num_experts_per_tok": 2},
            ),
            TinyFamily(
                name="deepseek_v3",
                about=(
                    "DeepSeek-V3: the first layer is dense, sigmoid router with bias and groups,"
                    " latent attention"
                ),
                sizes=_DEEPSEEK,
                moe_layers=(1, 2, 3),
            ),
            TinyFamily(
                name="mixtral",
                about="Mixtral: every layer is MoE",
                sizes={"num_local_experts": 8, "num_experts_per_tok": 2},
            ),
            TinyFamily(
                name="qwen3_next",
                about=(
                    "Qwen3-Next: linear and full attention take turns, so there are several groups"
                    " of KV cache"
                ),
                sizes=_QWEN_NEXT,
                hybrid=True,
            ),
            TinyFamily(
                name="afmoe",
                about=(
                    "AFMoE: sliding and full attention take turns, so there are several groups of"
                    " KV cache; the first layer is dense"
                ),
                sizes=_AFMOE,
                moe_layers=(1, 2, 3),
                hybrid=True,
            ),
            TinyFamily(
                name="mellum",
                about=(
                    "Mellum 2: Qwen3-MoE whose sliding and full attention take turns, with a KV"
                    " cache each; the first layer is dense"
                ),
                sizes=_MELLUM,
                moe_layers=(1, 2, 3),
                hybrid=True,
            ),
            TinyFamily(name="qwen3", about="Qwen3: dense, no router", moe_layers=()),
        )
    }
)
"""Every family by its name, which is the ``model_type`` of its config."""


def family_named(name: str) -> TinyFamily:
    """Return the family of that name. Raises ``UsageError`` for an unknown one."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise UsageError(
            f"No family of tiny models is named {name!r}; choose among {list(FAMILIES)}."
        ) from None


def make_checkpoint(
    folder: str | Path,
    family: str = "qwen3_moe",
    *,
    seed: int = 0,
    dtype: str = "float32",
    near_ties: float = 0.0,
    **sizes: Any,
) -> Path:
    """Write a checkpoint of ``family`` to ``folder`` and return it.

    ``near_ties`` plants a pair of experts in every router with scores that differ by about this
    fraction: if the two are at the border of the top-k, coarser rounding decides (bfloat16: about
    4e-3). ``sizes`` are fields of the config, in place of the family's. Raises ``UsageError`` for
    an unknown family, or a folder with other files.
    """
    import torch

    kind = family_named(family)
    path = _empty_folder(Path(folder))
    with _seeded(torch, seed):
        model = _random_model(kind, sizes)
        _sharpen_head(model)
    if near_ties:
        _plant_near_ties(model, near_ties)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def make_pair(
    folder: str | Path,
    family: str = "qwen3_moe",
    *,
    seed: int = 0,
    dtype: str = "float32",
    near_ties: float = 0.0,
) -> tuple[Path, Path]:
    """Write two checkpoints of one policy: ``folder/B`` is ``folder/A`` after an update."""
    base = Path(folder)
    first = make_checkpoint(base / "A", family, seed=seed, dtype=dtype, near_ties=near_ties)
    return first, second_version(first, base / "B", seed=seed + 1)


def second_version(first: str | Path, folder: str | Path, *, seed: int = 1) -> Path:
    """Write a checkpoint with other embeddings and norms than the model in ``first``.

    Engines pack, transpose or fuse matrices, but keep embeddings and norms as loaded, so those can
    be changed in place on any device. Embeddings get noise of half their spread, norms of a fifth
    of their size, so that nearly every token has other values under the second version. Raises
    ``UsageError`` for tied embeddings: the head would change with them.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(first, dtype="auto", local_files_only=True)
    if getattr(model.config, "tie_word_embeddings", False):
        raise UsageError(
            f"The model in {first} ties its head to its embeddings: another version of it cannot be"
            " made in this way."
        )
    with _seeded(torch, seed), torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.add_(
                    (0.5 * parameter.float().std() * torch.randn(parameter.shape)).to(
                        parameter.dtype
                    )
                )
            elif name.endswith("norm.weight"):
                parameter.add_(
                    (0.2 * parameter.float().abs().mean() * torch.randn(parameter.shape)).to(
                        parameter.dtype
                    )
                )
    path = _empty_folder(Path(folder))
    model.save_pretrained(path)
    return path


def _empty_folder(path: Path) -> Path:
    """Create the folder, or replace an earlier checkpoint of ours.

    Raises ``UsageError`` for a folder with other files.
    """
    if path.exists():
        other_files = sorted(
            entry.name for entry in path.iterdir() if entry.suffix not in (".json", ".safetensors")
        )
        if other_files:
            raise UsageError(
                f"{path} contains {other_files[:3]}, which are not parts of a tiny model. Name a"
                " folder that is empty or does not exist."
            )
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


@contextmanager
def _seeded(torch: Any, seed: int) -> Iterator[None]:
    """Seed torch's random numbers inside, and restore the caller's state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _random_model(family: TinyFamily, sizes: Mapping[str, Any]) -> Any:
    """Return the family's model with random weights, in float32 and evaluation mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family.name, **{**_SIZES, **family.sizes, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    routers = {id(parameter) for parameter in _routers(model).values()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            # inputs are the last dimension, of plain matrices and of stacked experts
            scale = (
                1.0
                if "embed" in name
                else (_ROUTER_SPREAD if id(parameter) in routers else _GAIN)
                * parameter.shape[-1] ** -0.5
            )
            parameter.copy_(torch.randn(parameter.shape) * scale)
        for name, buffer in [*model.named_buffers(), *model.named_parameters()]:
            if "bias" in name and ("score" in name or "expert_bias" in name):
                buffer.copy_(0.1 * torch.randn(buffer.shape))
    return model


def _routers(model: Any) -> dict[int, Any]:
    """Return the weight ``(experts, hidden)`` of each MoE layer's router, by layer."""
    routers = {}
    for layer, block in enumerate(model.model.layers):
        for name, parameter in block.named_parameters():
            if (
                name.endswith(("gate.weight", "router.weight", "router.gate.weight"))
                and parameter.dim() == 2
                and parameter.shape[0] > 1
            ):
                routers[layer] = parameter
    return routers


def _sharpen_head(model: Any) -> None:
    """Scale the head until the mean entropy of the next token is ``_ENTROPY``.

    The mean is over sequences that the model itself samples.
    """
    import torch

    head = model.lm_head.weight
    categorical: Any = torch.distributions.Categorical  # some releases of torch annotate it partly
    with torch.no_grad():
        # the second round samples its sequences with the head of the first
        for _ in range(2):
            logits = model(_sampled(model)).logits.flatten(0, 1).float()
            scale, low, high = 1.0, 1e-3, 1e3
            for _ in range(40):
                scale = (low * high) ** 0.5
                spread = categorical(logits=scale * logits).entropy().mean()
                low, high = (scale, high) if spread > _ENTROPY else (low, scale)
            head.mul_(scale)


def _sampled(model: Any) -> Any:
    """Return ids ``(probes, length)``: random prompts, continued by the model."""
    import torch

    ids = torch.randint(3, model.config.vocab_size, (_PROBES, 8))
    while ids.shape[1] < _PROBE_LENGTH:
        probabilities = torch.softmax(model(ids, use_cache=False).logits[:, -1].float(), -1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1)], 1)
    return ids


def _plant_near_ties(model: Any, size: float) -> None:
    """Give experts 0 and 1 of every router logits that differ by the fraction ``size``."""
    import torch

    with torch.no_grad():
        for weight in _routers(model).values():
            weight[1] = weight[0] * (1 + size)
