"""A small mixture-of-experts language model in numpy, with gradients derived by hand, in float64.

A layer mixes each token with the one before it, ``m = x + x_prev / 2``, and adds the output of its
experts: ``x + sum_k w_k tanh(m U_k)``. A router's scores are ``softmax(m G^T)``, and the weights
``w`` of the executed experts are their scores, divided by their sum if ``normalised``. The caller
chooses the experts and passes their ids, as routing replay does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.records import FloatArray, IntArray
from rollproof.core.router_spy import direction

__all__ = ["Gradients", "MoeModel", "TokenRows", "chosen"]

Gradients: TypeAlias = "dict[str, FloatArray]"


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRows:
    """The tokens of a microbatch in one line, sample after sample.

    tokens: ``(rows,)``.
    before: ``(rows,)``, the row of the previous token; -1 at the start of a sample.
    predicted: the rows that predict a trained token.
    labels: those tokens.
    """

    tokens: IntArray
    before: IntArray
    predicted: IntArray
    labels: IntArray


@dataclass
class MoeModel:
    """A stack of layers; those in ``moe`` have a router, the others are dense."""

    layers: int
    moe: tuple[int, ...]
    experts: int
    top_k: int
    vocab: int
    width: int = 6
    normalised: bool = False
    seed: int = 0
    weights: dict[str, FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.set_weights(0)

    def set_weights(self, number: int) -> None:
        """Set the first weights (0), those plus noise (n > 0), or those with a NaN in the first
        gate (-1).
        """
        random = np.random.default_rng(self.seed)
        noise = np.random.default_rng([self.seed, max(number, 0)])
        for name, shape in self._shapes():
            self.weights[name] = random.standard_normal(shape) * 0.8 + (
                noise.standard_normal(shape) * 0.5 if number > 0 else 0.0
            )
        if number < 0 and self.moe:
            self.weights[f"layers.{self.moe[0]}.gate"][0, 0] = np.nan

    def nudge(self, layer: int, size: float) -> None:
        """Add ``size`` times the fixed direction to a gate."""
        gate = self.weights[f"layers.{layer}.gate"]
        gate += size * direction(gate.shape)

    def zeros(self) -> Gradients:
        """Return gradients of zero."""
        return {name: np.zeros_like(value) for name, value in self.weights.items()}

    # Forward

    def embed(self, rows: TokenRows) -> FloatArray:
        """Return the embeddings, ``(rows, width)``."""
        return self.weights["embed"][rows.tokens]

    def mixed(self, rows: TokenRows, x: FloatArray) -> FloatArray:
        """Return each token's row plus half of the previous row."""
        return x + 0.5 * np.where(rows.before[:, None] >= 0, x[rows.before], 0.0)

    def scores(self, layer: int, mixed: FloatArray) -> FloatArray:
        """Return a router's scores, ``(rows, experts)``."""
        logits = mixed @ self.weights[f"layers.{layer}.gate"].T
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))

    def gates(self, scores: FloatArray, ids: IntArray) -> FloatArray:
        """Return the weights of the executed experts, ``(rows, top_k)``."""
        weights = np.take_along_axis(scores, ids, axis=1)
        return weights / weights.sum(axis=1, keepdims=True) if self.normalised else weights

    def dense(self, layer: int, rows: TokenRows, x: FloatArray) -> FloatArray:
        """Run a layer without a router."""
        return x + np.tanh(self.mixed(rows, x) @ self.weights[f"layers.{layer}.dense"])

    def sparse(self, layer: int, rows: TokenRows, x: FloatArray, ids: IntArray) -> FloatArray:
        """Run a layer with the experts ``ids``, ``(rows, top_k)``; their order does not matter."""
        # the order of a sum changes its last bits: equal sets of experts must give equal results
        ids = np.sort(ids, axis=1)
        mixed = self.mixed(rows, x)
        weights = self.gates(self.scores(layer, mixed), ids)
        return np.asarray(x + (weights[:, :, None] * self._experts(layer, mixed, ids)).sum(axis=1))

    def loss(self, rows: TokenRows, x: FloatArray, scale: float) -> tuple[float, FloatArray]:
        """Return the sum of negative logprobs times ``scale``, and the logprobs ``(labels,)``."""
        logits = x[rows.predicted] @ self.weights["head"]
        shifted = logits - logits.max(axis=1, keepdims=True, initial=-np.inf)
        logprobs = shifted[np.arange(len(logits)), rows.labels] - np.log(
            np.exp(shifted).sum(axis=1)
        )
        return float(-logprobs.sum() * scale), logprobs

    # Backward: each method adds to ``out`` and returns the gradient of its input

    def loss_backward(
        self, rows: TokenRows, x: FloatArray, scale: float, out: Gradients
    ) -> FloatArray:
        """Compute the gradient of ``loss``."""
        used = x[rows.predicted]
        logits = used @ self.weights["head"]
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        d_logits = shifted / shifted.sum(axis=1, keepdims=True)
        d_logits[np.arange(len(used)), rows.labels] -= 1.0
        d_logits *= scale
        out["head"] += used.T @ d_logits
        dx = np.zeros_like(x)
        # np.add.at adds repeated indexes; `dx[...] +=` would keep only the last of them
        np.add.at(dx, rows.predicted, d_logits @ self.weights["head"].T)
        return dx

    def dense_backward(
        self, layer: int, rows: TokenRows, x: FloatArray, dy: FloatArray, out: Gradients
    ) -> FloatArray:
        """Compute the gradient of ``dense``."""
        mixed, weight = self.mixed(rows, x), self.weights[f"layers.{layer}.dense"]
        d_pre = dy * (1.0 - np.tanh(mixed @ weight) ** 2)
        out[f"layers.{layer}.dense"] += mixed.T @ d_pre
        return dy + self._unmixed(rows, d_pre @ weight.T)

    def sparse_backward(
        self,
        layer: int,
        rows: TokenRows,
        x: FloatArray,
        ids: IntArray,
        dy: FloatArray,
        out: Gradients,
    ) -> FloatArray:
        """Compute the gradient of ``sparse``."""
        ids = np.sort(ids, axis=1)
        mixed = self.mixed(rows, x)
        scores = self.scores(layer, mixed)
        weights, made = self.gates(scores, ids), self._experts(layer, mixed, ids)
        d_weights = (dy[:, None, :] * made).sum(axis=2)
        d_pre = weights[:, :, None] * dy[:, None, :] * (1.0 - made**2)
        np.add.at(
            out[f"layers.{layer}.experts"], ids, mixed[:, None, :, None] * d_pre[:, :, None, :]
        )
        d_mixed = np.einsum("nke,nkde->nd", d_pre, self.weights[f"layers.{layer}.experts"][ids])
        d_logits = self.logits_backward(scores, ids, weights, d_weights)
        out[f"layers.{layer}.gate"] += d_logits.T @ mixed
        return dy + self._unmixed(rows, d_mixed + d_logits @ self.weights[f"layers.{layer}.gate"])

    def embed_backward(self, rows: TokenRows, dx: FloatArray, out: Gradients) -> None:
        """Compute the gradient of ``embed``."""
        np.add.at(out["embed"], rows.tokens, dx)

    def logits_backward(
        self, scores: FloatArray, ids: IntArray, weights: FloatArray, d_weights: FloatArray
    ) -> FloatArray:
        """Return the gradient of a router's logits, ``(rows, experts)``."""
        if self.normalised:
            total = np.take_along_axis(scores, ids, axis=1).sum(axis=1, keepdims=True)
            d_weights = (d_weights - (d_weights * weights).sum(axis=1, keepdims=True)) / total
        d_scores = np.zeros_like(scores)
        np.add.at(d_scores, (np.arange(len(ids))[:, None], ids), d_weights)
        return np.asarray(scores * (d_scores - (d_scores * scores).sum(axis=1, keepdims=True)))

    def _experts(self, layer: int, mixed: FloatArray, ids: IntArray) -> FloatArray:
        """Return the output of each executed expert, ``(rows, top_k, width)``."""
        return np.asarray(
            np.tanh(np.einsum("nd,nkde->nke", mixed, self.weights[f"layers.{layer}.experts"][ids]))
        )

    def _unmixed(self, rows: TokenRows, d_mixed: FloatArray) -> FloatArray:
        dx = d_mixed.copy()
        later = np.flatnonzero(rows.before >= 0)
        # a row precedes at most one row, so the indexes are unique
        dx[rows.before[later]] += 0.5 * d_mixed[later]
        return dx

    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        shapes: list[tuple[str, tuple[int, ...]]] = [
            ("embed", (self.vocab, self.width)),
            ("head", (self.width, self.vocab)),
        ]
        for layer in range(self.layers):
            if layer in self.moe:
                shapes.append((f"layers.{layer}.gate", (self.experts, self.width)))
                shapes.append((f"layers.{layer}.experts", (self.experts, self.width, self.width)))
            else:
                shapes.append((f"layers.{layer}.dense", (self.width, self.width)))
        return shapes


def chosen(scores: FloatArray, top_k: int) -> npt.NDArray[np.int64]:
    """Return a router's own choice, ``(rows, top_k)``: best first, lower id first in a tie."""
    # stable, so that ties go to the lower id on every platform
    return np.argsort(-scores, axis=1, kind="stable")[:, :top_k].astype(np.int64)
