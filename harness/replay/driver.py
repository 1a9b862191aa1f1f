"""Driving: asks a trainer for the steps of an episode and records what it, and its routers, did."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.error_text import describe_error
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
    as_given,
    as_payload,
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
    """Ask fresh subjects, one per episode, for the episodes of a profile, or of those for the ones
    named ``only``.

    What a subject raises is recorded, and what it does not offer is skipped with the reason. Raises
    ``UsageError`` for an episode that does not exist, and ``SubjectError`` for what is no
    ``ReplaySubject``, or returns what no trace can hold.
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
    recorder = Recorder(lambda: 0.0)
    for number, episode in enumerate(episodes):

        def tell(step: str, *, done: int = number, episode: str = episode.name) -> None:
            if progress is not None:
                progress(
                    Progress(done=done, total=len(episodes), what=f"{label}: {episode}, {step}")
                )

        tell("a fresh subject")
        drive_episode(subject or make_subject(factory, label), episode, recorder, label, tell=tell)
        subject = None
    return recorder.trace(header)


def record_again(factory: SubjectFactory, header: Header) -> Trace:
    """Ask a fresh subject for the episodes that a trace was made from. Raises ``UsageError`` where
    the header names none.
    """
    episodes = (header.case or {}).get("episodes")
    if (
        not isinstance(episodes, list | tuple)
        or not episodes
        or not all(isinstance(one, str) for one in episodes)
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
    tell: Callable[[str], None] | None = None,
) -> None:
    """Ask a fresh subject for the steps of one episode, and let it end; ``tell`` is called with the
    name of each step before it.
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
            if tell is not None:
                tell(planned.name)
            drive.ask(planned)
    finally:
        drive.stop()


def _named(episodes: list[Episode], only: tuple[str, ...]) -> list[Episode]:
    stray = sorted(set(only) - {episode.name for episode in episodes})
    if stray:
        raise UsageError(
            f"This trainer has no episodes {stray}; those of its contract are"
            f" {[episode.name for episode in episodes]}."
        )
    return [episode for episode in episodes if not only or episode.name in only]


def make_subject(factory: SubjectFactory, label: str) -> Any:
    """A fresh subject. Raises ``SubjectError`` where it cannot be made, or is no ``ReplaySubject``."""
    try:
        subject = _settled(factory())
    except RollproofError:
        raise
    except BaseException as error:  # whatever a user's constructor raises, told in our words
        raise_unless_outcome(error, label)
        raise SubjectError(f"{label} could not be made: {describe_error(error)}.") from error
    contract = getattr(subject, "contract", None)
    missing = [] if callable(getattr(subject, "run", None)) else ["a method `run(step, spy)`"]
    if not isinstance(contract, Contract) or contract.replay is None:
        missing.insert(
            0,
            "a `contract` with replay terms (rollproof.replay.contract.trainer_contract makes one)",
        )
    if missing:
        raise SubjectError(
            f"{label} made a {type(subject).__name__}, which is no ReplaySubject: it needs"
            f" {' and '.join(missing)}."
        )
    return subject


class _Refused(Exception):
    """A variant was refused while it was made, or weights of NaN while they were set."""


@dataclass
class _Drive:
    """One subject in one episode: its state as the harness set it, and the steps so far."""

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

    def ask(self, planned: Planned) -> None:
        """Ask for one step and record everything about it."""
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
        given = replace(
            step,
            microbatches=tuple(
                tuple(as_given(one, floating=one.request_id == floating) for one in microbatch)
                for microbatch in step.microbatches
            ),
        )
        spy = Spy(given)
        subject = self.subject
        try:
            subject = self._subject(planned)
            self._weigh(subject, step)
            outcome = self._run(subject, given, spy)
        except UnsupportedStep as error:
            outcome = Outcome(step=step.name, skipped=str(error))
        except _Refused as error:
            outcome = Outcome(step=step.name, error=str(error))
        strays = [
            type(one).__name__ for one in spy.events if not isinstance(one, Routing | Install)
        ]
        if strays:
            raise SubjectError(
                f"{self.label} gave its spy a {strays[0]}: Spy.extend takes the `events` of another"
                " Spy."
            )
        for event in spy.events:
            self.recorder.record(event)
        self.calls[step.name] = [
            one
            for one in spy.events
            if isinstance(one, Routing) and one.phase is Phase.FORWARD and one.model == "policy"
        ]
        self._end(
            step, replace(outcome, changed=changed_fields(step.samples, given.samples)), subject
        )

    def stop(self) -> None:
        """Let the subject, and its variants, end."""
        for subject in (self.subject, *self.variants.values()):
            stop = getattr(subject, "stop", None)
            if callable(stop):
                self._optional("stop", stop)

    def _optional(self, name: str, method: Callable[[], Any]) -> Any:
        """What an optional method returned. Raises ``SubjectError`` for what it raises."""
        try:
            return _settled(method())
        except BaseException as error:
            _pass_on(error, f"{self.label}.{name}")
            raise SubjectError(f"{self.label}.{name} raised {describe_error(error)}.") from error

    def _end(self, step: Step, outcome: Outcome, subject: Any = None) -> None:
        self.outcomes[step.name] = outcome
        self.recorder.record(outcome)
        residue = getattr(subject, "residue", None)
        if callable(residue) and not outcome.skipped and step.variant == "":
            left = self._optional("residue", residue)
            if not isinstance(left, Mapping) or not all(
                isinstance(one, str) and is_whole(left[one]) for one in left
            ):
                raise SubjectError(
                    f"{self.label}.residue must return a mapping from names to whole numbers, not"
                    f" {left!r:.200}."
                )
            self.recorder.record(
                Residue(after=step.name, left={one: int(left[one]) for one in left})
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
        """The subject, or its variant that the step is for."""
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
            except (
                KeyError,
                NotImplementedError,
            ) as error:  # the ways to say that it is not offered: a table without it, or in words
                raise UnsupportedStep(
                    f"the subject has no variant {planned.variant!r}: {describe_error(error)}"
                ) from error
            except (
                BaseException
            ) as error:  # an option that replay cannot go with may be refused while a model is made
                _pass_on(error, f"{self.label}.variant")
                raise _Refused(describe_error(error)) from error
            if not callable(getattr(made, "run", None)):
                raise SubjectError(
                    f"{self.label}.variant({planned.variant!r}) must return a ReplaySubject, not"
                    f" {type(made).__name__}."
                )
            self.variants[planned.variant] = made
        return self.variants[planned.variant]

    def _weigh(self, subject: Any, step: Step) -> None:
        """Set the weights that the step is for, where the subject holds others."""
        wanted = (step.weights, step.nudge, step.nudge_layer)
        if self.weights.get(id(subject), (0, 0.0, None)) == wanted:
            return
        set_weights, nudge = getattr(subject, "set_weights", None), getattr(subject, "nudge", None)
        if not callable(set_weights):
            raise UnsupportedStep("the subject has no set_weights, so its weights never drift")
        if step.nudge and not callable(nudge):
            raise UnsupportedStep("the subject has no nudge, so the slope of its loss is not known")
        self.weights.pop(id(subject), None)
        try:
            _settled(set_weights(step.weights))
            if step.nudge and nudge is not None:
                _settled(nudge(step.nudge_layer, step.nudge))
        except (
            NotImplementedError
        ) as error:  # the way to say that a subject does not offer it (UnsupportedStep is one)
            raise UnsupportedStep(
                f"the subject has no weights number {step.weights}: {describe_error(error)}"
            ) from error
        except BaseException as error:
            _pass_on(error, f"{self.label}.set_weights")
            if step.weights < 0:  # NaN may be refused where weights are set
                raise _Refused(describe_error(error)) from error
            raise SubjectError(
                f"{self.label} could not set weights number {step.weights}, nudged by {step.nudge}:"
                f" {describe_error(error)}. Raise UnsupportedStep for what a subject does not offer."
            ) from error
        self.weights[id(subject)] = wanted

    def _step(self, planned: Planned) -> Step:
        """The step with its samples. Raises ``UnsupportedStep`` where the routes of an earlier step
        are wanted and not known.
        """
        made = make_samples(self.contract, planned.batch)
        samples = list(
            self._routed(planned, tuple(map(shortest, made)) if planned.edge == SHORT else made)
        )
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
        """The sample with no more rows than its tokens have."""
        if sample.routes is None:
            return sample
        wide = sample.routes[: sample.total][:, list(self.contract.moe_columns)].astype(np.int32)
        return replace(sample, routes=as_payload(self.contract, wide))

    def _routed(self, planned: Planned, samples: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        kind = planned.routes
        if kind is RoutesFrom.NOWHERE:
            return samples
        if kind in (RoutesFrom.DRAWN, RoutesFrom.LARGEST):
            random = np.random.default_rng([planned.seed, planned.batch])
            largest = kind is RoutesFrom.LARGEST
            made = [
                with_drawn_routes(self.contract, sample, random, largest=largest)
                for sample in samples
            ]
            return tuple(
                made
                if planned.cut is None
                else [replace(one, routes=_cut(one.routes, planned.cut)) for one in made]
            )
        before = self.steps.get(planned.of)
        if before is None or not self.outcomes[planned.of].done:
            raise UnsupportedStep(
                f"step {planned.of!r}, whose routes it takes, did not run to its end"
            )
        if kind is RoutesFrom.RECORDED:
            recorded = self.outcomes[planned.of].recorded
            return tuple(
                replace(sample, routes=recorded.get(sample.request_id)) for sample in samples
            )
        chosen = chosen_routes(self.contract, before, self.calls[planned.of])
        if chosen is None:
            raise UnsupportedStep(
                f"the spy did not see every row of step {planned.of!r} routed, so its routes are"
                " not known"
            )
        experts = self.contract.num_experts or 1
        if chosen.size and chosen.max() >= experts:
            raise UnsupportedStep(
                f"a router of step {planned.of!r} chose expert {chosen.max()}, and the contract"
                f" declares {experts} of them"
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
                with_drawn_routes(self.contract, one, random, avoid)
                for one, avoid in zip(samples, pieces, strict=True)
            )
        return tuple(
            replace(sample, routes=as_payload(self.contract, piece, planned.cut))
            for sample, piece in zip(samples, pieces, strict=True)
        )


def _pass_on(error: BaseException, where: str) -> None:
    """Raise what is no outcome: Ctrl-C, an end of the process, and what says that the subject
    itself cannot go on.

    rollproof's other errors are outcomes like any: its own replay code refuses routers and routes
    by them.
    """
    if isinstance(error, UnsupportedStep | SubjectError | UsageError):
        raise error
    if not isinstance(error, RollproofError):
        raise_unless_outcome(error, where)


def _bare(planned: Planned, episode: str) -> Step:
    """The step without samples."""
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
    """What a sync or async method returned; an async one runs on the virtual clock."""
    if not isinstance(value, Awaitable):
        return value

    async def wait() -> Any:
        return await value

    return virtual_loop.run(wait)
