"""A model with Megatron-core's module names and layouts, which computes what a tiny Qwen3-MoE of HF
transformers computes. Needs torch.

Activations are (sequence, batch, hidden), the projections of a group's queries, key and value lie
side by side in one matrix, gate and up are one matrix, and the router hands on a map and a dense
table of weights: what a comparison with HF has to see through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rollproof.gap.localise.forwards import Forward

__all__ = ["MegatronNamed", "megatron_forward"]


class _Config:
    def __init__(self, config: Any) -> None:
        self.num_attention_heads: int = config.num_attention_heads
        self.num_query_groups: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.top_k: int = config.num_experts_per_tok


class _Norm(nn.Module):
    def __init__(self, weight: Any, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.eps = eps

    def forward(self, x: Any) -> Any:
        return self.weight * (
            x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        ).to(x.dtype)


class _Linear(nn.Module):
    """A projection that returns its output and a bias, as Megatron's do."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight), None


class _Attention(nn.Module):
    def __init__(self, own: Any, config: _Config, eps: float) -> None:
        super().__init__()
        groups, size = config.num_query_groups, config.head_dim
        each = config.num_attention_heads // groups
        q = own.q_proj.weight.reshape(groups, each * size, -1)
        k, v = (part.weight.reshape(groups, size, -1) for part in (own.k_proj, own.v_proj))
        self.linear_qkv = _Linear(torch.cat([q, k, v], dim=1).flatten(0, 1))
        self.q_layernorm, self.k_layernorm = (
            _Norm(own.q_norm.weight, eps),
            _Norm(own.k_norm.weight, eps),
        )
        self.linear_proj = _Linear(own.o_proj.weight)
        self.shape = (groups, each, size)

    def forward(self, x: Any, turn: Any) -> Any:
        groups, each, size = self.shape
        mixed = self.linear_qkv(x)[0].reshape(*x.shape[:2], groups, each + 2, size)
        q, k, v = mixed[..., :each, :].flatten(2, 3), mixed[..., each, :], mixed[..., each + 1, :]
        q, k = (
            turn(norm(part).permute(1, 2, 0, 3))
            for norm, part in ((self.q_layernorm, q), (self.k_layernorm, k))
        )
        k, v = (part.repeat_interleave(each, dim=1) for part in (k, v.permute(1, 2, 0, 3)))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear_proj(out.permute(2, 0, 1, 3).flatten(2))[0]


class _Router(nn.Module):
    def __init__(self, weight: Any, top_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.top_k = top_k

    def forward(self, x: Any) -> Any:
        probs = functional.linear(x.flatten(0, 1), self.weight).float().softmax(-1)
        chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(
            1, probs.topk(self.top_k).indices, True
        )
        weights = probs * chosen
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), chosen


class _Moe(nn.Module):
    def __init__(self, own: Any, config: _Config) -> None:
        super().__init__()
        self.router = _Router(own.gate.weight, config.top_k)
        self.experts = nn.ModuleList()
        for up, down in zip(own.experts.gate_up_proj, own.experts.down_proj, strict=True):
            self.experts.append(
                nn.ParameterDict({"up": up.detach().clone(), "down": down.detach().clone()})
            )

    def forward(self, x: Any) -> Any:
        weights, chosen = self.router(x)
        flat = x.flatten(0, 1)
        out = torch.zeros_like(flat)
        for expert, own in enumerate(self.experts):
            rows = chosen[:, expert].nonzero()[:, 0]
            gate, up = functional.linear(flat[rows], own["up"]).chunk(2, dim=-1)
            out[rows] += (
                functional.linear(functional.silu(gate) * up, own["down"])
                * weights[rows, expert, None]
            )
        return out.reshape(x.shape), None


class _Layer(nn.Module):
    def __init__(self, own: Any, config: _Config, eps: float) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = (
            _Norm(n.weight, eps) for n in (own.input_layernorm, own.post_attention_layernorm)
        )
        self.self_attention = _Attention(own.self_attn, config, eps)
        self.mlp = _Moe(own.mlp, config)

    def forward(self, x: Any, turn: Any) -> Any:
        x = x + self.self_attention(self.input_layernorm(x), turn)
        return x + self.mlp(self.pre_mlp_layernorm(x))[0]


class _Embedding(nn.Module):
    """Looks up batch-first, and returns sequence-first."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding.from_pretrained(weight.detach().clone())

    def forward(self, ids: Any) -> Any:
        return self.word_embeddings(ids).transpose(0, 1)


class MegatronNamed(nn.Module):
    """Made of a tiny Qwen3-MoE of HF transformers."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.config = _Config(hf.config)
        eps = hf.config.rms_norm_eps
        self.embedding = _Embedding(hf.model.embed_tokens.weight)
        self.decoder = nn.ModuleDict(
            {
                "layers": nn.ModuleList(
                    _Layer(layer, self.config, eps) for layer in hf.model.layers
                ),
                "final_layernorm": _Norm(hf.model.norm.weight, eps),
            }
        )
        self.output_layer = _Linear(hf.lm_head.weight)
        self.theta = float(hf.config.rope_parameters["rope_theta"])

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        half = self.config.head_dim // 2
        angle = torch.arange(len(x))[:, None] * self.theta ** (-torch.arange(half) / half)
        cos, sin = (torch.cat([part, part], -1).to(x.dtype) for part in (angle.cos(), angle.sin()))

        def turn(part: Any) -> Any:
            return part * cos + torch.cat([-part[..., half:], part[..., :half]], -1) * sin

        for layer in self.decoder["layers"]:
            x = layer(x, turn)
        return self.output_layer(self.decoder["final_layernorm"](x))[0]


def megatron_forward(model: Any, ids: Any) -> Forward:
    """The forward over ``ids`` ``(batch, width)``: token (b, s) is row s * batch + b."""
    batch, width = ids.shape
    rows = np.arange(batch * width).reshape(width, batch).T.reshape(-1)
    return Forward(
        model=model,
        run=lambda own: own(ids),
        size=batch * width,
        rows=rows,
        name="Megatron stand-in",
    )
