"""The steps of a trainer with everything that belongs to them; and the decorator for checks of
steps.

All checks of a trace share one assembly. Its memory holds the steps of an episode, which are a
dozen small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from rollproof.core.contract import Contract
from rollproof.core.events.replay import Action, Install, Outcome, Phase, Residue, Routing, Step
from rollproof.core.records import Rollout, Scalar
from rollproof.core.replay_contract import ReplayTerms
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.judging.checks import Applies, Check, Collector, trace_check
from rollproof.judging.expected_rows import ExpectedRows
from rollproof.judging.judge_context import JudgeContext

__all__ = ["NEEDS", "Assembly", "StepView", "replay_check"]

NEEDS = "Step, Routing and Outcome events of a ReplaySubject (rollproof.replay)"
REFERENCE = "reference"


@dataclass(eq=False)
class StepView:
    """One step: its options, what its routers did, its results, and what was left.

    step: The step.
    contract: The contract of the trainer.
    terms: Its replay terms.
    before: The steps of the episode by name.
    calls: The router calls.
    installs: The targets that were installed.
    outcome: The results.
    residue: What was left after the step.
    cache: Values that checks computed for the step and others use.
    learned: What checks learned about the trainer; all steps of a trace share it.
    """

    step: Step
    contract: Contract
    terms: ReplayTerms
    before: Mapping[str, StepView]
    calls: list[Routing] = field(default_factory=list)
    installs: list[Install] = field(default_factory=list)
    outcome: Outcome | None = None
    residue: Residue | None = None
    cache: dict[Any, Any] = field(default_factory=dict)
    learned: dict[str, str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether the step ran to its end."""
        return self.outcome is not None and self.outcome.done

    @property
    def hindrance(self) -> str | None:
        """Why the step shows nothing: it was skipped, or the trace ends within it."""
        if self.outcome is None:
            return "the trace ends within a step"
        return self.outcome.skipped or None

    @property
    def ordinary(self) -> bool:
        """Whether it is a well-formed step of the subject itself, without a raised failure."""
        return self.regular and self.step.fail_at is None

    @property
    def regular(self) -> bool:
        """Whether it is a well-formed step of the subject itself; a failure may have been raised in
        it.
        """
        step = self.step
        return step.defect is None and not step.edge and not step.variant

    @property
    def replays(self) -> bool:
        """Whether the policy's routers had to replay."""
        return self.step.action is Action.REPLAY and self.step.model == "policy"

    @property
    def same_as(self) -> StepView | None:
        """The earlier step that must have had the same results."""
        return self.before.get(self.step.same_as) if self.step.same_as else None

    @property
    def differs_from(self) -> StepView | None:
        """The earlier step that must have had other results."""
        return self.before.get(self.step.differs_from) if self.step.differs_from else None

    @cached_property
    def targets(self) -> ExpectedRows:
        """The experts that each row must execute."""
        return ExpectedRows(self.contract, self.step.samples)

    def calls_of(self, model: str, phase: Phase | None = None) -> Iterator[Routing]:
        """Return the router calls of a model, in one phase or in all."""
        return (
            call
            for call in self.calls
            if call.model == model and (phase is None or call.phase is phase)
        )

    def place(self, **more: Scalar) -> dict[str, Scalar]:
        """Return the place of a finding."""
        return {"episode": self.step.episode, "step": self.step.name, **more}

    def sample(self, place: int) -> tuple[Rollout, int]:
        """Return the sample and the position of a token, by its index among all tokens."""
        starts = self.targets.starts
        number = int((starts[1:] <= place).sum())
        return self.step.samples[number], place - int(starts[number])


class Assembly:
    """Assembles the events of a trace to steps.

    ``ended`` counts the steps that are complete; ``last`` is the latest of them.
    """

    def __init__(self, context: JudgeContext) -> None:
        self._context = context
        self._taken = -1
        self._episode: str | None = None
        self._open: StepView | None = None
        self._learned: dict[str, str] = {}
        self.steps: dict[str, StepView] = {}
        self.last: StepView | None = None
        self.ended: int = 0

    @classmethod
    def of(cls, context: JudgeContext) -> Assembly:
        """Return the assembly that all checks of a trace share."""
        assembly = context.shared.get(cls)
        if assembly is None:
            assembly = context.shared[cls] = cls(context)
        assert isinstance(assembly, Assembly)
        return assembly

    def take(self, event: Any) -> None:
        """Take an event once, however many checks pass it on."""
        # All checks of the family pass their events to one assembly.
        if event.index <= self._taken:
            return
        self._taken = event.index
        if isinstance(event, Step):
            self.close()
            if event.episode != self._episode:
                # Episodes are independent: a new one starts from fresh weights.
                self._episode, self.steps = event.episode, {}
            terms = self._context.contract.replay
            # replay_check rules out contracts without replay terms, so such steps are not
            # assembled.
            if terms is not None:
                self._open = StepView(
                    event, self._context.contract, terms, self.steps, learned=self._learned
                )
                self.steps.setdefault(event.name, self._open)
            return
        view = self._open
        if view is None:
            return
        if isinstance(event, Routing):
            view.calls.append(event)
        elif isinstance(event, Install):
            view.installs.append(event)
        elif isinstance(event, Outcome) and event.step == view.step.name:
            view.outcome = event
        elif isinstance(event, Residue) and event.after == view.step.name:
            view.residue = event

    def close(self) -> None:
        """End the open step."""
        if self._open is not None:
            self.last, self._open = self._open, None
            self.ended += 1


class _PerStep(EventCheck):
    """Calls ``judge`` with every step of the trace, in order."""

    judge: ClassVar[Callable[[StepView, Collector], None]]

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._assembly = Assembly.of(context)
        self._judged = 0

    def on_step(self, event: Step, out: Collector) -> None:
        """Judge the previous step."""
        self._assembly.take(event)
        self._judge(out)

    def on_routing(self, event: Routing, out: Collector) -> None:
        """Add it to the open step."""
        self._assembly.take(event)

    def on_install(self, event: Install, out: Collector) -> None:
        """Add it to the open step."""
        self._assembly.take(event)

    def on_outcome(self, event: Outcome, out: Collector) -> None:
        """Add it to the open step."""
        self._assembly.take(event)

    def on_residue(self, event: Residue, out: Collector) -> None:
        """Add it to the open step."""
        self._assembly.take(event)

    def finish(self, out: Collector) -> None:
        """Judge the last step."""
        self._assembly.close()
        self._judge(out)

    def _judge(self, out: Collector) -> None:
        view = self._assembly.last
        if view is not None and self._assembly.ended > self._judged:
            self._judged = self._assembly.ended
            type(self).judge(view, out)


def replay_check(
    id: str,
    *,
    promise: str,
    exercised_by: str | tuple[str, ...],
    needs: str = NEEDS,
    applies: Applies | None = None,
) -> Callable[[Callable[[StepView, Collector], None]], Check]:
    """Make a ``Check`` of a function ``(view, out)`` that is called once per step, after it has
    ended.
    """

    def ruled_out(contract: Contract) -> str | None:
        if contract.replay is None:
            return "the contract declares no replay terms"
        return None if applies is None else applies(contract)

    def make(judge: Callable[[StepView, Collector], None]) -> Check:
        fold = type(judge.__name__, (_PerStep,), {"judge": staticmethod(judge)})
        return trace_check(
            id,
            promise=promise,
            needs=needs,
            exercised_by=exercised_by,
            applies=ruled_out,
            about="replay",
        )(fold)

    return make
