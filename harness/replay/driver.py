"""Run the steps of episodes on a trainer, and record what it and its routers did."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.error_text import describe_error, describe_error_with_place
from rollproof.core.events.replay import Install, Outcome, Phase, Residue, Routing, Step
from rollproof.core.progress import Progress
from rollproof.core.records import IntArray, Rollout
from rollproof.core.replay_contract import Defect
from rollproof.core.router_spy import Spy, UnsupportedStep, is_whole
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Header, Recorder, Trace
from rollproof.core.trainer_contract import terms_of
from rollproof.errors import RollproofError, SubjectError, UsageError
from rollproof.judging.expected_rows import chosen_routes
from rollproof.replay.outcomes import changed_fields, injected, sound_outcome
from rollproof.replay.plans import (
    EMPTY,
    NO_RESPONSE,
    SHORT,
    Episode,
    Planned,
    RoutesFrom,
    episodes_for,
    random_episodes,
)
from rollproof.replay.replay_samples import (
    as_payload,
    for_trainer,
    make_samples,
    shortest,
    spoiled,
    with_drawn_routes,
    without_response,
)
from rollproof.simulation import virtual_loop
from rollproof.simulation.exception_policy import raise_unless_outcome

__all__ = ["drive_episode", "make_subject", "record_again", "record_replay"]

REFERENCE = "reference"


def record_replay(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    profile: str = "pr",
    seed: int = 0,
    only: Iterable[str] = (),
    recipe: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Trace:
    """Run the episodes of a profile, each on a fresh subject, and return the trace.

    ``only`` names those of them that are run. What a subject raises is recorded, and what it does
    not offer is skipped with the reason. Raises ``UsageError`` for an unknown episode, and
    ``SubjectError`` for a subject that is no ``ReplaySubject`` or returns an unusable value.
    """
    label = name or str(getattr(factory, "__qualname__", type(factory).__name__))
    subject = make_subject(factory, label)
    contract = subject.contract
    episodes = _named(
        list(episodes_for(contract, extra=random_episodes(profile), seed=seed)), tuple(only)
    )
    header = Header(
        subject=label,
        contract=contract,
        seed=seed,
        profile=profile,
        about="replay",
        case={"episodes": [episode.name for episode in episodes]},
        recipe=recipe,
    )
    # no clock: one seed must give one trace, byte for byte
    recorder = Recorder(lambda: 0.0)
    for number, episode in enumerate(episodes):

        def report(step: str, *, done: int = number, episode: str = episode.name) -> None:
            if progress is not None:
                progress(
                    Progress(done=done, total=len(episodes), what=f"{label}: {episode}, {step}")
                )

        report("a fresh subject")
        # making a trainer may take long, and the one made for its contract is still fresh
        drive_episode(
            subject or make_subject(factory, label), episode, recorder, label, report=report
        )
        subject = None
    return recorder.trace(header)


def record_again(factory: SubjectFactory, header: Header) -> Trace:
    """Run the episodes of a trace again, on fresh subjects.

    Raises ``UsageError`` if its header names none.
    """
    episodes = (header.case or {}).get("episodes")
    if (
        not isinstance(episodes, list | tuple)
        or not episodes
        or not all(isinstance(name, str) for name in episodes)
    ):
        raise UsageError(
            "The case of this trace names no episodes: it was not written by rollproof, or was"
            " edited."
        )
    return record_replay(
        factory,
        name=header.subject,
        profile=header.profile or "pr",
        seed=header.seed,
        only=episodes,
        recipe=header.recipe,
    )


def drive_episode(
    subject: Any,
    episode: Episode,
    recorder: Recorder,
    label: str = "the subject",
    *,
    report: Callable[[str], None] | None = None,
) -> None:
    """Run the steps of one episode on a fresh subject, and stop it.

    ``report`` is called with the name of each step before it runs.
    """
    drive = _Drive(
        subject=subject,
        contract=subject.contract,
        label=label,
        episode=episode.name,
        recorder=recorder,
    )
    try:
        for planned in episode.steps:
            if report is not None:
                report(planned.name)
            drive.run(planned)
    finally:
        drive.stop()


def _named(episodes: list[Episode], only: tuple[str, ...]) -> list[Episode]:
    unknown = sorted(set(only) - {episode.name for episode in episodes})
    if unknown:
        raise UsageError(
            f"This trainer has no episodes {unknown}; those of its contract are"
            f" {[episode.name for episode in episodes]}."
        )
    return [episode for episode in episodes if not only or episode.name in only]


def make_subject(factory: SubjectFactory, label: str) -> Any:
    """Make a subject. Raises ``SubjectError`` if that fails, or if it is no ``ReplaySubject``."""
    try:
        subject = _settled(factory())
    except RollproofError:
        raise
    except BaseException as error:  # whatever a user's constructor raises
        raise_unless_outcome(error, label)
        raise SubjectError(
            f"{label} could not be created: {describe_error_with_place(error)}."
        ) from error
    contract = getattr(subject, "contract", None)
    missing = [] if callable(getattr(subject, "run", None)) else ["a method `run(step, spy)`"]
    if not isinstance(contract, Contract) or contract.replay is None:
        missing.insert(
            0,
            "a `contract` with replay terms (rollproof.replay.contract.trainer_contract makes one)",
        )
    if missing:
        raise SubjectError(
            f"{label} made a {type(subject).__name__}, which is not a ReplaySubject: it needs"
            f" {' and '.join(missing)}."
        )
    return subject


class _Refused(Exception):
    """The subject refused to make a variant, or to take weights of NaN."""


@dataclass
class _Drive:
    """A subject in one episode: the state that the harness set, and the steps so far."""

    subject: Any
    contract: Contract
    label: str
    episode: str
    recorder: Recorder
    steps: dict[str, Step] = field(default_factory=dict)
    calls: dict[str, list[Routing]] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    variants: dict[str, Any] = field(default_factory=dict)
    weights: dict[int, tuple[int, float, int | None]] = field(default_factory=dict)

    def run(self, planned: Planned) -> None:
        """Run one step, and record everything about it."""
        try:
            step = self._step(planned)
        except UnsupportedStep as error:
            step = _bare(planned, self.episode)
            self.recorder.record(step)
            self._end(step, Outcome(step=step.name, skipped=str(error)))
            return
        self.recorder.record(step)
        self.steps[step.name] = step
        floating = step.defective if step.defect is Defect.FLOAT else None
        # the trainer gets copies: what it writes into them must not reach the trace
        passed = replace(
            step,
            microbatches=tuple(
                tuple(
                    for_trainer(sample, floating=sample.request_id == floating)
                    for sample in microbatch
                )
                for microbatch in step.microbatches
            ),
        )
        spy = Spy(passed)
        subject = self.subject
        try:
            subject = self._subject(planned)
            self._set_weights(subject, step)
            outcome = self._run(subject, passed, spy)
        except UnsupportedStep as error:
            outcome = Outcome(step=step.name, skipped=str(error))
        except _Refused as error:
            outcome = Outcome(step=step.name, error=str(error))
        foreign = [
            type(event).__name__ for event in spy.events if not isinstance(event, Routing | Install)
        ]
        if foreign:
            raise SubjectError(
                f"{self.label} gave its spy a {foreign[0]}: Spy.extend takes the `events` of"
                " another Spy."
            )
        for event in spy.events:
            self.recorder.record(event)
        # a recompute reports its rows once more, and routers of MTP layers are of the model `mtp`
        self.calls[step.name] = [
            event
            for event in spy.events
            if isinstance(event, Routing)
            and event.phase is Phase.FORWARD
            and event.model == "policy"
        ]
        self._end(
            step, replace(outcome, changed=changed_fields(step.samples, passed.samples)), subject
        )

    def stop(self) -> None:
        """Stop the subject and its variants."""
        for subject in (self.subject, *self.variants.values()):
            stop = getattr(subject, "stop", None)
            if callable(stop):
                self._optional("stop", stop)

    def _optional(self, name: str, method: Callable[[], Any]) -> Any:
        """Call an optional method. Raises ``SubjectError`` for whatever it raises."""
        try:
            return _settled(method())
        except BaseException as error:
            _pass_on(error, f"{self.label}.{name}")
            raise SubjectError(
                f"{self.label}.{name} raised {describe_error_with_place(error)}."
            ) from error

    def _end(self, step: Step, outcome: Outcome, subject: Any = None) -> None:
        self.outcomes[step.name] = outcome
        self.recorder.record(outcome)
        residue = getattr(subject, "residue", None)
        if callable(residue) and not outcome.skipped and step.variant == "":
            left = self._optional("residue", residue)
            if not isinstance(left, Mapping) or not all(
                isinstance(name, str) and is_whole(count) for name, count in left.items()
            ):
                raise SubjectError(
                    f"{self.label}.residue must return a mapping from names to whole numbers, not"
                    f" {left!r:.200}."
                )
            self.recorder.record(
                Residue(after=step.name, left={name: int(count) for name, count in left.items()})
            )

    def _run(self, subject: Any, step: Step, spy: Spy) -> Outcome:
        run = subject.run if step.variant != REFERENCE else None
        try:
            outcome = _settled(run(step, spy) if run is not None else subject.reference(step))
        except BaseException as error:  # noqa: BLE001 - what a trainer raises is judged
            _pass_on(error, f"{self.label}.run")
            return Outcome(step=step.name, error=describe_error(error), injected=injected(error))
        return sound_outcome(outcome, step, self.label)

    def _subject(self, planned: Planned) -> Any:
        """Return the subject, or the variant of it that the step runs on."""
        if planned.variant == REFERENCE:
            if not callable(getattr(self.subject, "reference", None)):
                raise UnsupportedStep("the subject has no reference path")
            return self.subject
        if not planned.variant:
            return self.subject
        if planned.variant not in self.variants:
            make = getattr(self.subject, "variant", None)
            if not callable(make):
                raise UnsupportedStep(f"the subject has no variants, so none {planned.variant!r}")
            try:
                made = _settled(make(planned.variant))
            except (KeyError, NotImplementedError) as error:
                # how a subject does not offer a variant: a table without it, or explicitly
                raise UnsupportedStep(
                    f"the subject has no variant {planned.variant!r}: {describe_error(error)}"
                ) from error
            except BaseException as error:
                # a trainer may refuse an option that excludes replay while it makes the model
                _pass_on(error, f"{self.label}.variant")
                raise _Refused(describe_error(error)) from error
            if not callable(getattr(made, "run", None)):
                raise SubjectError(
                    f"{self.label}.variant({planned.variant!r}) must return a ReplaySubject, not"
                    f" {type(made).__name__}."
                )
            self.variants[planned.variant] = made
        return self.variants[planned.variant]

    def _set_weights(self, subject: Any, step: Step) -> None:
        """Set the weights of the step, unless the subject has them."""
        weights = (step.weights, step.nudge, step.nudge_layer)
        if self.weights.get(id(subject), (0, 0.0, None)) == weights:
            return
        set_weights, nudge = getattr(subject, "set_weights", None), getattr(subject, "nudge", None)
        if not callable(set_weights):
            raise UnsupportedStep("the subject has no set_weights, so its weights never drift")
        if step.nudge and not callable(nudge):
            raise UnsupportedStep("the subject has no nudge, so the slope of its loss is unknown")
        # after a failure below nobody knows the weights, so the next step sets them again
        self.weights.pop(id(subject), None)
        try:
            _settled(set_weights(step.weights))
            if step.nudge and nudge is not None:
                _settled(nudge(step.nudge_layer, step.nudge))
        except NotImplementedError as error:
            # how a subject does not offer weights (UnsupportedStep is one)
            raise UnsupportedStep(
                f"the subject has no weights number {step.weights}: {describe_error(error)}"
            ) from error
        except BaseException as error:
            _pass_on(error, f"{self.label}.set_weights")
            if step.weights < 0:  # a trainer may refuse NaN when weights are set
                raise _Refused(describe_error(error)) from error
            raise SubjectError(
                f"{self.label} could not set weights number {step.weights}, nudged by"
                f" {step.nudge}: {describe_error(error)}. Raise UnsupportedStep for weights that a"
                " subject does not offer."
            ) from error
        self.weights[id(subject)] = weights

    def _step(self, planned: Planned) -> Step:
        """Return the step with its samples.

        Raises ``UnsupportedStep`` if it needs unknown routes of an earlier step.
        """
        plain = make_samples(self.contract, planned.batch, long=planned.long)
        if planned.edge == SHORT:
            plain = tuple(map(shortest, plain))
        samples = list(self._with_routes(planned, plain))
        defective = ""
        if planned.defect is not None:
            spot = len(samples) // 2
            samples[spot] = spoiled(self.contract, samples[spot], planned.defect)
            defective = samples[spot].request_id
        if planned.edge == NO_RESPONSE:
            samples[0] = self._fitted(without_response(samples[0]))
        size = terms_of(self.contract).microbatch_size
        microbatches = [tuple(samples[i : i + size]) for i in range(0, len(samples), size)]
        if planned.edge == EMPTY:
            microbatches[-1:] = [()]
        return replace(
            _bare(planned, self.episode), microbatches=tuple(microbatches), defective=defective
        )

    def _fitted(self, sample: Rollout) -> Rollout:
        """Return the sample with no more rows than tokens."""
        if sample.routes is None:
            return sample
        rows = sample.routes[: sample.total][:, list(self.contract.moe_columns)].astype(np.int32)
        return replace(sample, routes=as_payload(self.contract, rows))

    def _with_routes(self, planned: Planned, samples: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        kind = planned.routes
        if kind is RoutesFrom.NOWHERE:
            return samples
        if kind in (RoutesFrom.DRAWN, RoutesFrom.LARGEST):
            random = np.random.default_rng([planned.seed, planned.batch])
            largest = kind is RoutesFrom.LARGEST
            drawn = [
                with_drawn_routes(self.contract, sample, random, largest=largest)
                for sample in samples
            ]
            if planned.cut is not None:
                drawn = [
                    replace(sample, routes=_cut(sample.routes, planned.cut)) for sample in drawn
                ]
            return tuple(drawn)
        before = self.steps.get(planned.of)
        if before is None or not self.outcomes[planned.of].done:
            raise UnsupportedStep(
                f"step {planned.of!r}, which has the routes for it, did not complete"
            )
        if kind is RoutesFrom.RECORDED:
            recorded = self.outcomes[planned.of].recorded
            return tuple(
                replace(sample, routes=recorded.get(sample.request_id)) for sample in samples
            )
        # what the spy saw: a recording of the trainer would be the target by which it is judged
        chosen = chosen_routes(self.contract, before, self.calls[planned.of])
        if chosen is None:
            raise UnsupportedStep(
                f"the spy did not see every row of step {planned.of!r} routed, so its routes are"
                " unknown"
            )
        experts = self.contract.num_experts or 1
        if chosen.size and chosen.max() >= experts:
            raise UnsupportedStep(
                f"a router of step {planned.of!r} chose expert {chosen.max()}, but the contract"
                f" declares {experts} experts"
            )
        starts = np.cumsum([0, *(sample.total for sample in samples)]).tolist()
        pieces = [chosen[start:end] for start, end in pairwise(starts)]
        if kind is RoutesFrom.DISJOINT:
            if 2 * (self.contract.top_k or 1) > (self.contract.num_experts or 1):
                raise UnsupportedStep(
                    "there are fewer than 2 * top_k experts, so every choice overlaps with every"
                    " other"
                )
            random = np.random.default_rng(planned.seed)
            return tuple(
                with_drawn_routes(self.contract, sample, random, avoid)
                for sample, avoid in zip(samples, pieces, strict=True)
            )
        return tuple(
            replace(sample, routes=as_payload(self.contract, piece, planned.cut))
            for sample, piece in zip(samples, pieces, strict=True)
        )


def _pass_on(error: BaseException, where: str) -> None:
    """Raise an error that is no outcome of a step: Ctrl-C, or an error about the subject itself."""
    # rollproof's other errors are outcomes: its own replay code refuses routers and routes by them
    if isinstance(error, UnsupportedStep | SubjectError | UsageError):
        raise error
    if not isinstance(error, RollproofError):
        raise_unless_outcome(error, where)


def _bare(planned: Planned, episode: str) -> Step:
    """Return the step without samples."""
    names = (
        "name",
        "action",
        "purpose",
        "recompute",
        "weights",
        "nudge",
        "nudge_layer",
        "model",
        "variant",
        "fail_at",
        "fail_in",
        "same_as",
        "differs_from",
        "defect",
        "edge",
    )
    return Step(
        episode=episode, microbatches=(), **{name: getattr(planned, name) for name in names}
    )


def _cut(routes: IntArray | None, rows: int) -> IntArray | None:
    return None if routes is None else routes[:rows]


def _settled(value: Any) -> Any:
    """Return the result of a sync or async method; an async one runs on the virtual clock."""
    if not isinstance(value, Awaitable):
        return value

    async def wait() -> Any:
        return await value

    return virtual_loop.run(wait)
