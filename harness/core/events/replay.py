"""Events of a trainer: the steps that are requested, the choices of its routers, the results of a
step, and what is left of replay afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from rollproof.core.events.base import Event
from rollproof.core.records import FloatArray, IntArray, Rollout
from rollproof.core.replay_contract import Defect, Recompute

__all__ = ["Action", "Install", "Outcome", "Phase", "Purpose", "Residue", "Routing", "Step"]


class Action(StrEnum):
    """What the routers do in a step."""

    OFF = "off"
    """Replay is switched off in the configuration, as a user would do it. It must do nothing."""
    NATIVE = "native"
    """Replay is switched on but not used in this step: every router chooses by its own scores."""
    RECORD = "record"
    """Every router chooses by its own scores, and the trainer records the choices (R2)."""
    REPLAY = "replay"
    """Every router executes the routes that came with the samples."""


class Purpose(StrEnum):
    """Which kind of pass a step is."""

    TRAIN = "train"
    """Forward and backward of every microbatch."""
    OLD_LOGPROB = "old-logprob"
    """Forward only, as before an update."""
    EVAL = "eval"
    """Forward only, outside of training."""


class Phase(StrEnum):
    """In which pass a router was called."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    """A second time, within the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step(Event):
    """The harness requests one step of a trainer.

    Token ids are unique within the step, so that the input token of a row identifies its sample and
    position.

    Attributes:
        episode: The episode of the step. Every episode begins with a fresh subject.
        name: The name of the step, unique in its episode.
        action: What the routers do.
        purpose: The kind of pass.
        microbatches: Samples, in the order in which they run. A sample has ``routes`` if ``action``
            is ``replay``, and may have them if it is ``off``.
        recompute: The activation checkpointing.
        weights: The number for ``set_weights``. 0: the initial weights; n > 0: those plus noise;
            -1: those with NaN in the first gate.
        nudge: The size for ``nudge``: this many times ``rollproof.core.router_spy.direction`` is
            added to the gate weight of ``nudge_layer``.
        nudge_layer: The layer of ``nudge``.
        model: The role of the model that runs: ``policy``, or another one while replay is set up
            for the policy.
        variant: The variant of the subject that runs (``reference``: its method ``reference``).
        fail_at: The router call that raises ``InjectedFailure``, counted from 0 by each rank's spy.
        fail_in: The pass that ``fail_at`` counts in.
        same_as: An earlier step of the episode; loss and gradients must be the same.
        differs_from: An earlier step of the episode; loss and gradients must differ.
        defect: The defect of the routes of ``defective``.
        defective: The request id of the sample with the defect.
        edge: Another unusual property of the step, in words.
    """

    kind: ClassVar[str] = "step"
    episode: str
    name: str
    action: Action
    purpose: Purpose
    microbatches: tuple[tuple[Rollout, ...], ...]
    recompute: Recompute = Recompute.NONE
    weights: int = 0
    nudge: float = 0.0
    nudge_layer: int | None = None
    model: str = "policy"
    variant: str = ""
    fail_at: int | None = None
    fail_in: Phase = Phase.FORWARD
    same_as: str = ""
    differs_from: str = ""
    defect: Defect | None = None
    defective: str = ""
    edge: str = ""

    @property
    def samples(self) -> tuple[Rollout, ...]:
        """The samples of all microbatches, in order; ``Routing.samples`` are indexes into it."""
        return tuple(sample for microbatch in self.microbatches for sample in microbatch)

    @property
    def backward(self) -> bool:
        """Whether the step has a backward pass."""
        return self.purpose is Purpose.TRAIN


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing(Event):
    """One call of one router, as a spy on the router's *output* saw it.

    Attributes:
        layer: The global index of the layer.
        phase: The pass.
        experts: ``(rows, top_k)``: the ids that were executed, -1 in rows with fewer than top_k.
        samples: ``(rows,)``: indexes into ``Step.samples``, -1 for padding.
        positions: ``(rows,)``: positions in prompt and response.
        microbatch: The process's own count of microbatches.
        rank: The process.
        model: As in ``Step``, or ``mtp`` for a router of an MTP layer.
    """

    kind: ClassVar[str] = "routing"
    layer: int
    phase: Phase
    experts: IntArray
    samples: IntArray
    positions: IntArray
    microbatch: int = 0
    rank: int = 0
    model: str = "policy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Install(Event):
    """A target was given to the router of ``layer``, on ``rank``."""

    kind: ClassVar[str] = "install"
    layer: int
    microbatch: int = 0
    rank: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome(Event):
    """The outcome of a step: results, an error, or why it was skipped.

    Attributes:
        step: The name of the step.
        loss: The value whose gradient was taken.
        logprobs: ``(response,)`` by request.
        gradients: Sketches (``rollproof.core.router_spy.sketch``) by the trainer's own names.
        gates: Sketches of the gradients of gate weights, by global layer.
        recorded: The routes ``(rows, layers, top_k)`` that the trainer recorded, by request, in the
            form in which it passes them on.
        error: Class and text of an error.
        injected: Whether the error is the one that the harness raised.
        skipped: Why the step was skipped.
        changed: Names of what it changed in its samples.
    """

    kind: ClassVar[str] = "outcome"
    step: str
    loss: float | None = None
    logprobs: Mapping[str, FloatArray] = field(default_factory=dict)
    gradients: Mapping[str, FloatArray] = field(default_factory=dict)
    gates: Mapping[int, FloatArray] = field(default_factory=dict)
    recorded: Mapping[str, IntArray] = field(default_factory=dict)
    error: str | None = None
    injected: bool = False
    skipped: str = ""
    changed: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the step ran to its end."""
        return self.error is None and not self.skipped


@dataclass(frozen=True, kw_only=True, slots=True)
class Residue(Event):
    """What was left of replay after a step.

    Attributes:
        after: The name of the step.
        left: Counts by name, each of which should be 0.
    """

    kind: ClassVar[str] = "residue"
    after: str
    left: Mapping[str, int]
