"""The same model in plain PyTorch, undivided, in float64, with routes as an argument.

It gives the expected loss and gradients under replay.

It shares nothing with megatron-core but the names of the weights: no ``RouterReplay``, no
dispatcher, no padding, no ranks. The formulas are those of megatron-core's local layer specs:
RMSNorm, rotary positions over halves, attention heads as (q, k, v) groups, GELU, and gate values of
the given experts: a softmax over them, or their sigmoids divided by their sum, times the scaling
factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollproof.core.records import FloatArray, Rollout
from rollproof.replay.megatron.megatron_setups import MegatronSetup, RouterKind
from rollproof.replay.megatron.model_weights import values_of
from rollproof.replay.one_thread import one_thread

__all__ = ["PlainModel", "reference_losses"]

_HEADS = 4
_EPSILON = 1e-5  # TransformerConfig.layernorm_epsilon


def reference_losses(
    setup: MegatronSetup,
    samples: Sequence[Rollout],
    number: int,
    nudges: Sequence[tuple[int, FloatArray]],
) -> tuple[dict[str, FloatArray], dict[str, FloatArray]]:
    """Return logprobs of response tokens by request, and gradients of their negated sum by weight.

    ``samples`` have routes ``(rows, layers, top_k)``, a row for each token but the last. ``number``
    is that of the weights (``model_weights.values_of``), ``nudges`` are added to gates, by layer.
    """
    import torch

    model = PlainModel(setup, number, nudges)
    with one_thread():
        logprobs = {sample.request_id: model.logprobs(sample) for sample in samples}
        total = -torch.cat(list(logprobs.values())).sum()
        total.backward()
    gradients = {
        name: weight.grad.numpy()
        for name, weight in model.weights.items()
        if weight.grad is not None
    }
    return {name: values.detach().numpy() for name, values in logprobs.items()}, gradients


class PlainModel:
    """The undivided model, with the weights ``number`` and ``nudges`` on its gates.

    ``final`` computes the last token, too. A model with routers of its own overrides ``routes``.
    """

    def __init__(
        self,
        setup: MegatronSetup,
        number: int,
        nudges: Sequence[tuple[int, FloatArray]],
        *,
        final: bool = False,
    ) -> None:
        import torch

        self.setup = setup
        self.final = final
        shapes = _shapes(setup)
        self.weights: dict[str, Any] = {}
        for name, shape in shapes.items():
            values = values_of(name, number, shape).astype(np.float64)
            for layer, nudge in nudges:
                if name == f"layers.{layer}.mlp.router.weight":
                    values = (values + nudge).astype(np.float32).astype(np.float64)
            self.weights[name] = torch.tensor(
                values, requires_grad=not name.endswith("expert_bias")
            )

    def logprobs(self, sample: Rollout) -> Any:
        """Return the logprobs ``(response,)`` of response tokens.

        A response without a prompt begins after its first token.
        """
        import torch

        tokens = torch.tensor(sample.prompt_ids + sample.response_ids)
        hidden = self.weights["embedding.word_embeddings.weight"][
            tokens if self.final else tokens[:-1]
        ]
        for layer in range(self.setup.num_layers):
            hidden = self.layer(hidden, layer, sample)
        logits = (
            self._norm(hidden, "decoder.final_layernorm.weight")
            @ self.weights["output_layer.weight"].T
        )
        first = max(1, len(sample.prompt_ids))
        return logits.log_softmax(-1)[first - 1 : sample.total - 1].gather(1, tokens[first:, None])[
            :, 0
        ]

    def layer(self, hidden: Any, layer: int, sample: Rollout) -> Any:
        """Return the hidden states ``(rows, hidden)`` after one layer."""
        attended = self._attention(
            self._norm(hidden, f"layers.{layer}.input_layernorm.weight"),
            f"layers.{layer}.self_attention",
        )
        hidden = hidden + attended
        return hidden + self._feed_forward(
            self._norm(hidden, f"layers.{layer}.pre_mlp_layernorm.weight"), layer, sample
        )

    def routes(self, scores: Any, layer: int, sample: Rollout) -> Any:
        """Return the experts ``(rows, top_k)`` that a layer executes."""
        import torch

        assert sample.routes is not None
        return torch.tensor(
            sample.routes[: len(scores), self.setup.layout().column[layer]].astype(np.int64)
        )

    def _norm(self, hidden: Any, name: str) -> Any:
        import torch

        return (
            hidden
            * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + _EPSILON)
            * self.weights[name]
        )

    def _attention(self, hidden: Any, name: str) -> Any:
        import torch

        rows, width = hidden.shape
        size = width // _HEADS
        query, key, value = (
            (hidden @ self.weights[f"{name}.linear_qkv.weight"].T)
            .view(rows, _HEADS, 3 * size)
            .transpose(0, 1)
            .split(size, -1)
        )
        angles = torch.arange(rows)[:, None] / 10000 ** (
            torch.arange(0, size, 2, dtype=torch.float64) / size
        )
        query, key = _rotated(query, angles), _rotated(key, angles)
        scores = query @ key.transpose(1, 2) / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -math.inf)
        return (scores.softmax(-1) @ value).transpose(0, 1).reshape(rows, width) @ self.weights[
            f"{name}.linear_proj.weight"
        ].T

    def _feed_forward(self, hidden: Any, layer: int, sample: Rollout) -> Any:
        import torch

        setup, name = self.setup, f"layers.{layer}.mlp"
        if layer not in setup.moe_layers:
            return self._mlp(hidden, name)
        scores = hidden @ self.weights[f"{name}.router.weight"].T
        routes = self.routes(scores, layer, sample)
        if setup.router is RouterKind.SIGMOID:
            chosen = scores.sigmoid().gather(1, routes)
            # scores of several experts are normalised to 1, that of a single one is not (in
            # DeepSeek-V3's gate and in Megatron's)
            gates = 2.5 * (
                chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if setup.top_k > 1 else chosen
            )
        else:
            gates = scores.gather(1, routes).softmax(-1)
        out = (
            self._mlp(hidden, f"{name}.shared_experts")
            if setup.router is RouterKind.SIGMOID
            else torch.zeros_like(hidden)
        )
        for expert in range(setup.num_experts):
            rows, places = (routes == expert).nonzero(as_tuple=True)
            out = out.index_add(
                0,
                rows,
                self._mlp(hidden[rows], f"{name}.experts.{expert}") * gates[rows, places, None],
            )
        return out

    def _mlp(self, hidden: Any, name: str) -> Any:
        import torch

        inner = torch.nn.functional.gelu(hidden @ self.weights[f"{name}.linear_fc1.weight"].T)
        return inner @ self.weights[f"{name}.linear_fc2.weight"].T


def _rotated(heads: Any, angles: Any) -> Any:
    import torch

    first, second = heads.chunk(2, -1)
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        -1,
    )


def _shapes(setup: MegatronSetup) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the undivided model's weights by name."""
    hidden, dense, expert = 32, 64, 32
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (setup.vocab, hidden),
        "decoder.final_layernorm.weight": (hidden,),
        "output_layer.weight": (setup.vocab, hidden),
    }
    for layer in range(setup.num_layers):
        name = f"layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.pre_mlp_layernorm.weight": (hidden,),
        }
        shapes |= {
            f"{name}.self_attention.linear_qkv.weight": (3 * hidden, hidden),
            f"{name}.self_attention.linear_proj.weight": (hidden, hidden),
        }
        parts = {f"{name}.mlp": dense}
        if layer in setup.moe_layers:
            parts = {f"{name}.mlp.experts.{number}": expert for number in range(setup.num_experts)}
            shapes[f"{name}.mlp.router.weight"] = (setup.num_experts, hidden)
            if setup.router is RouterKind.SIGMOID:
                parts[f"{name}.mlp.shared_experts"] = 32
        for part, width in parts.items():
            shapes |= {
                f"{part}.linear_fc1.weight": (width, hidden),
                f"{part}.linear_fc2.weight": (hidden, width),
            }
    return shapes
