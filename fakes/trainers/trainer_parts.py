"""Parts of the replaying trainer: routers, microbatches and passes in progress, and its inputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract, Rows
from rollproof.core.events.replay import Action, Outcome, Phase, Step
from rollproof.core.records import FloatArray, IntArray, Rollout
from rollproof.core.router_spy import Spy, sketch
from rollproof.fakes.trainers.moe_model import Gradients, MoeModel, TokenRows, chosen
from rollproof.layouts import Rank, Source
from rollproof.layouts.pipeline import Operation

__all__ = [
    "Microbatch",
    "ReplayRouter",
    "TrainerPass",
    "is_ready",
    "outcome_of",
    "plain_targets",
    "problem_of",
    "token_rows",
]


class ReplayRouter:
    """The replay state of one router on one rank.

    ``action`` is ``None`` while it chooses by its own scores.
    """

    def __init__(self, layer: int, top_k: int) -> None:
        self.layer: int = layer
        self.top_k: int = top_k
        self.action: Action | None = None
        self.target: IntArray | None = None
        self.queue: deque[IntArray] = deque()
        self.recorded: list[IntArray] = []

    def install(self, target: IntArray, *, keep: bool) -> None:
        """Set the target of the next forward pass, and of the recompute with ``keep``.

        The target is ``(rows, top_k)``, -1 in free rows.
        """
        self.target = target
        if keep:
            self.queue.append(target)

    def choose(self, scores: FloatArray, phase: Phase) -> IntArray:
        """Return the experts to execute, ``(rows, top_k)``, for scores ``(rows, experts)``."""
        if self.action is not Action.REPLAY:
            own = chosen(scores, self.top_k)
            if self.action is Action.RECORD and phase is Phase.FORWARD:
                self.recorded.append(own)
            return own
        target = self.take(phase)
        free = target[:, :1] < 0
        return np.where(free, chosen(scores, self.top_k), target) if free.any() else target

    def take(self, phase: Phase) -> IntArray:
        """Remove and return the target of a pass. Raises ``RuntimeError`` if there is none."""
        if phase is Phase.RECOMPUTE:
            if not self.queue:
                raise RuntimeError(
                    f"The router of layer {self.layer} has no target left for its recompute."
                )
            # 1F1B runs backward passes in the order of the forward passes
            return self.queue.popleft()
        if self.target is None:
            raise RuntimeError(f"The router of layer {self.layer} has no target.")
        # a target serves one forward pass; a second use is a bug that must raise
        target, self.target = self.target, None
        return target

    def clear(self) -> None:
        """Clear action, target, queue and recordings."""
        self.action, self.target = None, None
        self.queue.clear()
        self.recorded.clear()


@dataclass(eq=False)
class Microbatch:
    """A microbatch in progress.

    first: index of its first sample in the step.
    starts: first row of each sample, and the number of rows.
    sources: the rows of each rank.
    inputs, executed: inputs and experts of each layer.
    x, dx: the current activations and their gradient.
    """

    number: int
    samples: tuple[Rollout, ...]
    first: int
    rows: TokenRows
    starts: npt.NDArray[np.int64]
    sources: list[tuple[Rank, Source]]
    inputs: dict[int, FloatArray] = field(default_factory=dict)
    executed: dict[int, IntArray] = field(default_factory=dict)
    x: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    dx: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each sample."""
        return [sample.total for sample in self.samples]

    def places(self, source: Source) -> npt.NDArray[np.int64]:
        """Return ``(rows,)``: the microbatch's row of each row of a rank; -1 for padding."""
        filled = np.where(source.filled, source.sample, 0)
        return np.where(
            source.filled, self.starts[filled] + source.position if len(self.samples) else -1, -1
        )


@dataclass(eq=False)
class TrainerPass:
    """A step in progress."""

    step: Step
    spy: Spy
    model: MoeModel
    routers: dict[tuple[int, int], ReplayRouter]
    scale: float
    gradients: Gradients
    microbatches: list[Microbatch] = field(default_factory=list)
    loss: float = 0.0
    logprobs: dict[str, FloatArray] = field(default_factory=dict)


def is_ready(
    operation: Operation, rank: int, pp: int, vpp: int, done: set[tuple[int, int, bool]]
) -> bool:
    """Whether the neighbour stages have produced the inputs of an operation."""
    stage = operation.chunk * pp + rank
    if not operation.backward:
        return stage == 0 or (operation.microbatch, stage - 1, False) in done
    if stage == pp * vpp - 1:
        return (operation.microbatch, stage, False) in done
    return (operation.microbatch, stage + 1, True) in done


def token_rows(samples: Sequence[Rollout]) -> tuple[TokenRows, npt.NDArray[np.int64]]:
    """Return the tokens of all samples in one line, and the first row of each sample."""
    tokens = [sample.prompt_ids + sample.response_ids for sample in samples]
    starts = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    before = np.arange(-1, starts[-1] - 1)
    before[starts[:-1][np.diff(starts) > 0]] = -1
    predicted = [
        np.arange(start + len(sample.prompt_ids) - 1, start + sample.total - 1)
        for start, sample in zip(starts[:-1], samples, strict=True)
    ]
    rows = TokenRows(
        tokens=np.array([token for ids in tokens for token in ids], dtype=np.int64),
        before=before,
        predicted=np.concatenate([np.zeros(0, dtype=np.int64), *predicted]),
        labels=np.array(
            [token for sample in samples for token in sample.response_ids], dtype=np.int64
        ),
    )
    return rows, starts


def outcome_of(
    step: Step,
    moe: tuple[int, ...],
    loss: float,
    logprobs: dict[str, FloatArray],
    gradients: Gradients,
) -> Outcome:
    """Return the results of a step, gradients as sketches; a forward-only step has none."""
    if not step.backward:
        return Outcome(step=step.name, loss=loss, logprobs=logprobs)
    sketches = {name: sketch(value) for name, value in gradients.items()}
    gates = {layer: sketches[f"layers.{layer}.gate"] for layer in moe}
    return Outcome(step=step.name, loss=loss, logprobs=logprobs, gradients=sketches, gates=gates)


def plain_targets(contract: Contract, sample: Rollout) -> dict[int, IntArray]:
    """Return the target of each token, by layer; -1 for a token without one."""
    if sample.routes is None:
        return {}
    out: dict[int, IntArray] = {}
    for column, layer in zip(contract.moe_columns, contract.moe_layers or (), strict=True):
        target = np.full((sample.total, contract.top_k or 1), -1, dtype=np.int64)
        target[: len(sample.routes)] = sample.routes[:, column]
        out[layer] = target
    return out


def problem_of(contract: Contract, sample: Rollout) -> str | None:
    """Return what is wrong with the routes of a sample, if anything is."""
    routes: Any = sample.routes
    if routes is None:
        return "it has no routes"
    if routes.dtype.kind not in "iu":
        return f"its routes are {routes.dtype}, not integers"
    if routes.shape[1:] != (contract.route_layers, contract.top_k):
        return (
            f"its routes have the shape {routes.shape}, not (rows, {contract.route_layers},"
            f" {contract.top_k})"
        )
    shortest = 0 if contract.rows is Rows.CAPTURED_PREFIX else sample.total - 1
    longest = sample.total if contract.rows is Rows.CAPTURED_PREFIX else sample.total - 1
    if not shortest <= len(routes) <= longest:
        return f"it has {len(routes)} rows for {sample.total} tokens"
    # columns of dense layers may contain anything
    moe = np.sort(routes[:, list(contract.moe_columns)].astype(np.int64), axis=2)
    if moe.size and (moe.min() < 0 or moe.max() >= (contract.num_experts or 1)):
        return "its routes contain ids of no expert"
    if (moe[:, :, 1:] == moe[:, :, :-1]).any():
        return "a row of its routes contains an expert twice"
    return None
