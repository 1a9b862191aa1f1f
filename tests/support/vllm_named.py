"""A model with vLLM's module names and layouts, which computes what a tiny dense Qwen3 of HF
transformers computes. Needs torch.

Tokens lie flat, projections are fused one after the other and return a bias with their output,
and a norm adds the residual in place and returns both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rollproof.gap.localise.forwards import Forward

__all__ = ["VllmNamed", "vllm_forward"]


class _Linear(nn.Module):
    def __init__(self, *weights: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([weight.detach() for weight in weights]))

    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight), None


class _Norm(nn.Module):
    def __init__(self, own: Any, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(own.weight.detach().clone())
        self.eps = eps

    def _normed(self, x: Any) -> Any:
        return self.weight * (
            x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        ).to(x.dtype)

    def forward(self, x: Any, residual: Any = None) -> Any:
        if residual is None:
            return self._normed(x)
        residual.add_(x)
        x.copy_(self._normed(residual))
        return x, residual


class _Attention(nn.Module):
    def __init__(self, own: Any, config: Any) -> None:
        super().__init__()
        self.qkv_proj = _Linear(own.q_proj.weight, own.k_proj.weight, own.v_proj.weight)
        self.o_proj = _Linear(own.o_proj.weight)
        self.q_norm, self.k_norm = (
            _Norm(own.q_norm, config.rms_norm_eps),
            _Norm(own.k_norm, config.rms_norm_eps),
        )
        self.sizes = [
            config.num_attention_heads * config.head_dim,
            *[config.num_key_value_heads * config.head_dim] * 2,
        ]
        self.head = config.head_dim

    def forward(self, x: Any, turn: Any, batch: int) -> Any:
        q, k, v = (
            part.reshape(len(x), -1, self.head)
            for part in self.qkv_proj(x)[0].split(self.sizes, dim=-1)
        )
        q, k, v = (
            part.reshape(batch, -1, *part.shape[1:]).transpose(1, 2)
            for part in (self.q_norm(q), self.k_norm(k), v)
        )
        each = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(each, dim=1) for part in (turn(k), v))
        out = functional.scaled_dot_product_attention(turn(q), k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(len(x), -1))[0]


class _Mlp(nn.Module):
    def __init__(self, own: Any) -> None:
        super().__init__()
        self.gate_up_proj = _Linear(own.gate_proj.weight, own.up_proj.weight)
        self.down_proj = _Linear(own.down_proj.weight)

    def forward(self, x: Any) -> Any:
        gate, up = self.gate_up_proj(x)[0].chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)[0]


class _Layer(nn.Module):
    def __init__(self, own: Any, config: Any) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = (
            _Norm(n, eps) for n in (own.input_layernorm, own.post_attention_layernorm)
        )
        self.self_attn, self.mlp = _Attention(own.self_attn, config), _Mlp(own.mlp)


class VllmNamed(nn.Module):
    """Made of a tiny dense Qwen3 of HF transformers."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.config = hf.config
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding.from_pretrained(
                    hf.model.embed_tokens.weight.detach().clone()
                ),
                "layers": nn.ModuleList(_Layer(layer, hf.config) for layer in hf.model.layers),
                "norm": _Norm(hf.model.norm, hf.config.rms_norm_eps),
            }
        )
        self.lm_head = nn.Linear(1, 1, bias=False)
        self.lm_head.weight = nn.Parameter(hf.lm_head.weight.detach().clone())

    def forward(self, ids: Any) -> Any:
        half = self.config.head_dim // 2
        angle = torch.arange(ids.shape[1])[:, None] * self.config.rope_parameters["rope_theta"] ** (
            -torch.arange(half) / half
        )
        cos, sin = (torch.cat([part, part], -1) for part in (angle.cos(), angle.sin()))

        def turn(part: Any) -> Any:
            return (part * cos + torch.cat([-part[..., half:], part[..., :half]], -1) * sin).to(
                part.dtype
            )

        x, residual = self.model["embed_tokens"](ids.reshape(-1)), None
        for layer in self.model["layers"]:
            if residual is None:
                residual = x.clone()
                x = layer.input_layernorm(x)
            else:
                x, residual = layer.input_layernorm(x, residual)
            x = layer.self_attn(x, turn, len(ids))
            x, residual = layer.post_attention_layernorm(x, residual)
            x = layer.mlp(x)
        return self.lm_head(self.model["norm"](x, residual)[0])


def vllm_forward(model: Any, ids: Any) -> Forward:
    """The forward over ``ids`` ``(batch, width)``, whose tokens lie flat."""
    return Forward(
        model=model,
        run=lambda own: own(ids),
        size=ids.numel(),
        rows=np.arange(ids.numel()),
        name="vLLM stand-in",
    )
