"""Events of a trainer: what a step was asked to do, what its routers chose, what came out, and what
was left behind.
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
    """What a step asks of the routers."""

    OFF = "off"
    """Replay is switched off as a user would switch it off: in the configuration. Nothing of it may
    act.
    """
    NATIVE = "native"
    """Replay is available and not used in this step: every router chooses by its own scores."""
    RECORD = "record"
    """Every router chooses by its own scores, and the trainer records it (R2)."""
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
    """Once more, within the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step(Event):
    """The harness asks a trainer for one step.

    ``name`` is unique in its ``episode``, which begins with a fresh subject. A step has
    ``microbatches`` of samples, in the order in which they are to run; a sample has ``routes``
    where ``action`` is ``replay``, and may have where it is ``off``. Token ids are unique over the
    step, so that a row's input token says which sample and position it is. ``weights`` numbers the
    weights (0: the first ones, others: the first ones plus noise, -1: the first ones with NaN in
    the first gate); ``nudge`` times ``rollproof.core.router_spy.direction`` is added to the gate
    weight of ``nudge_layer``. ``model`` is who runs: the policy, or a model of another role while
    the step is armed for the policy. ``variant`` names the variant of the subject that runs
    (``reference``: its independent path).

    Router call number ``fail_at`` of the pass ``fail_in`` raises ``InjectedFailure``, counted from
    0 by each rank's spy. ``same_as`` and ``differs_from`` name earlier steps of the episode whose
    loss and gradients this one must, or must not, repeat. ``defect`` is what is wrong with the
    routes of ``defective``, ``edge`` what else is unusual about the step.
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
        """The samples of all microbatches, in order: what ``Routing.samples`` counts."""
        return tuple(sample for microbatch in self.microbatches for sample in microbatch)

    @property
    def backward(self) -> bool:
        """Whether the step has a backward pass."""
        return self.purpose is Purpose.TRAIN


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing(Event):
    """One call of one router, as a spy on the router's *output* saw it.

    ``layer`` is the global index of the layer. ``experts`` is ``(rows, top_k)``: the ids that were
    executed, -1 where a row has fewer than top_k. ``samples`` ``(rows,)`` counts over
    ``Step.samples`` and is -1 for padding; ``positions`` ``(rows,)`` counts over prompt and
    response. ``rank`` is the process, ``microbatch`` its own count of microbatches. ``model`` as in
    ``Step``, or ``mtp`` for a router of an MTP layer.
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
    """What a step came to: results, an ``error`` (class and text), or why it was ``skipped``.

    ``loss`` is the number whose gradient was taken; ``logprobs`` ``(response,)`` by request.
    ``gradients`` are sketches (``rollproof.core.router_spy.sketch``) by the trainer's own names,
    ``gates`` those of the gate weights by global layer. ``recorded`` are the routes ``(rows,
    layers, top_k)`` that the trainer recorded, by request, as it would hand them on; ``changed``
    names what it changed in the samples that it was given. ``injected`` says that the error is the
    one that the harness raised.
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
    """What of replay was left when a step had ended: counts by name, each of which ought to be 0.

    ``after`` is the name of the step.
    """

    kind: ClassVar[str] = "residue"
    after: str
    left: Mapping[str, int]
